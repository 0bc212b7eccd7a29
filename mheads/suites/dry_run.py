"""What `mheads reproduce` would train, and how long that would take: of one suite run by run, of all suite by suite."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from mheads.common.errors import UserError
from mheads.common.number_words import count, duration
from mheads.common.progress import Terminal
from mheads.common.table import Head, Table, text_rows
from mheads.common.terminal_table import terminal_table
from mheads.optim.stage_updates import Optimizer
from mheads.suites.compute import count_cost
from mheads.suites.jobs import SuiteJob
from mheads.suites.reproduce import Reproduction, SuiteRequest
from mheads.suites.share_pretraining import leave_out_shared
from mheads.training.experiment import build_experiment

STEPS, ROWS = 3, 128  # that are timed, and examples of each at most
FORWARD = 1 / 3  # what an example costs in an evaluation, as a part of a step


class StepTime(NamedTuple):
    """What an example takes in steps of a run: seconds, and FLOP where they can be counted; the seconds of an update,
    which does not depend on the number of examples; and the test examples."""

    seconds: float
    flop: float | None
    update: float
    test_examples: int


class TimePredictor:
    """Predicts times: of one run of each recipe small steps are timed, and others go by their FLOP.

    A run whose FLOP cannot be counted without its data is timed itself.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._costs: dict[str, dict[str, float] | None] = {}  # by row: another seed costs as much
        self._times: dict[str, StepTime | UserError] = {}  # by recipe, or by row
        self.reasons: dict[str, str] = {}  # why a time is not known -> the first run of which it is not

    def predict(self, job: SuiteJob) -> float | None:
        """The seconds that the rest of a run will take, its steps and its evaluations; None where that is not known."""
        row = f"{job.path.parent.name}/{job.row}/{job.total}"
        if row not in self._costs:
            self._costs[row] = _count_or_none(job)
        cost = self._costs[row]
        try:
            one = self._time(job, row if cost is None else job.recipe)
        except UserError as error:  # it may need a run that is not there yet
            self.reasons.setdefault(str(error), job.name)
            return None
        if cost is not None and one.flop is not None:
            training, answer = (cost[key] * one.seconds / one.flop for key in ("training", "inference"))
        else:
            optim = job.config.optim
            training = one.seconds * optim.batch_size * optim.accumulate * job.total
            answer = one.seconds * FORWARD
        training += one.update * job.total
        done, every = job.steps_done(), job.config.log.evaluate_every
        evaluations = 1 + ((job.total - 1) // every - done // every if every else 0)
        answers = evaluations * one.test_examples * max(1, len(job.config.eval.views))
        return training * (1 - done / job.total) + answer * answers

    def _time(self, job: SuiteJob, key: str) -> StepTime:
        if key not in self._times:
            with self._console.status(Text(f"{STEPS} steps of {job.name}")):
                try:
                    self._times[key] = _time_steps(job)
                except UserError as error:
                    self._times[key] = error
        known = self._times[key]
        if isinstance(known, UserError):
            raise known
        return known


def _count_or_none(job: SuiteJob) -> dict[str, float] | None:
    try:
        return count_cost(job)
    except UserError:  # the shape of an example is not known without the data
        return None


def _time_steps(job: SuiteJob) -> StepTime:
    """Times small steps of a run, from any weights: those that it starts from may not be there yet. Writes nothing."""
    rows = min(ROWS, job.config.optim.batch_size)
    optim = job.config.optim.model_copy(update={"batch_size": rows, "accumulate": 1})
    start: dict[str, Any] = {"init": "random", "init_members": None, "init_map": {}}
    config = job.config.model_copy(update={"optim": optim, "pretrain": 0, **start})
    cost = _count_or_none(replace(job, config=config, rounds=None))
    experiment = build_experiment(config)
    times, updates = [], []
    with closing(experiment.make_engine()) as engine, closing(experiment.batches(engine)) as batches:
        optimizer = Optimizer(experiment.net, optim, engine.stacks)
        optimizer.set_rate(optim.lr)
        for step in range(STEPS):
            began = time.perf_counter()
            engine.step(step, batches.batch(step), experiment.loss_at(step))
            computed = time.perf_counter()
            engine.update(optimizer.update)
            times.append(computed - began)
            updates.append(time.perf_counter() - computed)
    flop = None if cost is None else cost["training"] / optim.iterations / rows
    # The first step prepares what later ones reuse.
    return StepTime(min(times) / rows, flop, min(updates), len(experiment.data.test))


def print_plan(suite: Reproduction, console: Console) -> None:
    """Prints the runs that would be trained and how long each would take; trains and writes nothing."""
    suite.check_other_data()
    missing = {job.path: job for job in leave_out_shared(suite.missing, suite.finished)}
    predictor, rows, total = TimePredictor(console), [], 0.0
    for job in suite.jobs:
        if (left := missing.get(job.path)) is None:
            rows.append([job.name, f"{job.total:,}", "finished, reused"])
            continue
        done, seconds = job.total - left.total + job.steps_done(), predictor.predict(left)
        total += seconds or 0.0
        steps = f"{job.total - done:,} of {job.total:,}" if done else f"{job.total:,}"
        rows.append([job.name, steps, "not known" if seconds is None else duration(seconds)])
    _print_table(console, "Runs", ("run", "iterations", "time"), rows, predictor)
    about, reused = "more than" if predictor.reasons else "about", len(suite.jobs) - len(suite.missing)
    text = f"{count(len(suite.missing), 'run')} to train, {about} {duration(total)}; {reused} reused"
    Terminal(console).say(text)


def print_plan_of_all(requests: Sequence[SuiteRequest], console: Console) -> None:
    """Prints for each suite how many runs there are, how many are finished, and the hours that the others take.

    A run that several suites show counts in the first of them.
    """
    predictor, seen = TimePredictor(console), set[Path]()
    rows, total, in_results = [], 0.0, 0.0
    for request in requests:
        try:
            suite = Reproduction(request, console)
        except UserError as error:
            predictor.reasons.setdefault(str(error), request.name)
            rows.append([request.suite, *["not known"] * 3])
            continue
        jobs = [job for job in suite.jobs if job.path not in seen]
        seen |= {job.path for job in jobs}
        missing = {job.path for job in suite.missing}
        known = {(key, run["seed"]) for key, runs in suite.document["runs"].items() for run in runs}
        left = leave_out_shared([job for job in jobs if job.path in missing], suite.finished)
        times = [(job, predictor.predict(job)) for job in left]
        taken = sum(time or 0.0 for _, time in times)
        total += taken
        in_results += sum(t or 0.0 for j, t in times if (suite.planner.key(suite.suite, j), j.seed) in known)
        hours = "not known" if any(t is None for _, t in times) else f"{taken / 3600:.1f}"
        rows.append([request.suite, f"{len(jobs)}", f"{len(jobs) - len(times)}", hours])
    _print_table(console, "All suites", ("suite", "runs", "finished", "hours to train"), rows, predictor)
    text = f"{'more than' if predictor.reasons else 'about'} {total / 3600:.1f} hours in all"
    if in_results:
        text += f"; {in_results / 3600:.1f} of them for runs that the results have, without a run folder here"
    Terminal(console).say(text)


def _print_table(
    console: Console, title: str, heads: Iterable[str], rows: list[list[str]], predictor: TimePredictor
) -> None:
    """A table with numbers in all columns but the first, and why some of them are not known."""
    head = [Head(text, right=i > 0, whole=True) for i, text in enumerate(heads)]
    console.print(terminal_table(Table(title, head, text_rows(rows))))
    for reason, run in predictor.reasons.items():
        Terminal(console).warn(f"{run}: {reason}")
