"""What the user sees while something runs."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from mheads.common.errors import in_words_of_caller, warn
from mheads.common.number_words import count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from mheads.problems import Result


class Watcher:
    """Is told of the progress of training, and shows nothing of it but warnings."""

    def on_build(self, folder: Path) -> None:
        """The experiment is built, and goes into this folder."""

    def training(self, total: int, done: int) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, step: int, loss: float, rate: float, images: int, shares: list[float]) -> None:
        """A step is done, at this learning rate."""

    def evaluating(self, examples: int) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(lambda count: None)

    def on_evaluation(self, step: int, result: Result) -> None:
        """The ensemble was evaluated."""

    def on_resume(self, step: int, total: int) -> None:
        self.say(f"resuming at iteration {step} of {total}")

    def on_finished(self, folder: Path) -> None:
        """The run in the folder is finished already."""

    def say(self, message: str) -> None:
        """Shows a message."""

    def warn(self, message: str) -> None:
        warn(message)


class Silent(Watcher):
    """Shows nothing but warnings."""


class Mute(Watcher):
    """Shows nothing at all, where another watcher shows the same."""

    def warn(self, message: str) -> None:
        pass


@contextmanager
def forward_warnings(watch: Watcher) -> Iterator[None]:
    """Inside, Python's warnings go to the watcher."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        watch.warn(str(warning.message))


def step_bar(console: Console, *columns: ProgressColumn, show: bool = True) -> Progress:
    """A bar of steps with a label, these columns and a text behind it; only a terminal shows it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24 if console.width >= 110 else 6),
        MofNCompleteColumn(),
        *columns,
        TextColumn("{task.fields[info]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=console,
        transient=True,
        refresh_per_second=4,
        disable=not (show and console.is_terminal),
    )


class Terminal(Watcher):
    """A progress bar, and a line for each evaluation; with `folder`, one that says where the run is."""

    def __init__(self, console: Console, label: str = "train", bar: bool = True, folder: bool = False) -> None:
        from rich.progress import TimeRemainingColumn

        self.console, self.label, self._folder = console, label, folder
        self._bar = step_bar(console, TimeRemainingColumn(compact=True), show=bar)

    def on_build(self, folder: Path) -> None:
        if self._folder:
            self.say(f"run folder {folder}")

    @contextmanager
    def training(self, total: int, done: int) -> Iterator[None]:
        self._task = self._bar.add_task(self.label, total=total, completed=done, info="")
        self._pace, self._total, self._warm = Pace(), total, done + 3
        self._warm_at: float | None = None
        with self._bar:
            yield
        self._bar.remove_task(self._task)

    def step(self, step: int, loss: float, rate: float, images: int, shares: list[float]) -> None:
        if self._bar.disable:
            self._say_duration(step)
        self._bar.update(self._task, completed=step, info=step_line(loss, rate, self._pace.add(images), shares))

    def _say_duration(self, step: int) -> None:
        """Says in one line how long training will take, if no bar is shown and it takes more than a minute.

        The first three steps are the slowest: it is measured over those after them, for a second or more.
        """
        if step == self._warm:
            self._warm_at = time.monotonic()
        elif self._warm_at is not None and (took := time.monotonic() - self._warm_at) >= 1:
            self._warm_at = None
            left = took / (step - self._warm) * (self._total - step)
            if left > 60:
                minutes = count(round(left / 60), "minute")
                self.say(f"{count(self._total - step, 'iteration')} to go, about {minutes}")

    @contextmanager
    def evaluating(self, examples: int) -> Iterator[Callable[[int], None]]:
        running = self._bar.live.is_started
        task = self._bar.add_task("eval", total=examples, info="")
        if not running:
            self._bar.start()
        try:
            yield lambda count: self._bar.advance(task, count)
        finally:
            self._bar.remove_task(task)
            if not running:
                self._bar.stop()

    def on_evaluation(self, step: int, result: Result) -> None:
        self.say(evaluation_line(step, result))

    def on_finished(self, folder: Path) -> None:
        self.say(f"{folder} is finished: nothing to do (give more optim.iterations to go on)")

    def say(self, message: str) -> None:
        self.console.print(in_words_of_caller(message), highlight=False, markup=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        self.console.print(in_words_of_caller(message), style="yellow", highlight=False, markup=False, soft_wrap=True)


class Notebook(Watcher):
    """A bar and the evaluations so far, in the output of the cell."""

    def __init__(self, label: str = "train") -> None:
        from IPython.display import display

        self.label = label
        self._lines: list[str] = []
        self._evaluations: list[tuple[int, Result]] = []
        self._bar = ""
        self._shown_at = 0.0
        self._output = display(self, display_id=True)

    def _repr_html_(self) -> str:
        """What the cell shows: the bar, a table of the evaluations, and the messages."""
        evaluations = [{"iteration": f"{step:,}", **result.headline()} for step, result in self._evaluations]
        rows = "".join(f"<tr>{''.join(f'<td>{text}</td>' for text in row.values())}</tr>" for row in evaluations)
        head = "".join(f"<th>{name}</th>" for name in evaluations[0]) if evaluations else ""
        table = f"<table><tr>{head}</tr>{rows}</table>" if rows else ""
        return "".join(f"<div>{escape(line)}</div>" for line in self._lines) + self._bar + table

    def __repr__(self) -> str:
        """What is shown where the output is plain text, as in a console or a saved log."""
        return "\n".join([*self._lines, *(evaluation_line(*pair) for pair in self._evaluations)]) or self.label

    def _show(self, at_once: bool = True) -> None:
        now = time.monotonic()
        if at_once or now - self._shown_at > 0.25:  # a browser need not redraw every step
            self._shown_at = now
            self._output.update(self)

    @contextmanager
    def training(self, total: int, done: int) -> Iterator[None]:
        self._total, self._pace = total, Pace()
        self._began = (time.monotonic(), done)
        try:
            yield
        finally:
            self._bar = ""
            self._show()

    def step(self, step: int, loss: float, rate: float, images: int, shares: list[float]) -> None:
        began, first = self._began
        left = (time.monotonic() - began) / max(1, step - first) * (self._total - step)
        line = f"{step:,}/{self._total:,}, {left:.0f} s left, {step_line(loss, rate, self._pace.add(images), shares)}"
        self._bar = f"<progress value={step} max={self._total}></progress> {escape(line)}"
        self._show(at_once=False)

    def on_evaluation(self, step: int, result: Result) -> None:
        self._evaluations.append((step, result))
        self._show()

    def on_finished(self, folder: Path) -> None:
        self.say(f"{folder} is finished: nothing to do (give more iterations to go on)")

    def say(self, message: str) -> None:
        self._lines.append(in_words_of_caller(message))
        self._show()

    def warn(self, message: str) -> None:
        self.say(f"Warning: {message}")


class Pace:
    """Images per second over the last twenty steps or so."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = [(time.perf_counter(), 0)]

    def add(self, images: int) -> float:
        self._seen = [*self._seen[-20:], (time.perf_counter(), self._seen[-1][1] + images)]
        (t0, n0), (t1, n1) = self._seen[0], self._seen[-1]
        return (n1 - n0) / max(t1 - t0, 1e-9)


def step_line(loss: float, rate: float, pace: float, shares: list[float]) -> str:
    wins = " wins " + "/".join(f"{100 * s:.0f}" for s in shares) if len(shares) > 1 else ""
    return f"loss {loss:.4f} rate {rate:.2g} {pace:,.0f} img/s{wins}"


def evaluation_line(step: int, result: Result) -> str:
    return "  ".join([f"iteration {step:>6}", *(f"{name} {text}" for name, text in result.headline().items())])


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, whose cells show HTML."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def watcher(show: bool | None) -> Watcher:
    """Where the progress of Python calls is shown: a notebook's cell, a terminal, or nowhere if nobody looks."""
    if show is None:
        show = in_notebook() or sys.stderr.isatty()
    if not show:
        return Silent()
    if in_notebook():
        return Notebook()
    from mheads.common.console import Console

    return Terminal(Console(stderr=True))


@contextmanager
def fetching(console: Console, name: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for a download: called with what is under way, how much is done, and of how much (0: unknown)."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)
