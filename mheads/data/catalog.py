"""The datasets by name: an entry holds all that is particular to one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mheads.common.errors import UserError, did_you_mean
from mheads.data.arrays import with_augmentation
from mheads.data.assembly import assemble
from mheads.data.data_section import DataOptions, as_default, read_options
from mheads.data.detection.regions import read_voc, region_shape
from mheads.data.readers.cache import cache_dir
from mheads.data.readers.caffe_lmdb import lmdb_shape, read_lmdb
from mheads.data.readers.cifar import CIFAR10, CIFAR100, find_cifar, load_cifar
from mheads.data.readers.csv_table import csv_table_shape, read_csv_table
from mheads.data.readers.diabetes import read_diabetes
from mheads.data.readers.digits_images import LEVELS, read_digits
from mheads.data.readers.hdf5 import hdf5_shape, read_hdf5
from mheads.data.readers.image_files import read_sized
from mheads.data.readers.image_folder import STATISTICS, folder_image, folder_shape, read_folder
from mheads.data.readers.image_list import read_list
from mheads.data.readers.npz import npz_shape, read_npz
from mheads.data.readers.several_answers import (
    SIDE,
    read_ambiguous_masks,
    read_three_futures,
    read_two_roots,
)
from mheads.data.readers.uci import read_uci, uci_shape
from mheads.data.splits import Data, Source
from mheads.problems import Problem


@dataclass(frozen=True)
class Dataset:
    """All that is particular to a dataset. Its functions get those keys of `data.` that are their arguments.

    `read(path, mirror, ..., need_test, only)` gives the training and the test split and the
    problem. Splits that it mirrors itself are left alone; others are arrays, moved and mirrored by `pad` and `mirror`.
    Without `need_test`, examples for testing will be held out of the training split, and the test split may be empty.

    `shape` is that of an example, or a function that finds it without reading the examples (None if it cannot).
    `image(file, shape, resize, stretch, where)` turns an image to predict into an example, uint8 [C, H, W];
    `stretch` brings it to the shape whatever its size, and `where` names the run in messages.

    `scale` is what uint8 is multiplied by unless a config says otherwise, `statistics` caps the number of examples
    that the mean is measured on, and `find(root)` says where a fetched set lies.
    """

    name: str
    description: str
    read: Callable[..., tuple[Source, Source, Problem]]
    shape: tuple[int, ...] | Callable[..., tuple[int, ...] | None]
    image: Callable[..., np.ndarray] = read_sized
    scale: float = 1 / 255
    statistics: int | None = None
    find: Callable[[Path | None], Path] | None = None

    @property
    def needs_get(self) -> bool:
        return self.find is not None

    @property
    def needs_path(self) -> bool:
        return self.takes("path")

    @property
    def cached_at(self) -> Path | None:
        """Where `mheads data get` puts it; None for sets that are not fetched."""
        return cache_dir() / self.name if self.needs_get else None

    @property
    def available(self) -> bool:
        """Whether it can be loaded now (given a path, where it needs one)."""
        try:
            if self.find is not None:
                self.find(None)
        except UserError:
            return False
        return True

    def takes(self, key: str) -> bool:
        """Whether its reader takes this key of a config."""
        return key in inspect.signature(self.read).parameters

    def example_shape(self, **keys: Any) -> tuple[int, ...] | None:
        """The shape of an example, if it is known before the data are read."""
        return self.shape if isinstance(self.shape, tuple) else _call(self.shape, keys)

    def example(self, file: Path, shape: tuple[int, ...], **keys: Any) -> np.ndarray:
        """Reads an image as an example, uint8 [C, H, W]."""
        example: np.ndarray = _call(partial(self.image, file, shape), keys)
        return example


DATASETS = {
    entry.name: entry
    for entry in (
        Dataset(
            "digits",
            "8 x 8 handwritten digits, 10 classes, 1,437 train / 360 test; built in",
            read_digits,
            (1, 8, 8),
            image=partial(read_sized, levels=LEVELS),
            scale=1 / LEVELS,
        ),
        Dataset(
            "diabetes", "10 numbers of a patient, to predict one; 354 train / 88 test; built in", read_diabetes, (10,)
        ),
        Dataset(
            "cifar10",
            "32 x 32 photos, 10 classes, 50,000 train / 10,000 test",
            partial(load_cifar, CIFAR10),
            (3, 32, 32),
            find=partial(find_cifar, CIFAR10),
        ),
        Dataset(
            "cifar100",
            "32 x 32 photos, 100 classes, 50,000 train / 10,000 test",
            partial(load_cifar, CIFAR100),
            (3, 32, 32),
            find=partial(find_cifar, CIFAR100),
        ),
        Dataset(
            "folder",
            "your images in path/train/<class>/ and path/val/<class>/",
            read_folder,
            folder_shape,
            image=folder_image,
            statistics=STATISTICS,
        ),
        Dataset(
            "voc",
            "your images with objects in boxes, as PASCAL VOC lays them out",
            read_voc,
            region_shape,
            statistics=STATISTICS,
        ),
        Dataset("npz", "your arrays x_train, y_train, x_test, y_test in one .npz file", read_npz, npz_shape),
        Dataset(
            "csv", "your tables, whose last column is the target: path and test_path", read_csv_table, csv_table_shape
        ),
        Dataset(
            "list",
            "your images, listed in text files, a name and a class number per line: path and test_path",
            read_list,
            folder_shape,
            image=folder_image,
            statistics=STATISTICS,
        ),
        Dataset("hdf5", "your HDF5 files, or text files that list some: path and test_path", read_hdf5, hdf5_shape),
        Dataset(
            "lmdb", "your LMDBs of Caffe's Datum messages: path and test_path", read_lmdb, lmdb_shape, statistics=50_000
        ),
        Dataset("two_roots", "a number, to predict one of its two roots; 2,000 train; generated", read_two_roots, (1,)),
        Dataset(
            "three_futures",
            "2 numbers, to predict one of three ways [12, 2]; 2,000 train; generated",
            read_three_futures,
            (2,),
        ),
        Dataset(
            "ambiguous_masks",
            "16 x 16 images of spots, whose masks end at one of three radii; 500 train; generated",
            read_ambiguous_masks,
            (1, SIDE, SIDE),
        ),
        Dataset("uci", "UCI tables with their standard splits, in root: data.table and data.fold", read_uci, uci_shape),
    )
}


def names_examples(options: DataOptions) -> bool:
    """Whether a config names the examples of its run; a run of `fit` has arrays, which it does not keep."""
    return options.name in DATASETS


def load(name: str, *, only: str | None = None, **keys: Any) -> Data:
    """A dataset by name, ready to train on. The keywords are the keys of `data.` in a config (docs/configuration.md).

    `only` is test where nothing is to be learned.
    """
    return load_section(read_options(name=name, **keys), only)


def load_section(options: DataOptions, only: str | None = None) -> Data:
    """The dataset that the `data` section of a config describes."""
    if options.name not in DATASETS:
        near = did_you_mean(options.name, DATASETS)
        raise UserError(f"there is no dataset {options.name!r}{near}; there are {', '.join(DATASETS)}")
    entry = DATASETS[options.name]
    keys = {**dict(options), "only": only, "need_test": options.validation == 0}
    keys["problem"] = "auto" if options.problem == "examples" else options.problem
    keys["limit"] = None if options.validation else options.limit  # examples that are not used need not be read
    check_keys(entry, keys)
    train, test, problem = _call(entry.read, keys)
    if not entry.takes("mirror"):
        train = with_augmentation(train, options)
    return assemble(train, test, problem, options, auto=entry.scale, statistics=entry.statistics)


# Keys that are an error for datasets whose reader does not take them, unless they have their default; and why.
UNUSED = {
    "path": "is not read from a path",
    "test_path": "takes none",
    "root": "has none",
    "crop": "keeps its size (data.pad makes random crops)",
    "arrays": "is not read from HDF5 files",
    "problem": "says itself what is learned",
    "grey": "is not read from image folders",
    "table": "is one set",
    "fold": "has one split",
}


def check_keys(entry: Dataset, keys: dict[str, Any]) -> None:
    """Raises an error for keys that mean nothing to this dataset, instead of ignoring them."""
    if entry.needs_path and keys["path"] is None:
        raise UserError(f"dataset {entry.name!r} reads your own files; say where they are with data.path")
    for key, reason in UNUSED.items():
        if keys[key] != DataOptions.model_fields[key].default and not entry.takes(key):
            others = " or ".join(other.name for other in DATASETS.values() if other.takes(key))
            raise UserError(
                f"data.{key} is {keys[key]}, but {entry.name!r} {reason}; give {as_default(key)}, or use {others}",
                key=f"data.{key}",
            )
    if keys["pad"] and entry.takes("mirror") and not entry.takes("pad"):
        crops = entry.takes("crop")
        how = "crops at random by data.resize and data.crop; use these, and" if crops else "shows whole images;"
        raise UserError(f"data.pad is {keys['pad']}, but {entry.name} {how} give {as_default('pad')}", key="data.pad")


def _call(function: Callable[..., Any], keys: dict[str, Any]) -> Any:
    """Calls a function with those of the keys that are its arguments."""
    arguments = inspect.signature(function).parameters
    return function(**{key: value for key, value in keys.items() if key in arguments})
