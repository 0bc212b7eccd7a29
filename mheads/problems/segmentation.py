"""One class for each pixel of an image."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mheads.common import nested_values, number_words
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.common.schemas import Measures
from mheads.problems.answer_text import AnswerColumns, AnswerText
from mheads.problems.base import ClassScores, further_row, percent_rows
from mheads.problems.member_losses import IGNORED, cross_entropies
from mheads.problems.metrics import add_counts, mean_members, owner_of, weighted_mean
from mheads.problems.result import PercentResult, by_predictor

CHUNK = 2**22  # numbers that are looked at together, to bound the memory


@dataclass(frozen=True)
class SegmentationResult(PercentResult):
    """Mean intersections over unions, in percent; `pixel_accuracy` holds the same of another measure.

    `oracle` is of the member with the best mean IoU on each image, and the group of an image the class of most pixels.
    """

    problem: ClassVar[str] = "segmentation"

    pixel_accuracy: Measures

    @classmethod
    def unknown(cls, members: int, groups: int, **further: Any) -> SegmentationResult:
        return super().unknown(members, groups, pixel_accuracy=by_predictor([math.nan] * (members + 2)))


class SegmentationMetrics:
    """Counts over a stream of scores [M, b, C, H, W] and classes [b, H, W].

    The members, the mean of their probabilities, if they are `scored` that mean weighted by the scores, and the Oracle
    are the predictors. A pixel with a score that is NaN is answered with no class, which is column C.
    """

    def __init__(self, members: int, classes: int, scored: bool = False, of_scores: bool = False) -> None:
        self.members, self.classes, self.scored, self.of_scores = members, classes, scored, of_scores
        self.examples = 0
        predictors = members + 2 + scored
        self._confusion = torch.zeros(predictors, classes, classes + 1, dtype=torch.long)  # [predictor, true, answer]
        self._right = torch.zeros(predictors, dtype=torch.long)
        self._ownership = torch.zeros(members, classes, dtype=torch.long)

    def update(self, outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        expected = (self.members, len(y), self.classes, *y.shape[1:])
        if tuple(outputs.shape) != expected:
            raise ValueError(f"outputs are {tuple(outputs.shape)}, expected (M, b, C, H, W) = {expected}")
        pixels = y[:1].numel()
        rows = max(1, CHUNK // max(1, self.members * self.classes * max(pixels, self.classes + 1)))
        counts = [None] * len(y) if weights is None else weights.detach().cpu().split(rows, 1)
        for scores, labels, count in zip(outputs.split(rows, 1), y.split(rows), counts, strict=False):
            self._add(scores.detach().cpu().double(), labels.detach().cpu().long(), count)

    def _add(self, scores: Tensor, y: Tensor, weights: Tensor | None) -> None:
        probabilities, m = F.softmax(scores, 2), self.members
        answered = [F.softmax(mean_members(scores), 1) if self.of_scores else mean_members(probabilities)]
        answered += [] if weights is None else [weighted_mean(probabilities, weights)]
        predictors = torch.cat([scores, torch.stack(answered)])
        answers = predictors.argmax(2).masked_fill(predictors.isnan().any(2), self.classes)  # [predictors, b, H, W]
        tables = self._tables(answers, y)  # [predictors, b, C, C + 1]
        right = _diagonal(tables).sum(-1)  # [predictors, b]
        best = mean_iou(tables[:m]).nan_to_num(nan=-1).argmax(0)
        chosen = tables[best, torch.arange(len(y))]
        owner, owned = owner_of(cross_entropies(scores, y))
        self.examples += len(y)
        self._confusion += torch.cat([tables, chosen[None]]).sum(1)
        self._right += torch.cat([right.sum(1), right[:m].amax(0).sum()[None]])
        add_counts(self._ownership, owner[owned], most_frequent(y, self.classes)[owned])

    def _tables(self, answers: Tensor, y: Tensor) -> Tensor:
        """How often which class is answered with which, for each predictor and image."""
        c = self.classes
        image = torch.arange(answers.shape[0] * len(y)).view(answers.shape[0], len(y), 1, 1)
        cells = (image * c + y) * (c + 1) + answers
        counts = torch.bincount(cells[(y != IGNORED).expand_as(cells)], minlength=image.numel() * c * (c + 1))
        return counts.view(*answers.shape[:2], c, c + 1)

    def result(self) -> SegmentationResult:
        if self.examples == 0:
            raise ValueError("no examples to measure")
        counted = self._confusion[0].sum()
        return SegmentationResult(
            **by_predictor((100 * mean_iou(self._confusion)).tolist(), self.scored),
            pixel_accuracy=by_predictor((100 * self._right.double() / counted).tolist(), self.scored),
            ownership=self._ownership.tolist(),
            examples=self.examples,
        )


def mean_iou(tables: Tensor) -> Tensor:
    """Of counts [..., true class, answered class]: the mean of right / (there or answered) over those that are."""
    right = _diagonal(tables)
    union = tables.sum(-1) + tables[..., : tables.shape[-2]].sum(-2) - right
    return torch.where(union > 0, right / union.clamp_min(1).double(), 0.0).sum(-1) / (union > 0).sum(-1)


def _diagonal(tables: Tensor) -> Tensor:
    return tables.diagonal(dim1=-2, dim2=-1)


def most_frequent(y: Tensor, classes: int) -> Tensor:
    """The class that most pixels of each image have, the lower number among equals: [b, H, W] -> [b]."""
    flat = y.flatten(1)
    counted = flat != IGNORED
    counts = torch.zeros(len(y), classes, dtype=torch.long, device=y.device)
    return counts.scatter_add_(1, flat.where(counted, 0), counted.long()).argmax(1)


@dataclass(frozen=True)
class Segmentation(ClassScores):
    """Targets are class numbers [B, H, W], -100 where a pixel does not count; answers are scores [M, B, C, H, W]."""

    size: tuple[int, int]
    name: ClassVar[str] = "segmentation"
    answer_kind: ClassVar[str] = "a class for each pixel"
    measure: ClassVar[str] = "mean IoU, %"
    oracle_picks: ClassVar[str] = "the member with the best mean IoU is picked for each image"
    result_type: ClassVar[Any] = SegmentationResult
    metrics_type: ClassVar[Any] = SegmentationMetrics
    base_losses: ClassVar[tuple[str, ...]] = ("cross_entropy",)
    output_form: ClassVar[str] = "logits [B, C, H, W]"
    answer_dims: ClassVar[int] = 4

    @property
    def groups(self) -> tuple[str, ...]:
        return self.classes

    def group(self, targets: Tensor) -> Tensor:
        return most_frequent(targets, len(self.classes))

    def mean(self, answers: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.average(answers, partial(torch.softmax, dim=-3), weights)

    def losses(self, outputs: Value, targets: Tensor) -> Tensor:
        return cross_entropies(outputs, targets)

    def check_output(self, output: Value, network: str, data: str) -> None:
        scores, expected = nested_values.leaves(output)[0], (len(self.classes), *self.size)
        if tuple(scores.shape[1:]) != expected:
            classes = number_words.count(expected[0], "class", "es")
            raise UserError(
                f"{network} gives outputs of shape {tuple(scores.shape[1:])}, but {data} has {classes} for "
                f"each of {self.size[0]} x {self.size[1]} pixels; a network gives one score per class and pixel, "
                f"{expected}"
            )

    def check_targets(self, targets: np.ndarray, where: str) -> None:
        if not len(targets):
            return
        count = len(self.classes)
        if targets.shape[1:] != self.size:
            raise UserError(f"{where}: classes of {targets.shape[1:]} pixels, but the network gives {self.size}")
        bad = np.flatnonzero((((targets < 0) & (targets != IGNORED)) | (targets >= count)).any((1, 2)))
        if len(bad):
            wrong = sorted(set(np.unique(targets[bad[0]]).tolist()) - {IGNORED, *range(count)})
            raise UserError(
                f"{where}: pixels of example {bad[0]} have the class {wrong[0]}, but the {count} classes are numbered "
                f"0 to {count - 1}, and {IGNORED} or 255 where a pixel does not count ({len(bad)} such examples)"
            )
        empty = np.flatnonzero((targets == IGNORED).all((1, 2)))
        if len(empty):
            raise UserError(
                f"{where}: no pixel of example {empty[0]} counts ({len(empty)} such examples); take them out"
            )

    @staticmethod
    def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
        return [
            *percent_rows(summary, "mean IoU of members"),
            ("pixel accuracy", further_row(summary["pixel_accuracy"])),
        ]

    def answer_text(self, outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerText:
        return AnswerText(self._answer_lines(outputs.softmax(2).argmax(2), [p.argmax(1) for p in ensemble]), long=True)

    def answer_columns(self, outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerColumns:
        raise UserError(
            f"a row of a .csv has no room for outputs of shape {tuple(outputs.shape[2:])} per example: write an .npz"
        )

    def for_scores(self, count: int) -> Segmentation:
        return self.with_classes(count)

    def _answer_lines(self, votes: Tensor, ensemble: Sequence[Tensor]) -> Iterator[list[str]]:
        """From the classes of pixels: [M, B, H, W] of members, [B, H, W] of the ensemble."""

        def shares(pixels: Tensor) -> str:
            each = pixels.flatten().bincount(minlength=len(self.classes)) / pixels.numel()
            best = each.topk(min(3, len(self.classes)))
            pairs = zip(best.values, best.indices, strict=True)
            return ", ".join(f"{self.classes[c]} {100 * share:.1f}%" for share, c in pairs if share)

        for row, pixels in enumerate(ensemble[0]):
            same = 100 * (votes[:, row] == pixels).all(0).double().mean()
            answers = [shares(answer[row]) for answer in ensemble]
            yield [*answers, f"on {same:.1f}%", *(shares(one) for one in votes[:, row])]
