"""Where fetched datasets live, how they get there whole, and how a damaged file is noticed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mheads.common import atomic_files
from mheads.common.errors import UserError
from mheads.common.safe_yaml import from_json

MANIFEST = "manifest.json"
SUFFIX = ".partial"
OLD = "old"  # what is about to be replaced
STALE_SECONDS = 24 * 3600  # leftovers of other hosts that are older come from a killed process


def cache_dir() -> Path:
    """$MHEADS_DATA, else mheads in the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."""
    if chosen := os.environ.get("MHEADS_DATA"):
        return Path(chosen).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mheads"
    except RuntimeError as error:
        raise UserError("this user has no home folder to keep datasets in: set MHEADS_DATA to a folder") from error


@contextmanager
def storing(target: Path) -> Iterator[None]:
    """Turns a full disk or a forbidden folder into a message."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot store {target.name} in {target.parent} ({error});"
            " free some space there, or set MHEADS_DATA to another folder"
        ) from error


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `target` when the block ends well, and vanishes otherwise.

    It lies beside `target`, hence on the same file system, and is renamed at the end: even if the process is
    killed, nothing half-made ever has the final name. What was there before is put back by the next that builds it.
    """
    with storing(target), scratch(target) as work:
        folder, old = work / "new", work / OLD
        folder.mkdir()
        yield folder
        for path in folder.iterdir():
            atomic_files.flush(path)
        if target.exists():
            target.rename(old)
        try:
            folder.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise


def store(target: Path, content: bytes) -> None:
    """Writes a file of the cache that is whole or absent; others may write the same one at the same time."""
    with scratch(target) as work:
        (work / target.name).write_bytes(content)
        (work / target.name).replace(target)


@contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target` for this process alone, removed at the end, as are those that killed ones left.

    The owner of one holds a lock on it, which ends with the process. Locks may not reach other hosts: what these left
    is removed after a day. If one was killed while it replaced `target`, that is put back first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_files.hold_lock(target.parent):  # which keeps others from removing the folder before it is locked
        _sweep(target)
        work = Path(tempfile.mkdtemp(SUFFIX, _own(target), target.parent))
        held = os.open(work, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_EX)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(held)


def recover(target: Path) -> None:
    """Removes what processes left that were killed while they made `target`, and puts back what they had moved."""
    with suppress(OSError), atomic_files.hold_lock(target.parent):
        _sweep(target)


def _sweep(target: Path) -> None:
    for leftover in target.parent.glob(f".{target.name}-*{SUFFIX}"):
        if _is_abandoned(leftover, leftover.name.startswith(_own(target))):
            if (leftover / OLD).exists() and not target.exists():
                (leftover / OLD).rename(target)
            shutil.rmtree(leftover, ignore_errors=True)


def _own(target: Path) -> str:
    """What the names of this host's folders begin with."""
    return f".{target.name}-{platform.node()}@"


def _is_abandoned(folder: Path, own: bool) -> bool:
    """Whether the process that made the folder, which ran on this host if it is its `own`, is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if own:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                return False  # it is held
            except OSError:
                pass  # a file system without locks
        return time.time() - os.fstat(descriptor).st_mtime > STALE_SECONDS
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, source: str) -> None:
    """Records size and SHA-256 of every file of the folder, and where they came from."""
    entries = {
        path.name: {"bytes": path.stat().st_size, "sha256": atomic_files.digest(path)}
        for path in sorted(folder.iterdir())
    }
    (folder / MANIFEST).write_text(json.dumps({"source": source, "files": entries}, indent=1) + "\n")


def sizes_match(folder: Path) -> bool:
    """Whether the files have the sizes that the manifest records; true where there is no manifest."""
    try:
        entries = _read_manifest(folder).items()
        return all((folder / file).stat().st_size == entry["bytes"] for file, entry in entries)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_verified(path: Path, remedy: str) -> bytes:
    """The bytes of a file, checked against the manifest beside it where there is one."""
    try:
        entry = _read_manifest(path.parent).get(path.name)
        content = path.read_bytes()
        if entry is None:
            return content
        size, digest = entry["bytes"], entry["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} or the manifest beside it cannot be read ({error}); {remedy}") from error
    if len(content) != size:
        raise UserError(f"{path} has {len(content)} bytes, but was stored with {size}; {remedy}")
    if hashlib.sha256(content).hexdigest() != digest:
        raise UserError(f"{path} was altered since it was stored: its SHA-256 is not {digest}; {remedy}")
    return content


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """The manifest's entries by file name; none for files that the user put there."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        return {}
    entries = from_json(manifest.read_bytes())["files"]
    if not isinstance(entries, dict):
        raise TypeError(f"the files in {MANIFEST} are {entries!r}")
    return entries
