"""Problems: what is learned. Each defines what a target is, how an output must look, the loss of one member on one
example, the metrics, and the groups that ownership counts.

    problem = Classification(("cat", "dog"))
    problem.losses(outputs, targets)          # [M, B]
    metrics = problem.metrics(members=4)

`PROBLEMS` turns the name in a file into the class that reads the rest of the file.
"""

from typing import Any, TypeGuard

from mheads.problems.base import Metrics, Problem, widen_classes
from mheads.problems.classification import PROBABILITIES, Classification, are_probabilities
from mheads.problems.detection import Detection
from mheads.problems.member_losses import BASE_LOSSES, BaseLoss, cross_entropies, squared_errors
from mheads.problems.multilabel import MultiLabel
from mheads.problems.regression import Regression
from mheads.problems.result import Result
from mheads.problems.segmentation import Segmentation
from mheads.problems.soft_labels import SoftLabels

PROBLEMS: dict[str, Any] = {
    "classification": Classification,
    "soft_labels": SoftLabels,
    "multilabel": MultiLabel,
    "segmentation": Segmentation,
    "regression": Regression,
    "detection": Detection,
}

__all__ = [
    "BASE_LOSSES",
    "PROBABILITIES",
    "PROBLEMS",
    "BaseLoss",
    "Classification",
    "Detection",
    "Metrics",
    "MultiLabel",
    "Problem",
    "Regression",
    "Result",
    "Segmentation",
    "SoftLabels",
    "are_probabilities",
    "cross_entropies",
    "find_problem_type",
    "finds_objects",
    "from_dict",
    "gives_numbers",
    "gives_probabilities",
    "is_single_label",
    "squared_errors",
    "widen_classes",
]


def from_dict(facts: dict[str, Any]) -> Problem:
    """The problem that a run folder describes."""
    problem: Problem = find_problem_type(facts["name"]).from_dict(facts)
    return problem


def find_problem_type(name: str) -> Any:
    """The kind of problem that a file names."""
    if name not in PROBLEMS:
        raise ValueError(f"problem = {name!r}: there are {', '.join(PROBLEMS)}")
    return PROBLEMS[name]


# What kind of answers a problem has, for code that shows or uses these.


def is_single_label(problem: Problem) -> TypeGuard[Classification]:
    """Whether an answer is one class of several: then the problem has what Classification has."""
    return problem.single_label


def gives_probabilities(problem: Problem) -> TypeGuard[Classification | MultiLabel]:
    """Whether the ensemble's mean is a probability for each class."""
    return problem.gives_probabilities


def finds_objects(problem: Problem) -> TypeGuard[Detection]:
    """Whether an answer is boxes in an image: then the problem has what Detection has."""
    return problem.finds_objects


def gives_numbers(problem: Problem) -> TypeGuard[Regression]:
    """Whether an answer is numbers in the units of the targets: then the problem has what Regression has."""
    return problem.gives_numbers
