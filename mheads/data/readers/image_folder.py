"""Folders of images, one folder per class, as ILSVRC is usually unpacked; decoded when they are read.

path/train/<class>/*.jpg     path/val/<class>/*.jpg     (or path/test; .png, .bmp, .webp, ... as well)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
import torch

from mheads.common import seeds
from mheads.common.errors import UserError
from mheads.data.augmentation import uniforms
from mheads.data.file_digests import digest_files
from mheads.data.readers.image_files import SUFFIXES, read_crop, refuse_torn
from mheads.data.splits import TargetRows
from mheads.data.value_range import ValueRange
from mheads.problems import Classification, Problem

STATISTICS = 2000  # images that the mean is measured on: decoding a million takes hours and changes little


@dataclass(frozen=True, eq=False)  # arrays have no truth value to compare by
class FolderSplit:
    """Image files, each resized to `resize` pixels on its shorter side and cropped to `crop` x `crop`, RGB or grey.

    Read with seeds, the crop is at random and, with `mirror`, mirrored half of the time; without seeds, or
    without `augment`, it is the centre.
    """

    root: Path
    files: np.ndarray  # str [N], relative to root
    targets: np.ndarray
    resize: int
    crop: int
    mirror: bool = False
    grey: bool = False
    augment: bool = True
    margin = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (1 if self.grey else 3, self.crop, self.crop)

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        """Raw images, uint8 [b, crop, crop, C], decoded by as many threads as there are cores."""
        rows = np.asarray(rows)
        out = np.empty((len(rows), self.crop, self.crop, self.shape[0]), np.uint8)
        chances = None if seeds is None or not self.augment else uniforms(np.asarray(seeds), 3).T

        def decode(i: int) -> None:
            chance = None if chances is None else (chances[i, 0], chances[i, 1])
            pixels = read_crop(self.root / self.files[rows[i]], self.resize, self.crop, chance, self.grey)
            flip = chances is not None and self.mirror and chances[i, 2] < 0.5
            out[i] = pixels[:, ::-1] if flip else pixels

        run_in_threads(decode, len(rows))
        return torch.from_numpy(out)

    def read_targets(self, rows: np.ndarray, seeds: np.ndarray | None) -> TargetRows:
        return TargetRows(torch.from_numpy(self.targets[rows]))

    def places(self, seeds: np.ndarray) -> torch.Tensor | None:
        """The places of the crops in the centre square of `resize` x `resize`, that of the mean image.

        Along the longer side of an image, a crop that lies a third of the way, say, is put at a third of the square.
        """
        if not self.augment:
            return None
        down, right, flip = uniforms(np.asarray(seeds), 3)
        most = self.resize - self.crop
        found = [(down * (most + 1)).astype(int), (right * (most + 1)).astype(int), (flip < 0.5) & self.mirror]
        return torch.from_numpy(np.stack(found, axis=1))

    def part(self, rows: slice) -> Self:
        return replace(self, files=self.files[rows], targets=self.targets[rows])

    def without_augmentation(self) -> Self:
        return replace(self, augment=False)

    def whole(self) -> Self:
        return replace(self, crop=self.resize)

    def survey(self, where: str) -> ValueRange:
        return ValueRange("uint8", 0, 255)

    def checksum(self) -> bytes:
        """A digest of names, labels and contents."""
        # An image that cannot be decoded would end the training later, and one in its place would be other data.
        found = digest_files(self.root, self.files.tolist(), cores(), refuse_torn)
        listing = zip(self.files.tolist(), self.targets.tolist(), found, strict=True)
        return hashlib.sha256("\n".join(map(repr, listing)).encode()).digest()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_in_threads(decode: Callable[[int], None], count: int) -> None:
    """Calls it for 0 to count - 1, on as many threads as there are cores; raises the first error."""

    def share(start: int) -> None:
        # A share of the images per thread: a task for each would spend as long on handing it over.
        for i in range(start, count, cores()):
            decode(i)

    for _ in _pool().map(share, range(cores())):
        pass  # taking the results raises


@cache
def _pool() -> ThreadPoolExecutor:
    """One pool for the process; Pillow releases the interpreter while it decodes and resizes."""
    return ThreadPoolExecutor(cores(), thread_name_prefix="decode")


def read_folder(
    path: Path, *, resize: int, crop: int | None, mirror: bool, grey: bool, need_test: bool
) -> tuple[FolderSplit, FolderSplit, Problem]:
    """Train and test splits and the problem; without `need_test` a missing test folder is an empty split."""
    crop = resize if crop is None else crop
    if not 1 <= crop <= resize:
        raise UserError(f"data.crop is {crop} but images are resized to data.resize={resize}; give 1 to {resize}")
    classes = _class_folders(path / "train")
    train = _list_split(path / "train", classes, resize, crop, mirror, grey)
    lacking = sorted(set(range(len(classes))) - set(train.targets.tolist()))
    if lacking:
        raise UserError(
            f"{path / 'train' / classes[lacking[0]]} holds no image ({', '.join(SUFFIXES)});"
            " put some there or remove the folder"
        )
    held_out = next((path / part for part in ("val", "test") if (path / part).is_dir()), None)
    if held_out is None:
        if need_test:
            raise UserError(
                f"{path} has neither a val nor a test folder; add one, or hold out training images with"
                " data.validation=n"
            )
        return train, train.part(slice(0)), Classification(classes)
    unknown = sorted(set(_class_folders(held_out)) - set(classes))
    if unknown:
        raise UserError(
            f"{held_out} has the class {unknown[0]!r}, which {path / 'train'} does not have;"
            f" its classes are {', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}"
        )
    test = _list_split(held_out, classes, resize, crop, False, grey)
    if not len(test):
        raise UserError(f"{held_out} holds no image ({', '.join(SUFFIXES)}) in its class folders; put some there")
    return train, test, Classification(classes)


def folder_shape(resize: int, crop: int | None, grey: bool) -> tuple[int, ...]:
    """The shape of an example."""
    side = resize if crop is None else crop
    return (1 if grey else 3, side, side)


def folder_image(file: Path, shape: tuple[int, ...], resize: int) -> np.ndarray:
    """An image as an example of this shape: resized, then cropped at the centre, uint8 [C, H, W]."""
    return read_crop(file, resize, shape[1], grey=shape[0] == 1).transpose(2, 0, 1)


def _class_folders(path: Path) -> tuple[str, ...]:
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; data.path must hold train/<class>/ and val/<class>/ with images")
    names = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise UserError(f"{path} has no class folders; put the images of each class into {path}/<class>/")
    return tuple(names)


def _list_split(root: Path, classes: tuple[str, ...], resize: int, crop: int, mirror: bool, grey: bool) -> FolderSplit:
    found = [
        (f"{name}/{entry.name}", label)
        for label, name in enumerate(classes)
        if (root / name).is_dir()
        for entry in sorted(os.scandir(root / name), key=lambda entry: entry.name)
        if entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".")  # what systems leave there
    ]
    # Always the same mixed order, so that the last n, or the first n, are a fair sample of the classes.
    mixed = seeds.numpy_generator("folder", "order").permutation(len(found))
    files, labels = zip(*(found[i] for i in mixed), strict=True) if found else ((), ())
    return FolderSplit(
        root, np.array(files, dtype=object), np.array(labels, dtype=np.int64), resize, crop, mirror, grey
    )
