"""Tables of numbers with fixed splits, in the layout of Hernandez-Lobato and Adams (2015).

A folder for each table: data.txt (rows of numbers), index_features.txt and index_target.txt (numbers of columns), and
of each split I index_train_I.txt and index_test_I.txt (numbers of rows).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mheads.common.errors import UserError
from mheads.data.arrays import ArraySplit
from mheads.data.python_data import read_arrays
from mheads.data.readers.cache import cache_dir
from mheads.problems import Problem


def read_uci(root: Path | None, table: str | None, fold: int) -> tuple[ArraySplit, ArraySplit, Problem]:
    """Features float32 [N, F] and one number each, of the training and test rows of a split."""
    folder = _find(root, table)
    if not (folder / f"index_train_{fold}.txt").is_file():
        count = len(list(folder.glob("index_train_*.txt")))
        raise UserError(f"{folder} has {count} splits, 0 to {count - 1}, and data.fold is {fold}", key="data.fold")
    rows = _read(folder / "data.txt")
    features, target = (_read_index(folder / f"index_{part}.txt", rows.shape[1]) for part in ("features", "target"))
    x, y = rows[:, features].astype(np.float32), rows[:, target]
    train, test = (_read_index(folder / f"index_{part}_{fold}.txt", len(rows)) for part in ("train", "test"))
    return read_arrays((x[train], y[train]), (x[test], y[test]), f"uci {folder.name}", problem="regression")


def uci_shape(root: Path | None, table: str | None) -> tuple[int, ...]:
    return (_read(_find(root, table) / "index_features.txt").size,)


def _find(root: Path | None, table: str | None) -> Path:
    root = cache_dir() / "uci" if root is None else root
    known = sorted(file.parent.name for file in root.glob("*/data.txt"))
    if not known:
        raise UserError(
            f"{root} holds no tables: say with data.root where the folders of the UCI tables are", key="data.root"
        )
    if table not in known:
        raise UserError(f"data.table is {table}, and {root} has {', '.join(known)}: give one", key="data.table")
    return root / table


def _read_index(file: Path, count: int) -> np.ndarray:
    index = _read(file).ravel()
    if not len(index) or (index != index.round()).any() or index.min() < 0 or index.max() >= count:
        raise UserError(f"{file} should hold whole numbers from 0 to {count - 1}")
    return index.astype(np.int64)


def _read(file: Path) -> np.ndarray:
    try:
        return np.loadtxt(file, ndmin=2)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as rows of numbers: {error}") from error
