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
from PIL import Image

from mheads.common.errors import UserError
from mheads.common.protobuf import BYTES, FIXED32, VARINT, fields
from mheads.data.file_digests import digest_files
from mheads.data.readers.image_crops import CroppedSplit, cores, shuffle_examples
from mheads.data.readers.image_files import UNREADABLE, pixels_of
from mheads.data.readers.image_list import check_test_path
from mheads.data.targets import pose_numbers
from mheads.data.value_range import ValueRange, measure_rows
from mheads.problems import Problem

CHANNELS, HEIGHT, WIDTH, DATA, LABEL, FLOATS, ENCODED = range(1, 8)  # the numbers of a Datum's fields
BATCH = 1000  # rows read at a time where all of them are looked at


@dataclass(frozen=True, eq=False)
class DatumSplit(CroppedSplit):
    """The examples under these keys, all of one size, of which `crop` x `crop` is cut: at random in training.

    `turned`: channels are given in the opposite order of that in which they are stored.
    """

    path: Path
    keys: np.ndarray  # bytes [N]
    targets: np.ndarray
    size: tuple[int, int, int]
    floats: bool
    crop: int | None = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size if self.crop is None else (self.size[0], self.crop, self.crop)

    @property
    def dtype(self) -> type:
        return np.float32 if self.floats else np.uint8

    @property
    def free(self) -> tuple[int, int]:
        return self.size[1] - self.shape[1], self.size[2] - self.shape[2]

    def decode(self, row: int, chance: tuple[float, float] | None) -> np.ndarray:
        key = self.keys[row]
        with _transaction(self.path) as opened:
            pixels = _pixels(self.path, key, opened.get(key))
        if pixels.shape != self.size or (pixels.dtype != np.uint8) != self.floats:
            raise UserError(
                f"{self.path}: the datum {_show_key(key)} is {_describe(pixels.shape, pixels.dtype)}, the first "
                f"{_describe(self.size, self.dtype)}: write all in one size (convert_imageset --resize_height)"
            )
        down, right = (side // 2 for side in self.free)
        if chance is not None:
            down, right = (int(part * (side + 1)) for part, side in zip(chance, self.free, strict=True))
        _, height, width = self.shape
        cut = pixels[:: -1 if self.turned else 1, down : down + height, right : right + width]
        return cut.transpose(1, 2, 0)

    def part(self, rows: slice) -> Self:
        return replace(self, keys=self.keys[rows], targets=self.targets[rows])

    def whole(self) -> Self:
        return replace(self, crop=None)

    def survey(self, where: str) -> ValueRange:
        if not self.floats:
            return super().survey(where)
        lows, highs, whole = [np.zeros(0)], [np.zeros(0)], self.whole()
        for start in range(0, len(self), BATCH):
            values = whole.read(np.arange(start, min(start + BATCH, len(self))), None).flatten(1).numpy()
            lows.append(values.min(1))
            highs.append(values.max(1))
        return measure_rows(np.concatenate(lows), np.concatenate(highs), where)

    def checksum(self) -> bytes:
        """A digest of the file, and of which of its examples are taken."""
        digest = hashlib.sha256(digest_files(self.path.parent, [self.path.name], cores())[0].encode())
        for key, target in zip(self.keys.tolist(), self.targets.tolist(), strict=True):
            digest.update(key + f"{target}\n".encode())
        return digest.digest()


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
    check_test_path(path, test_path, need_test, "an LMDB")
    train = _list_datums(path, crop, mirror, channels)
    test = train.part(slice(0)) if test_path is None else _list_datums(test_path, crop, False, channels)
    return pose_numbers(train, test, problem, str(test_path))


def lmdb_shape(path: Path | None, crop: int | None) -> tuple[int, ...] | None:
    """The shape of an example, from the first; None without an LMDB."""
    if path is None or not (path.is_file() or (path / "data.mdb").is_file()):
        return None
    size = _first(_file(path))[0]
    return size if crop is None else (size[0], crop, crop)


def _list_datums(place: Path, crop: int | None, mirror: bool, channels: str) -> DatumSplit:
    path = _file(place)
    size, floats = _first(path)
    if crop is not None and not 1 <= crop <= min(size[1:]):
        raise UserError(f"data.crop is {crop}, but {place} holds {size[1]} x {size[2]}; give 1 to {min(size[1:])}")
    keys, labels = [], []
    with _transaction(path) as opened:
        for key, value in opened.cursor():
            keys.append(bytes(key))
            labels.append(_label(path, keys[-1], value))
    turned = channels == "bgr" and size[0] == 3
    return DatumSplit(path, *shuffle_examples("lmdb", keys, labels), size, floats, crop, turned, mirror=mirror)


def _file(path: Path) -> Path:
    file = path / "data.mdb" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path} is no LMDB: give the folder that holds its data.mdb")
    return file.resolve()


@cache  # a process may open one only once
def _open_lmdb(path: Path) -> Any:
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
    database = _open_lmdb(path)
    import lmdb

    try:
        with database.begin(buffers=True) as transaction:
            yield transaction
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
        label = next((v for number, kind, v in fields(value) if number == LABEL and kind == VARINT), 0)
    except ValueError as error:
        raise _no_datum(path, key, error) from error
    if label >= 2**31:  # a negative number, in ten bytes
        raise UserError(f"{path}: the datum {_show_key(key)} has the label {label - 2**64}: give numbers from 0 on")
    return label


def _pixels(path: Path, key: bytes, value: memoryview | None) -> np.ndarray:
    """The values of a datum [C, H, W], uint8 or float32; encoded images as Caffe decodes them, in BGR."""
    if value is None:
        raise UserError(f"{path} has no datum {_show_key(key)} any more: it was changed while it was read")
    try:
        datum: dict[int, Any] = {CHANNELS: 0, HEIGHT: 0, WIDTH: 0, DATA: b"", ENCODED: 0}
        values: list[np.ndarray] = []
        for number, kind, content in fields(value):
            if number == FLOATS and kind in (BYTES, FIXED32):
                values.append(np.frombuffer(content, "<f4"))
            elif number in datum and kind == (BYTES if number == DATA else VARINT):
                datum[number] = content
        if datum[ENCODED]:
            with Image.open(io.BytesIO(datum[DATA])) as image:
                return pixels_of(image)[::-1]
        size = (datum[CHANNELS], datum[HEIGHT], datum[WIDTH])
        if not all(size):
            raise ValueError(f"its sides are {' x '.join(map(str, size))}")
        if len(datum[DATA]):
            values = [np.frombuffer(datum[DATA], np.uint8)]
        return np.concatenate(values or [np.zeros(0, np.float32)]).reshape(size)  # a copy: the buffer is not ours
    except (ValueError, *UNREADABLE) as error:
        raise _no_datum(path, key, error) from error


def _no_datum(path: Path, key: bytes, error: Exception) -> UserError:
    return UserError(f"{path}: what is under {_show_key(key)} is no Datum of Caffe's ({error}): make the LMDB anew")


def _show_key(key: bytes) -> str:
    return repr(key[:40].decode("utf-8", "replace"))


def _describe(size: tuple[int, ...], dtype: Any) -> str:
    return f"{' x '.join(map(str, size))} {'bytes' if dtype == np.uint8 else 'floats'}"
