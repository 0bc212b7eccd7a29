"""LMDBs of Caffe's Datum messages, as its tools write them: an example and its class number under each key."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image

from mheads.common import seeds
from mheads.common.errors import UserError
from mheads.common.protobuf import BYTES, FIXED32, VARINT, fields
from mheads.data.augmentation import uniforms
from mheads.data.file_digests import digest_files
from mheads.data.readers.image_files import UNREADABLE, eight_bits
from mheads.data.readers.image_folder import cores, run_in_threads
from mheads.data.readers.image_list import pose_numbers
from mheads.data.splits import TargetRows
from mheads.data.value_range import ValueRange, measure_rows
from mheads.problems import Problem

CHANNELS, HEIGHT, WIDTH, DATA, LABEL, FLOATS, ENCODED = range(1, 8)  # the numbers of a Datum's fields
BATCH = 1000  # rows read at a time where all of them are looked at


@dataclass(frozen=True, eq=False)  # arrays have no truth value to compare by
class DatumSplit:
    """The examples under these keys, all of one size, of which `crop` x `crop` is cut: at random in training.

    `turned`: channels are given in the opposite order of that in which they are stored.
    """

    path: Path
    keys: np.ndarray  # bytes [N]
    targets: np.ndarray
    size: tuple[int, int, int]
    floats: bool
    crop: int | None = None
    mirror: bool = False
    turned: bool = False
    augment: bool = True
    margin = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size if self.crop is None else (self.size[0], self.crop, self.crop)

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        """Raw examples, uint8 [b, H, W, C], or float32 [b, C, H, W] where datums hold floats."""
        rows = np.asarray(rows)
        channels, height, width = self.shape
        out = np.empty((len(rows), height, width, channels), np.float32 if self.floats else np.uint8)
        chances = None if seeds is None or not self.augment else uniforms(np.asarray(seeds), 3).T
        most = (self.size[1] - height, self.size[2] - width)

        def decode(i: int) -> None:
            key = self.keys[rows[i]]
            with _transaction(self.path) as opened:
                pixels = _pixels(self.path, key, opened.get(key))
            if pixels.shape != self.size or (pixels.dtype != np.uint8) != self.floats:
                raise UserError(
                    f"{self.path}: the datum {_shown(key)} is {_described(pixels.shape, pixels.dtype)}, the first "
                    f"{_described(self.size, out.dtype)}: write all in one size (convert_imageset --resize_height)"
                )
            down, right = (side // 2 for side in most)
            if chances is not None:
                down, right = (int(chance * (side + 1)) for chance, side in zip(chances[i], most, strict=False))
            cut = pixels[:: -1 if self.turned else 1, down : down + height, right : right + width]
            flip = chances is not None and self.mirror and chances[i, 2] < 0.5
            out[i] = (cut[:, :, ::-1] if flip else cut).transpose(1, 2, 0)

        run_in_threads(decode, len(rows))
        found = torch.from_numpy(out)
        return found.permute(0, 3, 1, 2).contiguous() if self.floats else found

    def read_targets(self, rows: np.ndarray, seeds: np.ndarray | None) -> TargetRows:
        return TargetRows(torch.from_numpy(self.targets[rows]))

    def places(self, seeds: np.ndarray) -> torch.Tensor | None:
        if not self.augment or (self.crop is None and not self.mirror):
            return None
        chances = uniforms(np.asarray(seeds), 3)
        most = (self.size[1] - self.shape[1], self.size[2] - self.shape[2])
        down, right = ((chance * (side + 1)).astype(int) for chance, side in zip(chances, most, strict=False))
        return torch.from_numpy(np.stack([down, right, (chances[2] < 0.5) & self.mirror], axis=1))

    def part(self, rows: slice) -> Self:
        return replace(self, keys=self.keys[rows], targets=self.targets[rows])

    def without_augmentation(self) -> Self:
        return replace(self, augment=False)

    def whole(self) -> Self:
        return replace(self, crop=None)

    def survey(self, where: str) -> ValueRange:
        if not self.floats:
            return ValueRange("uint8", 0, 255)
        lows, highs, whole = [], [], self.whole()
        for start in range(0, len(self), BATCH):
            values = whole.read(np.arange(start, min(start + BATCH, len(self))), None).flatten(1).numpy()
            lows.append(values.min(1))
            highs.append(values.max(1))
        return measure_rows(np.concatenate([*lows, np.zeros(0)]), np.concatenate([*highs, np.zeros(0)]), where)

    def checksum(self) -> bytes:
        """A digest of the file, and of which of its examples are taken."""
        found = hashlib.sha256(digest_files(self.path.parent, [self.path.name], cores())[0].encode())
        for key, target in zip(self.keys.tolist(), self.targets.tolist(), strict=True):
            found.update(key + f"{target}\n".encode())
        return found.digest()


def read_lmdb(
    path: Path,
    test_path: Path | None,
    channels: str,
    *,
    crop: int | None,
    mirror: bool,
    problem: str = "auto",
    need_test: bool,
) -> tuple[DatumSplit, DatumSplit, Problem]:
    """Train and test splits, and the problem: as many classes as the largest number says, unless it is another."""
    if need_test and test_path is None:
        raise UserError(f"{path} is to train on: give data.test_path, an LMDB to test on, or data.validation=n")
    train = _listed(path, crop, mirror, channels)
    test = train.part(slice(0)) if test_path is None else _listed(test_path, crop, False, channels)
    return pose_numbers(train, test, problem, str(test_path))


def lmdb_shape(path: Path | None, crop: int | None) -> tuple[int, ...] | None:
    """The shape of an example, from the first; None without an LMDB."""
    if path is None or not is_lmdb(path):
        return None
    size = _first(_file(path))[0]
    return size if crop is None else (size[0], crop, crop)


def is_lmdb(path: Path) -> bool:
    return path.is_file() or (path / "data.mdb").is_file()


def _listed(given: Path, crop: int | None, mirror: bool, channels: str) -> DatumSplit:
    path = _file(given)
    size, floats = _first(path)
    if crop is not None and not 1 <= crop <= min(size[1:]):
        raise UserError(f"data.crop is {crop}, but {given} holds {size[1]} x {size[2]}; give 1 to {min(size[1:])}")
    keys, labels = [], []
    with _transaction(path) as opened:
        for key, value in opened.cursor():
            keys.append(bytes(key))
            labels.append(_label(path, keys[-1], value))
    # Always the same mixed order, as for folders: they may be sorted by class.
    mixed = seeds.numpy_generator("lmdb", "order").permutation(len(keys))
    named = np.array(keys, dtype=object)[mixed]
    turned = channels == "bgr" and size[0] == 3
    return DatumSplit(path, named, np.array(labels, np.int64)[mixed], size, floats, crop, mirror, turned)


def _file(path: Path) -> Path:
    found = path / "data.mdb" if path.is_dir() else path
    if not found.is_file():
        raise UserError(f"{path} is no LMDB: give the folder that holds its data.mdb")
    return found.resolve()


@cache  # a process may open one only once
def _opened(path: Path) -> Any:
    try:
        import lmdb
    except ImportError as error:
        raise UserError("LMDBs are read with lmdb, which is not installed: pip install 'mheads[caffe]'") from error
    try:
        # Without its locks, since nobody writes: a read-only folder, and any number of ranks, will do.
        return lmdb.open(str(path), subdir=False, readonly=True, lock=False, readahead=False, max_readers=1024)
    except lmdb.Error as error:
        raise UserError(f"{path} cannot be read as an LMDB ({error}): is it whole?") from error


@contextmanager
def _transaction(path: Path) -> Iterator[Any]:
    opened = _opened(path)
    import lmdb

    try:
        with opened.begin(buffers=True) as found:
            yield found
    except lmdb.Error as error:
        raise UserError(f"{path} cannot be read ({error}): is it whole?") from error


def _first(path: Path) -> tuple[tuple[int, int, int], bool]:
    """Size of the first example, and whether it is one of floats."""
    with _transaction(path) as opened:
        cursor = opened.cursor()
        if not cursor.first():
            raise UserError(f"{path} holds no example")
        pixels = _pixels(path, bytes(cursor.key()), cursor.value())
    channels, height, width = pixels.shape
    return (channels, height, width), pixels.dtype != np.uint8


def _label(path: Path, key: bytes, value: memoryview) -> int:
    try:
        found = next((v for number, kind, v in fields(value) if number == LABEL and kind == VARINT), 0)
    except ValueError as error:
        raise _no_datum(path, key, error) from error
    if found >= 2**31:  # a negative number, in ten bytes
        raise UserError(f"{path}: the datum {_shown(key)} has the label {found - 2**64}: give numbers from 0 on")
    return found


def _pixels(path: Path, key: bytes, value: memoryview | None) -> np.ndarray:
    """The values of a datum [C, H, W], uint8 or float32; encoded images as Caffe decodes them, in BGR."""
    if value is None:
        raise UserError(f"{path} has no datum {_shown(key)} any more: it was changed while it was read")
    try:
        found: dict[int, Any] = {CHANNELS: 0, HEIGHT: 0, WIDTH: 0, DATA: b"", ENCODED: 0}
        values: list[np.ndarray] = []
        for number, kind, content in fields(value):
            if number == FLOATS and kind in (BYTES, FIXED32):
                values.append(np.frombuffer(content, "<f4"))
            elif number in found and kind == (BYTES if number == DATA else VARINT):
                found[number] = content
        if found[ENCODED]:
            with Image.open(io.BytesIO(found[DATA])) as image:
                grey = image.mode in ("1", "L", "I") or image.mode.startswith("I;")
                pixels = np.asarray(eight_bits(image, grey))
            return pixels[None] if grey else pixels[:, :, ::-1].transpose(2, 0, 1)
        size = (found[CHANNELS], found[HEIGHT], found[WIDTH])
        if not all(size):
            raise ValueError(f"its sides are {' x '.join(map(str, size))}")
        if len(found[DATA]):
            values = [np.frombuffer(found[DATA], np.uint8)]
        return np.concatenate(values or [np.zeros(0, np.float32)]).reshape(size)  # a copy: the buffer is not ours
    except (ValueError, *UNREADABLE) as error:
        raise _no_datum(path, key, error) from error


def _no_datum(path: Path, key: bytes, error: Exception) -> UserError:
    return UserError(f"{path}: what is under {_shown(key)} is no Datum of Caffe's ({error}): make the LMDB anew")


def _shown(key: bytes) -> str:
    return repr(key[:40].decode("utf-8", "replace"))


def _described(size: tuple[int, ...], dtype: Any) -> str:
    return f"{' x '.join(map(str, size))} {'bytes' if dtype == np.uint8 else 'floats'}"
