"""Folders of images, one folder per class, as ILSVRC is usually unpacked; decoded when they are read.

path/train/<class>/*.jpg     path/val/<class>/*.jpg     (or path/test; .png, .bmp, .webp, ... as well)
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from mheads.common.errors import UserError
from mheads.data.file_digests import digest_files
from mheads.data.readers.image_crops import CroppedSplit, choose_crop, cores, shuffle_examples
from mheads.data.readers.image_files import SUFFIXES, check_whole, read_crop
from mheads.problems import Classification, Problem

STATISTICS = 2000  # images that the mean is measured on: decoding a million takes hours and changes little


@dataclass(frozen=True, eq=False)
class FolderSplit(CroppedSplit):
    """Image files, each resized to `resize` pixels on its shorter side and cropped to `crop` x `crop`, RGB or grey."""

    root: Path
    files: np.ndarray  # str [N], relative to root
    targets: np.ndarray
    resize: int
    crop: int
    grey: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (1 if self.grey else 3, self.crop, self.crop)

    @property
    def free(self) -> tuple[int, int]:
        return (self.resize - self.crop,) * 2

    def decode(self, row: int, chance: tuple[float, float] | None) -> np.ndarray:
        return read_crop(self.root / self.files[row], self.resize, self.crop, chance, self.grey)

    def part(self, rows: slice) -> Self:
        return replace(self, files=self.files[rows], targets=self.targets[rows])

    def whole(self) -> Self:
        return replace(self, crop=self.resize)

    def checksum(self) -> bytes:
        """A digest of names, labels and contents."""
        # An image that cannot be decoded would end the training later, and one in its place would be other data.
        contents = digest_files(self.root, self.files.tolist(), cores(), check_whole)
        listing = zip(self.files.tolist(), self.targets.tolist(), contents, strict=True)
        return hashlib.sha256("\n".join(map(repr, listing)).encode()).digest()


def read_folder(
    path: Path, *, resize: int, crop: int | None, mirror: bool, grey: bool, need_test: bool
) -> tuple[FolderSplit, FolderSplit, Problem]:
    """Train and test splits and the problem; without `need_test` a missing test folder is an empty split."""
    split = partial(FolderSplit, resize=resize, crop=choose_crop(resize, crop), grey=grey)
    classes = _class_folders(path / "train")
    train = split(path / "train", *_list_images(path / "train", classes), mirror=mirror)
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
    test = split(held_out, *_list_images(held_out, classes))
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


def _list_images(root: Path, classes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Files and class numbers."""
    images = [
        (f"{name}/{entry.name}", label)
        for label, name in enumerate(classes)
        if (root / name).is_dir()
        for entry in sorted(os.scandir(root / name), key=lambda entry: entry.name)
        if entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".")  # what systems leave there
    ]
    return shuffle_examples("folder", [file for file, _ in images], [label for _, label in images])
