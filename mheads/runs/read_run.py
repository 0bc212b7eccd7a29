"""What can be seen of a run, finished or still training, without building its network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mheads.common.errors import UserError
from mheads.config.schema import Config
from mheads.problems.baselines import top
from mheads.runs.data_facts import DataFacts
from mheads.runs.folder import RunFolder
from mheads.runs.metrics_log import Log


@dataclass(frozen=True)
class Record:
    """A run as its folder shows it. `result` is that of the end or of the newest evaluation, None before the first."""

    title: str
    folder: RunFolder
    config: Config
    data: DataFacts
    log: Log
    result: dict[str, Any] | None
    finished: bool
    in_memory: bool = False  # its folder is a temporary one of ours

    @staticmethod
    def read(path: Path, title: str | None = None, lenient: bool = False) -> Record:
        """The run in a folder; `lenient` leaves a damaged log or result out, which else raise an error."""
        folder = RunFolder(path)
        config = folder.read_config()
        data, finished = folder.read_data(), folder.is_finished(config.pretrain + config.optim.iterations)
        if finished:
            log = Log([], []) if lenient and folder.manifest.problem(folder.metrics) else folder.read_log()
        else:
            if folder.result.is_file() and not lenient:
                folder.read_result()  # that of an end before; a damaged one is not taken for a run that goes on
            log = Log.of(folder.growing_lines(lenient))
        result = folder.read_result() if finished else (log.evaluations[-1] if log.evaluations else None)
        return Record(title or path.resolve().name, folder, config, data, log, result, finished)

    @property
    def place(self) -> str:
        """What messages call it: its folder, or, of a run in memory, the title that it was given."""
        if not self.in_memory:
            return str(self.folder.path)
        return "this run" if self.title == self.folder.path.name else self.title

    @property
    def iteration(self) -> int:
        """The last one that is known of."""
        return max((line["iteration"] for lines in self.log for line in lines), default=0)

    @property
    def evaluated(self) -> str:
        """What follows the iteration of a run whose `result` is of an earlier one."""
        at = self.log.evaluations[-1]["iteration"] if self.log.evaluations else self.iteration
        return "" if self.finished or at == self.iteration else f", evaluated at {at:,}"

    def require_result(self) -> dict[str, Any]:
        """The result; refuses a run that has none."""
        if self.result is None:
            raise UserError(
                f"{self.place} was not evaluated yet (iteration {self.iteration:,}): let it train on, or give a "
                "smaller log.evaluate_every"
            )
        return self.result

    @property
    def measured(self) -> str:
        """A mark of the examples that it was evaluated on: those of another mark are others, or may be.

        What is held out may differ from seed to seed, and is of the same data then.
        """
        data, result = self.config.data, self.result or {}
        count = f"{result['examples']:,} examples, " if "examples" in result else ""
        if result.get("split") == "test":
            return f"{count}checksum {self.data.fingerprint}"
        where = [str(part) for part in (data.path, data.test_path, data.root, data.limit) if part is not None]
        return f"{count}{data.validation:,} held out of {', '.join(where) or data.name}"

    def read_assignments(self) -> dict[str, np.ndarray]:
        """Who owned which class at each evaluation, see `metrics_log.History`."""
        if not self.folder.assignments.is_file():
            self.require_result()
        return self.folder.read_assignments()

    def read_ownership(self) -> tuple[np.ndarray, np.ndarray]:
        """Who owned which class of the examples evaluated on: iterations [T], owned examples [T, M, C]."""
        assignments = self.read_assignments()
        return assignments["iterations"], assignments["test"]

    def read_learning(self) -> tuple[np.ndarray, np.ndarray]:
        """Who learned from which class over training, as finely as it is known: moments [T], assignment [T, M, C]."""
        assignments = self.read_assignments()
        fine = len(assignments.get("moments", ())) > len(assignments["iterations"])
        return (
            (assignments["moments"], assignments["steps"])
            if fine
            else (assignments["iterations"], assignments["train"])
        )


def one_network(records: Sequence[Record], k: int) -> tuple[str, float] | None:
    """What one network reaches with k guesses, which an Oracle of k answers compares with: (whose it is, its top-k).

    That of the first run of one member, else of the mean member of independent ones; None if no run tells.
    """
    for alone in (True, False):
        for record in records:
            members = record.config.members
            fits = members == 1 if alone else record.config.loss.name == "independent"
            if fits and record.result and (value := top(record.result, k, "single")) is not None:
                return (record.title if alone else f"the mean member of {record.title}"), value
    return None


def read_all(paths: Sequence[Path], lenient: bool = False) -> list[Record]:
    """Runs under titles that tell them apart: the names of their folders, with parents where names are equal."""
    return [Record.read(path, title, lenient) for path, title in zip(paths, titles(paths), strict=True)]


def titles(paths: Sequence[Path]) -> list[str]:
    places = [path.resolve() for path in paths]
    depth = 1
    while len({place.parts[-depth:] for place in places}) < len(set(places)):
        depth += 1
    return ["/".join(place.parts[-depth:]) for place in places]
