"""CSV files: rows of numbers, and to train on a target in the last column."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mheads.common import atomic_files, seeds
from mheads.common.errors import UserError
from mheads.data.arrays import ArraySplit
from mheads.data.python_data import read_arrays
from mheads.data.readers.image_list import check_test_path
from mheads.problems import Problem

WHOLE = re.compile(r"[+-]?[0-9]{1,18}")  # what int64 holds
Rows = list[tuple[int, list[str]]]  # with the numbers of their lines


def read_csv_table(
    path: Path, test_path: Path | None, problem: str = "auto", need_test: bool = True
) -> tuple[ArraySplit, ArraySplit, Problem]:
    """Train and test splits of tables whose last column is the target: whole numbers or names of classes, or numbers.

    The rows to train on are shuffled, always in the same order, since tables are often sorted.
    """
    check_test_path(path, test_path, need_test, "a table")
    x, cells = _read_table(path)
    x_test, test_cells = (x[:0], []) if test_path is None else _read_table(test_path)
    targets = _to_targets(cells + test_cells)  # together, so that both are of one kind
    y, y_test = targets[: len(x)], targets[len(x) :]
    mixed = seeds.numpy_generator("csv", "order").permutation(len(x))
    return read_arrays((x[mixed], y[mixed]), (x_test, y_test), str(path), None, problem)


def csv_table_shape(path: Path | None) -> tuple[int, ...] | None:
    """The shape of an example; None without a file."""
    return None if path is None or not path.is_file() else (len(_read_rows(path)[0][1]) - 1,)


def read_csv(path: Path) -> np.ndarray:
    """Rows of numbers [N, F], separated by commas, semicolons or tabs; a header is skipped."""
    return _to_numbers(path, _read_rows(path))


def _read_table(path: Path) -> tuple[np.ndarray, list[str]]:
    """The numbers [N, F] before the last column, and the cells of that column, the targets."""
    rows = _read_rows(path)
    x = _to_numbers(path, rows, drop_last=True)
    if not x.shape[1]:
        raise UserError(f"{path} has one column; a table has columns of numbers, and the target in the last one")
    cells = [line[-1].strip() for _, line in rows]
    if "" in cells:
        number, _ = rows[cells.index("")]
        raise UserError(f"{path}: line {number} has no target in the last column; fill it, or leave the line out")
    return x, cells


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
    if all(WHOLE.fullmatch(cell) for cell in cells):
        return np.array(cells, np.int64)
    if all(_is_number(cell) for cell in cells):
        return np.array(cells, np.float64)
    return np.array(cells)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
