"""The runs that a suite wants: their configs, their folders, and which of them are there already."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mheads.api.classical_mcl import is_stable, read_rounds
from mheads.common import atomic_files
from mheads.common.errors import DamageError, UserError
from mheads.config import read as configs
from mheads.config import schema
from mheads.config.schema import Config
from mheads.optim.schedules import part_of
from mheads.runs.checkpoint import Checkpoints
from mheads.runs.folder import RunFolder
from mheads.suites.suite import Suite, Table, read
from mheads.training.build_from_config import load_data

FOLDER = Path("runs/reproduce")
DONORS = ("init", "sampling.generalist")  # keys of runs that another starts from
RUN = re.compile(r"<run:([^<>]*)>")
PLACES = ("/", "~")  # what a path of this machine begins with
INNER = re.compile(r"(?<=[\s\[{,'\"])[/~][^,{}\[\]'\"]*")  # one in a value such as {name: file, path: /here/it.npz}


@dataclass(frozen=True)
class Options:
    """How a suite is run: on which recipe, how long, and what is different in all its rows."""

    recipe: str = "cifar10_quick"
    seed: int = 0
    scale: float = 1.0
    validation: int = 0
    overrides: tuple[str, ...] = ()
    test: bool = False  # what was trained without the validation examples is measured on the test set

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise UserError(f"--scale {self.scale:g}: give a part of the iterations, above 0 and up to 1")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed}: give 0 or more")
        if self.validation < 0:
            raise UserError(f"--validation {self.validation}: give how many training examples are held out")
        if self.test and not self.validation:
            raise UserError("--test goes with --validation N: other runs are measured on the test set anyway")
        _refuse_named(self.overrides)

    @property
    def short(self) -> str:
        """The recipe's name, also if it is a path."""
        return Path(self.recipe).stem

    @property
    def suffix(self) -> str:
        """What the names of runs end in, unless they are of full length on all training examples."""
        scaled = "" if self.scale == 1 else f"-scale{self.scale:g}"
        return scaled + (f"-validation{self.validation}" if self.validation else "")

    @property
    def split(self) -> str:
        """What the runs are measured on."""
        return "validation" if self.validation and not self.test else "test"


@dataclass(frozen=True)
class Job:
    """One run: a row with one seed."""

    row: str
    seed: int
    config: Config
    overrides: tuple[str, ...]
    shown: tuple[str, ...]  # the overrides with folders as on any machine
    path: Path
    recipe: str
    needs: tuple[Job, ...] = ()  # runs that it starts from
    rounds: int | None = None  # of classical MCL: the path then holds a run for each

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

    def finished(self) -> bool:
        """Whether the run is there to be reused. Refuses a folder of another config."""
        if self.rounds is not None:
            known = self._rounds()
            return bool(known) and (len(known) == self.rounds or is_stable(known[-1])) and self.damage() is None
        folder = RunFolder(self.path)
        folder.refuse_other_content()
        if not folder.exists():
            return False
        try:
            before = folder.read_config()
            key = difference(before, self.config)
            if key in DONORS:  # reading weights takes time
                key = difference(before, self.config, self._same_donors(folder))
            if key is not None:
                there, here = (schema.flatten(c)[key] for c in (before, self.config))
                raise UserError(
                    f"{self.path} is in the way: a run of another config, {key}: {there!r} there, {here!r} here; "
                    "give another --folder, or move that one"
                )
            return folder.finished(self.total) and folder.manifest.problem(folder.metrics) is None
        except DamageError:  # training makes it anew, or says why it cannot
            return False

    def damage(self) -> str | None:
        """What is wrong with a file that a table reads; training makes it anew where there is a checkpoint."""
        folder = self.folder
        try:
            found = {path: folder.manifest.problem(path) for path in (folder.result, folder.model, folder.metrics)}
        except DamageError as error:
            return str(error)
        return next((f"{path} {problem}" for path, problem in found.items() if problem), None)

    def _same_donors(self, folder: RunFolder) -> list[str]:
        """The keys of runs that the one in the folder started from, and that are those needed here by their weights.

        Its config may name another place: folders are moved.
        """
        found = folder.read_identity()
        began = dict(zip(DONORS, ([found.get("start")], list((found.get("sampling") or {}).values())), strict=True))
        models = {os.path.realpath(need.path): need.folder.model for need in self.needs}
        given = schema.flatten(self.config)
        return [
            key
            for key, digests in began.items()
            if given[key] and (model := models.get(os.path.realpath(given[key]))) is not None
            if model.is_file() and atomic_files.digest(model) in digests
        ]

    def steps_done(self) -> int:
        """How far an unfinished run has come."""
        path, before = self.path, 0
        if self.rounds is not None:
            path, before = path / f"round{len(self._rounds())}", sum(entry["iterations"] for entry in self._rounds())
        return before + max(Checkpoints(path / "checkpoints").steps(), default=0)


def difference(there: Config, here: Config, alike: Sequence[str] = ()) -> str | None:
    """The first key that makes the results of two configs differ, but for those that are known to be alike."""

    # How long a run is may change when it is resumed, but not here: a table compares runs of equal length.
    def decides(key: str) -> bool:
        return key not in alike and (key == "optim.iterations" or not schema.is_free(key, here))

    return next(filter(decides, schema.differing(there, here)), None)


def _text(path: Path) -> str:
    """A path as YAML has it: in quotes if it has more than letters, digits and the like."""
    plain = re.fullmatch(r"[\w./+-]+", str(path))
    return str(path) if plain else json.dumps(str(path), ensure_ascii=False)


def _refuse_named(overrides: Sequence[str]) -> None:
    """Refuses keys that an option of the command gives."""
    for key, option in (("seed", "--seed"), ("data.validation", "--validation")):
        if any(key in configs.keys_of(override) for override in overrides):
            raise UserError(f"give {option} instead of {key}=..., since it is part of the names of the runs")


def _refuse_overriding(row: Sequence[str], given: Sequence[str]) -> None:
    """Refuses to change for all rows what a row sets itself: its name would tell of another run.

    How long rows train is the command's to say: names do not promise it.
    """
    own = {key for override in row for key in configs.keys_of(override)} - {"optim.iterations"}
    for override in given:
        for key in configs.keys_of(override):
            if set_there := [mine for mine in own if f"{mine}.".startswith(f"{key}.") or key.startswith(f"{mine}.")]:
                raise UserError(
                    f"{override} for all rows: this one sets {min(set_there)} itself, and would be another run under "
                    "its name; leave it out, or write a suite of your own"
                )


class Planner:
    """Makes the jobs of suites; rows of one name in several suites are one run."""

    def __init__(self, options: Options, folder: Path = FOLDER) -> None:
        self.options = options
        self.folder = folder
        self._tables: dict[str, Table] = {}
        self._jobs: dict[tuple[str, str, int], Job] = {}
        self._others: dict[str, Planner] = {}
        self._places: dict[Path, Job] = {}  # of all recipes: two files of one name share a folder
        self._test_sets: dict[str, str | None] = {}

    def table(self, suite: Suite) -> Table:
        if suite.source not in self._tables:
            config = configs.load(self.options.recipe, self._overrides(suite))
            self._tables[suite.source] = suite.on(self.options.short, config)
        return self._tables[suite.source]

    def _overrides(self, suite: Suite, row: Sequence[str] = ()) -> list[str]:
        special = suite.recipes.get(self.options.short)
        held_out = [f"data.validation={self.options.validation}"] if self.options.validation else []
        return [*(special.set if special else ()), *row, *self.options.overrides, *held_out]

    def job(self, suite: Suite, name: str, seed: int, within: tuple[str, ...] = ()) -> Job:
        """The run of a row: its own, or that of the row that it is `from`."""
        key = f"{suite.source}/{name}"
        if key in within:
            chain = " needs ".join((*within, key))
            raise UserError(f"{suite.source}: row {name!r} needs itself: {chain}", key=suite.source)
        if (suite.source, name, seed) not in self._jobs:
            self._jobs[suite.source, name, seed] = self._make(suite, name, seed, (*within, key))
        return self._jobs[suite.source, name, seed]

    def jobs_there(self, suite: Suite, name: str) -> list[Job]:
        """The runs of a row that have a folder, whatever their seeds."""
        first = self.job(suite, name, self.options.seed)
        form = re.compile(rf"{re.escape(first.row)}-seed(\d+){re.escape(self.options.suffix)}")
        places = sorted(first.path.parent.iterdir()) if first.path.parent.is_dir() else ()
        return [self.job(suite, name, int(found[1])) for place in places if (found := form.fullmatch(place.name))]

    def _make(self, suite: Suite, name: str, seed: int, within: tuple[str, ...]) -> Job:
        row = self.table(suite).row(name)

        def other(reference: str) -> Job:
            """The run of a row here, of another suite, SUITE/ROW, or with another recipe, RECIPE:SUITE/ROW."""
            recipe, _, place = reference.rpartition(":")
            there, _, of_row = place.rpartition("/")
            planner = self._of(recipe) if recipe else self
            return planner.job(read(there) if there else suite, of_row, seed, within)

        def donor(reference: str) -> Job:
            found = other(reference)
            if found.rounds is not None:
                raise UserError(
                    f"<run:{reference}>: a row with rounds has a run for each, and which is the last shows when they "
                    "are trained; start from a row without rounds"
                )
            return found

        try:
            if row.from_ is not None:
                return other(row.from_)
            special = suite.recipes.get(self.options.short)
            _refuse_named([*(special.set if special else ()), *row.set])
            _refuse_overriding(row.set, self.options.overrides)
            needs = {found[1]: donor(found[1]) for override in row.set for found in RUN.finditer(override)}

            def filled(place: Callable[[Job], Path]) -> list[str]:
                """The row's overrides, with the folders of the runs that it starts from."""
                return [RUN.sub(lambda found: _text(place(needs[found[1]])), override) for override in row.set]

            if open_ := [override for override in filled(self.public) if "<run:" in override]:
                raise UserError(f"{open_[0]!r} has a <run:ROW> that does not end: close it with >")
            last = [f"seed={seed}"]
            overrides = [*self._overrides(suite, filled(lambda need: need.path)), *last]
            config = configs.load(self.options.recipe, overrides)
            if self.options.scale != 1:
                last += scaling(config, self.options.scale)
                overrides = [*overrides[:-1], *last]
                config = configs.load(self.options.recipe, overrides)
            shown = tuple(map(public, [*self._overrides(suite, filled(self.public)), *last]))
        except UserError as error:
            if error.key == suite.source:  # raised for another row of this suite, which it names
                raise
            raise UserError(f"{suite.source}: row {name!r}: {error}", key=suite.source) from error
        path = self.folder / self._group(suite) / f"{name}-seed{seed}{self.options.suffix}"
        recipe, donors = self.options.recipe, tuple(needs.values())
        job = Job(name, seed, config, tuple(overrides), shown, path, recipe, donors, row.rounds)
        known = self._places.setdefault(path, job)
        key = "rounds" if known.rounds != job.rounds else difference(known.config, config)
        if key is not None:
            whose = "another suite" if known.recipe == job.recipe else f"{known.recipe}, whose name is the same"
            raise UserError(
                f"{suite.source}: row {name!r} has the name of a row of {whose} and is another run ({key} differs); "
                "give it another name",
                key=suite.source,
            )
        return job

    def _group(self, suite: Suite) -> str:
        """The folder of a suite's runs, beside those of other recipes."""
        special = suite.recipes.get(self.options.short)
        return (special.folder if special else None) or self.options.short

    def key(self, suite: Suite, job: Job) -> str:
        """What a run is called in the results of a suite: its row, after the folder if that is not the suite's own."""
        group = job.path.parent.name
        return job.row if group == self._group(suite) else f"{group}/{job.row}"

    def _of(self, recipe: str) -> Planner:
        """Of another recipe, without what the command changes in this one."""
        if recipe not in self._others:
            other = Planner(replace(self.options, recipe=recipe, overrides=()), self.folder)
            other._others, other._places = self._others, self._places
            self._others[recipe] = other
        return self._others[recipe]

    def test_set(self, job: Job) -> str | None:
        """A digest of the data with their test set, at which runs with validation examples do not look; None where the
        data are not here."""
        config = job.config.model_copy(update={"data": job.config.data.model_copy(update={"validation": 0})})
        key = config.data.model_dump_json()
        if key not in self._test_sets:
            try:
                self._test_sets[key] = load_data(config).fingerprint
            except UserError:
                self._test_sets[key] = None
        return self._test_sets[key]

    def command(self, job: Job) -> str:
        """The command that trains this run alone, with folders as on any machine."""
        kind = ["train"] if job.rounds is None else ["classical", "--rounds", str(job.rounds)]
        return shlex.join(["mheads", *kind, public(job.recipe), *job.shown, "-f", str(self.public(job))])

    def public(self, job: Job) -> Path:
        """Where a run lies on any machine."""
        return FOLDER / job.path.relative_to(self.folder)


def public(word: str) -> str:
    """A word of a command, `key=value` or a path, without a path of this machine."""
    key, equals, value = ("", "", word) if word.startswith(PLACES) else word.partition("=")
    if value.startswith(PLACES):
        return f"{key}{equals}.../{Path(value).name}"
    return INNER.sub(lambda found: f".../{Path(found[0].rstrip()).name}", word) if equals else word


def scaling(config: Config, factor: float) -> list[str]:
    """The overrides that shorten training to a part, with everything in it that is counted in iterations."""
    schedule = config.optim.schedule

    found: dict[str, Any] = {"optim.iterations": part_of(config.optim.iterations, factor)}
    if config.pretrain:
        found["pretrain"] = part_of(config.pretrain, factor)
    if schedule.warmup:
        found["optim.schedule.warmup"] = part_of(schedule.warmup, factor)
    stretched = schedule.entry.stretch(schedule.options, factor)
    found |= {f"optim.schedule.{key}": value for key, value in stretched.items()}
    # Some lines of metrics.jsonl however short the run is; evaluations and checkpoints cost time and stay as they are.
    if config.log.every > found["optim.iterations"] // 10:
        found["log.every"] = max(1, found["optim.iterations"] // 10)
    return [f"{key}={value}" for key, value in found.items()]


def in_order(jobs: Sequence[Job]) -> Iterator[Job]:
    """Each run once, after those that it starts from."""
    seen: set[Path] = set()

    def walk(job: Job) -> Iterator[Job]:
        if job.path not in seen:
            for need in job.needs:
                yield from walk(need)
            seen.add(job.path)
            yield job

    for job in jobs:
        yield from walk(job)
