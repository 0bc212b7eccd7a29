"""Digests of many files, remembered by path, size and times so that only what changed is read again."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mheads.common.atomic_files import open_file
from mheads.common.errors import UserError
from mheads.common.safe_yaml import seal, unseal
from mheads.data.readers import cache

Entry = list[Any]  # digest, size, mtime, ctime: as JSON has them
_writing = threading.Lock()


def digest_files(
    root: Path, names: Sequence[str], threads: int, check: Callable[[Path], None] | None = None
) -> list[str]:
    """SHA-256 of the contents of root/name, for each name; only files that are new or changed are read.

    These are also given to `check`; the first UserError that it raises ends this, with the number of all.
    """
    known = _read_store(root)
    entries: dict[str, Entry] = {}
    errors: dict[str, UserError] = {}

    def share(first: int) -> None:
        for name in names[first::threads]:  # a task per file would spend as long on handing it over
            entry = _entry(root / name, known.get(name))
            try:
                if check is not None and entry != known.get(name):
                    check(root / name)
                entries[name] = entry
            except UserError as error:
                errors[name] = error
            advance()

    # Reading and hashing release the interpreter. Taking the results raises the first error.
    with (
        show_progress(len(names), "reading files for their checksum") as advance,
        ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool,
    ):
        list(pool.map(share, range(threads)))
    if any(known.get(name) != entry for name, entry in entries.items()):
        _write_store(root, entries)
    if errors:
        more = f" ({len(errors)} such files)" if len(errors) > 1 else ""
        raise UserError(f"{errors[min(errors)]}{more}")
    return [entries[name][0] for name in names]


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


def _store(root: Path) -> Path:
    """The file that remembers the digests of a folder."""
    return cache.cache_dir() / "contents" / f"{hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:16]}.json"


def _read_store(root: Path) -> dict[str, Entry]:
    try:
        cache.recover(_store(root))
        return {name: entry for name, entry in unseal(_store(root).read_text())["files"].items() if len(entry) == 4}
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # reading all files again is never wrong


def _write_store(root: Path, entries: dict[str, Entry]) -> None:
    # Without it, or without a home folder for it, only the next start is slower.
    with suppress(OSError, UserError), _writing:
        content = seal({"files": _read_store(root) | entries})  # two splits may share a folder
        cache.store(_store(root), content.encode())


@contextmanager
def show_progress(total: int, what: str) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, which is gone afterwards; the function that it gives advances it by one."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    console, columns = Console(stderr=True), (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
