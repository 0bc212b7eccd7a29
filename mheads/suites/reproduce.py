"""Runs a suite: trains what is missing, reuses what is finished, and shows our table beside the paper's."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mheads.api.classical_mcl import train_rounds
from mheads.common import atomic_files
from mheads.common.errors import UserError
from mheads.common.number_words import duration
from mheads.common.signals import handling
from mheads.common.table import Head, Table, text_rows
from mheads.common.terminal_table import terminal_table
from mheads.config.schema import Config
from mheads.problems.metric_text import label
from mheads.report.figures.figure import save
from mheads.report.figures.suite_rows import draw_suite
from mheads.suites import findings, markdown, results, tables, timing
from mheads.suites.jobs import FOLDER, Job, Options, Planner, in_order
from mheads.suites.progress_line import Overview
from mheads.suites.same_data_and_code import Alike
from mheads.suites.suite import SUITES as SUITES
from mheads.suites.suite import read as read
from mheads.training.experiment import Experiment, build_experiment
from mheads.training.loop import Stopped, stop_at_once, train_config

OUTPUT = Path("results")


def reproduce(
    name: str,
    options: Options,
    console: Console,
    *,
    trials: int = 1,
    only: Sequence[str] = (),
    folder: Path = FOLDER,
    output: Path = OUTPUT,
    train: bool = True,
) -> None:
    """Trains the rows of a suite that are missing (or with `train` off none), then writes and shows its table."""
    suite = Run(name, options, console, trials, only, folder, output, every_seed=not train)
    suite.gather()
    if train:
        suite.train()
    suite.publish()


class Run:
    """A suite on a recipe, with its document of results."""

    def __init__(
        self,
        name: str,
        options: Options,
        console: Console,
        trials: int,
        only: Sequence[str],
        folder: Path,
        output: Path,
        every_seed: bool = False,
    ) -> None:
        if trials < 1:
            raise UserError(f"--trials {trials}: give 1 or more")
        self.options, self.console, self.trials = options, console, trials
        self.suite = read(name)
        self.planner = Planner(options, folder)
        self.table = self.planner.table(self.suite)
        if not options.overrides:
            for row in self.table.paper:
                self.table.row(row)  # a figure of the paper for no row is a mistake
        for row in only:
            self.table.row(row)
        self.path = output / results.file_name(self.suite.name, options)
        results.check_writable(self.path)
        self.document = results.make(self.table, self.planner, trials)
        results.merge(self.document, self.path, self.table, self.planner, trials)
        seeds = range(options.seed, options.seed + trials)  # of all rows the first seed first
        wanted = list(only) or self.table.names
        jobs = [self.planner.job(self.suite, row, seed) for seed in seeds for row in wanted]
        self.jobs = list(in_order(jobs))
        there = {job.path: job.finished() for job in self.jobs}
        self.alike = Alike()
        for job in self.jobs:
            if there[job.path]:
                self.alike.note(job)
        self.missing = [job for job in self.jobs if not there[job.path]]
        others = [self.planner.job(self.suite, row, seed) for seed in seeds for row in self.table.names]
        if every_seed:
            others += [job for row in self.table.names for job in self.planner.jobs_there(self.suite, row)]
        self.there = [  # rows that were not asked for are shown if they are there
            job for job in in_order([*self.jobs, *others]) if (there[job.path] if job.path in there else _there(job))
        ]
        again = [results.command(name, options, seeds), *(f"--only {shlex.quote(row)}" for row in only)]
        places = (("-f", folder, FOLDER), ("-o", output, OUTPUT))
        again += [f"{key} {shlex.quote(str(path))}" for key, path, usual in places if path != usual]
        self.again = " ".join(again)

    def gather(self) -> None:
        """Adds the runs that are there to the document."""
        for job in self.there:
            self._add(job)

    def _add(self, job: Job) -> None:
        measuring = self.console.status(Text(f"{job.name} on the test set")) if self.options.test else nullcontext()
        with measuring:
            results.add(self.document, job, self.planner, self.suite)

    def _save(self) -> None:
        """Writes the document, with what another process may have added to it since."""
        results.merge(self.document, self.path, self.table, self.planner, self.trials)
        results.save(self.document, self.path)

    def train(self) -> None:
        """Trains what is missing. A run that cannot go on is named at the end; the others are trained all the same."""
        watch = Overview(self.console, self.suite.name, self.missing)
        failed: dict[Path, str] = {}
        done = reused = len(self.jobs) - len(self.missing)
        self.console.print(f"{_runs(len(self.missing))} to train, {reused} finished", markup=False)
        try:
            with handling(stop_at_once):
                for job in self.missing:
                    watch.begin(job)
                    result = None
                    try:
                        if broken := [need.name for need in job.needs if need.path in failed]:
                            raise UserError(f"it starts from {broken[0]}, which failed")
                        result = self._train(job, watch)
                        if damage := job.damage():  # and there was no checkpoint to make it anew from
                            raise UserError(f"{damage}: move {job.path} away, and it is trained anew")
                        self.alike.note(job)
                        done += 1
                        self._add(job)
                        with results.locked(self.path.parent):
                            self._save()
                    except UserError as error:
                        again = str(error) in failed.values()  # a set that is missing, say, for every row
                        failed[job.path] = str(error)
                        watch.warn(f"{job.name} failed{' for the same reason' if again else f': {error}'}")
                    watch.ended(job, result)
        except Stopped:
            self.publish(show=False)
            self.console.print(
                f"{done} of {_runs(len(self.jobs))} done. To go on: {self.again}", markup=False, soft_wrap=True
            )
            raise
        for job in [job for job in self.missing if job.path in failed and _there(job)]:
            del failed[job.path]  # another process was at it, and is done
            self._add(job)
        if failed:
            if self.document["runs"]:
                self.publish()
            reasons: dict[str, list[str]] = {}
            for path, why in failed.items():
                reasons.setdefault(why, []).append(path.name)
            lines = "\n".join(f"  {', '.join(names)}: {why}" for why, names in reasons.items())
            others = "; the others are done" if len(failed) < len(self.missing) else ""
            raise UserError(f"{len(failed)} of {_runs(len(self.missing))} failed{others}:\n{lines}")

    def _train(self, job: Job, watch: Overview) -> dict[str, Any]:
        def checked(config: Config) -> Experiment:
            experiment = build_experiment(config)
            found = experiment.identity()
            self.alike.check(job, found)
            results.check_alike(self.document, self.planner.key(self.suite, job), job, results.marks_of(found))
            return experiment

        if job.rounds is None:
            return train_config(job.config, job.folder, watch, checked)
        train_rounds(job.config, job.path, lambda label: watch, job.rounds)
        return job.folder.read_result()

    def publish(self, show: bool = True) -> None:
        """Writes the document, its table and figure, and the page of all results."""
        with results.locked(self.path.parent):
            self._save()
            _write_tables(self.path.parent, self.console, [self.path])
        if show:
            self.console.print(tables.shown(self.document))
            self.console.print(
                f"written to {self.path.with_suffix('')}.json, .md and .png", markup=False, soft_wrap=True
            )

    def foretell(self) -> None:
        """Shows the runs that would be trained and how long each would take; trains and writes nothing."""
        rows: list[list[str]] = []
        times: dict[str, float | None] = {}
        total, unknown = 0.0, []
        missing = {job.path for job in self.missing}
        for job in self.jobs:
            if job.path not in missing:
                rows.append([job.name, f"{job.total:,}", "finished, reused"])
                continue
            done = job.steps_done()
            key = f"{job.path.parent.name}/{job.row} {done}"  # another seed takes as long
            if key not in times:
                with self.console.status(Text(f"three steps of {job.name}")):
                    try:
                        times[key] = timing.seconds(job)
                    except UserError as error:  # it may need a run that is not there yet
                        times[key] = None
                        unknown.append(f"{job.name}: {error}")
            time = times[key]
            total += time or 0.0
            count = f"{job.total - done:,} of {job.total:,}" if done else f"{job.total:,}"
            rows.append([job.name, count, "not known" if time is None else duration(time)])
        head = [Head(text, right=text != "run", whole=True) for text in ("run", "iterations", "time")]
        self.console.print(terminal_table(Table("Runs", head, text_rows(rows))))
        for line in unknown:
            _warn(self.console, line)
        about, reused = "more than" if unknown else "about", len(self.jobs) - len(self.missing)
        text = f"{_runs(len(self.missing))} to train, {about} {duration(total)}; {reused} reused"
        self.console.print(text, markup=False, soft_wrap=True)


def dry_run(
    name: str, options: Options, console: Console, trials: int, only: Sequence[str], folder: Path, output: Path
) -> None:
    """Lists the runs of a suite, those that would be reused, and the time that the others would take."""
    Run(name, options, console, trials, only, folder, output).foretell()


def write_tables(folder: Path, console: Console) -> list[Path]:
    """Makes all tables and figures anew from the JSON files in a folder, and README.md of all."""
    if not any(folder.glob("*.json")):
        raise _no_results(folder)
    with results.locked(folder):
        return _write_tables(folder, console)


def _write_tables(folder: Path, console: Console, changed: Sequence[Path] | None = None) -> list[Path]:
    documents = results.all_in(folder, partial(_warn, console))
    if not documents:
        raise UserError(f"{folder}: none of its .json files can be read as results; bring one back")
    for path, document in documents.items():
        if changed is None or path in changed:
            save(_figure(document), path.with_suffix(".png"))
            atomic_files.write_atomically(path.with_suffix(".md"), markdown.markdown(document, f"{path.stem}.png"))
    atomic_files.write_atomically(folder / "README.md", markdown.readme(documents))
    return list(documents)


def _no_results(folder: Path) -> UserError:
    return UserError(f"{folder} holds no results: give a suite to run, {', '.join(SUITES)}, or another folder with -o")


def _figure(document: dict[str, Any]) -> Any:
    rows = [entry["name"] for entry in document["rows"]]
    panels: dict[str, list[tuple[Any, ...]]] = {}
    for metric in [metric for metric in document["metrics"] if metric != "members"] or ["oracle"]:
        points = []
        for row in rows:
            ours, paper = findings.trials(document, row, metric), findings.paper(document, row, metric) or {}
            mean, std = (ours.mean, ours.std) if ours else (None, None)
            points.append((mean, std, paper.get("mean"), paper.get("std")))
        panels[label(metric)] = points
    return draw_suite(rows, panels, tables.title(document))


def _warn(console: Console, message: str) -> None:
    console.print(message, style="yellow", markup=False, soft_wrap=True)


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


def _there(job: Job) -> bool:
    """Whether the run is finished; one of another config, which nobody asked for now, is not."""
    try:
        return job.finished()
    except UserError:
        return False
