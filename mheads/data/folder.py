"""Folders of images, one folder per class, as ILSVRC is usually unpacked; decoded when they are read.

path/train/<class>/*.jpg     path/val/<class>/*.jpg     (or path/test; .jpg, .jpeg or .png)
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
import torch
from PIL import Image

from mheads import seeds
from mheads.data.augment import uniforms
from mheads.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png")
STATISTICS = 2000  # images that the mean is measured on: decoding a million takes hours and changes little


@dataclass(frozen=True, eq=False)  # arrays have no truth value to compare by
class FolderSplit:
    """Image files, each resized to `resize` pixels on its shorter side and cropped to `crop` x `crop` RGB.

    Read with seeds, the crop is at random and, with `mirror`, mirrored half of the time; without seeds, or
    without `augment`, it is the centre.
    """

    root: Path
    files: np.ndarray  # str [N], relative to root
    sizes: np.ndarray  # bytes, int64 [N]
    labels: np.ndarray
    resize: int
    crop: int
    mirror: bool = False
    augment: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return (3, self.crop, self.crop)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        """Raw images, uint8 [b, crop, crop, 3], decoded by as many threads as there are cores."""
        rows = np.asarray(rows)
        out = np.empty((len(rows), self.crop, self.crop, 3), np.uint8)
        down, right = np.full((2, len(rows)), 0.5)
        flip = np.zeros(len(rows), bool)
        if seeds is not None and self.augment:
            down, right, chance = uniforms(np.asarray(seeds), 3)
            flip = (chance < 0.5) & self.mirror

        def decode(start: int) -> None:
            # A share of the batch per thread: a task per image would spend as long on handing it over.
            for i in range(start, len(rows), cores()):
                pixels = read_crop(self.root / self.files[rows[i]], self.resize, self.crop, down[i], right[i])
                out[i] = pixels[:, ::-1] if flip[i] else pixels

        for _ in _pool().map(decode, range(cores())):
            pass  # taking the results raises the first error
        return torch.from_numpy(out)

    def part(self, rows: slice) -> Self:
        return replace(self, files=self.files[rows], sizes=self.sizes[rows], labels=self.labels[rows])

    def fixed(self) -> Self:
        return replace(self, augment=False)

    def checksum(self) -> bytes:
        """Of names, sizes and labels; reading every image would take too long."""
        listing = zip(self.files.tolist(), self.sizes.tolist(), self.labels.tolist(), strict=True)
        return hashlib.sha256("\n".join(map(repr, listing)).encode()).digest()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pool() -> ThreadPoolExecutor:
    """One for the process; Pillow lets go of the interpreter while it decodes and resizes."""
    return ThreadPoolExecutor(cores(), thread_name_prefix="decode")


def read_crop(path: Path, resize: int, crop: int, down: float, right: float) -> np.ndarray:
    """RGB pixels [crop, crop, 3] of the image resized so that its shorter side is `resize`.

    down and right in [0, 1) place the crop among the whole-pixel places that it has; 0.5 is the centre.
    """
    try:
        with Image.open(path) as image:
            ratio = resize / min(image.size)
            width, height = (max(resize, round(side * ratio)) for side in image.size)
            image.draft("RGB", (width, height))  # JPEGs are decoded at the nearest larger eighth
            x = int(right * (width - crop + 1))
            y = int(down * (height - crop + 1))
            across, along = image.width / width, image.height / height
            # Only the crop is resized, not the rest of the image; the filter still sees beyond its edges.
            box = (x * across, y * along, (x + crop) * across, (y + crop) * along)
            resized = image.convert("RGB").resize((crop, crop), Image.Resampling.BILINEAR, box=box)
            return np.asarray(resized)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image ({error}); replace it or take it out") from error


def read_folder(
    path: Path, *, resize: int, crop: int | None, mirror: bool, need_test: bool
) -> tuple[FolderSplit, FolderSplit, tuple[str, ...]]:
    """Train and test splits and the class names; without `need_test` a missing test folder is an empty split."""
    crop = resize if crop is None else crop
    if not 1 <= crop <= resize:
        raise UserError(f"data.crop is {crop} but images are resized to data.resize={resize}; give 1 to {resize}")
    classes = _class_folders(path / "train")
    train = _list_split(path / "train", classes, resize, crop, mirror)
    lacking = sorted(set(range(len(classes))) - set(train.labels.tolist()))
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
        return train, train.part(slice(0)), classes
    unknown = sorted(set(_class_folders(held_out)) - set(classes))
    if unknown:
        raise UserError(
            f"{held_out} has the class {unknown[0]!r}, which {path / 'train'} does not have;"
            f" its classes are {', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}"
        )
    test = _list_split(held_out, classes, resize, crop, mirror=False)
    if not len(test):
        raise UserError(f"{held_out} holds no image ({', '.join(SUFFIXES)}) in its class folders; put some there")
    return train, test, classes


def _class_folders(path: Path) -> tuple[str, ...]:
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; data.path must hold train/<class>/ and val/<class>/ with images")
    names = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise UserError(f"{path} has no class folders; put the images of each class into {path}/<class>/")
    return tuple(names)


def _list_split(root: Path, classes: tuple[str, ...], resize: int, crop: int, mirror: bool) -> FolderSplit:
    found = [
        (f"{name}/{entry.name}", entry.stat().st_size, label)
        for label, name in enumerate(classes)
        if (root / name).is_dir()
        for entry in sorted(os.scandir(root / name), key=lambda entry: entry.name)
        if entry.name.lower().endswith(SUFFIXES)
    ]
    # Always the same mixed order, so that the last n, or the first n, are a fair sample of the classes.
    mixed = seeds.numpy_generator("folder", "order").permutation(len(found))
    files, sizes, labels = zip(*(found[i] for i in mixed), strict=True) if found else ((), (), ())
    return FolderSplit(
        root,
        np.array(files, dtype=object),
        np.array(sizes, dtype=np.int64),
        np.array(labels, dtype=np.int64),
        resize,
        crop,
        mirror,
    )
