"""A user's own arrays in one .npz file."""

from __future__ import annotations

import zlib
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from mheads.data.arrays import ArraySplit, as_split
from mheads.data.sources import posed
from mheads.errors import UserError
from mheads.problems import Problem

NEEDED = ("x_train", "y_train", "x_test", "y_test")


def read_npz(path: Path) -> tuple[ArraySplit, ArraySplit, Problem]:
    """Train and test splits and the problem of a file with x_train, y_train, x_test, y_test.

    Arrays as `from_arrays` takes them. Optional: `classes`, an array of names; `side_NAME_train` and `side_NAME_test`,
    side inputs for layers that take NAME.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            missing = [key for key in NEEDED if key not in file]
            if missing:
                raise UserError(
                    f"{path} has no array {', '.join(missing)} (it has {', '.join(file) or 'none'});"
                    f" save it with numpy.savez(path, {', '.join(f'{key}=...' for key in NEEDED)})"
                )
            arrays = {key: file[key] for key in file if key in (*NEEDED, "classes") or key.startswith("side_")}
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give data.path the .npz file") from error
    except (ValueError, OSError, EOFError, BadZipFile, TypeError, zlib.error) as error:
        raise UserError(
            f"{path} cannot be read as an .npz file of plain arrays ({error}); save it with numpy.savez,"
            " without arrays of objects"
        ) from error
    train, test = (
        as_split(arrays[f"x_{part}"], arrays[f"y_{part}"], f"{path}: {part}", _side(arrays, part))
        for part in ("train", "test")
    )
    names = arrays["classes"].ravel().tolist() if "classes" in arrays else None
    splits, problem = posed({"train": train, "test": test}, names)
    return splits["train"], splits["test"], problem


def _side(arrays: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    start, end = "side_", f"_{part}"
    named = [key for key in arrays if key.startswith(start) and key.endswith(end)]
    return {key.removeprefix(start).removesuffix(end): arrays[key] for key in named}
