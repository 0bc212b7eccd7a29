"""The runs that a suite needs: their configs, their folders, and which of them are finished."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mheads.api.classical_mcl import is_stable, read_rounds
from mheads.common import atomic_files
from mheads.common.errors import DamageError, UserError
from mheads.config import read as configs
from mheads.config import schema
from mheads.config.schema import Config
from mheads.runs.checkpoint import Checkpoints
from mheads.runs.folder import RunFolder

SOURCE_RUNS = ("init", "sampling.generalist")  # keys of runs that another starts from


@dataclass(frozen=True)
class Options:
    """How a suite is run: on which recipe, how long, and what is different in all its rows."""

    recipe: str = "cifar10_quick"
    seed: int = 0
    scale: float = 1.0
    validation: int = 0
    overrides: tuple[str, ...] = ()
    test: bool = False  # what was trained without the validation examples is measured on the test set
    ood: tuple[str, ...] = ()  # data keys of other examples, in the place of the suite's
    shifted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise UserError(f"--scale {self.scale:g}: give a part of the iterations, above 0 and up to 1")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed}: give 0 or more")
        if self.validation < 0:
            raise UserError(f"--validation {self.validation}: give how many training examples are held out")
        if self.test and not self.validation:
            raise UserError(
                "--test goes with --validation N, or a recipe with data.validation: other runs are measured on the "
                "test set anyway"
            )
        check_not_in_names(self.overrides)

    @property
    def short(self) -> str:
        """The recipe's name, also if it is a path."""
        return Path(self.recipe).stem

    @property
    def has_name_of_another(self) -> bool:
        """Whether the recipe is a file of the user's that has the name of one of the package."""
        return self.recipe != self.short and self.short in configs.recipes()

    @property
    def suffix(self) -> str:
        """What the names of runs end in, unless they are of full length on all training examples."""
        scale = "" if self.scale == 1 else f"-scale{self.scale:g}"
        return scale + (f"-validation{self.validation}" if self.validation else "")

    @property
    def split(self) -> str:
        """What the runs are measured on."""
        return "validation" if self.validation and not self.test else "test"


def check_not_in_names(overrides: Sequence[str]) -> None:
    """Raises an error for keys that an option of the command gives."""
    for key, option in (("seed", "--seed"), ("data.validation", "--validation")):
        if any(key in configs.keys_of(override) for override in overrides):
            raise UserError(f"give {option} instead of {key}=..., since it is part of the names of the runs")


@dataclass(frozen=True)
class SuiteJob:
    """One run: a row with one seed."""

    row: str
    seed: int
    config: Config
    overrides: tuple[str, ...]  # with folders as on any machine
    path: Path
    recipe: str
    needs: tuple[SuiteJob, ...] = ()  # runs that it starts from
    rounds: int | None = None  # of classical MCL: the path then holds a run for each
    by_seed: bool = False  # whether the seed also decides keys, such as the split of the data

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def total(self) -> int:
        return (self.config.pretrain + self.config.optim.iterations) * (self.rounds or 1)

    @property
    def folder(self) -> RunFolder:
        """The run whose result counts: of rounds the last one."""
        return RunFolder(self.path if self.rounds is None else self.path / f"round{max(0, len(self._rounds()) - 1)}")

    def _rounds(self) -> list[dict[str, Any]]:
        """The rounds that are done, up to the last one that is wanted."""
        return read_rounds(self.path, self.config)[: self.rounds]

    def is_finished(self) -> bool:
        """Whether the run can be reused. A folder of another config is an error."""
        if self.rounds is not None:
            rounds = self._rounds()
            return bool(rounds) and (len(rounds) == self.rounds or is_stable(rounds[-1])) and self.damage() is None
        folder = RunFolder(self.path)
        folder.refuse_other_content()
        if not folder.exists():
            return False
        try:
            self._check_config(folder)
            return folder.is_finished(self.total) and folder.manifest.problem(folder.metrics) is None
        except DamageError:  # training makes it anew, or says why it cannot
            return False

    def _check_config(self, folder: RunFolder) -> None:
        before = folder.read_config()
        key = find_difference(before, self.config)
        if key in SOURCE_RUNS:  # reading weights takes time
            key = find_difference(before, self.config, self._same_sources(folder))
        if key is not None:
            old, new = (schema.flatten(config)[key] for config in (before, self.config))
            raise UserError(
                f"{self.path} is in the way: a run of another config, {key}: {old!r} there, {new!r} here; "
                "give another --folder, or move that one"
            )

    def _same_sources(self, folder: RunFolder) -> list[str]:
        """The keys of source runs of the folder's run that, by their weights, are those needed here.

        Its config may name another place: folders are moved.
        """
        identity, config = folder.read_identity(), schema.flatten(self.config)
        digests = {"init": [identity.get("start")], "sampling.generalist": (identity.get("sampling") or {}).values()}
        models = {os.path.realpath(need.path): need.folder.model for need in self.needs}
        return [
            key
            for key in SOURCE_RUNS
            if config[key] and (model := models.get(os.path.realpath(config[key]))) is not None
            if model.is_file() and atomic_files.digest(model) in digests[key]
        ]

    def damage(self) -> str | None:
        """What is wrong with a file that a table reads; training makes it anew where there is a checkpoint."""
        folder = self.folder
        try:
            problems = {path: folder.manifest.problem(path) for path in (folder.result, folder.model, folder.metrics)}
        except DamageError as error:
            return str(error)
        return next((f"{path} {problem}" for path, problem in problems.items() if problem), None)

    def steps_done(self) -> int:
        """How far an unfinished run has come."""
        path, before = self.path, 0
        if self.rounds is not None:
            path, before = path / f"round{len(self._rounds())}", sum(entry["iterations"] for entry in self._rounds())
        return before + max(Checkpoints(path / "checkpoints").steps(), default=0)


def find_difference(before: Config, config: Config, alike: Sequence[str] = ()) -> str | None:
    """The first key that makes the results of two configs differ, but for those that are known to be alike."""
    keys = schema.differing(before, config)  # also of length: a table compares runs of equal length
    return next((key for key in keys if key not in alike and schema.decides_result(key, config)), None)


def sort_jobs(jobs: Sequence[SuiteJob]) -> list[SuiteJob]:
    """Each run once, after those that it starts from."""
    ordered: dict[Path, SuiteJob] = {}

    def add(job: SuiteJob) -> None:
        if job.path not in ordered:
            for need in job.needs:
                add(need)
            ordered[job.path] = job

    for job in jobs:
        add(job)
    return list(ordered.values())
