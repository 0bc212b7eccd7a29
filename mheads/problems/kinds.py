"""What kind of answers a problem has, for code that shows or uses these: asked of the problem, not of its class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from mheads.problems.classification import Classification
    from mheads.problems.detection import Detection
    from mheads.problems.multilabel import MultiLabel
    from mheads.problems.regression import Regression


def is_single_label(problem: Any) -> TypeGuard[Classification]:
    """Whether an answer is one class of several: `single_label = True`, and it has what Classification has."""
    return bool(getattr(problem, "single_label", False))


def gives_probabilities(problem: Any) -> TypeGuard[Classification | MultiLabel]:
    """Whether the ensemble's mean is a probability for each class: `gives_probabilities = True`."""
    return bool(getattr(problem, "gives_probabilities", False))


def finds_objects(problem: Any) -> TypeGuard[Detection]:
    """Whether an answer is boxes in an image: `finds_objects = True`, and it has what Detection has."""
    return bool(getattr(problem, "finds_objects", False))


def gives_numbers(problem: Any) -> TypeGuard[Regression]:
    """Whether an answer is numbers in the units of the targets: `gives_numbers = True`, and what Regression has."""
    return bool(getattr(problem, "gives_numbers", False))
