"""Errors that the user can fix."""

from __future__ import annotations

import difflib
import errno
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_OF_THE_SYSTEM = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR,
    errno.ELOOP, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOENT,
}  # fmt: skip


class SpecialFileError(OSError):
    """A pipe, a device or a socket where a file is read: one could be waited on for ever."""

    def __str__(self) -> str:
        return str(self.strerror)


class UserError(Exception):
    """A mistake in what the user gave: its message says what, where, and what to do next.

    The command line shows the message alone, without a traceback, and exits with code 2. Code that handles the error
    reads its fields, never its wording: `key` is the config key or the name that the mistake is about, and `hint` is
    advice that ends the message, which a caller may replace.
    """

    def __init__(self, text: str, *, key: str | None = None, hint: str | None = None) -> None:
        super().__init__(text)
        self.key, self.hint = key, hint

    def __str__(self) -> str:
        text = super().__str__()
        separator = "\n" if "\n" in text else "; "
        return f"{text}{separator}{self.hint}" if self.hint else text


_words: ContextVar[Callable[[str], str]] = ContextVar("words", default=str)


@contextmanager
def speaking(translate: Callable[[str], str]) -> Iterator[None]:
    """Inside, warnings and messages of progress, which name config keys, are translated."""
    token = _words.set(translate)
    try:
        yield
    finally:
        _words.reset(token)


def in_words_of_caller(message: str) -> str:
    """The message in the words of whoever called us: the config's, unless `speaking` says otherwise."""
    return _words.get()(message)


def warn(message: str) -> None:
    """A Python warning that points at the line of the user's code from which we were called."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("mheads", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(in_words_of_caller(message), stacklevel=level)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint in brackets if a name is spelt nearly like a known one, else nothing."""
    near = difflib.get_close_matches(name, [*known], 1)
    return f" (did you mean {near[0]}?)" if near else ""


def describe_error(error: BaseException) -> str:
    """The type and the text of an error that somebody else's code raised."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def as_user_error(error: OSError) -> Exception:
    """A UserError for what a user can fix (disks, rights, paths); any other error is returned as it is."""
    if error.errno not in _OF_THE_SYSTEM and not isinstance(error, SpecialFileError):
        return error
    name = str(error.filename or "")
    name = name if len(name) <= 300 else f"{name[:300]}... ({len(name):,} characters)"
    return UserError(f"{error.strerror} ({name})" if name else f"{error.strerror}")


class DamageError(UserError):
    """Raised when a file is not what was written: `path` is the file, and `problem` what is wrong with it."""

    def __init__(self, path: Path, problem: str, *, hint: str | None = None) -> None:
        super().__init__(f"{path} {problem}", hint=hint)
        self.path, self.problem = path, problem
