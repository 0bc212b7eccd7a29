"""What the user sees while something runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

    from mheads.metrics import Result


class Watcher(Protocol):
    """Hears of the progress of training."""

    def training(self, total: int, done: int) -> AbstractContextManager[None]: ...
    def step(self, step: int, loss: float, rate: float, images: int, shares: list[float]) -> None: ...
    def evaluating(self, examples: int) -> AbstractContextManager[Callable[[int], None]]: ...
    def evaluated(self, step: int, result: Result) -> None: ...
    def resumed(self, step: int, total: int) -> None: ...
    def finished(self, folder: Path) -> None: ...
    def note(self, message: str) -> None: ...
    def warn(self, message: str) -> None: ...


class Silent:
    """Says nothing but warnings."""

    def training(self, total: int, done: int) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, step: int, loss: float, rate: float, images: int, shares: list[float]) -> None:
        pass

    def evaluating(self, examples: int) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(lambda count: None)

    def evaluated(self, step: int, result: Result) -> None:
        pass

    def resumed(self, step: int, total: int) -> None:
        pass

    def finished(self, folder: Path) -> None:
        pass

    def note(self, message: str) -> None:
        pass

    def warn(self, message: str) -> None:
        import warnings

        warnings.warn(message, stacklevel=2)


class Terminal:
    """A progress bar, and a line for each evaluation."""

    def __init__(self, console: Console, label: str = "train", bar: bool = True) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        self.console = console
        self.label = label
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24 if console.width >= 110 else 6),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[info]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not (bar and console.is_terminal),
        )

    @contextmanager
    def training(self, total: int, done: int) -> Iterator[None]:
        import time

        self._task = self._bar.add_task(self.label, total=total, completed=done, info="")
        self._seen: list[tuple[float, int]] = [(time.perf_counter(), 0)]
        with self._bar:
            yield
        self._bar.remove_task(self._task)

    def step(self, step: int, loss: float, rate: float, images: int, shares: list[float]) -> None:
        import time

        # Images a second over the last twenty steps or so.
        self._seen = [*self._seen[-20:], (time.perf_counter(), self._seen[-1][1] + images)]
        (t0, n0), (t1, n1) = self._seen[0], self._seen[-1]
        info = f"loss {loss:.4f} rate {rate:.2g} {(n1 - n0) / max(t1 - t0, 1e-9):,.0f} img/s"
        if len(shares) > 1:
            info += " wins " + "/".join(f"{100 * s:.0f}" for s in shares)
        self._bar.update(self._task, completed=step, info=info)

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

    def evaluated(self, step: int, result: Result) -> None:
        members = " ".join(f"{a:.1f}" for a in result.members)
        text = f"iteration {step:>6}  Ensemble-Mean {result.ensemble_mean:.2f}  Oracle {result.oracle:.2f}"
        self.console.print(f"{text}  [dim]{members}[/]", highlight=False, soft_wrap=True)

    def resumed(self, step: int, total: int) -> None:
        self.console.print(f"resuming at iteration {step} of {total}", highlight=False)

    def finished(self, folder: Path) -> None:
        text = f"{folder} is finished: nothing to do (more optim.iterations would go on)"
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def note(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        self.console.print(message, style="yellow", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def fetching(console: Console, name: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for a download: called with what is under way, how much is done, and of how much (0: unknown)."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)
