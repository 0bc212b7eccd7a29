"""Runs a suite: trains what is missing, reuses what is finished, and shows our table beside the paper's."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mheads.api.classical_mcl import train_rounds
from mheads.common import atomic_files
from mheads.common.errors import UserError
from mheads.common.number_words import count
from mheads.common.progress import Terminal
from mheads.common.signals import handling
from mheads.config.schema import Config
from mheads.problems.metric_text import label
from mheads.report.figures.figure import save
from mheads.report.figures.suite_costs import draw_costs
from mheads.report.figures.suite_rows import draw_suite
from mheads.runs.folder import RunFolder
from mheads.suites import findings, markdown, results, tables
from mheads.suites.jobs import Options, SuiteJob, sort_jobs
from mheads.suites.other_data import check_other_data
from mheads.suites.planner import FOLDER, Planner
from mheads.suites.progress_line import Overview
from mheads.suites.run_entries import (
    add_run,
    check_same_marks,
    describe_measured,
    digest_data_and_code,
    write_half_outputs,
)
from mheads.suites.run_locks import Claims
from mheads.suites.same_data_and_code import SameDataAndCode
from mheads.suites.share_pretraining import begin_with_shared
from mheads.suites.suite import SUITES, read_suite
from mheads.training.experiment import Experiment, build_experiment
from mheads.training.loop import Stopped, stop_at_once, train_config

OUTPUT = Path("results")
POLL = 5.0  # seconds, at most, between two looks at runs that other processes train


@dataclass(frozen=True)
class SuiteRequest:
    """What `mheads reproduce` is asked for."""

    suite: str
    options: Options
    trials: int = 1
    only: Sequence[str] = ()  # rows
    folder: Path = FOLDER
    output: Path = OUTPUT
    sources: Sequence[Path] = ()  # other folders of results, whose runs are taken over
    outputs: bool = False  # whether the outputs of runs are written beside the results

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise UserError(f"--trials {self.trials}: give 1 or more")

    @property
    def name(self) -> str:
        return f"{self.suite} on {self.options.short}"

    @property
    def seeds(self) -> range:
        return range(self.options.seed, self.options.seed + self.trials)

    def command(self) -> str:
        """The same command again."""
        held_out = Planner(self.options).held_out(read_suite(self.suite))
        words = [results.command(self.suite, self.options, self.seeds, held_out)]
        words += [f"--only {shlex.quote(row)}" for row in self.only]
        places = (("-f", self.folder, FOLDER), ("-o", self.output, OUTPUT))
        words += [f"{key} {shlex.quote(str(path))}" for key, path, usual in places if path != usual]
        return " ".join([*words, *(["--outputs"] if self.outputs else [])])


def reproduce(request: SuiteRequest, console: Console, train: bool = True) -> None:
    """Trains the rows of a suite that are missing (or with `train` off none), then writes and shows its table."""
    suite = Reproduction(request, console, every_seed=not train)
    if train:
        suite.check_other_data()
    suite.gather()
    if train:
        suite.train()
    suite.publish()


def for_each(requests: Sequence[SuiteRequest], console: Console, do: Callable[[SuiteRequest], None]) -> None:
    """Does what is asked for one after another; of several, one that fails is named at the end, after the others."""
    failed = []
    for request in requests:
        try:
            do(request)
        except UserError as error:
            if len(requests) == 1:
                raise
            failed.append(request.name)
            Terminal(console).warn(f"{request.name}: {error}")
    if failed:
        raise UserError(f"{len(failed)} of {count(len(requests), 'table')} failed: {', '.join(failed)}; see above")


class Reproduction:
    """A suite on a recipe, with its document of results."""

    def __init__(self, request: SuiteRequest, console: Console, every_seed: bool = False) -> None:
        self.request, self.console, self.say = request, console, Terminal(console).say
        options = request.options
        suite, given = read_suite(request.suite), {"ood": options.ood, "shifted": options.shifted}
        self.suite = suite.model_copy(update={name: [*keys] for name, keys in given.items() if keys})
        self.planner = Planner(options, request.folder)
        self.table = self.planner.expand(self.suite)
        # A figure of the paper for no row is a mistake, unless an override took the row out.
        for row in (*request.only, *(() if options.overrides else self.table.paper)):
            self.table.row(row)
        if not options.validation and (chooses := [row.name for row in self.table.rows if row.best_of]):
            raise UserError(
                f"{self.suite.name}: row {chooses[0]!r} chooses among rows by validation examples: give --validation N"
            )
        self.path = request.output / results.file_name(self.suite.name, options)
        results.check_writable(self.path)
        self.seeds = self._seeds()
        self.document = results.make_document(self.table, self.planner)
        self._merge()
        only = [name for row in request.only for name in (self.table.row(row).best_of or [row])]
        self.jobs = sort_jobs(self._jobs(only or self.table.names))
        finished = {job.path: job.is_finished() for job in self.jobs}
        self.missing = [job for job in self.jobs if not finished[job.path]]
        self.same = SameDataAndCode()
        for job in self.jobs:
            if finished[job.path]:
                self.same.note(job)
        others = self._jobs(self.table.names)  # rows that were not asked for are shown if they are finished
        if every_seed:
            others += [job for row in self.table.names for job in self.planner.jobs_with_folders(self.suite, row)]
        self.finished = [
            job
            for job in sort_jobs([*self.jobs, *others])
            if (finished[job.path] if job.path in finished else _is_reusable(job))
        ]

    def _jobs(self, rows: Sequence[str]) -> list[SuiteJob]:
        """Of all rows the first seed first."""
        return [self.planner.job(self.suite, row, seed) for seed in self.seeds for row in rows]

    def _seeds(self) -> Sequence[int]:
        """The seeds that are asked for, without those that the recipe does not have in this suite."""
        changes, asked = self.suite.recipes.get(self.request.options.short), self.request.seeds
        if changes is None or changes.trials is None:
            return asked
        if not (seeds := [seed for seed in asked if seed < changes.trials]):
            raise UserError(
                f"--seed {asked[0]}: {self.suite.name} has {count(changes.trials, 'trial')} with "
                f"{self.request.options.short}; give a seed below {changes.trials}"
            )
        return seeds

    def gather(self) -> None:
        """Adds the finished runs to the document."""
        for job in self.finished:
            self._add(job)
        for job in self.finished:  # after all were measured anew whose data have changed
            self._check_measured(job)

    def _check_measured(self, job: SuiteJob) -> None:
        """Raises an error if the run is not measured on what others of its row were measured on."""
        entry = describe_measured(job, self.planner, self.suite)
        check_same_marks(self.document, self.planner.key(self.suite, job), job, entry)

    def _add(self, job: SuiteJob) -> None:
        options = self.request.options
        measures = options.test or self.suite.ood or self.suite.shifted or self.request.outputs
        with self.console.status(Text(f"measuring {job.name}")) if measures else nullcontext():
            add_run(self.document, job, self.planner, self.suite)
            if self.request.outputs:
                name = f"{job.name}{'-test' if options.test else ''}.npz"
                write_half_outputs(job, self.path.parent / "outputs" / job.path.parent.name / name, options.split)

    def check_other_data(self) -> None:
        """Raises an error, before anything is trained, for other data that the runs cannot be measured on."""
        if self.missing:
            check_other_data(self.suite, self.missing[0].config)

    def _merge(self) -> None:
        results.merge(self.document, self.path, self.table, self.planner, self.seeds, self.request.sources)

    def _save(self) -> None:
        """Writes the document, with what another process may have added to it since."""
        self._merge()
        results.save(self.document, self.path)

    def train(self) -> None:
        """Trains what is missing. A run that fails is named at the end; the others are trained all the same."""
        watch = Overview(self.console, self.suite.name, self.missing)
        failed: dict[Path, str] = {}
        self.say(f"{count(len(self.missing), 'run')} to train, {len(self.jobs) - len(self.missing)} finished")
        try:
            with handling(stop_at_once):
                self._share(watch, failed)
        except Stopped:
            if self.document["runs"]:
                self.publish(show=False)
            num_done = sum(map(_is_reusable, self.jobs))  # the last of which may have ended with the signal
            self.say(f"{num_done} of {count(len(self.jobs), 'run')} done. To resume: {self.request.command()}")
            raise
        for job in [job for job in self.missing if job.path in failed and _is_reusable(job)]:
            try:
                self._add(job)
            except UserError as error:  # it was trained, and cannot be measured
                failed[job.path] = str(error)
            else:
                del failed[job.path]  # another process trained it meanwhile
        if failed:
            if self.document["runs"]:
                self.publish()
            raise self._failure(failed)

    def _share(self, watch: Overview, failed: dict[Path, str]) -> None:
        """Trains the runs that no other process has claimed, and waits for the others: they may die."""
        claims, pending, waited = Claims(), {job.path: job for job in self.missing}, 0.0
        while pending:
            before = len(pending)
            for job in list(pending.values()):
                ready = not any(need.path in pending for need in job.needs)
                if ready and (claim := claims.take(job.path)) is not None:
                    with claim:
                        del pending[job.path]
                        watch.claim = claim
                        self._train_and_save(job, watch, failed)
            if pending and len(pending) == before:
                if not waited:
                    names = ", ".join(job.name for job in pending.values())
                    self.say(f"waiting for other processes, which train {names}")
                waited = min(POLL, 2 * waited or 0.1)
                time.sleep(waited)

    def _train_and_save(self, job: SuiteJob, watch: Overview, failed: dict[Path, str]) -> None:
        watch.begin(job)
        result = None
        try:
            if broken := [need.name for need in job.needs if need.path in failed]:
                raise UserError(f"it starts from {broken[0]}, which failed")
            self._check_measured(job)
            if _is_reusable(job):
                watch.skip(job)
            else:
                result = self._train(job, watch)
            if damage := job.damage():  # and there was no checkpoint to make it anew from
                raise UserError(f"{damage}: move {job.path} away, and it is trained anew")
            self.same.note(job)
            self._add(job)
            with results.lock(self.path.parent):
                self._save()
        except UserError as error:
            again = str(error) in failed.values()  # a set that is missing, say, for every row
            failed[job.path] = str(error)
            watch.warn(f"{job.name} failed{' for the same reason' if again else f': {error}'}")
        watch.end(job, result)

    def _train(self, job: SuiteJob, watch: Overview) -> dict[str, Any]:
        def build_and_check(config: Config) -> Experiment:
            experiment = build_experiment(config)
            identity = experiment.identity()
            self.same.check(job, identity)
            key = self.planner.key(self.suite, job)
            check_same_marks(self.document, key, job, {"marks": digest_data_and_code(identity)})
            watch.leave_out(begin_with_shared(job.folder, experiment, self._folders(), watch))
            return experiment

        if job.rounds is None:
            return train_config(job.config, job.folder, watch, build_and_check)
        train_rounds(job.config, job.path, lambda label: watch, job.rounds)
        return job.folder.read_result()

    def _folders(self) -> list[RunFolder]:
        """The folders of runs of one training each, in their order."""
        return [job.folder for job in sort_jobs([*self.jobs, *self.finished]) if job.rounds is None]

    def _failure(self, failed: dict[Path, str]) -> UserError:
        reasons: dict[str, list[str]] = {}
        for path, why in failed.items():
            reasons.setdefault(why, []).append(path.name)
        lines = "\n".join(f"  {', '.join(names)}: {why}" for why, names in reasons.items())
        others = "; the others are done" if len(failed) < len(self.missing) else ""
        return UserError(f"{len(failed)} of {count(len(self.missing), 'run')} failed{others}:\n{lines}")

    def publish(self, show: bool = True) -> None:
        """Writes the document, its table and figure, and the page of all results."""
        with results.lock(self.path.parent):
            self._save()
            _write_tables(self.path.parent, self.console, [self.path])
        if show:
            self.console.print(tables.show_document(self.document))
            self.say(f"written to {self.path.with_suffix('')}.json, .md and .png")


def write_tables(folder: Path, console: Console) -> list[Path]:
    """Makes all tables and figures anew from the JSON files in a folder, and README.md of all."""
    if not any(folder.glob("*.json")):
        raise UserError(
            f"{folder} holds no results: give a suite to run, {', '.join(SUITES)}, or another folder with -o"
        )
    with results.lock(folder):
        return _write_tables(folder, console)


def _write_tables(folder: Path, console: Console, changed: Sequence[Path] | None = None) -> list[Path]:
    documents = results.load_all(folder, Terminal(console).warn)
    if not documents:
        raise UserError(f"{folder}: none of its .json files can be read as results; bring one back")
    for path, document in documents.items():
        if changed is None or path in changed:
            save(_draw(document), path.with_suffix(".png"))
            atomic_files.write_atomically(path.with_suffix(".md"), markdown.markdown(document, f"{path.stem}.png"))
    atomic_files.write_atomically(folder / "README.md", markdown.readme(documents))
    return list(documents)


def _draw(document: results.Document) -> Any:
    rows = findings.rows_run(document) or [entry["name"] for entry in document["rows"]]
    against_costs = document.get("cost_figure", [])
    panels: dict[str, list[tuple[Any, ...]]] = {}
    for metric in against_costs or [metric for metric in document["metrics"] if metric != "members"] or ["oracle"]:
        panels[label(metric)] = points = []
        for row in rows:
            ours, paper = findings.trials(document, row, metric), findings.paper(document, row, metric) or {}
            mean, std = (ours.mean, ours.std) if ours else (None, None)
            points.append((mean, std, paper.get("mean"), paper.get("std")))
    if against_costs:
        counted = {entry["name"]: entry.get("cost", {}) for entry in document["rows"]}
        costs = {f"{kind} FLOP": [counted[row].get(kind) for row in rows] for kind in ("training", "inference")}
        return draw_costs(rows, panels, costs, tables.title(document))
    return draw_suite(rows, panels, tables.title(document))


def _is_reusable(job: SuiteJob) -> bool:
    """Whether the run is finished; one of another config, which nobody asked for now, is not."""
    try:
        return job.is_finished()
    except UserError:
        return False
