"""Where fetched datasets live, how they get there whole, and how a damaged file is noticed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mheads.errors import UserError

MANIFEST = "manifest.json"
STALE_SECONDS = 24 * 3600  # leftovers that are older come from a killed process


def cache_dir() -> Path:
    """$MHEADS_DATA, else mheads in the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."""
    if chosen := os.environ.get("MHEADS_DATA"):
        return Path(chosen).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mheads"
    except RuntimeError as error:
        raise UserError("this user has no home folder to keep datasets in: set MHEADS_DATA to a folder") from error


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `target` when the block ends well, and vanishes otherwise.

    It lies beside `target`, hence on the same file system, and is renamed at the end: even if the process is
    killed, nothing half-made ever has the final name.
    """
    prefix, suffix = f".{target.name}-", ".partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in target.parent.glob(f"{prefix}*{suffix}"):
            if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, suffix=suffix, dir=target.parent) as work:
            folder = Path(work, "new")
            folder.mkdir()
            yield folder
            if target.exists():
                target.rename(Path(work, "old"))
            folder.rename(target)
    except OSError as error:
        raise UserError(
            f"cannot store {target.name} in {target.parent} ({error});"
            " free some space there, or set MHEADS_DATA to another folder"
        ) from error


def write_manifest(folder: Path, source: str) -> None:
    """Records size and SHA-256 of every file of the folder, and where they came from."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(folder.iterdir())
    }
    (folder / MANIFEST).write_text(json.dumps({"source": source, "files": files}, indent=1) + "\n")


def sizes_match(folder: Path) -> bool:
    """Whether the files have the sizes that the manifest records; true where there is no manifest."""
    try:
        recorded = _recorded(folder)
        return all((folder / file).stat().st_size == entry["bytes"] for file, entry in recorded.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_verified(path: Path, remedy: str) -> bytes:
    """The bytes of a file, checked against the manifest beside it where there is one."""
    try:
        entry = _recorded(path.parent).get(path.name)
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


def _recorded(folder: Path) -> dict[str, dict]:
    """The manifest's entries by file name; none for files that the user put there."""
    manifest = folder / MANIFEST
    return json.loads(manifest.read_text())["files"] if manifest.exists() else {}
