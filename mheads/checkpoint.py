"""Checkpoints: whole or absent, and nothing in them can run code.

    checkpoints/step-00000500/tensors.safetensors   weights, optimizer state, ownership so far
                              state.json            the rest, and the checksum of both

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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mheads.errors import UserError
from mheads.plain import from_json


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
        if step in self.steps():
            return  # whole already: the run was stopped or resumed just here
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        self._pending = self._writer.submit(self._write, step, copies, state)

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raises what a save met that has ended, so that training does not go on for nothing."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    def steps(self) -> list[int]:
        """Steps with a checkpoint, the newest first."""
        if not self.folder.is_dir():
            return []
        names = (path.name.removeprefix("step-") for path in self.folder.glob("step-*"))
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that is whole; `warn` hears of those that are not."""
        steps = self.steps()
        for i, step in enumerate(steps):
            try:
                return self._read(step)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                older = steps[i + 1 : i + 2]
                back = f"the one before, iteration {older[0]}" if older else "the start: no other is left"
                warn(f"checkpoint {self.path(step)} is damaged ({error}); going back to {back}")
        return None

    def drop_after(self, step: int) -> None:
        """Removes damaged checkpoints newer than the one in use, which would otherwise count as the newest."""
        for other in self.steps():
            if other > step:
                self._remove(other)
        for leftover in self.folder.glob(".*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)

    def _remove(self, step: int) -> None:
        """Renamed first: half a checkpoint never bears a final name."""
        hidden = self.folder / f".old-{step:08d}"
        shutil.rmtree(hidden, ignore_errors=True)
        self.path(step).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def _read(self, step: int) -> Checkpoint:
        path = self.path(step)
        written = from_json((path / "state.json").read_text())
        state = written["state"]
        if written["sha256"] != _sha256(path / "tensors.safetensors", state):
            raise ValueError("its checksum does not match")
        return Checkpoint(step, load_file(path / "tensors.safetensors"), state)

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        hidden = self.folder / f".step-{step:08d}"
        with saving(self.path(step), hidden):
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
            save_file(tensors, hidden / "tensors.safetensors")
            digest = _sha256(hidden / "tensors.safetensors", state)
            (hidden / "state.json").write_text(json.dumps({"sha256": digest, "state": state}))
            for file in hidden.iterdir():
                flush(file)
            flush(hidden)
            final = self.path(step)
            if final.exists():
                self._remove(step)
            hidden.rename(final)
            flush(self.folder)
        for old in self.steps()[self.keep :]:
            self._remove(old)


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def saving(path: Path, hidden: Path | None = None) -> Iterator[None]:
    """Turns a full disk or a forbidden folder into a message and removes `hidden`, the half of a new `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if hidden is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(hidden) if hidden.is_dir() else hidden.unlink(missing_ok=True)
        # The writer of safetensors says the number in words only.
        words = ("os error 28", "os error 122", "os error 27")
        full = getattr(error, "errno", None) in FULL or any(word in str(error) for word in words)
        cause = "no space left on the disk" if full else getattr(error, "strerror", None) or error
        remedy = "free some space" if full else "make the folder writable"
        raise UserError(
            f"could not save {path}: {cause}. What was saved before is whole: {remedy} and give the same command again"
        ) from error


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file beside its final name, flushes it, and renames it: readers see the old one or the new one."""
    hidden = path.with_name(f".{path.name}")
    with saving(path, hidden):
        write(hidden)
        flush(hidden)
        os.replace(hidden, path)
        flush(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    def write(hidden: Path) -> None:
        hidden.write_text(text)

    write_atomically(path, write)


def flush(path: Path) -> None:
    """Down to the disk, a file or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path, state: dict[str, Any]) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps(state, sort_keys=True).encode())
    return digest.hexdigest()
