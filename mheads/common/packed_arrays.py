"""Arrays that somebody packed into a file: how large they become is looked at before anything is unpacked.

A file may claim any size, and a small one may hold gigabytes of zeros.
"""

from __future__ import annotations

import lzma
import math
import os
import tokenize
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile, is_zipfile

import numpy as np

from mheads.common import atomic_files
from mheads.common.errors import UserError

MOST = "MHEADS_MAX_UNPACKED"  # the variable that raises the limit, in GB
ENOUGH = 10**9  # bytes that any file may become
TIMES = 100  # a larger one may become so many times as large: images shrink to a half, labels to a thirtieth
MAGIC = b"\x93NUMPY"  # how an .npy file begins
_UNREADABLE = (
    ValueError, EOFError, BadZipFile, TypeError, KeyError, RuntimeError, OverflowError, SyntaxError, MemoryError,
    zlib.error, lzma.LZMAError, tokenize.TokenError,
)  # fmt: skip


@contextmanager
def _as_value_errors() -> Iterator[None]:
    """Inside, whatever a damaged file makes a reader raise becomes a ValueError."""
    try:
        yield
    except _UNREADABLE as error:
        raise ValueError(str(error) or type(error).__name__) from error


class Arrays(Mapping[str, np.ndarray]):
    """The arrays of an .npz file by name, or of an .npy file the one under no name; each is read when it is asked for.

    What cannot be read raises ValueError, what would become too large UserError.
    """

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self.path, self._stream = path, stream
        single = stream.read(len(MAGIC)) == MAGIC
        self._zip = None if single else _open_zip(stream)
        names = [""] if self._zip is None else self._zip.namelist()
        self._members = {name.removesuffix(".npy"): name for name in names}
        self._unpacked = 0

    def __contains__(self, name: object) -> bool:
        return name in self._members  # and need not be read for that

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, name: str) -> np.ndarray:
        member = self._members[name]
        with _as_value_errors():
            self._check(name, member)
            with self._open(member) as stream:
                return np.lib.format.read_array(stream, allow_pickle=False)

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """The shape and type of an array, which is not read."""
        with _as_value_errors(), self._open(self._members[name]) as stream:
            return _read_header(stream)[:2]

    def _check(self, name: str, member: str) -> None:
        with self._open(member) as stream:
            shape, dtype, begin = _read_header(stream)
        if dtype.hasobject:
            raise ValueError(f"the array {name or 'in it'} is one of objects, which may be any code")
        size = math.prod(shape) * dtype.itemsize
        held = (self._size if self._zip is None else self._zip.getinfo(member).file_size) - begin
        if size > held:
            claimed = f"{dtype} {list(shape)}, which is {say_bytes(size)}"
            raise ValueError(f"the array {name or 'in it'} says that it is {claimed}, and {say_bytes(held)} are there")
        self._unpacked += size
        refuse_too_large(self._unpacked, self.path, self._size)

    @property
    def _size(self) -> int:
        return os.fstat(self._stream.fileno()).st_size

    @contextmanager
    def _open(self, member: str) -> Iterator[IO[bytes]]:
        if self._zip is None:
            self._stream.seek(0)
            yield self._stream
        else:
            with self._zip.open(member) as stream:
                yield stream


@contextmanager
def open_arrays(path: Path) -> Iterator[Arrays]:
    """The arrays in an .npz or .npy file, while it is open."""
    with atomic_files.open_file(path) as stream:
        yield Arrays(stream, path)


def refuse_too_large(num_bytes: int, path: Path, packed: int | None = None) -> None:
    """Refuses what a file of `packed` bytes would become, if it is more than it may and than this machine holds."""
    packed = path.stat().st_size if packed is None else packed
    most = most_of(packed)
    if num_bytes > most:
        raise UserError(
            f"{path} has {say_bytes(packed)} and would become {say_bytes(num_bytes)} in memory, of which at most "
            f"{say_bytes(most)} are unpacked: if that is meant, set {MOST}={math.ceil(num_bytes / 1e9)} (GB)"
        )


def refuse_zip_bomb(path: Path) -> None:
    """Refuses a file of zipped parts, as torch.save writes them, that would become too large; others are left alone."""
    with atomic_files.open_file(path) as stream:
        if is_zipfile(stream):
            refuse_too_large(sum(part.file_size for part in _open_zip(stream).infolist()), path)


def say_bytes(count: float) -> str:
    """A number of bytes in words: 5.8 MB."""
    units = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")
    power = min(len(units) - 1, int(math.log10(max(1, count))) // 3)
    return f"{count / 1000**power:,.3g} {units[power]}" if power else f"{count:,} bytes"


def most_of(packed: int) -> float:
    if given := os.environ.get(MOST):
        try:
            most = float(given)
            if most > 0:
                return most * 1e9
        except ValueError:
            pass
        raise UserError(f"{MOST}={given}: give how many GB a file may become in memory, such as 20")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(max(ENOUGH, TIMES * packed), max(ENOUGH, memory))


def _open_zip(stream: IO[bytes]) -> ZipFile:
    stream.seek(0)
    with _as_value_errors():
        return ZipFile(stream)


def _read_header(stream: Any) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape, type, and the place where the numbers begin."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    if any(length < 0 for length in shape) or math.prod(shape) >= 2**60:
        raise ValueError(f"an array of shape {list(shape)} cannot be")
    return shape, dtype, stream.tell()
