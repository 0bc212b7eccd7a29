"""CSV files: rows of numbers, and to train on a target in the last column."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mheads.common import atomic_files, seeds
from mheads.common.errors import UserError
from mheads.data.arrays import ArraySplit
from mheads.data.python_data import read_arrays
from mheads.data.readers.image_list import check_test_path
from mheads.problems import Problem

Rows = list[tuple[int, list[str]]]  # with the numbers of their lines


def read_csv_table(
    path: Path, test_path: Path | None, problem: str = "auto", need_test: bool = True
) -> tuple[ArraySplit, ArraySplit, Problem]:
    """Train and test splits of tables whose last column is the target: whole numbers or names of classes, or numbers.

    The rows to train on are shuffled, always in the same order, since tables are often sorted.
    """
    check_test_path(path, test_path, need_test, "a table")
    train, test = _read_rows(path), [] if test_path is None else _read_rows(test_path)
    x = _to_numbers(path, train, drop_last=True)
    x_test = x[:0] if test_path is None else _to_numbers(test_path, test, drop_last=True)
    targets = _to_targets([line[-1] for _, line in train + test])
    mixed = seeds.numpy_generator("csv", "order").permutation(len(x))
    y, y_test = targets[: len(x)], targets[len(x) :]
    return read_arrays((x[mixed], y[mixed]), (x_test, y_test), str(path), None, problem)


def csv_table_shape(path: Path | None) -> tuple[int, ...] | None:
    """The shape of an example; None without a file."""
    return None if path is None or not path.is_file() else (len(_read_rows(path)[0][1]) - 1,)


def read_csv(path: Path) -> np.ndarray:
    """Rows of numbers [N, F], separated by commas, semicolons or tabs; a header is skipped."""
    return _to_numbers(path, _read_rows(path))


def _read_rows(path: Path) -> Rows:
    """The lines that are not empty, but for a header: a first line without a number."""
    try:
        with io.TextIOWrapper(atomic_files.open_file(path), "utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            lines = csv.reader(file, delimiter=max(",;\t", key=first.count))
            rows = [(number, line) for number, line in enumerate(lines, 1) if any(line)]
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as rows of numbers ({error})") from error
    if rows and not any(_is_number(cell) for cell in rows[0][1]):
        rows = rows[1:]
    if not rows:
        raise UserError(f"{path} holds no rows of numbers; give one row for each example")
    return rows


def _to_numbers(path: Path, rows: Rows, drop_last: bool = False) -> np.ndarray:
    """The cells [N, F], without the last column if that is the target."""
    width = len(rows[0][1])
    for number, line in rows:
        cells = line[:-1] if drop_last else line
        wrong = next((cell for cell in cells if not _is_number(cell)), None)
        if wrong is not None or len(line) != width:
            content = f"{len(line)} values, the first row {width}" if wrong is None else f"{wrong!r}, not a number"
            before = " before the last column, the target" if drop_last else ""
            raise UserError(f"{path}: line {number} has {content}; every row needs equally many numbers{before}")
    return np.array([line[:-1] if drop_last else line for _, line in rows], np.float64)


def _to_targets(cells: Sequence[str]) -> np.ndarray:
    """Class numbers if all are whole, numbers if all are numbers, else names of classes."""
    if all(cell.strip().lstrip("+-").isdecimal() for cell in cells):
        return np.array([int(cell) for cell in cells])
    if all(_is_number(cell) for cell in cells):
        return np.array([float(cell) for cell in cells])
    return np.array([cell.strip() for cell in cells])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
