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

    Arrays as `from_arrays` takes them. Optional: `classes`, an array of names.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            missing = [key for key in NEEDED if key not in file]
            if missing:
                raise UserError(
                    f"{path} has no array {', '.join(missing)} (it has {', '.join(file) or 'none'});"
                    f" save it with numpy.savez(path, {', '.join(f'{key}=...' for key in NEEDED)})"
                )
            arrays = {key: file[key] for key in (*NEEDED, "classes") if key in file}
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give data.path the .npz file") from error
    except (ValueError, OSError, EOFError, BadZipFile, TypeError, zlib.error) as error:
        raise UserError(
            f"{path} cannot be read as an .npz file of plain arrays ({error}); save it with numpy.savez,"
            " without arrays of objects"
        ) from error
    train = as_split(arrays["x_train"], arrays["y_train"], where=f"{path}: train")
    test = as_split(arrays["x_test"], arrays["y_test"], where=f"{path}: test")
    names = arrays["classes"].ravel().tolist() if "classes" in arrays else None
    splits, problem = posed({"train": train, "test": test}, names)
    return splits["train"], splits["test"], problem
