"""CIFAR-10 and CIFAR-100 in their official binary layout.

A file is a row of records: the label bytes, then the red, green and blue planes of a 32 x 32 image.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mheads.common.errors import UserError
from mheads.data.arrays import ArraySplit
from mheads.data.readers.cache import cache_dir, read_verified
from mheads.problems import Classification, Problem

SIDE = 32
PIXELS = 3 * SIDE * SIDE


@dataclass(frozen=True)
class Layout:
    """How one of the sets is laid out on disk; the label used is the last of `label_bytes`."""

    name: str
    unpacked: str  # the folder's name in the official archive
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    label_bytes: int
    classes: tuple[str, ...]
    class_file: str | None = None

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train_files, *self.test_files)

    @property
    def record(self) -> int:
        return self.label_bytes + PIXELS


CIFAR10 = Layout(
    name="cifar10",
    unpacked="cifar-10-batches-bin",
    train_files=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test_files=("test_batch.bin",),
    label_bytes=1,
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)
CIFAR100 = Layout(
    name="cifar100",
    unpacked="cifar-100-binary",
    train_files=("train.bin",),
    test_files=("test.bin",),
    label_bytes=2,  # coarse, fine
    classes=tuple(map(str, range(100))),
    class_file="fine_label_names.txt",
)


def find_cifar(layout: Layout, root: Path | None) -> Path:
    """The folder with the files: `root` (or the cache), or the folder of the set in it."""
    base = cache_dir() if root is None else root
    for folder in (base / layout.name, base / layout.unpacked, base):
        present = [file for file in layout.files if (folder / file).exists()]
        if len(present) == len(layout.files):
            return folder
        if present:
            missing = ", ".join(sorted(set(layout.files) - set(present)))
            raise UserError(f"{folder} lacks {missing}; run `mheads data get {layout.name} --force`")
    raise UserError(
        f"{layout.name} is not in {base}; run `mheads data get {layout.name}`,"
        f" or put the official binary files into {cache_dir() / layout.name}"
    )


def load_cifar(layout: Layout, root: Path | None) -> tuple[ArraySplit, ArraySplit, Problem]:
    """Train and test splits and the problem, from `root` or the cache."""
    train, test, classes = read_cifar(layout, find_cifar(layout, root))
    return train, test, Classification(classes)


def read_cifar(layout: Layout, folder: Path) -> tuple[ArraySplit, ArraySplit, tuple[str, ...]]:
    """Train and test splits, images uint8 [N, 32, 32, 3], and the names of the classes."""
    with ThreadPoolExecutor(2) as pool:  # checksums and copies release the interpreter
        parts = list(pool.map(lambda file: _read_records(layout, folder / file), layout.files))
    num_train = len(layout.train_files)
    return _join(parts[:num_train]), _join(parts[num_train:]), _classes(layout, folder)


def write_records(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Writes CIFAR-10 records of images uint8 [N, 32, 32, 3] and labels [N]."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(labels), PIXELS)
    records = np.concatenate([labels.astype(np.uint8)[:, None], planes], axis=1)
    path.write_bytes(records.tobytes())


def _read_records(layout: Layout, path: Path) -> tuple[np.ndarray, np.ndarray]:
    remedy = f"run `mheads data get {layout.name} --force`"
    content = read_verified(path, remedy)
    if not content or len(content) % layout.record:
        raise UserError(
            f"{path} has {len(content)} bytes, which is not a whole number of {layout.name} records of"
            f" {layout.record} bytes; {remedy}"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, layout.record)
    labels = records[:, layout.label_bytes - 1].astype(np.int64)
    if labels.max() >= len(layout.classes):
        row = int(labels.argmax())
        raise UserError(
            f"{path}: record {row} has label {labels[row]}, but {layout.name} has {len(layout.classes)}"
            f" classes, so this is another kind of file; {remedy}"
        )
    planes = records[:, layout.label_bytes :].reshape(-1, 3, SIDE, SIDE)
    # Plane by plane is several times faster than copying the transposed array.
    return np.stack([planes[:, 0], planes[:, 1], planes[:, 2]], axis=-1), labels


def _join(parts: list[tuple[np.ndarray, np.ndarray]]) -> ArraySplit:
    images, labels = zip(*parts, strict=True)
    return ArraySplit(np.concatenate(images), np.concatenate(labels))


def _classes(layout: Layout, folder: Path) -> tuple[str, ...]:
    if layout.class_file is None or not (folder / layout.class_file).exists():
        return layout.classes
    remedy = f"run `mheads data get {layout.name} --force`"
    content = read_verified(folder / layout.class_file, remedy)
    names = tuple(content.decode(errors="replace").split())
    if len(names) != len(layout.classes):
        raise UserError(
            f"{folder / layout.class_file} has {len(names)} names for {len(layout.classes)} classes; {remedy}"
        )
    return names
