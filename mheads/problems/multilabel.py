"""Several labels for each example, any number of the classes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mheads.common import nested_values, number_words
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.common.schemas import Measures
from mheads.problems.answer_text import AnswerColumns, AnswerText, number_columns
from mheads.problems.base import ClassScores, further_row, more_classes, percent_rows, refuse_other_width
from mheads.problems.member_losses import binary_cross_entropies
from mheads.problems.metrics import mean_members, owner_of, weighted_mean
from mheads.problems.result import PercentResult, by_predictor


@dataclass(frozen=True)
class MultiLabelResult(PercentResult):
    """Mean average precisions, in percent; `f1_micro` and `f1_macro` hold the same of other measures.

    `oracle` is of the scores of the member with the lowest loss on each example.
    """

    problem: ClassVar[str] = "multilabel"

    f1_micro: Measures  # of all labels of all classes together
    f1_macro: Measures  # the mean of that of each class

    @classmethod
    def unknown(cls, members: int, groups: int, **further: Any) -> MultiLabelResult:
        measures = by_predictor([math.nan] * (members + 2))
        return super().unknown(members, groups, f1_micro=measures, f1_macro=measures)


class MultiLabelMetrics:
    """Keeps the scores [M, b, C] and labels [b, C] of a stream: a precision depends on how all examples are ranked."""

    def __init__(self, members: int, classes: int, scored: bool = False, of_scores: bool = False) -> None:
        self.members, self.classes, self.scored, self.of_scores = members, classes, scored, of_scores
        self._scores: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        expected = (self.members, len(y), self.classes)
        if tuple(outputs.shape) != expected or y.shape != outputs.shape[1:]:
            shapes = f"outputs are {tuple(outputs.shape)} and labels {tuple(y.shape)}"
            raise ValueError(f"{shapes}, expected (M, b, C) = {expected} and (b, C)")
        self._scores.append(outputs.detach().cpu())
        self._weights += [] if weights is None else [weights.detach().cpu()]
        self._labels.append(y.detach().cpu() > 0.5)

    def result(self) -> MultiLabelResult:
        if not sum(map(len, self._labels)):
            raise ValueError("no examples to measure")
        scores, labels = torch.cat(self._scores, 1).double(), torch.cat(self._labels)
        owner, owned = owner_of(binary_cross_entropies(scores, labels.double()))
        oracle = scores[owner, torch.arange(len(labels))].masked_fill(~owned[:, None], math.nan)
        answered = [mean_members(scores).sigmoid() if self.of_scores else mean_members(scores.sigmoid())]
        answered += [weighted_mean(scores.sigmoid(), torch.cat(self._weights, 1))] if self.scored else []
        precisions = [mean_average_precision(one, labels) for one in (*scores, *answered, oracle)]
        answers = [*(scores > 0), *(p > 0.5 for p in answered), oracle > 0]
        micro, macro = zip(*(f1(one, labels) for one in answers), strict=True)
        counts = torch.bincount(owner[owned], minlength=self.members).tolist()
        return MultiLabelResult(
            **by_predictor([100 * x for x in precisions], self.scored),
            f1_micro=by_predictor([100 * x for x in micro], self.scored),
            f1_macro=by_predictor([100 * x for x in macro], self.scored),
            ownership=[[count] for count in counts],
            examples=len(labels),
        )


def mean_average_precision(scores: Tensor, labels: Tensor) -> float:
    """Of scores [N, C] and bools [N, C], over the classes that some example has; NaN where there is none.

    The average precision of a class is the sum over its ranked examples of precision times the gain in recall; equal
    scores are one step. A score that is NaN comes last.
    """
    ranked, order = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).sort(0, descending=True)
    right = labels.gather(0, order).double()
    places = torch.arange(len(labels))[:, None].expand_as(order)
    precision = right.cumsum(0) / (places + 1)
    last = torch.ones_like(labels)
    last[:-1] = ranked[:-1] != ranked[1:]
    # The precision of an example is that at the last of its equals.
    steps = places.where(last, torch.tensor(len(labels))).flip(0).cummin(0).values.flip(0)
    precisions, positives = (right * precision.gather(0, steps)).sum(0), labels.sum(0)
    return (precisions / positives)[positives > 0].mean().item()


def f1(answers: Tensor, labels: Tensor) -> tuple[float, float]:
    """2 right / (answered + there) of bools [N, C]: of all classes together, and the mean of each class's own.

    A class that is neither there nor answered has 0.
    """
    right, total = (answers & labels).sum(0).double(), (answers.sum(0) + labels.sum(0)).double()
    return (2 * right.sum() / total.sum().clamp_min(1)).item(), (2 * right / total.clamp_min(1)).mean().item()


@dataclass(frozen=True)
class MultiLabel(ClassScores):
    """Targets are 0 and 1 [B, C], answers are scores [M, B, C], whose sigmoids are probabilities.

    Examples are one group: each has several labels, and is owned once.
    """

    name: ClassVar[str] = "multilabel"
    answer_kind: ClassVar[str] = "several classes"
    measure: ClassVar[str] = "mean average precision, %"
    oracle_picks: ClassVar[str] = (
        "the member with the lowest loss is picked for each example; since precision is over all examples together, "
        "this need not be above the others"
    )
    result_type: ClassVar[Any] = MultiLabelResult
    metrics_type: ClassVar[Any] = MultiLabelMetrics
    base_losses: ClassVar[tuple[str, ...]] = ("bce",)
    gives_probabilities: ClassVar[bool] = True
    output_form: ClassVar[str] = "logits [B, C]"
    answer_dims: ClassVar[int] = 2

    def mean(self, answers: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.average(answers, torch.sigmoid, weights)

    def losses(self, outputs: Value, targets: Tensor) -> Tensor:
        return binary_cross_entropies(outputs, targets)

    def check_output(self, output: Value, network: str, data: str) -> None:
        scores, count = nested_values.leaves(output)[0], len(self.classes)
        if scores.dim() != 2 or scores.shape[1] != count:
            classes = number_words.count(count, "class", "es")
            raise UserError(
                f"{network} gives outputs of shape {tuple(scores.shape[1:])}, but {data} has {classes}, of "
                "which an example may have several; a network gives one score per class "
                f"({more_classes(network, count)})"
            )

    def check_targets(self, targets: np.ndarray, where: str) -> None:
        if not len(targets):
            return
        refuse_other_width(targets, self.classes, where)
        bad = np.flatnonzero(~np.isin(targets, (0, 1)).all(1))
        if len(bad):
            raise UserError(
                f"{where}: example {bad[0]} has labels {targets[bad[0]].tolist()[:10]} ({len(bad)} such); give 1 for "
                "each class that it has and 0 for the others"
            )

    @staticmethod
    def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
        return [
            *percent_rows(summary, "mean AP of members"),
            ("F1, micro", further_row(summary["f1_micro"])),
            ("F1, macro", further_row(summary["f1_macro"])),
        ]

    def answer_text(self, outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerText:
        return AnswerText(self._answer_lines(outputs.sigmoid() > 0.5, ensemble), long=True)

    def answer_columns(self, outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerColumns:
        return number_columns(outputs.sigmoid(), ensemble, self.classes)  # probabilities, as their mean is

    def _answer_lines(self, given: Tensor, ensemble: Sequence[Tensor]) -> Iterator[list[str]]:
        """From the labels [M, B, C] that members give, and probabilities [B, C] of the ensemble."""

        def labels(p: Tensor) -> str:
            return ", ".join(f"{self.classes[c]} {100 * p[c]:.1f}%" for c in (p > 0.5).nonzero()[:, 0]) or "none"

        for row, p in enumerate(ensemble[0]):
            agree = f"{int((given[:, row] == (p > 0.5)).all(-1).sum())} of {len(given)}"
            members = (", ".join(self.classes[c] for c in one.nonzero()[:, 0]) or "none" for one in given[:, row])
            yield [*(labels(answer[row]) for answer in ensemble), agree, *members]
