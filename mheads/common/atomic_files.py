"""Writes files that are whole or absent, and never follows a link; reads regular files alone, which cannot block."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from mheads.common.errors import SpecialFileError, UserError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
SPECIAL = {stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}


class NotSavedError(UserError):
    """Raised where a disk is full, or a folder cannot be written."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what, self.remedy, self.before = what, remedy, "What was saved before is whole"

    def __str__(self) -> str:
        return f"{self.what}. {self.before}: {self.remedy} and give the same command again"


@contextlib.contextmanager
def saving(path: Path, hidden: Path | None = None) -> Iterator[None]:
    """Turns a full disk or a forbidden folder into a message and removes `hidden`, the unfinished `path`."""
    try:
        yield
    except OSError as error:
        if hidden is not None:
            with contextlib.suppress(OSError):
                remove(hidden)
        full = error.errno in FULL
        cause = "no space left on the disk" if full else error.strerror or error
        denied = error.errno in DENIED
        remedy = "free some space" if full else "make the folder writable" if denied else "set that right"
        if isinstance(error, FileNotFoundError):
            cause, remedy = "its folder is gone", "bring it back"
        raise NotSavedError(f"could not save {path}: {cause}", remedy) from error


@contextlib.contextmanager
def replacing(path: Path, hidden: Path | None = None) -> Iterator[Path]:
    """A name to write a file to that takes the place of `path` when the block ends well, and vanishes otherwise.

    Readers see the old file or the new one. The name is always the same, so that a process that was killed leaves at
    most one such file, which the next one removes.
    """
    hidden = hidden or hidden_name(path)
    with saving(path):
        try:
            remove(hidden)
            yield hidden
            flush(hidden)
            os.replace(hidden, path)  # a link of that name is replaced, not followed
            flush(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                remove(hidden)
            raise


def write_atomically(path: Path, content: bytes | str | Callable[[IO[bytes]], None]) -> None:
    """Writes a file that is whole or absent: see `replacing`."""
    with replacing(path) as hidden:
        write_new(hidden, content)


@contextlib.contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Inside, no other process is at the folder that asks for the same lock. It ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system that has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def check_output(path: Path, suffixes: Sequence[str]) -> Path:
    """Refuses a kind of file that is not written, or a place where it cannot be, before any work is done."""
    if path.suffix.lower() not in suffixes:
        *others, last = suffixes
        raise UserError(f"{path}: give a file that ends in {', '.join(others)}{' or ' if others else ''}{last}")
    return check_place(path)


def check_place(path: Path) -> Path:
    """Refuses a place where no file can be written, before any work is done."""
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder; give a file in it, {path / f'name{path.suffix}'}")
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}; make it, or give another file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {path}: the folder {path.parent} is not writable; make it so, or give another")
    return path


def hidden_name(path: Path) -> Path:
    """The name of a file or folder until it is whole."""
    return path.with_name(f".{path.name}.new")


def write_new(path: Path, content: bytes | str | Callable[[IO[bytes]], None]) -> None:
    """Writes a file that must not exist yet, not even as a link, and flushes it to the disk."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb") as file:
        if callable(content):
            content(file)
        else:
            file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def open_in_place(path: Path) -> int:
    """Opens a file to read and write it in place, and makes it if it is not there; refuses a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def open_file(path: Path, flags: int = 0) -> io.BufferedReader:
    """Opens a file that somebody hands in; a pipe and the like raise an error, since reading one may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)  # without it, opening a pipe waits for a writer
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    message = f"it is a {SPECIAL.get(kind, 'special file')}, not a file: give a copy of what it holds"
    raise SpecialFileError(errno.EINVAL, message, str(path))


def read_text(path: Path, encoding: str = "utf-8", most: int = -1) -> str:
    """The text in a file that somebody hands in, or as much of it; line ends become Python's."""
    with io.TextIOWrapper(open_file(path), encoding) as file:
        return file.read(most)


def read(path: Path) -> bytes:
    """The content of a file; refuses a link."""
    with open_file(path, os.O_NOFOLLOW) as file:
        return file.read()


def digest(path: Path) -> str:
    """The SHA-256 of a file, which need not fit in memory; refuses a link."""
    with open_file(path, os.O_NOFOLLOW) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Removes a file or folder; if it is a link, the link and not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
