"""Examples without labels in one file: .npz and .csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mheads.common import atomic_files
from mheads.common.errors import UserError
from mheads.data.readers.npz import open_arrays

ARRAYS = (".npz", ".csv")


def read_array(path: Path, names: Sequence[str]) -> np.ndarray:
    """The first array of these names in a .npz file, or its only one."""
    with open_arrays(path) as file:
        name = next((name for name in names if name in file), None)
        if name is None and len(file) != 1:
            raise UserError(
                f"{path} has the arrays {', '.join(file) or 'none'}; call the one with the examples {names[0]}"
            )
        return file[next(iter(file)) if name is None else name]


def read_csv(path: Path) -> np.ndarray:
    """Rows of numbers [N, F], separated by commas, semicolons or tabs; a header is skipped."""
    try:
        with io.TextIOWrapper(atomic_files.open_file(path), "utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            rows = csv.reader(file, delimiter=max(",;\t", key=first.count))
            lines = [(number, line) for number, line in enumerate(rows, 1) if any(line)]
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as rows of numbers ({error})") from error
    if lines and not any(_is_number(cell) for cell in lines[0][1]):
        lines = lines[1:]
    if not lines:
        raise UserError(f"{path} holds no rows of numbers; give one row for each example")
    width = len(lines[0][1])
    for number, line in lines:
        wrong = next((cell for cell in line if not _is_number(cell)), None)
        if wrong is not None or len(line) != width:
            content = f"{len(line)} values, the first row {width}" if wrong is None else f"{wrong!r}, not a number"
            raise UserError(f"{path}: line {number} has {content}; every row needs equally many numbers")
    return np.array([line for _, line in lines], np.float64)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
