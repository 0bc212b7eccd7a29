"""Records of a run that grow during training: metrics.jsonl, and who owned which class."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mheads.common import atomic_files, schemas
from mheads.common.atomic_files import saving
from mheads.common.safe_yaml import from_json
from mheads.runs.tensorboard import Board

if TYPE_CHECKING:
    from mheads.problems import Problem


class MetricsLog:
    """metrics.jsonl: appended line by line, and cut back to the checkpoint on resuming.

    `parts` are the lines that checkpoints know, as [bytes, SHA-256] from one checkpoint to the next: lines of a part
    that is damaged are left out, and `mended` says so. A `board` is given each line too.
    """

    def __init__(
        self, path: Path, parts: list[list[Any]], warn: Callable[[str], None], board: Board | None = None
    ) -> None:
        self._path, self._board = path, board
        content, bad = good_lines(path, parts)
        self.parts = [part for i, part in enumerate(parts) if i not in bad]
        self.mended = bool(bad)
        if bad:
            lost = sum(parts[i][0] for i in bad)
            warn(f"{path} is damaged: {lost:,} bytes of its lines are left out, the {len(content):,} others kept")
            atomic_files.write_atomically(path, content)
        with saving(path):
            # No buffer, so that a full disk is an error at the write, not at close.
            self._file = os.fdopen(atomic_files.open_in_place(path), "r+b", buffering=0)
            self._file.truncate(len(content))
            self._file.seek(0, os.SEEK_END)
        self._begin_part()

    def _begin_part(self) -> None:
        self._bytes, self._sha256 = 0, hashlib.sha256()

    def write(self, line: dict[str, Any]) -> None:
        content = json.dumps(line).encode() + b"\n"
        self._bytes += len(content)
        self._sha256.update(content)
        with saving(self._path):
            while content:  # half a line on a full disk is cut off on resuming
                content = content[self._file.write(content) or 0 :]
        if self._board is not None:
            self._board.write(line)

    def mark(self) -> list[list[Any]]:
        """Flushes the lines to the disk and begins another part; returns the parts so far."""
        with saving(self._path):
            os.fsync(self._file.fileno())
        if self._bytes:
            self.parts = [*self.parts, [self._bytes, self._sha256.hexdigest()]]
            self._begin_part()
        return self.parts

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def good_lines(path: Path, parts: list[list[Any]]) -> tuple[bytes, set[int]]:
    """The content of the undamaged parts, and the numbers of the damaged ones."""
    try:
        content = atomic_files.read(path)
    except FileNotFoundError:
        content = b""
    good, bad, at = [], set(), 0
    for i, (size, digest) in enumerate(parts):
        part, at = content[at : at + size], at + size
        if hashlib.sha256(part).hexdigest() == digest:
            good.append(part)
        else:
            bad.add(i)
    return b"".join(good), bad


class Log(NamedTuple):
    """What metrics.jsonl holds: a dict for each logged step, and one for each evaluation."""

    steps: list[dict[str, Any]] = []  # noqa: RUF012
    evaluations: list[dict[str, Any]] = []  # noqa: RUF012

    @staticmethod
    def of(lines: list[dict[str, Any]]) -> Log:
        steps = [line for line in lines if "result" not in line]
        evaluations = [
            {"iteration": line["iteration"], "split": line["split"], **line["result"]}
            for line in lines
            if "result" in line
        ]
        return Log(steps, evaluations)


def check_line(line: bytes, where: str, problem: Problem, members: int) -> dict[str, Any]:
    """A line of metrics.jsonl as plain data; raises ValueError if it is none of a run of so many members."""
    try:
        entry: dict[str, Any] = from_json(line)
        if isinstance(entry, dict) and "result" in entry:
            schemas.check(schemas.EvaluationLine, entry)
            problem.result_type.from_dict(entry["result"]).check_sizes(members, len(problem.groups))
            return entry
        schemas.check(schemas.StepLine, entry)
        for key, value in entry.items():
            if isinstance(value, list) and len(value) != members:
                raise ValueError(f"{key} has {len(value)} numbers, and the run {members} members")
        return entry
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


FINEST = 5  # moments of the fine history for each doubling of the iterations, as a power of two
MOST_NUMBERS = 4_000_000  # in the fine history of a run of a million iterations
ENOUGH = 20  # assigned examples of each class, on average, in a moment


class History:
    """Who owned which class over the course of training.

    At each evaluation, `iterations` [T]: `test` [T, M, C], owned examples of the test set; `train` [T, M, C],
    assignment since the evaluation before. In between as well, `moments` [F]: `steps` [F, M, C], assignment since the
    moment before. What is settled is settled early, so moments are steps at first, if these have examples enough, and
    lie ever wider apart: 32 for each doubling of the iterations, fewer if there are very many members and classes.
    """

    def __init__(self, members: int, classes: int) -> None:
        self.iterations, self.moments = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.test, self.train = np.zeros((0, members, classes)), np.zeros((0, members, classes))
        self.steps = np.zeros((0, members, classes), np.float32)
        self.lately = np.zeros((members, classes))  # assignment since the last moment
        self._fine = min(FINEST, max(1, MOST_NUMBERS // (20 * members * classes)).bit_length() - 1)

    def append(self, iteration: int, test: np.ndarray, train: np.ndarray) -> None:
        """Records an evaluation."""
        self.iterations = np.append(self.iterations, iteration)
        self.test = np.concatenate([self.test, test[None]])
        self.train = np.concatenate([self.train, train[None]])
        if self.lately.any():
            self._end_moment(iteration)

    def note(self, iteration: int, assigned: np.ndarray) -> None:
        """Records a step."""
        self.lately = self.lately + assigned
        width = 1 << max(0, iteration.bit_length() - 1 - self._fine)
        if iteration % width == 0 and self.lately.sum() >= ENOUGH * self.lately.shape[1]:
            self._end_moment(iteration)

    def _end_moment(self, iteration: int) -> None:
        self.moments = np.append(self.moments, iteration)
        self.steps = np.concatenate([self.steps, self.lately[None].astype(np.float32)])
        self.lately = np.zeros_like(self.lately)

    def arrays(self) -> dict[str, np.ndarray]:
        """What assignments.npz holds."""
        return {name: getattr(self, name) for name in ("iterations", "test", "train", "moments", "steps")}

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint holds."""
        return {**self.arrays(), "lately": self.lately}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        for name in self.state():
            if name in arrays:  # a checkpoint of an older version has no moments
                setattr(self, name, arrays[name])
