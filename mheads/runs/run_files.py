"""The files of a run folder: each is read where its digest is right and its content is what its schema says.

config.yaml        the resolved config                    metrics.jsonl      a line per log step and evaluation
data.safetensors   preprocessing, class names             assignments.npz    who owns which class, over training
identity.json      what network and loss are              checkpoints/       to resume from
manifest.json      digests of all these                   model.safetensors, result.json   at the end
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mheads.common import atomic_files, packed_arrays, schemas
from mheads.common.errors import DamageError, UserError
from mheads.common.safe_yaml import from_json
from mheads.config import read as configs
from mheads.config.read import ConfigError
from mheads.config.schema import Config
from mheads.problems import Problem
from mheads.runs.checkpoint import to_bytes
from mheads.runs.data_facts import DataFacts
from mheads.runs.lock import LOCK
from mheads.runs.manifest import AGAIN, Manifest
from mheads.runs.metrics_log import Log, check_line, good_lines

T = TypeVar("T")
# Of runs that were begun before there were these keys.
BEFORE = {"engine": {"stack": "never", "stack_batch_norm": "never", "cores": 2}}


class RunFiles:
    """Reads and writes the files of a run."""

    def __init__(self, path: Path) -> None:
        path = Path(os.path.expanduser(path))
        if str(path).encode("utf-8", "replace") != os.fsencode(path):  # safetensors opens no such file
            raise UserError(f"the run folder {path}: its name is not UTF-8; give another --folder")
        self.path = path
        self.config = path / "config.yaml"
        self.data = path / "data.safetensors"
        self.identity = path / "identity.json"
        self.metrics = path / "metrics.jsonl"
        self.assignments = path / "assignments.npz"
        self.model = path / "model.safetensors"
        self.result = path / "result.json"
        self.checkpoints = path / "checkpoints"
        self.manifest = Manifest(path)
        self._parsed: tuple[str, Config] | None = None

    def exists(self) -> bool:
        return self.config.is_file()

    def require(self) -> None:
        if not self.exists():
            inside = [RunFiles(path) for path in sorted(self.path.glob("*/"))]
            runs = [str(folder.path) for folder in inside if folder.exists()]
            hint = f"; it holds {len(runs):,} runs, such as {runs[-1]}" if runs else ""
            raise UserError(f"{self.path} is not a run folder: it has no {self.config.name}{hint}")
        self.refuse_links()

    def refuse_links(self) -> None:
        """Refuses links inside the run folder; the folder itself may be one."""
        for path in (*vars(self).values(), self.manifest.path, self.path / LOCK):
            if isinstance(path, Path) and path != self.path and path.is_symlink():
                raise UserError(
                    f"{path} is a symbolic link, and inside a run folder none is followed: put the real file or folder "
                    "there, or link the whole run folder"
                )

    # What is wrong with them.

    def problems(self) -> dict[Path, str]:
        """Files that are damaged or missing, and what is wrong with them."""
        paths = (self.path / name for name in self.manifest.digests)
        return {path: problem for path in paths if (problem := self.problem(path))}

    def problem(self, path: Path) -> str | None:
        """What is wrong with a file, if anything: it is not what was written, or makes no sense."""
        readers = {
            self.config: self.read_config, self.identity: self.read_identity, self.data: self.read_data,
            self.result: self.read_result, self.metrics: self.read_metrics, self.assignments: self.read_assignments,
            self.model: self._check_model,
        }  # fmt: skip
        if found := self.manifest.problem(path):
            return found
        try:
            readers.get(path, bool)()
        except DamageError as error:
            return error.problem if error.path == path else None  # another file that reading needs has the problem
        except ConfigError as error:
            return "; ".join(error.problems) if path == self.config else None
        return None

    # Reading and writing.

    def write(self, path: Path, content: bytes) -> None:
        self.manifest.expect(path, content)
        atomic_files.write_atomically(path, content)

    def _read_checked(self, path: Path, read: Callable[[], T]) -> T:
        """What a file holds, if it is what was written and makes sense."""
        self.manifest.check(path)
        try:
            return read()
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise DamageError(path, f"is damaged ({what})", hint=AGAIN) from error

    def read_config(self) -> Config:
        self.require()
        self.manifest.check(self.config)
        now = atomic_files.digest(self.config)
        if self._parsed is None or self._parsed[0] != now:  # parsing takes milliseconds, and other files need it
            self._parsed = now, configs.read(self.config, defaults=BEFORE)
        return self._parsed[1]

    def write_config(self, config: Config) -> None:
        content = config.to_yaml().encode()
        if not self.exists() or atomic_files.read(self.config) != content:
            self.write(self.config, content)

    def read_identity(self) -> dict[str, Any]:
        return self._read_checked(self.identity, lambda: _json_of(self.identity, schemas.Identity))

    def read_data(self) -> DataFacts:
        return self._read_checked(self.data, lambda: DataFacts.read(self.data))

    def write_result(self, result: dict[str, Any]) -> None:
        self.write(self.result, as_json(result))

    def read_result(self) -> dict[str, Any]:
        problem, members = self._problem_and_members()

        def read() -> dict[str, Any]:
            result = _json_of(self.result, schemas.Summary)
            if result["problem"] != problem.name:
                raise ValueError(f"problem = {result['problem']!r}, and {self.data.name} says {problem.name!r}")
            problem.result_type.from_dict(result).check_sizes(members, len(problem.groups))
            return {**result, "seconds": float(result["seconds"])}

        return self._read_checked(self.result, read)

    def _problem_and_members(self) -> tuple[Problem, int]:
        """What measures of this run are about: the problem, and how many members."""
        return self.read_data().problem, self.read_config().members

    def write_model(self, weights: dict[str, Tensor]) -> None:
        self.write(self.model, to_bytes(weights))

    def _check_model(self) -> None:
        def look() -> None:
            with safe_open(self.model, "pt"):
                pass

        self._read_checked(self.model, look)

    def read_metrics(self, known: list[list[Any]] | None = None) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: of a finished run all, else those in the parts that a checkpoint knows."""
        if known is not None:
            content, bad = good_lines(self.metrics, known)
            if bad:
                raise DamageError(self.metrics, "is damaged", hint=AGAIN)
            return self._lines(content)
        return self._read_checked(self.metrics, lambda: self._lines(atomic_files.read(self.metrics)))

    def _lines(self, content: bytes) -> list[dict[str, Any]]:
        problem, members = self._problem_and_members()
        lines = content.splitlines()
        return [check_line(line, f"line {number}", problem, members) for number, line in enumerate(lines, 1)]

    def growing_lines(self, lenient: bool = False) -> list[dict[str, Any]]:
        """The lines of a log that may be growing, up to one that is being written; if `lenient`, or is damaged."""
        try:
            content = atomic_files.read(self.metrics)
        except FileNotFoundError:
            return []
        problem, members = self._problem_and_members()
        lines = []
        for number, line in enumerate(content.splitlines(keepends=True), 1):
            try:
                lines.append(check_line(line, f"line {number}", problem, members))
            except ValueError as error:
                if not lenient and _is_json(line):
                    raise DamageError(self.metrics, f"is damaged ({error})", hint=AGAIN) from error
                break
        return lines

    def read_log(self, known: list[list[Any]] | None = None) -> Log:
        """The content of metrics.jsonl, steps and evaluations apart: see `read_metrics`."""
        return Log.of(self.read_metrics(known))

    def seal_metrics(self) -> None:
        """Enters metrics.jsonl in the manifest at the end of training, when no line will follow."""
        self.manifest.expect(self.metrics, atomic_files.read(self.metrics))

    def write_assignments(self, arrays: dict[str, np.ndarray]) -> None:
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
        self.write(self.assignments, content.getvalue())

    def read_assignments(self) -> dict[str, np.ndarray]:
        """iterations [T], test and train [T, M, C]: see History."""
        problem, members = self._problem_and_members()

        def read() -> dict[str, np.ndarray]:
            with packed_arrays.open_arrays(self.assignments) as file:
                arrays = dict(file)
            schemas.check_history(arrays, members, len(problem.groups))
            return arrays

        return self._read_checked(self.assignments, read)


def _json_of(path: Path, schema: Any) -> dict[str, Any]:
    found: dict[str, Any] = from_json(atomic_files.read(path))
    schemas.check(schema, found)
    return found


def _is_json(text: bytes) -> bool:
    try:
        from_json(text)
    except ValueError:
        return False
    return True


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
