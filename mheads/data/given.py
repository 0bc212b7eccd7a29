"""Priors of a user's own, an array or a file of one: which member learns from which example, with what weight."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from mheads.errors import UserError

KEY = "priors"
SAVED = f"save it with numpy.savez(path, {KEY}=...)"


def read_priors(path: Path) -> np.ndarray:
    """The array in an .npy file, or the one called `priors` in an .npz file."""
    try:
        with path.open("rb") as stream:
            found = np.load(stream, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return found
            if KEY not in found:
                raise UserError(f"{path} has no array {KEY} (it has {', '.join(found) or 'none'}); {SAVED}")
            return found[KEY]
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give sampling.path an .npz or .npy file of priors [M, N]") from error
    except (ValueError, OSError, EOFError, BadZipFile, TypeError, zlib.error) as error:
        raise UserError(f"{path} cannot be read as an .npz or .npy file of plain arrays ({error}); {SAVED}") from error


def of_rows(given: Any, rows: np.ndarray | None, count: int) -> Any:
    """Priors [M, N] of all `count` examples as those of the rows that training has; others as they are."""
    shape: tuple[int, ...] = getattr(given, "shape", ())
    return given[:, rows] if rows is not None and len(shape) == 2 and len(rows) < count == shape[1] else given


def check_priors(given: Any, members: int, n: int, where: str) -> np.ndarray:
    """Priors [M, N] as float32 with rows of mean 1."""
    try:
        found = np.asarray(given)
        if found.dtype.kind not in "biuf":
            raise TypeError(f"type {found.dtype}")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: the priors are not numbers ({error}); give an array [M, N]") from error
    if found.shape != (members, n):
        raise UserError(
            f"{where}: priors of shape {list(found.shape)}, but there are {members} members and {n} training examples; "
            f"give an array [{members}, {n}], without examples that are held out, or one of all with them"
        )
    found = found.astype(np.float64)
    bad = np.argwhere(~(np.isfinite(found) & (found >= 0)))
    if len(bad):
        m, i = bad[0]
        raise UserError(
            f"{where}: the prior of member {m} on example {i} is {found[m, i]} ({len(bad)} such values); "
            "give finite numbers, 0 or more"
        )
    largest = found.max(axis=1, keepdims=True)
    if not largest.all():
        raise UserError(
            f"{where}: member {int(np.argmin(largest))} has no example, all its priors are 0; "
            "give each member at least one"
        )
    found = np.ldexp(found, -np.frexp(largest)[1])  # exact, and the sum of the largest numbers stays finite
    return (found / found.mean(axis=1, keepdims=True)).astype(np.float32)
