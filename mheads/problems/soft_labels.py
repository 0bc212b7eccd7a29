"""Probabilities of the classes for each example: several people's votes, or what another network says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.problems.base import refuse_other_width
from mheads.problems.classification import Classification
from mheads.problems.metrics import ClassificationMetrics, ClassificationResult

TOLERANCE = 1e-3  # of a row's sum: float16 is not more exact


@dataclass(frozen=True)
class SoftLabelsResult(ClassificationResult):
    """The metrics of classification, with the most probable class for the label."""

    problem: ClassVar[str] = "soft_labels"


class SoftLabelsMetrics(ClassificationMetrics):
    result_type = SoftLabelsResult

    def update(self, outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        super().update(outputs, y.argmax(-1), weights)


@dataclass(frozen=True)
class SoftLabels(Classification):
    """Targets are probabilities [B, C], answers are scores [M, B, C]."""

    name: ClassVar[str] = "soft_labels"
    result_type: ClassVar[Any] = SoftLabelsResult
    metrics_type: ClassVar[Any] = SoftLabelsMetrics

    def group(self, targets: Value) -> Tensor:
        return super().group(targets).argmax(-1)

    def check_targets(self, targets: np.ndarray, where: str) -> None:
        if not len(targets):
            return
        refuse_other_width(targets, self.classes, where)
        check_probabilities(targets, where, "soft label")


def check_probabilities(rows: np.ndarray, where: str, what: str) -> None:
    """Raises UserError unless each row [C] holds probabilities; `what` is what the message calls a row."""
    with np.errstate(invalid="ignore"):
        good = (rows >= 0).all(1) & (np.abs(rows.sum(1, dtype=np.float64) - 1) <= TOLERANCE)
    bad = np.flatnonzero(~good)
    if len(bad):
        raise UserError(
            f"{where}: example {bad[0]} has the {what} {rows[bad[0]].tolist()[:10]} ({len(bad)} such); give "
            "probabilities: numbers of 0 or more whose sum is 1"
        )
