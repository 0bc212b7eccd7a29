"""HDF5 files, and text files that list some, as Caffe's HDF5Data layer reads them: one to train on, one to test on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mheads.common import atomic_files, packed_arrays
from mheads.common.errors import UserError
from mheads.data.arrays import ArraySplit
from mheads.data.python_data import read_arrays
from mheads.data.readers.image_list import check_test_path, read_lines
from mheads.problems import Problem

EXAMPLES, TARGETS = ("data", "x", "images"), ("label", "labels", "y", "target")


def read_hdf5(
    path: Path,
    test_path: Path | None,
    arrays: Sequence[str] | None = None,
    problem: str = "auto",
    need_test: bool = True,
) -> tuple[ArraySplit, ArraySplit, Problem]:
    """Train and test splits of the HDF5 files that are listed, or of single ones.

    `arrays` are the names of the examples and the targets there, by default `data` and `label` or the like.
    """
    check_test_path(path, test_path, need_test, "a list")
    train = _arrays(path, arrays, problem)
    test = (train[0][:0], train[1][:0]) if test_path is None else _arrays(test_path, arrays, problem)
    return read_arrays(train, test, str(path), None, problem)


def hdf5_shape(path: Path | None, arrays: Sequence[str] | None = None) -> tuple[int, ...] | None:
    """The shape of an example, from the head of the first file; None without a file."""
    if path is None or not path.is_file():
        return None
    with _open_hdf5(_hdf5_files(path)[0]) as file:
        shape = _find_array(file, _names(arrays)[0], path).shape[1:]
    return (1, *shape) if len(shape) == 2 else tuple(shape)


def _names(arrays: Sequence[str] | None) -> tuple[Sequence[str], Sequence[str]]:
    """What examples and targets may be called."""
    return (EXAMPLES, TARGETS) if arrays is None else (arrays[:1], arrays[1:])


def _arrays(path: Path, arrays: Sequence[str] | None, problem: str) -> tuple[np.ndarray, np.ndarray]:
    examples, targets = [], []
    names = _names(arrays)
    for name in _hdf5_files(path):
        with _open_hdf5(name) as file:
            examples.append(_array(file, names[0], name))
            own = arrays is not None and arrays[0] == arrays[1] and problem == "auto"  # no targets but the examples
            targets.append(np.zeros(len(examples[-1])) if own else _array(file, names[1], name))
        if examples[-1].shape[1:] != examples[0].shape[1:] or len(examples[-1]) != len(targets[-1]):
            raise UserError(f"{name}: {examples[-1].shape} examples and {targets[-1].shape} labels do not fit together")
    x, y = np.concatenate(examples), np.concatenate(targets)
    x = x if x.dtype == np.uint8 else x.astype(np.float32)
    if y.dtype.kind == "f" and problem in ("auto", "classification", "segmentation") and (y == np.floor(y)).all():
        y = y.astype(np.int64)  # Caffe keeps class numbers as floats
    if y.ndim > 1 and problem in ("auto", "classification") and math.prod(y.shape[1:]) == 1:
        y = y.reshape(-1)
    if problem in ("regression", "multilabel"):
        y = y.reshape(len(y), math.prod(y.shape[1:]))  # blobs have four axes
    return x, y


def _hdf5_files(path: Path) -> list[Path]:
    """The files that a list names, from here or from where it lies; or the file itself."""
    if path.suffix in (".h5", ".hdf5"):
        return [path]
    names = [Path(line.strip()) for line in read_lines(path) if line.strip()]
    if not names:
        raise UserError(f"{path} lists no file: write the name of an .h5 file on each line")
    return [name if name.is_file() else path.parent / name for name in names]


def import_h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise UserError("HDF5 files are read with h5py, which is not installed: pip install 'mheads[caffe]'") from error
    return h5py


def _open_hdf5(path: Path) -> Any:
    h5py = import_h5py()
    try:
        atomic_files.open_file(path).close()  # which no pipe is, and h5py would wait on
        return h5py.File(path, "r")
    except OSError as error:
        raise UserError(f"{path} cannot be read as an HDF5 file ({error})") from error


def _find_array(file: Any, names: Sequence[str], where: Path) -> Any:
    array = next((file[name] for name in names if name in file), None)
    if array is None or not getattr(array, "shape", ()):
        raise UserError(
            f"{where} has no array {' or '.join(names)}; it has {', '.join(file) or 'none'}: data.arrays names them"
        )
    return array


def _array(file: Any, names: Sequence[str], where: Path) -> np.ndarray:
    array = _find_array(file, names, where)
    packed_arrays.refuse_too_large(array.size * array.dtype.itemsize, where)
    return np.asarray(array)
