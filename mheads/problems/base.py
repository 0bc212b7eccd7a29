"""What every problem gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.problems.answer_text import AnswerColumns, AnswerText, number_columns, number_text
from mheads.problems.metrics import weighted_mean


class Result(Protocol):
    """The measures of an ensemble: plain data, under the same names as in JSON."""

    problem: ClassVar[str]  # its name

    @property
    def members(self) -> list[float]: ...
    @property
    def ownership(self) -> list[list[int]]: ...
    @property
    def examples(self) -> int: ...
    def to_dict(self) -> dict[str, Any]: ...
    def headline(self) -> dict[str, str]:
        """The few measures that a line of progress shows, by name."""


class Metrics(Protocol):
    """Measures a stream of outputs; exact however the stream is cut."""

    def update(self, outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> None: ...
    def result(self) -> Result: ...


class Problem(Protocol):
    """What is learned. M members, B examples."""

    name: ClassVar[str]
    unit: ClassVar[str]  # of the measures in the headline: "%", or nothing
    answer_kind: ClassVar[str]  # what a member gives, in words: "numbers"
    measure: ClassVar[str]  # what is measured in the headline, with its unit
    result_type: ClassVar[Any]  # a `PlainResult`
    base_losses: ClassVar[tuple[str, ...]]  # those in `member_losses.py` that fit, its own first

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups that ownership counts: classes, where there are some."""

    def group(self, targets: Tensor) -> Tensor:
        """The group of each target, int64 [B]."""

    def answer(self, outputs: Value) -> Tensor:
        """The leaf of all members' outputs that is the answer, [M, B, ...]; others serve the loss."""

    def mean(self, answers: Tensor, weights: Tensor | None = None) -> Tensor:
        """What the ensemble answers, from the answers of all members: [M, B, ...] -> [B, ...].

        Weights [M, B] say how much each member counts, where they have scores.
        """

    def losses(self, outputs: Value, targets: Tensor) -> Tensor:
        """The loss of each member's answer on each example, [M, B]."""

    def check_output(self, output: Value, network: str, data: str) -> None:
        """Refuses a network whose output [B, ...] cannot be an answer for these data."""

    def check_targets(self, targets: np.ndarray, where: str) -> None: ...
    def metrics(self, members: int, scored: bool = False) -> Metrics: ...
    def unknown(self, members: int) -> Any:
        """The result where nothing was evaluated: NaN throughout."""

    @staticmethod
    def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
        """The lines of a table of a result, as (name, text)."""

    def answer_text(self, outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerText:
        """The answers of members [M, B, ...] and of the ensemble (each as `mean` gives it) as text."""

    def answer_columns(self, outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerColumns:
        """The answers as cells of a .csv file: of the ensemble, and of each member."""

    def for_scores(self, count: int) -> Any:
        """The same for networks with so many scores, where labels alone do not say how many classes there are."""

    @property
    def answer_dims(self) -> int:
        """Dimensions of one member's answers, the examples included."""

    @property
    def output_form(self) -> str:
        """What one network must give, in words and with its shape."""

    def to_dict(self) -> dict[str, Any]: ...


class ProblemDefaults:
    """What problems do unless they say otherwise: examples are one group, answers are numbers."""

    @property
    def groups(self) -> tuple[str, ...]:
        return ("all",)

    def group(self, targets: Value) -> Tensor:
        return torch.zeros(len(targets), dtype=torch.long, device=targets.device)

    def answer(self, outputs: Value) -> Tensor:
        return nested_values.leaves(outputs)[0]  # the answer comes first

    def answer_text(self, outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerText:
        return number_text(outputs, ensemble)

    def answer_columns(self, outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerColumns:
        return number_columns(outputs, ensemble)

    def for_scores(self, count: int) -> Any:
        return self


ANSWERS = {"ensemble_mean": "Ensemble-Mean", "ensemble_scored": "Ensemble-Scored"}  # what tables call them


def together(
    scores: Tensor, probabilities: Callable[[Tensor], Tensor], weights: Tensor | None, of_scores: bool
) -> Tensor:
    """The probabilities that members give together: the mean of theirs, or those of their mean score.

    [M, B, ...] -> [B, ...]. Members with weights [M, B] are averaged by these.
    """
    if of_scores and weights is None:
        return probabilities(scores.mean(0))
    return mean_or_weighted(probabilities(scores), weights)


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
    rows = [(members, "  ".join(number(a) for a in summary["members"]) + (" %" if not several else ""))]
    if several:
        rows += [
            ("mean member", f"{number(summary['single'])} %"),
            *((who, f"{number(summary[key])} %") for key, who in ANSWERS.items() if key in summary),
            ("Oracle", f"{number(summary['oracle'])} %"),
        ]
    return rows


def further_row(measure: dict[str, Any], form: str = ".2f", unit: str = " %") -> str:
    """What a table shows of a further measure: of one network, or of the members' mean, Ensemble-Mean and Oracle."""
    who = {"single": "mean member", **ANSWERS, "oracle": "Oracle"}
    if len(measure["members"]) == 1:
        return number(measure["single"], form) + unit
    return ", ".join(f"{who[name]} {number(measure[name], form)}{unit}" for name in who if name in measure)


def number(value: float | None, form: str = ".2f") -> str:
    """A number of a result as JSON has it."""
    return "not finite" if value is None else format(value, form)


class HasClasses(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def classes(self) -> tuple[str, ...]: ...


P = TypeVar("P", bound=HasClasses)


def with_classes(problem: P, count: int) -> P:
    """The problem with so many classes, called by their numbers; labels must not need more."""
    largest = len(problem.classes) - 1
    if largest >= count:
        raise UserError(f"label {largest}, but the models give {count} scores")
    return replace(problem, classes=tuple(map(str, range(count))))


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
    """How a network is given as many classes: a Caffe net says so itself, others take an argument."""
    if of_caffe(network):
        return f"num_output: {count} in the net's last layer?"
    return f"model_args.classes={count}?"
