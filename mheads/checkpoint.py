"""Checkpoints: whole or absent, and nothing in them can run code.

    checkpoints/step-00000500/tensors.safetensors   weights, optimizer state, ownership so far
                              state.json            the rest, and the checksum of the tensors

A checkpoint is written to a hidden folder, flushed to the disk, and renamed: whatever kills the process, a folder under
its final name is complete. Damage that happens later is found by the checksum.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mheads.errors import UserError


@dataclass(frozen=True)
class Checkpoint:
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run folder; written by a thread of their own, so that training goes on meanwhile."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="mheads-writer")
        self._pending: Future[None] | None = None

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Begins to save; the tensors are copied first, so they may change at once. Raises what the last save met."""
        self.wait()
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        self._pending = self._writer.submit(self._write, step, copies, state)

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    def steps(self) -> list[int]:
        """Steps with a checkpoint, the newest first."""
        if not self.folder.is_dir():
            return []
        return sorted((int(p.name.removeprefix("step-")) for p in self.folder.glob("step-*")), reverse=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that is whole; `warn` hears of those that are not."""
        for step in self.steps():
            try:
                return self._read(step)
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                warn(f"checkpoint {self.path(step).name} is damaged ({error}); going back to the one before")
        return None

    def drop_after(self, step: int) -> None:
        """Removes damaged checkpoints newer than the one in use, which would otherwise count as the newest."""
        for other in self.steps():
            if other > step:
                shutil.rmtree(self.path(other))

    def _read(self, step: int) -> Checkpoint:
        path = self.path(step)
        state = json.loads((path / "state.json").read_text())
        if _sha256(path / "tensors.safetensors") != state["sha256"]:
            raise ValueError("its checksum does not match")
        return Checkpoint(step, load_file(path / "tensors.safetensors"), state)

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        hidden = self.folder / f".step-{step:08d}"
        with saving(hidden):
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
            save_file(tensors, hidden / "tensors.safetensors")
            digest = _sha256(hidden / "tensors.safetensors")
            (hidden / "state.json").write_text(json.dumps({**state, "step": step, "sha256": digest}))
            for file in hidden.iterdir():
                flush(file)
            flush(hidden)
            final = self.path(step)
            if final.exists():
                shutil.rmtree(final)
            hidden.rename(final)
            flush(self.folder)
        for old in self.steps()[self.keep :]:
            shutil.rmtree(self.path(old))


@contextlib.contextmanager
def saving(path: Path) -> Any:
    """Turns a full disk or a forbidden folder into a message; what was there before stays."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        remedy = "free some space" if full else "make the folder writable"
        raise UserError(
            f"could not save {path.parent}: {'no space left on the disk' if full else error}. "
            f"The checkpoints already there are whole: {remedy} and give the same command again to go on from them"
        ) from error


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file beside its final name, flushes it, and renames it: readers see the old one or the new one."""
    hidden = path.with_name(f".{path.name}")
    with saving(hidden):
        write(hidden)
        flush(hidden)
        os.replace(hidden, path)
        flush(path.parent)


def flush(path: Path) -> None:
    """Down to the disk, a file or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
