"""Arrays that a user gives beside the examples, or files of them: sample weights [M, N], how much each member learns
from each example, and what a teacher answers, [N, C]."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mheads.common.errors import UserError
from mheads.data.arrays import refuse_masked, to_numpy
from mheads.data.readers.npz import open_arrays
from mheads.data.splits import Data
from mheads.problems import is_single_label
from mheads.problems.soft_labels import check_probabilities


def read_sample_weights(path: Path) -> np.ndarray:
    # `priors` is what such arrays were called at first.
    return read_array(path, ("sample_weights", "priors"), "sampling.path", "sample weights [M, N]")


def read_answers(path: Path) -> np.ndarray:
    return read_array(path, ("answers",), "teacher.answers", "probabilities [N, C]")


def read_array(path: Path, names: tuple[str, ...], option: str, what: str) -> np.ndarray:
    """The array in an .npy file, or the one of these names in an .npz file; files are written with the first name."""
    hint = f"save it with numpy.savez(path, {names[0]}=...), as {option} takes {what}"
    with open_arrays(path, hint) as arrays:
        if list(arrays) == [""]:  # an .npy file
            return arrays[""]
        name = next((name for name in names if name in arrays), None)
        if name is None:
            raise UserError(f"{path} has no array {names[0]} (it has {', '.join(arrays) or 'none'})", hint=hint)
        return arrays[name]


def select_training_rows(weights: Any, rows: np.ndarray | None, members: int, count: int) -> Any:
    """Sample weights [M, N] of all `count` examples as those of the rows that training has; others as they are."""
    with suppress(ValueError):  # `check_sample_weights` raises it in words
        weights = np.asarray(weights) if isinstance(weights, list | tuple) else weights
    whole = rows is not None and len(rows) < count and getattr(weights, "shape", ()) == (members, count)
    return weights[:, rows] if whole else weights


def check_answers(answers: Any, data: Data, where: str) -> np.ndarray:
    """What a teacher answers to the training examples, as float32 [N, C]."""
    problem = data.problem
    if not is_single_label(problem):
        raise UserError(
            f"{where}: a teacher's answers are probabilities of classes, and {data.name} is {problem.name}; to learn "
            "what another network gives, give that as the targets"
        )
    try:
        if isinstance(answers, torch.Tensor) and answers.is_floating_point():
            answers = answers.detach().cpu()
            if answers.dtype.itemsize < 4:  # whose rows add to 1 only nearly
                answers = answers.float()
                sums = answers.sum(-1, keepdim=True)
                answers = torch.where((sums - 1).abs() < 0.02, answers / sums, answers)
        refuse_masked(answers, f"{where}: the answers")
        answers = to_numpy(answers)
        if answers.dtype.kind != "f":
            raise TypeError(f"type {answers.dtype}")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: the answers are not probabilities ({error}); give an array [N, C]") from error
    if data.rows is not None and len(data.rows) < data.num_given == len(answers):
        answers = answers[data.rows]  # all were answers, and some are held out
    shape = (len(data.train), len(problem.classes))
    if answers.shape != shape:
        raise UserError(
            f"{where}: answers of shape {list(answers.shape)}, but there are {shape[0]} training examples and "
            f"{shape[1]} classes; give an array {list(shape)}, without examples that are held out, or one of all"
        )
    check_probabilities(answers, where, "answer")
    return np.ascontiguousarray(answers, np.float32)


def check_sample_weights(weights: Any, members: int, n: int, where: str) -> np.ndarray:
    """Sample weights [M, N] as float32 with rows of mean 1."""
    try:
        refuse_masked(weights, f"{where}: the sample weights")
        weights = to_numpy(weights)
        if weights.dtype.kind not in "biuf":
            raise TypeError(f"type {weights.dtype}")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: the sample weights are not numbers ({error}); give an array [M, N]") from error
    if weights.shape != (members, n):
        raise UserError(
            f"{where}: sample weights of shape {list(weights.shape)}, but there are {members} members and {n} "
            f"training examples; give an array [{members}, {n}], without examples that are held out, or one of all"
        )
    weights = weights.astype(np.float64)
    bad = np.argwhere(~(np.isfinite(weights) & (weights >= 0)))
    if len(bad):
        m, i = bad[0]
        raise UserError(
            f"{where}: the sample weight of member {m} on example {i} is {weights[m, i]} ({len(bad)} such values); "
            "give finite numbers, 0 or more"
        )
    largest = weights.max(axis=1, keepdims=True)
    if not largest.all():
        raise UserError(
            f"{where}: member {int(np.argmin(largest))} has no example, all its sample weights are 0; "
            "give each member at least one"
        )
    weights = np.ldexp(weights, -np.frexp(largest)[1])  # exact, and the sum of the largest numbers stays finite
    scaled: np.ndarray = (weights / weights.mean(axis=1, keepdims=True)).astype(np.float32)
    return scaled
