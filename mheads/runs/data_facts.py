"""What a run remembers of its data: data.safetensors."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from mheads import problems
from mheads.common import schemas
from mheads.common.nested_values import Value
from mheads.common.safe_yaml import from_json
from mheads.data import Data, Preprocess, ValueRange
from mheads.problems import Problem
from mheads.runs.checkpoint import to_bytes


@dataclass(frozen=True)
class DataFacts:
    """What a run remembers of its data: enough to predict, and to notice that the data changed."""

    name: str
    shape: tuple[int, ...]
    problem: Problem
    preprocess: Preprocess
    fingerprint: str
    seen: ValueRange | None = None
    held_out: str | None = None
    held_out_rows: np.ndarray | None = field(default=None, compare=False)  # of the training examples as they were given
    side: dict[str, tuple[int, ...]] | None = field(default=None, compare=False)  # shapes; None in older runs

    @staticmethod
    def of(data: Data) -> DataFacts:
        shape, problem, held_out = tuple(data.train.shape), data.problem, (data.held_out, data.held_out_rows)
        return DataFacts(data.name, shape, problem, data.preprocess, data.fingerprint, data.seen, *held_out, data.side)

    def check(self, given: ValueRange | None, what: str) -> None:
        """Refuses other examples that cannot be brought to the range that training saw."""
        if self.seen is not None and given is not None:
            self.seen.check(given, what)

    def describe_preprocessing(self) -> str:
        """What the run does to inputs and targets, in words; empty if it does nothing."""
        normalized = "targets normalised" if getattr(self.problem, "std_of_targets", ()) else ""
        return ", ".join(part for part in (str(self.preprocess), normalized) if part)

    def inputs(self, raw: Value, dtype: torch.dtype) -> Tensor:
        """Other examples as the network takes them: raw values in the units of training, preprocessed as there."""
        raw, *beside = raw if isinstance(raw, tuple) else (raw,)
        raw = raw if self.seen is None else self.seen.convert(raw)
        return self.preprocess((raw, *beside) if beside else raw, dtype)

    def to_bytes(self) -> bytes:
        """The content of data.safetensors; `read` is the inverse."""
        facts = {
            "name": self.name,
            "shape": list(self.shape),
            "problem": self.problem.to_dict(),
            "scale": self.preprocess.scale,
            "bgr": self.preprocess.bgr,
            "fingerprint": self.fingerprint,
            "seen": None if self.seen is None else [self.seen.kind, self.seen.low, self.seen.high],
            "held_out": self.held_out,
            "side": self.side,
        }
        rows = {} if self.held_out_rows is None else {"held_out": torch.from_numpy(self.held_out_rows)}
        return to_bytes(self.preprocess.tensors() | rows, {"facts": json.dumps(facts)})

    @staticmethod
    def read(path: Path) -> DataFacts:
        """The facts in a file; raises ValueError and the like if they are none."""
        with safe_open(path, "pt") as file:
            facts = from_json((file.metadata() or {})["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        schemas.check(schemas.StoredFacts, facts)
        shape = tuple(facts["shape"])
        _check_tensors(tensors, shape)
        preprocess = Preprocess.from_tensors(tensors, facts["scale"], facts.get("bgr", False))
        seen = None if facts["seen"] is None else ValueRange(*facts["seen"])
        rows = tensors["held_out"].numpy() if "held_out" in tensors else None
        side = facts.get("side")
        side = None if side is None else {name: tuple(size) for name, size in side.items()}
        problem = problems.from_dict(facts["problem"])
        return DataFacts(
            facts["name"], shape, problem, preprocess, facts["fingerprint"], seen, facts["held_out"], rows, side
        )


def _check_tensors(tensors: dict[str, Tensor], shape: tuple[int, ...]) -> None:
    """Refuses a mean that no example of this shape could be subtracted from, and the like."""
    for name in ("mean", "std"):
        if (tensor := tensors.get(name)) is None:
            continue
        by_channel = (shape[0], 1, 1) if len(shape) == 3 else shape
        fits = tuple(tensor.shape) == by_channel
        if name == "mean" and len(shape) == tensor.ndim == 3 and tensor.shape[0] == shape[0]:
            fits = fits or all(here >= needed for here, needed in zip(tensor.shape[1:], shape[1:], strict=True))
        if not fits:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, and examples are {list(shape)}")
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 4 or not torch.isfinite(tensor).all():
            raise ValueError(f"{name} ({tensor.dtype}) should hold finite numbers in float32 or float64")
    rows = tensors.get("held_out")
    if rows is not None and (rows.dtype != torch.int64 or rows.ndim != 1 or (rows < 0).any()):
        raise ValueError(f"held_out ({rows.dtype} {list(rows.shape)}) should hold the numbers of rows, as int64 [N]")
