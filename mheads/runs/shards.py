"""The tensors of a checkpoint on disk: one file, or shards with an index.

    tensors.safetensors                  written by one process
    tensors-00001-of-00003.safetensors   written by several: each writes the stages that it holds
    tensors.safetensors.index.json       which tensor is in which shard, in Hugging Face's format, and their SHA-256

The state of a checkpoint vouches for the one file or for the index, and the index for its shards.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field
from safetensors import safe_open
from torch import Tensor

from mheads.common import atomic_files
from mheads.common.atomic_files import saving
from mheads.common.safe_yaml import from_json
from mheads.common.schemas import check
from mheads.engine.interface import Notes

TENSORS = "tensors.safetensors"
INDEX = f"{TENSORS}.index.json"
ShardName = Annotated[str, Field(pattern=re.compile(r"^tensors-\d{5}-of-\d{5}\.safetensors$"))]


class _Metadata(BaseModel):
    sha256: dict[ShardName, str]


class _Index(BaseModel):
    metadata: _Metadata
    weight_map: dict[str, ShardName]


@dataclass(frozen=True)
class Writers:
    """The ranks that write a checkpoint together, each its shard; the first is the main rank, which adds the index."""

    ranks: Sequence[int]
    rank: int  # this process
    notes: Notes
    launch: str  # makes the names of unfinished folders unique: ranks of an earlier launch may still be writing theirs

    def write(self, folder: Path, content: bytes) -> str:
        """Writes the shard of this rank; the main rank waits for the others and returns the digest of the index."""
        names = {rank: f"tensors-{i:05d}-of-{len(self.ranks):05d}.safetensors" for i, rank in enumerate(self.ranks, 1)}
        own = f"{folder.name}/{self.rank}"
        try:
            folder.mkdir(exist_ok=True)
            atomic_files.write_new(folder / names[self.rank], content)
        except OSError as error:
            self.notes.post(own, str(error.errno))
            raise
        self.notes.post(own, hashlib.sha256(content).hexdigest())
        if self.rank != self.ranks[0]:
            return ""
        digests = {name: self._take_digest(f"{folder.name}/{rank}") for rank, name in names.items()}
        weight_map: dict[str, str] = {}
        for name in digests:
            with safe_open(folder / name, "pt") as shard:
                weight_map |= dict.fromkeys(shard.keys(), name)
        index = json.dumps({"metadata": {"sha256": digests}, "weight_map": weight_map}, indent=1).encode()
        atomic_files.write_new(folder / INDEX, index)
        return hashlib.sha256(index).hexdigest()

    def _take_digest(self, key: str) -> str:
        """The digest of a rank's shard; raises the error of a rank that could not write it."""
        note = self.notes.take(key)
        if note.isdecimal() and len(note) < 64:
            raise OSError(int(note), os.strerror(int(note)))
        return note


def digest(folder: Path) -> str:
    """The SHA-256 of the one file, or of the index; raises ValueError if a shard is not the one of the index."""
    if not os.path.lexists(folder / INDEX):
        return atomic_files.digest(folder / TENSORS)
    content = atomic_files.read(folder / INDEX)
    expected = _read_index(content).metadata.sha256
    with ThreadPoolExecutor(8) as readers:
        for name, sha256 in zip(
            expected, readers.map(atomic_files.digest, map(folder.joinpath, expected)), strict=True
        ):
            if sha256 != expected[name]:
                raise ValueError(f"the checksum of {name} does not match")
    return hashlib.sha256(content).hexdigest()


def load(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of the wanted names, whoever wrote them."""
    files: dict[str, list[str]] = {}
    if os.path.lexists(folder / INDEX):
        for tensor, name in _read_index(atomic_files.read(folder / INDEX)).weight_map.items():
            files.setdefault(name, []).append(tensor)
    else:
        with safe_open(folder / TENSORS, "pt") as file:
            files[TENSORS] = list(file.keys())
    tensors: dict[str, Tensor] = {}
    for name, held in files.items():
        with safe_open(folder / name, "pt") as file:
            tensors |= {tensor: file.get_tensor(tensor) for tensor in held if wanted(tensor)}
    return tensors


def _read_index(content: bytes) -> _Index:
    index = from_json(content.decode())
    check(_Index, index)
    return _Index(**index)


# Whether ranks have the folder in common is tried: each leaves a mark there, and the main rank looks for them.


def begin_trial(folder: Path) -> str:
    """Makes the folder and leaves the mark of the main rank; returns the name of this launch."""
    launch = secrets.token_hex(4)
    with saving(folder):
        folder.mkdir(exist_ok=True)
        atomic_files.write_new(_mark(folder, launch, 0), b"")
    return launch


def join_trial(folder: Path, launch: str, rank: int) -> None:
    """Leaves the mark of another rank, if it sees that of the main rank and may write there."""
    with suppress(OSError):
        if _mark(folder, launch, 0).exists():
            atomic_files.write_new(_mark(folder, launch, rank), b"")


def end_trial(folder: Path, launch: str, ranks: Sequence[int]) -> bool:
    """Whether the main rank sees the marks of all these ranks, which it removes."""
    marks = [_mark(folder, launch, rank) for rank in ranks]
    seen = all(mark.exists() for mark in marks)
    for mark in marks:
        atomic_files.remove(mark)
    return seen


def _mark(folder: Path, launch: str, rank: int) -> Path:
    return folder / f".trial-{launch}-{rank}"
