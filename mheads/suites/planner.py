"""Makes the jobs of suites: the config and the folder of every row and seed, and the command that trains it alone."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mheads.api.examples_of_run import load_other_data
from mheads.common.errors import UserError
from mheads.config import read as configs
from mheads.config.aliases import rename_key
from mheads.config.options_without_effect import check_idle_options
from mheads.config.schema import SECTIONS, Config
from mheads.data.splits import Data
from mheads.optim.schedules import part_of
from mheads.suites.expand import ExpandedSuite, expand
from mheads.suites.jobs import Options, SuiteJob, check_not_in_names, find_difference
from mheads.suites.suite import RecipeChanges, Suite, SuiteError, SuiteRow, read_suite
from mheads.training.build_from_config import load_data

FOLDER = Path("runs/reproduce")
RUN = re.compile(r"<run:([^<>]*)>")
LOCAL = ("/", "~")  # what a path of this machine begins with
INNER = re.compile(r"(?<=[\s\[{,'\"])[/~][^,{}\[\]'\"]*")  # one in a value such as {name: file, path: /here/it.npz}


class Planner:
    """Makes the jobs of suites; rows of one name in several suites are one run."""

    def __init__(self, options: Options, folder: Path = FOLDER) -> None:
        self.options = options
        self.folder = folder
        self._expanded: dict[str, ExpandedSuite] = {}
        self._jobs: dict[tuple[str, str, int], SuiteJob] = {}
        self._others: dict[str, Planner] = {}
        self._places: dict[Path, SuiteJob] = {}  # of all recipes: two files of one name share a folder
        self._digests: dict[str, str | None] = {}  # of data, by their config

    def expand(self, suite: Suite) -> ExpandedSuite:
        if suite.source not in self._expanded:
            self._expanded[suite.source] = expand(suite, self.options.short, self._recipe_config(suite))
        return self._expanded[suite.source]

    def held_out(self, suite: Suite) -> int:
        """How many training examples the suite holds out with this recipe, or else the recipe itself."""
        return self._changes(suite).validation or self._recipe_config(suite).data.validation

    def _recipe_config(self, suite: Suite) -> Config:
        return configs.load(self._base(suite), self._overrides(suite, self.options.seed))

    def _changes(self, suite: Suite) -> RecipeChanges:
        return suite.recipes.get(self.options.short, RecipeChanges())

    def _base(self, suite: Suite) -> str:
        """The recipe that is read."""
        return self._changes(suite).base or self.options.recipe

    def _overrides(self, suite: Suite, seed: int, row: Sequence[str] = ()) -> list[str]:
        held_out = [f"data.validation={self.options.validation}"] if self.options.validation else []
        suites, rows = (
            [override.replace("<seed>", str(seed)) for override in part] for part in (self._changes(suite).set, row)
        )
        # What chooses a loss or the like forgets its options, so it comes before the options that rows give.
        choices = [override for override in self.options.overrides if _chooses(override)]
        others = [override for override in self.options.overrides if not _chooses(override)]
        return [*suites, *choices, *rows, *others, *held_out]

    def job(self, suite: Suite, name: str, seed: int, within: tuple[str, ...] = ()) -> SuiteJob:
        """The run of a row: its own, or that of the row that it is `from`, or the first of those that it chooses from.

        `within` are the rows that need it.
        """
        key = f"{suite.source}/{name}"
        if key in within:
            raise SuiteError(suite.source, f"row {name!r} needs itself: {' needs '.join((*within, key))}")
        if (suite.source, name, seed) not in self._jobs:
            self._jobs[suite.source, name, seed] = self._make(suite, name, seed, (*within, key))
        return self._jobs[suite.source, name, seed]

    def _make(self, suite: Suite, name: str, seed: int, within: tuple[str, ...]) -> SuiteJob:
        row = self.expand(suite).row(name)

        def other(reference: str) -> SuiteJob:
            """The run of a row here, of another suite, SUITE/ROW, or with another recipe, RECIPE:SUITE/ROW."""
            recipe, _, place = reference.rpartition(":")
            source, _, other_row = place.rpartition("/")
            planner = self._for_recipe(recipe) if recipe else self
            return planner.job(read_suite(source) if source else suite, other_row, seed, within)

        try:
            if row.from_ is not None:
                return other(row.from_)
            if row.best_of and len(within) > 1:
                raise UserError(f"it is the best of several runs; name one of {', '.join(row.best_of)}")
            if row.best_of:
                return other(row.best_of[0])
            references = dict.fromkeys(reference for override in row.set for reference in RUN.findall(override))
            job = self._configure(suite, row, seed, {reference: other(reference) for reference in references})
        except UserError as error:
            if error.key == suite.source:  # raised for another row of this suite, which it names
                raise
            raise SuiteError(suite.source, f"row {name!r}: {error}") from error
        known = self._places.setdefault(job.path, job)
        key = "rounds" if known.rounds != job.rounds else find_difference(known.config, job.config)
        if key is not None:
            whose = "another suite" if known.recipe == job.recipe else f"{known.recipe}, whose name is the same"
            raise SuiteError(
                suite.source,
                f"row {name!r} has the name of a row of {whose} and is another run ({key} differs); give it another "
                "name",
            )
        return job

    def _configure(self, suite: Suite, row: SuiteRow, seed: int, sources: dict[str, SuiteJob]) -> SuiteJob:
        """The job of a row that has a run of its own, started from these runs."""
        check_not_in_names([*self._changes(suite).set, *row.set])
        _check_not_overridden(row.set, self.options.overrides)
        _check_sources(row.set, sources)

        def fill(place: Callable[[SuiteJob], Path]) -> list[str]:
            own = [RUN.sub(lambda match: _quote(place(sources[match[1]])), override) for override in row.set]
            return self._overrides(suite, seed, own)

        overrides, last = fill(lambda source: source.path), [f"seed={seed}"]
        config = configs.load(self._base(suite), [*overrides, *last])
        check_idle_options(config, row.set)
        if config.data.validation != self.options.validation:  # a recipe's own: all rows are measured on one split
            last.append(f"data.validation={self.options.validation}")
        if self.options.scale != 1:
            last += scale_training(config, self.options.scale)
        if len(last) > 1:
            config = configs.load(self._base(suite), [*overrides, *last])
        return SuiteJob(
            row.name,
            seed,
            config,
            (*map(hide_local_paths, fill(self.public_path)), *last),
            self.folder / self._group(suite) / f"{row.name}-seed{seed}{self.options.suffix}",
            self._base(suite),
            tuple(sources.values()),
            row.rounds,
            any("<seed>" in override for override in (*self._changes(suite).set, *row.set)),
        )

    def jobs_with_folders(self, suite: Suite, name: str) -> list[SuiteJob]:
        """The runs of a row that have a folder, whatever their seeds."""
        first = self.job(suite, name, self.options.seed)
        form = re.compile(rf"{re.escape(first.row)}-seed(\d+){re.escape(self.options.suffix)}")
        places = sorted(first.path.parent.iterdir()) if first.path.parent.is_dir() else ()
        return [self.job(suite, name, int(match[1])) for place in places if (match := form.fullmatch(place.name))]

    def _group(self, suite: Suite) -> str:
        """The folder of a suite's runs, beside those of other recipes."""
        return self._changes(suite).folder or self.options.short

    def key(self, suite: Suite, job: SuiteJob) -> str:
        """What a run is called in the results of a suite: its row, after the folder if that is not the suite's own."""
        group = job.path.parent.name
        return job.row if group == self._group(suite) else f"{group}/{job.row}"

    def _for_recipe(self, recipe: str) -> Planner:
        """The planner of another recipe, without what the command changes in this one."""
        if recipe not in self._others:
            other = Planner(replace(self.options, recipe=recipe, overrides=()), self.folder)
            other._others, other._places = self._others, self._places
            self._others[recipe] = other
        return self._others[recipe]

    def test_set(self, job: SuiteJob) -> str | None:
        """A digest of the data with their test set, at which runs with validation examples do not look; None where the
        data are not here."""
        config = job.config.model_copy(update={"data": job.config.data.model_copy(update={"validation": 0})})
        return self._digest(config.data.model_dump_json(), lambda: load_data(config))

    def other_data(self, job: SuiteJob, keys: Sequence[str]) -> str | None:
        """A digest of the other data that a run is measured on, with these data keys; None where they are not here."""
        key = " ".join([job.config.data.model_dump_json(), *keys])
        return self._digest(key, lambda: load_other_data(job.config, keys)[1])

    def _digest(self, key: str, read: Callable[[], Data]) -> str | None:
        if key not in self._digests:
            try:
                self._digests[key] = read().fingerprint
            except UserError:
                self._digests[key] = None
        return self._digests[key]

    def command(self, job: SuiteJob) -> str:
        """The command that trains this run alone, with folders as on any machine."""
        kind = ["train"] if job.rounds is None else ["classical", "--rounds", str(job.rounds)]
        words = [hide_local_paths(job.recipe), *job.overrides, "-f", str(self.public_path(job))]
        return shlex.join(["mheads", *kind, *words])

    def public_path(self, job: SuiteJob) -> Path:
        """Where a run lies on any machine."""
        return FOLDER / job.path.relative_to(self.folder)


def _chooses(override: str) -> bool:
    """Whether `key=value` gives a section its name, as loss=mcl does."""
    key = rename_key(override.partition("=")[0])
    return key in SECTIONS and f"{key}.name" in configs.keys_of(override)


def _check_not_overridden(row: Sequence[str], overrides: Sequence[str]) -> None:
    """Raises an error for changing in all rows what a row sets itself: its name would tell of another run.

    How long rows train is the command's to say: names do not promise it.
    """
    own = {key for override in row for key in configs.keys_of(override)} - {"optim.iterations"}
    for override in overrides:
        for key in configs.keys_of(override):
            if clashes := [mine for mine in own if f"{mine}.".startswith(f"{key}.") or key.startswith(f"{mine}.")]:
                raise UserError(
                    f"{override} for all rows: this one sets {min(clashes)} itself, and would be another run under "
                    "its name; leave it out, or write a suite of your own"
                )


def _check_sources(row: Sequence[str], sources: dict[str, SuiteJob]) -> None:
    for reference, job in sources.items():
        if job.rounds is not None:
            raise UserError(
                f"<run:{reference}>: a row with rounds has a run for each, and which is the last shows when they "
                "are trained; start from a row without rounds"
            )
    if unclosed := [override for override in row if "<run:" in RUN.sub("", override)]:
        raise UserError(f"{unclosed[0]!r} has a <run:ROW> that does not end: close it with >")


def _quote(path: Path) -> str:
    """A path as YAML has it: in quotes if it has more than letters, digits and the like."""
    plain = re.fullmatch(r"[\w./+-]+", str(path))
    return str(path) if plain else json.dumps(str(path), ensure_ascii=False)


def hide_local_paths(word: str) -> str:
    """A word of a command, `key=value` or a path, without a path of this machine."""
    key, equals, value = ("", "", word) if word.startswith(LOCAL) else word.partition("=")
    if value.startswith(LOCAL):
        return f"{key}{equals}.../{Path(value).name}"
    return INNER.sub(lambda match: f".../{Path(match[0].rstrip()).name}", word) if equals else word


def scale_training(config: Config, factor: float) -> list[str]:
    """The overrides that shorten training to a part, with everything in it that is counted in iterations."""
    schedule, iterations = config.optim.schedule, part_of(config.optim.iterations, factor)
    changes: dict[str, Any] = {"optim.iterations": iterations}
    if config.pretrain:
        changes["pretrain"] = part_of(config.pretrain, factor)
    if schedule.warmup:
        changes["optim.schedule.warmup"] = part_of(schedule.warmup, factor)
    stretched = schedule.entry.stretch(schedule.options, factor)
    changes |= {f"optim.schedule.{key}": value for key, value in stretched.items()}
    # Some lines of metrics.jsonl however short the run is; evaluations and checkpoints cost time and stay as they are.
    if config.log.every > iterations // 10:
        changes["log.every"] = max(1, iterations // 10)
    return [f"{key}={value}" for key, value in changes.items()]
