"""Digests of many files, remembered by path, size and times so that only what changed is read again."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mheads.common.atomic_files import open_file
from mheads.common.errors import UserError
from mheads.common.safe_yaml import sealed, unsealed
from mheads.data.readers import cache

Entry = list[Any]  # digest, size, mtime, ctime: as JSON has them
_writing = threading.Lock()
PATIENCE = 3.0  # seconds before a terminal is told what is going on


def digest_files(
    root: Path, names: Sequence[str], threads: int, check: Callable[[Path], None] | None = None
) -> list[str]:
    """SHA-256 of the contents of root/name, for each name; only files that are new or changed are read.

    These are given to `check`, which may refuse them; how many it refuses is told with the first.
    """
    store = _store(root)
    known = _remembered(store)
    shown = ProgressLine(len(names), "reading images for their checksum")
    found: dict[str, Entry] = {}
    refused: dict[str, UserError] = {}

    def share(first: int) -> None:
        for name in names[first::threads]:  # a task per file would spend as long on handing it over
            entry = _entry(root / name, known.get(name))
            try:
                if check is not None and entry != known.get(name):
                    check(root / name)
                found[name] = entry
            except UserError as error:
                refused[name] = error
            shown.advance()

    # Reading and hashing release the interpreter. Taking the results raises the first error.
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        list(pool.map(share, range(threads)))
    shown.close()
    if any(known.get(name) != entry for name, entry in found.items()):
        _remember(store, found)
    if refused:
        more = f" ({len(refused)} such files)" if len(refused) > 1 else ""
        raise UserError(f"{refused[min(refused)]}{more}")
    return [found[name][0] for name in names]


def _entry(path: Path, known: Entry | None) -> Entry:
    """Digest, size and times of a file; a known digest is kept if size and times are as known."""
    try:
        # ctime, unlike mtime, cannot be set back.
        facts = path.stat()
        stamp = [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
        if known is not None and known[1:] == stamp:
            return known
        with open_file(path) as file:
            return [hashlib.file_digest(file, "sha256").hexdigest(), *stamp]
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); replace it or take it out") from error


def _store(root: Path) -> Path | None:
    """The file that remembers the digests of a folder; None where there is no place for one."""
    name = hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:16]
    try:
        return cache.cache_dir() / "contents" / f"{name}.json"
    except (RuntimeError, UserError):  # no home folder
        return None


def _remembered(store: Path | None) -> dict[str, Entry]:
    if store is None:
        return {}
    try:
        cache.recover(store)
        known = unsealed(store.read_text())
        known = known.get("files", known)  # which earlier versions did not have, nor a seal
        return {name: entry for name, entry in known.items() if isinstance(entry, list) and len(entry) == 4}
    except (OSError, ValueError, AttributeError):
        return {}  # reading all files again is never wrong


def _remember(store: Path | None, found: dict[str, Entry]) -> None:
    if store is None:
        return
    try:
        with _writing:
            content = sealed({"files": _remembered(store) | found})  # two splits may share a folder
            cache.store(store, content.encode())
    except OSError:
        pass  # only the next start is slower


class ProgressLine:
    """Shows a line on a terminal if something takes long."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.done, self.what = total, 0, what
        self.next = time.monotonic() + PATIENCE if sys.stderr.isatty() else float("inf")
        self.began = time.monotonic()
        self.written = False

    def advance(self) -> None:
        self.done += 1  # off by a few when threads meet, but it is only shown
        if time.monotonic() > self.next:
            self.next = time.monotonic() + 0.5
            self.written = True
            left = (time.monotonic() - self.began) * (self.total / self.done - 1)
            bar = "━" * round(24 * self.done / self.total)
            line = f"{self.what} {bar:╌<24} {self.done:,} of {self.total:,}, {left / 60:.0f} min left"
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.written:
            print("\r\033[K", end="", file=sys.stderr)
