"""Checkpoints: whole or absent, and nothing in them can run code.

    checkpoints/step-00000500/tensors.safetensors   weights, optimizer state, ownership so far; or shards, of several
                              state.json            the rest, and the checksum of both

`shards.py` has the files of the tensors. A checkpoint is written to a hidden folder, flushed to the disk, and renamed:
however the process ends, a folder under its final name is complete. Later damage is found by the checksum; a checkpoint
that was renamed or comes from another run is found by the step and the run in its state.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import save as serialise
from torch import Tensor

from mheads.common import atomic_files
from mheads.common.atomic_files import saving
from mheads.common.safe_yaml import from_json
from mheads.common.schemas import CheckpointState, check, check_arrays
from mheads.runs import shards
from mheads.runs.shards import Writers

UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError)


@dataclass(frozen=True)
class Checkpoint:
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class _Written(BaseModel):
    sha256: str
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run folder; written by a thread of their own, so that training continues meanwhile.

    Each holds the `config` and the `identity` of its run. Where `run` is known, those of other runs are not read.
    Several `writers` each have one of these, and save the same steps.
    """

    def __init__(self, folder: Path, keep: int = 1, run: str | None = None) -> None:
        self.folder = folder
        self.keep = keep  # of the newest; those of the steps in `stay` are kept besides
        self.stay: Collection[int] = ()
        self.run = run
        self.fits: Callable[[dict[str, Tensor]], None] = lambda tensors: None  # raises ValueError for others
        self.wanted: Callable[[str], bool] = lambda name: True  # the tensors that `newest` reads
        self.config = ""
        self.identity: dict[str, Any] = {}
        self.writers: Writers | None = None
        self.saved: int | None = None  # the step of the checkpoint that was saved last, or resumed from
        self._count = 0  # of saves
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="mheads-writer")
        self._pending: Future[None] | None = None

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any] | None, again: bool = False) -> None:
        """Begins to save; the tensors may change once this returns. Raises the error of the save before, if it failed.

        A checkpoint that is there already is whole, since the run was resumed from it or stopped just here: it is
        left alone, unless it is to be written `again`. Of several writers, the main rank alone gives the state.
        """
        self.wait()
        if step == self.saved and not again:
            return
        self.saved, self._count = step, self._count + 1
        # The bytes of the file are the copy: large models need no second one.
        content = to_bytes(tensors)
        self._pending = self._writer.submit(self._write, step, content, state, self._count)

    def replace_state(self, step: int, state: dict[str, Any]) -> None:
        """Writes the state of a checkpoint anew; its tensors stay."""
        path = self.path(step)
        atomic_files.write_atomically(path / "state.json", self._seal(step, shards.digest(path), state))

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raises the error of a save that has failed, so that training does not continue for nothing."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    def steps(self) -> list[int]:
        """Steps with a checkpoint, the newest first."""
        if not self.folder.is_dir():
            return []
        names = (path.name.removeprefix("step-") for path in self.folder.glob("step-*"))
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def newest(self, warn: Callable[[str], None], limit: int | None = None) -> Checkpoint | None:
        """The newest checkpoint that is whole, of those up to step `limit`; warns of damaged ones."""
        steps = [step for step in self.steps() if limit is None or step <= limit]
        for i, step in enumerate(steps):
            try:
                return self._read(step)
            except UNREADABLE as error:
                older = steps[i + 1 : i + 2]
                back = f"the one before, iteration {older[0]}" if older else "the start: no other is left"
                warn(f"checkpoint {self.path(step)} is damaged ({error}); going back to {back}")
        return None

    def recover(self) -> None:
        """Brings back a checkpoint that was about to be replaced when the process was killed."""
        for replaced in self.folder.glob(".replaced-*"):
            final = self.folder / f"step-{replaced.name.removeprefix('.replaced-')}"
            if not os.path.lexists(final):
                replaced.rename(final)

    def drop_after(self, step: int) -> None:
        """Removes checkpoints newer than the one in use, which would otherwise count as the newest."""
        for other in self.steps():
            if other > step:
                self._remove(other)
        for leftover in self.folder.glob(".*"):  # left by a process that was killed
            atomic_files.remove(leftover)

    def _replaced(self, step: int) -> Path:
        return self.folder / f".replaced-{step:08d}"

    def _remove(self, step: int) -> None:
        """Removes a checkpoint; it is renamed first, so that half of one never has a final name."""
        hidden = self.folder / f".old-{step:08d}"
        atomic_files.remove(hidden)
        self.path(step).rename(hidden)
        atomic_files.remove(hidden)

    def damages(self) -> dict[Path, str]:
        """Checkpoints that are damaged, and what is wrong with them."""
        problems = {}
        for step in self.steps():
            try:
                self._state(step)
            except UNREADABLE as error:
                problems[self.path(step)] = str(error)
        return problems

    def _read(self, step: int) -> Checkpoint:
        state, tensors = self._state(step), self.load(step, self.wanted)
        self.fits(tensors)
        return Checkpoint(step, tensors, state)

    def load(self, step: int, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
        """The tensors of these names in a checkpoint that is known to be whole."""
        return shards.load(self.path(step), wanted)

    def _state(self, step: int) -> dict[str, Any]:
        """The state in a checkpoint, if nothing in it is damaged."""
        path = self.path(step)
        if path.is_symlink():
            raise ValueError("it is a link")
        written = from_json(atomic_files.read(path / "state.json").decode())
        check(_Written, written)
        state: dict[str, Any] = written["state"]
        if written["sha256"] != _sha256(shards.digest(path), state):
            raise ValueError("its checksum does not match")
        if state["step"] != step:
            raise ValueError(f"it is that of iteration {state['step']}, renamed")
        if self.run is not None and state["identity"]["run"] != self.run:
            raise ValueError("it belongs to another run")
        check(CheckpointState, state)
        return state

    def _write(self, step: int, tensors: bytes, state: dict[str, Any] | None, count: int) -> None:
        final = self.path(step)
        hidden = atomic_files.hidden_name(final)
        if self.writers is not None:
            hidden = hidden.with_name(f"{hidden.name}-{self.writers.launch}-{count}")
        with saving(final, None if state is None else hidden):
            if self.writers is not None:
                digest = self.writers.write(hidden, tensors)
            else:
                self.folder.mkdir(exist_ok=True)  # but not the run folder, if that is gone
                atomic_files.remove(hidden)
                hidden.mkdir()
                atomic_files.write_new(hidden / shards.TENSORS, tensors)
                digest = hashlib.sha256(tensors).hexdigest()
            if state is None:
                return
            atomic_files.write_new(hidden / "state.json", self._seal(step, digest, state))
            atomic_files.flush(hidden)
            replaced = self._replaced(step)
            atomic_files.remove(replaced)
            if os.path.lexists(final):
                final.rename(replaced)
            hidden.rename(final)
            atomic_files.flush(self.folder)
            atomic_files.remove(replaced)
        for old in [step for step in self.steps() if step not in self.stay][self.keep :]:
            self._remove(old)

    def _seal(self, step: int, tensors: str, state: dict[str, Any]) -> str:
        """The content of state.json, with the checksum of this state and of tensors of this digest."""
        state = {**state, "step": step, "config": self.config, "identity": self.identity}
        return json.dumps({"sha256": _sha256(tensors, state), "state": state})


def refuse_misfits(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless these tensors are found, of the same shapes, and of numbers of the same kind."""
    check_arrays(found, {name: tuple(tensor.shape) for name, tensor in wanted.items()})
    for name, tensor in wanted.items():
        dtype = found[name].dtype
        if dtype.is_complex or dtype.is_floating_point != tensor.dtype.is_floating_point:
            raise ValueError(f"{name} is {dtype}, where {tensor.dtype} should be")


def to_bytes(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file; they share no memory with the tensors."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()  # tied weights, which the format does not have
        seen.add(tensor.untyped_storage().data_ptr())
        plain[name] = tensor
    return serialise(plain, metadata)


def _sha256(tensors: str, state: dict[str, Any]) -> str:
    return hashlib.sha256(f"{tensors} {json.dumps(state, sort_keys=True)}".encode()).hexdigest()
