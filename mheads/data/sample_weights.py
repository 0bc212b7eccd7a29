"""Arrays that a user gives beside the examples, or files of them: sample weights [M, N], how much each member learns
from each example, and what a teacher answers, [N, C]."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mheads.common import packed_arrays
from mheads.common.errors import UserError
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
    saved = f"save it with numpy.savez(path, {names[0]}=...)"
    try:
        with packed_arrays.opened(path) as arrays:
            if list(arrays) == [""]:  # an .npy file
                return arrays[""]
            name = next((name for name in names if name in arrays), None)
            if name is None:
                raise UserError(f"{path} has no array {names[0]} (it has {', '.join(arrays) or 'none'}); {saved}")
            return arrays[name]
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give {option} an .npz or .npy file of {what}") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read as an .npz or .npy file of plain arrays ({error}); {saved}") from error


def select_training_rows(given: Any, rows: np.ndarray | None, members: int, count: int) -> Any:
    """Sample weights [M, N] of all `count` examples as those of the rows that training has; others as they are."""
    with suppress(ValueError):  # told where it is looked at
        given = np.asarray(given) if isinstance(given, list | tuple) else given
    whole = rows is not None and len(rows) < count and getattr(given, "shape", ()) == (members, count)
    return given[:, rows] if whole else given


def check_answers(given: Any, data: Data, where: str) -> np.ndarray:
    """What a teacher answers to the training examples, as float32 [N, C]."""
    problem = data.problem
    if not is_single_label(problem):
        raise UserError(
            f"{where}: a teacher's answers are probabilities of classes, and {data.name} is {problem.name}; to learn "
            "what another network gives, give that as the targets"
        )
    try:
        if isinstance(given, torch.Tensor) and given.is_floating_point():
            given = given.detach().cpu()
            if given.dtype.itemsize < 4:  # whose rows add to 1 only nearly
                given = given.float()
                sums = given.sum(-1, keepdim=True)
                given = torch.where((sums - 1).abs() < 0.02, given / sums, given)
        found = np.asarray(given)
        if found.dtype.kind != "f":
            raise TypeError(f"type {found.dtype}")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: the answers are not probabilities ({error}); give an array [N, C]") from error
    if data.rows is not None and len(data.rows) < data.given == len(found):
        found = found[data.rows]  # all were given, and some are held out
    shape = (len(data.train), len(problem.classes))
    if found.shape != shape:
        raise UserError(
            f"{where}: answers of shape {list(found.shape)}, but there are {shape[0]} training examples and {shape[1]} "
            f"classes; give an array {list(shape)}, without examples that are held out, or one of all with them"
        )
    check_probabilities(found, where, "answer")
    return np.ascontiguousarray(found, np.float32)


def check_sample_weights(given: Any, members: int, n: int, where: str) -> np.ndarray:
    """Sample weights [M, N] as float32 with rows of mean 1."""
    try:
        found = np.asarray(given)
        if found.dtype.kind not in "biuf":
            raise TypeError(f"type {found.dtype}")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: the sample weights are not numbers ({error}); give an array [M, N]") from error
    if found.shape != (members, n):
        raise UserError(
            f"{where}: sample weights of shape {list(found.shape)}, but there are {members} members and {n} "
            f"training examples; give an array [{members}, {n}], without examples that are held out, or one of all "
            "with them"
        )
    found = found.astype(np.float64)
    bad = np.argwhere(~(np.isfinite(found) & (found >= 0)))
    if len(bad):
        m, i = bad[0]
        raise UserError(
            f"{where}: the sample weight of member {m} on example {i} is {found[m, i]} ({len(bad)} such values); "
            "give finite numbers, 0 or more"
        )
    largest = found.max(axis=1, keepdims=True)
    if not largest.all():
        raise UserError(
            f"{where}: member {int(np.argmin(largest))} has no example, all its sample weights are 0; "
            "give each member at least one"
        )
    found = np.ldexp(found, -np.frexp(largest)[1])  # exact, and the sum of the largest numbers stays finite
    weights: np.ndarray = (found / found.mean(axis=1, keepdims=True)).astype(np.float32)
    return weights
