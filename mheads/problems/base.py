"""What every problem gives, and what those with classes have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.problems.answer_text import AnswerColumns, AnswerText, number_columns, number_text
from mheads.problems.metrics import weighted_mean
from mheads.problems.result import Result


class Metrics(Protocol):
    """Measures a stream of outputs; exact however the stream is cut."""

    def update(self, outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> None: ...
    def result(self) -> Result: ...


class Problem(Protocol):
    """What is learned. M members, B examples.

    A problem derives from this and says what is open here. Unless it says otherwise, examples are one group, answers
    are numbers, and nothing is calibrated.
    """

    name: ClassVar[str]
    unit: ClassVar[str]  # of the measures in the headline: "%", or nothing
    answer_kind: ClassVar[str]  # what a member gives, in words: "numbers"
    measure: ClassVar[str]  # what is measured in the headline, with its unit
    oracle_picks: ClassVar[str] = "the best member is picked for each example"
    result_type: ClassVar[Any]  # a `Result`
    base_losses: ClassVar[tuple[str, ...]]  # those in `member_losses.py` that fit, its own first
    # What kind of answers it has: see `is_single_label` and the like in `problems/__init__.py`.
    single_label: ClassVar[bool] = False
    gives_probabilities: ClassVar[bool] = False
    finds_objects: ClassVar[bool] = False
    gives_numbers: ClassVar[bool] = False
    other_losses: ClassVar[tuple[str, ...]] = ()  # that cannot be used for it
    evaluation_rows: ClassVar[int | None] = None  # examples that are evaluated together, where not any number can be

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups that ownership counts: classes, where there are some."""
        return ("all",)

    def group(self, targets: Value) -> Tensor:
        """The group of each target, int64 [B]."""
        return torch.zeros(len(targets), dtype=torch.long, device=targets.device)

    def in_original_units(self, outputs: Value) -> Value:
        """Outputs of one member [B, ...] in the units of the targets, where members learn normalised targets."""
        return outputs

    def answer(self, outputs: Value) -> Tensor:
        """The leaf of all members' outputs that is the answer, [M, B, ...]; others serve the loss."""
        return nested_values.leaves(outputs)[0]  # the answer comes first

    def mean(self, answers: Tensor, weights: Tensor | None = None) -> Tensor:
        """What the ensemble answers, from the answers of all members: [M, B, ...] -> [B, ...].

        Weights [M, B] say how much each member counts, where they have scores.
        """

    def together(self, answers: Tensor, weights: Tensor | None) -> list[Tensor]:
        """What the ensemble answers; where members have scores, weighted by them, and the mean after it."""
        return [self.mean(answers, weights), *([] if weights is None else [self.mean(answers)])]

    def losses(self, outputs: Value, targets: Value) -> Tensor:
        """The loss of each member's answer on each example, [M, B]."""

    def log_variances(self, outputs: Value) -> Tensor | None:
        """The logarithms of variances [M, B, ...] in the units of the targets, where members give some."""
        return None

    def check_output(self, output: Value, network: str, data: str) -> None:
        """Refuses a network whose output [B, ...] cannot be an answer for these data."""

    def check_targets(self, targets: np.ndarray, where: str) -> None: ...
    def metrics(self, members: int, scored: bool = False) -> Any:
        """The `Metrics` of so many members."""

    def unknown(self, members: int) -> Any:
        """The result where nothing was evaluated: NaN throughout."""
        return self.result_type.unknown(members, len(self.groups))

    def calibrator(self) -> Any:
        """What chooses on held-out examples, by `update` and `result` as metrics have them; None where nothing is."""
        return None

    def calibrated(self, summary: Mapping[str, Any]) -> Any:
        """The problem with what was chosen for a run whose result, as JSON has it, is this."""
        return self

    @staticmethod
    def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
        """The lines of a table of a result, as (name, text)."""

    def answer_text(self, outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerText:
        """The answers of members [M, B, ...] and of the ensemble (as `together` gives them) as text."""
        return number_text(outputs, ensemble)

    def answer_columns(self, outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerColumns:
        """The answers as cells of a .csv file: of the ensemble, and of each member."""
        return number_columns(outputs, ensemble)

    def for_scores(self, count: int) -> Any:
        """The same for networks with so many scores, where labels alone do not say how many classes there are."""
        return self

    def taught_by(self, mean_of_scores: bool, variances: bool) -> Self:
        """The same for a loss that trains the mean of scores, or whose members learn variances, where that matters."""
        return self

    @property
    def answer_dims(self) -> int:
        """Dimensions of one member's answers, the examples included."""

    @property
    def output_form(self) -> str:
        """What one network must give, in words and with its shape."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, but those that are empty, and those that belong to no run (`compare=False`)."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}  # type: ignore[arg-type]
        return {"name": self.name, **{key: _listed(value) for key, value in kept.items() if value not in ((), False)}}

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; an older file may lack fields that have a default."""
        known = {f.name for f in fields(cls) if f.compare}  # type: ignore[arg-type]
        return cls(**{key: _tupled(value) for key, value in facts.items() if key in known})


def _listed(value: Any) -> Any:
    return [_listed(part) for part in value] if isinstance(value, tuple) else value


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class ClassScores(Problem):
    """A problem whose answers are scores of classes."""

    classes: tuple[str, ...]
    of_scores: bool = field(default=False, kw_only=True)  # the ensemble answers with the mean of scores, not of p
    unit: ClassVar[str] = "%"
    metrics_type: ClassVar[Any]

    def metrics(self, members: int, scored: bool = False) -> Any:
        return self.metrics_type(members, len(self.classes), scored, self.of_scores)

    def taught_by(self, mean_of_scores: bool, variances: bool) -> Self:
        return replace(self, of_scores=mean_of_scores)

    def average(self, scores: Tensor, probabilities: Callable[[Tensor], Tensor], weights: Tensor | None) -> Tensor:
        """The probabilities that members give together: the mean of theirs, or those of their mean score.

        [M, B, ...] -> [B, ...]. Members with weights [M, B] are averaged by these.
        """
        if self.of_scores and weights is None:
            return probabilities(scores.mean(0))
        return mean_or_weighted(probabilities(scores), weights)

    def with_classes(self, count: int) -> Self:
        """The problem with so many classes, called by their numbers; labels must not need more."""
        largest = len(self.classes) - 1
        if largest >= count:
            raise UserError(f"label {largest}, but the models give {count} scores")
        return replace(self, classes=tuple(map(str, range(count))))


ANSWERS = {"ensemble_mean": "Ensemble-Mean", "ensemble_scored": "Ensemble-Scored"}  # what tables call them


def mean_or_weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    """[M, B, ...] -> [B, ...], of members that count alike, or by weights [M, B]."""
    return values.mean(0) if weights is None else weighted_mean(values, weights)


def refuse_other_width(targets: np.ndarray, classes: tuple[str, ...], where: str) -> None:
    """Refuses targets [N, C] for another number of classes."""
    if targets.shape[1:] != (len(classes),):
        raise UserError(f"{where}: labels of shape {list(targets.shape)}, but there are {len(classes)} classes")


def percent_rows(summary: dict[str, Any], members: str) -> list[tuple[str, str]]:
    """The rows of a table that results in percent have in common; `members` says what of the members is shown."""
    several = len(summary["members"]) > 1
    rows = [(members, "  ".join(format_number(a) for a in summary["members"]) + (" %" if not several else ""))]
    if several:
        rows += [
            ("mean member", f"{format_number(summary['single'])} %"),
            *((who, f"{format_number(summary[key])} %") for key, who in ANSWERS.items() if key in summary),
            ("Oracle", f"{format_number(summary['oracle'])} %"),
        ]
    return rows


def further_row(measure: dict[str, Any], form: str = ".2f", unit: str = " %") -> str:
    """What a table shows of a further measure: of one network, or of the members' mean, Ensemble-Mean and Oracle."""
    who = {"single": "mean member", **ANSWERS, "oracle": "Oracle"}
    if len(measure["members"]) == 1:
        return format_number(measure["single"], form) + unit
    return ", ".join(f"{who[name]} {format_number(measure[name], form)}{unit}" for name in who if name in measure)


def format_number(value: float | None, form: str = ".2f") -> str:
    """A number of a result as JSON has it."""
    return "not finite" if value is None else format(value, form)


def widen_classes(problem: Any, output: Value, network: str) -> Any:
    """The problem with as many classes as a Caffe net has scores for: as there, labels need not use them all."""
    scores = nested_values.leaves(output)[0]
    if problem.name not in ("classification", "segmentation") or scores.dim() < 2 or not of_caffe(network):
        return problem
    more = tuple(map(str, range(len(problem.classes), scores.shape[1])))
    return replace(problem, classes=(*problem.classes, *more)) if more else problem


def of_caffe(network: str) -> bool:
    return network.startswith("mheads.caffe.")


def more_classes(network: str, count: int) -> str:
    """How a network is given as many classes: a Caffe net says so itself, others take an argument of any name."""
    if of_caffe(network):
        return f"num_output: {count} in the net's last layer?"
    return f"model_args.classes={count}, or what the factory calls their number"
