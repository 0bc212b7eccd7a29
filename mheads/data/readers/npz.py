"""A user's own arrays in one .npz file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mheads.common import packed_arrays
from mheads.common.errors import UserError
from mheads.data.arrays import ArraySplit
from mheads.data.python_data import read_arrays
from mheads.problems import Problem

NEEDED = ("x_train", "y_train", "x_test", "y_test")
TABLES = (".csv", ".tsv", ".txt")
FROM_TABLE = "data.name=csv reads tables, whose last column is the target (docs/data.md)"


def read_npz(
    path: Path, problem: str = "auto", need_test: bool = True, only: str | None = None
) -> tuple[ArraySplit, ArraySplit, Problem]:
    """Train and test splits and the problem of a file with x_train, y_train, x_test, y_test.

    Arrays as `from_arrays` takes them. Optional: `classes`, an array of names; `side_NAME_train` and `side_NAME_test`,
    side inputs for layers that take NAME. Without `need_test` a test set that is not there is an empty split; with
    `only` test, examples to learn from that are not there are those to test on.
    """
    needed = NEEDED[2:] if only == "test" else NEEDED if need_test else NEEDED[:2]
    is_table = path.suffix.lower() in TABLES
    with open_arrays(path, FROM_TABLE if is_table else "save it with numpy.savez, without arrays of objects") as file:
        missing = [key for key in needed if key not in file]
        if missing:
            names = ", ".join(name or "one without a name" for name in file)
            raise UserError(
                f"{path} has no array {', '.join(missing)} (it has {names or 'none'});"
                f" save it with numpy.savez(path, {', '.join(f'{key}=...' for key in NEEDED)})"
                + ", or give data.validation=N, which holds out training examples to test on"
                * need_test,
                key=missing[0],
            )
        arrays = {key: file[key] for key in file if key in (*NEEDED, "classes") or key.startswith("side_")}
    classes = arrays["classes"].ravel().tolist() if "classes" in arrays else None
    parts = {
        part: (arrays[f"x_{part}"], arrays[f"y_{part}"], _side(arrays, part))
        for part in ("train", "test")
        if f"x_{part}" in arrays and f"y_{part}" in arrays
    }
    if "test" not in parts:
        x, y, side = parts["train"]
        parts["test"] = (x[:0], y[:0], {name: array[:0] for name, array in side.items()})
    return read_arrays(parts.get("train", parts["test"]), parts["test"], str(path), classes, problem)


@contextmanager
def open_arrays(path: Path, hint: str | None = None) -> Iterator[packed_arrays.Arrays]:
    """The arrays of an .npz or .npy file; what cannot be read is a UserError that ends with the hint."""
    try:
        with packed_arrays.open_arrays(path) as arrays:
            yield arrays
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except (ValueError, OSError) as error:
        raise UserError(
            f"{path} cannot be read as an {'.npy' if path.suffix == '.npy' else '.npz'} file of plain arrays ({error})",
            hint=hint,
        ) from error


def _side(arrays: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    start, end = "side_", f"_{part}"
    keys = [key for key in arrays if key.startswith(start) and key.endswith(end)]
    return {key.removeprefix(start).removesuffix(end): arrays[key] for key in keys}


def npz_shape(path: Path | None) -> tuple[int, ...] | None:
    """The shape of an example, from the header alone, since arrays may be large; None without a file."""
    if path is None or not path.is_file():
        return None
    try:
        with packed_arrays.open_arrays(path) as file:
            shape, _ = file.header("x_train")
    except (ValueError, OSError) as error:
        raise UserError(f"{path} has no array x_train to take the shape of an example from ({error})") from error
    return (1, *shape[1:]) if len(shape) == 3 else tuple(shape[1:])  # images without channels have one
