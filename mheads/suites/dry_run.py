"""What `mheads reproduce` would train, and how long that would take: of one suite run by run, of all suite by suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mheads.common.errors import UserError
from mheads.common.number_words import count, duration
from mheads.common.table import Head, Table, text_rows
from mheads.common.terminal_table import terminal_table
from mheads.suites.compute import count_cost
from mheads.suites.jobs import SuiteJob
from mheads.suites.reproduce import Reproduction, SuiteRequest
from mheads.suites.timing import predict_seconds


def print_plan(suite: Reproduction, console: Console) -> None:
    """Prints the runs that would be trained and how long each would take; trains and writes nothing."""
    rows: list[list[str]] = []
    times: dict[str, float | None] = {}
    unknown: list[str] = []
    total, missing = 0.0, {job.path for job in suite.missing}
    for job in suite.jobs:
        if job.path not in missing:
            rows.append([job.name, f"{job.total:,}", "finished, reused"])
            continue
        done = job.steps_done()
        key = f"{job.path.parent.name}/{job.row} {done}"  # another seed takes as long
        if key not in times:
            with console.status(Text(f"three steps of {job.name}")):
                try:
                    times[key] = predict_seconds(job)
                except UserError as error:  # it may need a run that is not there yet
                    times[key] = None
                    unknown.append(f"{job.name}: {error}")
        time = times[key]
        total += time or 0.0
        steps = f"{job.total - done:,} of {job.total:,}" if done else f"{job.total:,}"
        rows.append([job.name, steps, "not known" if time is None else duration(time)])
    head = [Head(text, right=text != "run", whole=True) for text in ("run", "iterations", "time")]
    console.print(terminal_table(Table("Runs", head, text_rows(rows))))
    for line in unknown:
        console.print(line, style="yellow", markup=False, soft_wrap=True)
    about, reused = "more than" if unknown else "about", len(suite.jobs) - len(suite.missing)
    text = f"{count(len(suite.missing), 'run')} to train, {about} {duration(total)}; {reused} reused"
    console.print(text, markup=False, soft_wrap=True)


class _Hours:
    """Predicts hours from operations: of one run of each recipe three steps are timed, and others go by their FLOP."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rates: dict[str, float | str] = {}  # hours per FLOP, or why that is not known
        self._costs: dict[str, dict[str, float] | None] = {}  # by row: another seed costs as much
        self.reasons: dict[str, str] = {}  # by recipe

    def predict(self, job: SuiteJob) -> float | None:
        key = f"{job.path.parent.name}/{job.row}"
        if key not in self._costs:
            self._costs[key] = count_cost(job)
        cost = self._costs[key]
        if cost is None:
            self.reasons.setdefault(job.recipe, "the shape of an example is not known without the data")
            return None
        if job.recipe not in self._rates:
            with self._console.status(Text(f"three steps of {job.name}")):
                try:
                    self._rates[job.recipe] = predict_seconds(job) / 3600 / cost["training"]
                except UserError as error:
                    self._rates[job.recipe] = str(error)
        rate = self._rates[job.recipe]
        if isinstance(rate, str):
            self.reasons.setdefault(job.recipe, rate)
            return None
        return rate * cost["training"] * (1 - job.steps_done() / job.total)


def print_plan_of_all(requests: Sequence[SuiteRequest], console: Console) -> None:
    """Prints for each suite how many runs there are, how many are finished, and the hours that the others take.

    A run that several suites show counts in the first of them.
    """
    hours, seen = _Hours(console), set[Path]()
    rows, total, in_results = [], 0.0, 0.0
    for request in requests:
        suite = Reproduction(request, console)
        jobs = [job for job in suite.jobs if job.path not in seen]
        seen |= {job.path for job in jobs}
        missing = {job.path for job in suite.missing}
        known = {(key, run["seed"]) for key, runs in suite.document["runs"].items() for run in runs}
        times = [(job, hours.predict(job)) for job in jobs if job.path in missing]
        taken = sum(time or 0.0 for _, time in times)
        total += taken
        in_results += sum(t or 0.0 for j, t in times if (suite.planner.key(suite.suite, j), j.seed) in known)
        counts = [f"{len(jobs)}", f"{len(jobs) - len(times)}"]
        rows.append([request.suite, *counts, "not known" if any(t is None for _, t in times) else f"{taken:.1f}"])
    heads = [Head(text, right=text != "suite", whole=True) for text in ("suite", "runs", "finished", "hours to train")]
    console.print(terminal_table(Table("All suites", heads, text_rows(rows))))
    for recipe, reason in hours.reasons.items():
        console.print(f"{recipe}: {reason}", style="yellow", markup=False, soft_wrap=True)
    about = "more than" if hours.reasons else "about"
    text = f"{about} {total:.1f} hours in all"
    text += (
        f"; {in_results:.1f} of them for runs that the results have, without a run folder here" if in_results else ""
    )
    console.print(text, markup=False, soft_wrap=True)
