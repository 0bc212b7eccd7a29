"""One line over all runs of a suite: how many are done, the current one with its bar, and the time left for all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console

from mheads.common.errors import UserError
from mheads.common.number_words import duration
from mheads.common.progress import Pace, Watcher, step_bar, step_line
from mheads.problems.baselines import top
from mheads.problems.metric_text import format_metric
from mheads.suites import findings
from mheads.suites.jobs import SuiteJob
from mheads.suites.run_locks import Claim


class Overview(Watcher):
    """Watches each run. Without a terminal it shows one line for each finished run."""

    def __init__(self, console: Console, label: str, jobs: list[SuiteJob]) -> None:
        self.console = console
        self._label, self._count = label, len(jobs)
        self._left = sum(job.total - job.steps_done() for job in jobs)  # steps of all runs
        self._done = 0  # runs
        self._seconds, self._steps = 0.0, 0  # what steps have taken so far
        self._bar = step_bar(console)
        self.claim: Claim | None = None  # of the current run

    def begin(self, job: SuiteJob) -> None:
        self._name = job.name

    def skip(self, job: SuiteJob) -> None:
        """Another process has trained the run meanwhile."""
        self._left = max(0, self._left - job.total)
        self.say(f"{job.name} was trained by another process")

    def leave_out(self, steps: int) -> None:
        """The current run begins with so many steps that another one has done."""
        self._left -= steps

    def end(self, job: SuiteJob, result: dict[str, Any] | None) -> None:
        self._done += 1
        if result is not None:
            measures = (("mean member", "single"), ("Ensemble-Mean", "ensemble_mean"), ("Oracle", "oracle"))
            write = partial(format_metric, percent=findings.is_in_percent(result))
            known = [(name, key) for name, key in measures if isinstance(result[key], int | float)]
            texts = [f"{name} {write(result[key], key)}" for name, key in known]
            members = len(result.get("members", ()))
            if members > 1 and (best := top(result, members)) is not None:
                texts.append(f"top-{members} {write(best, 'top_m')}")
            self.say("  ".join([f"{self._done}/{self._count}", job.name, *texts, duration(result["seconds"])]))

    @contextmanager
    def training(self, total: int, done: int) -> Iterator[None]:
        label = f"{self._label} {self._done + 1}/{self._count} {self._name}"
        task = self._bar.add_task(label, total=total, completed=done, info="")
        self._task, self._pace, self._since = task, Pace(), time.monotonic()
        with self._bar:
            yield
        self._bar.remove_task(task)

    def step(self, step: int, loss: float, rate: float, images: int, shares: list[float]) -> None:
        if self.claim is not None and self.claim.lost:
            raise UserError(f"another process took {self._name} over, since this one seemed dead; it stops here")
        now = time.monotonic()
        self._seconds, self._since = self._seconds + now - self._since, now
        self._steps, self._left = self._steps + 1, self._left - 1
        left = duration(self._seconds / self._steps * self._left)
        info, pace = f"{left} left for all", self._pace.add(images)
        if self.console.width >= 110:  # else there is room for the bar alone
            info += f", {step_line(loss, rate, pace, shares)}"
        self._bar.update(self._task, completed=step, info=info)

    def on_resume(self, step: int, total: int) -> None:
        pass

    def say(self, message: str) -> None:
        self.console.print(message, markup=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        self.console.print(message, style="yellow", markup=False, soft_wrap=True)
