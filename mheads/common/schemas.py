"""What the files of a run folder must hold, and results: each file is checked against its schema where it is read.

A right checksum says that a file is what somebody wrote, not that it makes sense. What is wrong raises ValueError with
the key and what stands there, to go after the name of the file. Keys that are not known here are left alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, Strict, TypeAdapter, ValidationError

from mheads.common.safe_yaml import short

LARGEST = 2**53  # beyond it floats and integers differ
MOST = 1e300


def _refuse_other_numbers(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) > LARGEST):
        raise ValueError("it should be a number that a float can hold")
    if isinstance(value, float) and MOST < abs(value) < math.inf:
        raise ValueError(f"it should be a number up to {MOST:g}, so that sums of some are finite")
    return value


Number = Annotated[float, Strict(), BeforeValidator(_refuse_other_numbers)]  # may be infinite or NaN
Finite = Annotated[Number, Field(allow_inf_nan=False)]
Count = Annotated[int, Strict(), Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Strict(), Field(ge=1, le=2**31)]
Yes = Annotated[bool, Strict()]
Numbers = Annotated[list[Number], Field(min_length=1)]
Parts = Annotated[list[Annotated[Finite, Field(ge=0, le=1e6)]], Field(min_length=1)]  # of what there is


# results


class _Measures(BaseModel):
    members: Numbers
    single: Number
    ensemble_mean: Number
    oracle: Number
    ensemble_scored: Number = 0


class OfClasses(BaseModel):
    """What a detector's answers measure, class by class."""

    members: list[list[Number]]
    ensemble_mean: list[Number]
    oracle: list[Number]


def _like(schema: Any) -> AfterValidator:
    def validate(value: Any) -> Any:
        check(schema, value)
        return value

    return AfterValidator(validate)


def _has_answers(value: dict[str, Any]) -> dict[str, Any]:
    if missing := [key for key in ("single", "ensemble_mean") if key not in value]:
        raise ValueError(f"{missing[0]} is missing")
    return value


Measures = Annotated[dict[str, Any], _like(_Measures)]  # one measure of each predictor
Answers = Annotated[dict[str, Number], AfterValidator(_has_answers)]  # one of single members and of all together
Ranks = Annotated[dict[str, list[Number]], AfterValidator(_has_answers)]


# files of a run folder


class Digests(BaseModel):
    """manifest.json."""

    files: dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], list[str]]
    sha256: str


class _Learning(BaseModel):
    wins: Parts
    entropy: Number
    effective_batch: Numbers
    gradient_norm: Numbers


Learning = Annotated[dict[str, Any], AfterValidator(lambda value: (value and check(_Learning, value)) or value)]


class Summary(BaseModel):
    """result.json, without the measures of its problem."""

    problem: str
    split: str
    iterations: Count
    parameters: Count
    seconds: Annotated[Finite, Field(ge=0)]
    versions: dict[str, str] = {}
    machine: str = ""
    learning: Learning | None = None
    peak_memory: Count | None = None
    engine: dict[str, Any] = {}


class StepLine(BaseModel):
    """A line of metrics.jsonl about the iterations since the line before."""

    iteration: Count
    loss: Number
    rate: Number
    member_losses: Numbers
    share: Parts
    wins: Parts = []
    entropy: Number = 0
    effective_batch: Numbers = []
    gradient_norm: Numbers = []
    images_per_second: Number = 0


class EvaluationLine(BaseModel):
    """A line of metrics.jsonl about an evaluation."""

    iteration: Count
    split: str
    result: dict[str, Any]  # of the problem's own type


class _Code(BaseModel):
    code: str = ""
    source: list[str] = []
    values: dict[str, str] = {}


class _Described(BaseModel):
    layers: dict[str, str] = {}
    code: dict[str, _Code]
    name: str | None = None
    iterations: Count | None = None


class _Network(_Described):
    seed: Annotated[int, Strict()] | Annotated[str, Field(pattern=r"^-?\d{1,40}$")]
    init: str


class Identity(BaseModel):
    """identity.json."""

    run: str
    data: str
    network: _Network
    loss: _Described
    start: str | None = None
    sampling: dict[str, Any] | None = None
    place: str | None = None


class _ProblemFacts(BaseModel):
    name: str
    classes: Annotated[list[str], Field(min_length=1)] = ["one"]
    of_scores: Yes = False
    integer_names: Yes = False
    size: Annotated[list[Positive], Field(min_length=2, max_length=2)] = [1, 1]
    num_values: Positive = 1
    shape: list[Positive] = []
    variances: Yes = False
    mean_of_targets: list[Finite] = []
    std_of_targets: list[Annotated[Finite, Field(gt=0)]] = []
    means: list[Annotated[list[Finite], Field(min_length=4, max_length=4)]] = []
    deviations: list[Annotated[list[Finite], Field(min_length=4, max_length=4)]] = []


class StoredFacts(BaseModel):
    """What data.safetensors holds beside tensors."""

    name: str
    shape: Annotated[list[Positive], Field(min_length=1, max_length=8)]
    problem: _ProblemFacts
    scale: Finite
    bgr: Yes = False
    fingerprint: str
    seen: tuple[Literal["uint8", "float", "tokens"], Finite, Finite] | None
    held_out: str | None
    side: dict[str, list[Count]] | None = None


class _Schedule(BaseModel):
    drops: Count
    total: Number
    count: Count
    previous: Number | None


class CheckpointState(BaseModel):
    """What state.json of a checkpoint holds."""

    step: Count
    rate: Number
    schedule: _Schedule
    log: list[tuple[Count, str]]
    seconds: Finite
    config: str
    identity: Identity
    window: Annotated[list[Number], Field(min_length=4, max_length=5)] = [0, 0, 0, 0]
    learning: Learning = {}


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def check(schema: Any, value: Any) -> None:
    """Raises ValueError unless the value is as the schema, a type, says."""
    try:
        _adapter(schema).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ValueError(f"{key} is missing") from None
        message = re.sub(r" or instance of \w+", "", first["msg"].removeprefix("Value error, "))
        message = message[:1].lower() + message[1:]
        raise ValueError(f"{f'{key} = ' if key else ''}{short(first['input'])}: {message}") from None


# arrays


def check_arrays(arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int | None, ...]]) -> None:
    """Raises ValueError unless these arrays or tensors are there, of these shapes; None fits any length."""
    for name, shape in shapes.items():
        if name not in arrays:
            raise ValueError(f"{name} is missing")
        actual = tuple(arrays[name].shape)
        if len(actual) != len(shape) or any(n not in (None, m) for n, m in zip(shape, actual, strict=True)):
            wanted = ", ".join("any" if n is None else str(n) for n in shape)
            raise ValueError(f"{name} has shape {list(actual)}, where [{wanted}] should be")


def check_history(arrays: Mapping[str, np.ndarray], members: int, groups: int) -> None:
    """Raises ValueError unless the arrays are those of a `metrics_log.History`; older ones have no moments."""
    cells = (members, groups)
    for when, counts in (("iterations", ("test", "train")), ("moments", ("steps",))):
        if when == "moments" and when not in arrays and "steps" not in arrays:
            continue
        check_arrays(arrays, {when: (None,)})
        check_arrays(arrays, {name: (len(arrays[when]), *cells) for name in counts})
        if arrays[when].dtype.kind not in "iu" or (np.diff(arrays[when].astype(np.int64)) < 0).any():
            raise ValueError(f"{when} are {arrays[when].dtype}, or not in order: they should be iterations")
        if len(arrays[when]) and not 0 <= arrays[when].min() <= arrays[when].max() <= LARGEST:
            raise ValueError(f"{when} go from {arrays[when].min()} to {arrays[when].max()}: they should be iterations")
        for name in counts:
            if arrays[name].dtype.kind not in "iuf" or not np.isfinite(arrays[name]).all() or (arrays[name] < 0).any():
                raise ValueError(f"{name} ({arrays[name].dtype}) should hold numbers of examples, 0 or more")
