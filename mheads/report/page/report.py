"""`mheads report`: one HTML file of a run or of several."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from mheads.common.atomic_files import check_output, check_place, write_atomically
from mheads.common.errors import UserError
from mheads.common.progress import Silent, Watcher
from mheads.report.page.html import Page
from mheads.report.page.one_run import make_page
from mheads.report.page.several_runs import make_comparison
from mheads.report.shown_run import PaperFigures, ShownRun
from mheads.runs.folder import RunFolder
from mheads.runs.read_run import Record, read_all

SUFFIXES = (".html", ".htm")
WATCHED = ("metrics.jsonl", "assignments.npz", "result.json", "config.yaml")
REFRESH = 5  # seconds after which an open page of a run that still trains is loaded again
POLL = 1.0  # seconds between two looks at its folder, at least
PAUSE = 5  # times as long as a page took: the network of a large run is built for each, beside its training


def report(
    paths: Sequence[Path], output: Path | None, watch: Watcher, trust: bool = False, paper: PaperFigures | None = None
) -> Path:
    """Writes the page of a run to report.html in its folder, or of several beside the first; returns where it is."""
    if output is not None:
        check_output(output, SUFFIXES)
    records = read_all(paths, lenient=True)
    output = check_place(output or _default_file(paths))
    return _write(make_any_page(records, watch, trust, paper=paper), output, watch)


def report_run(run: ShownRun, output: Path) -> Path:
    """Writes the page of a run that a program has at hand; returns where it is."""
    check_output(output, SUFFIXES)
    return _write(make_page(run), check_place(output), run.watch)


def _write(page: Page, output: Path, watch: Watcher) -> Path:
    """Writes a page, and warns of what it lacks."""
    for reason, sections in page.lacking.items():
        if len(sections) > 1:  # the network or the data, and not a panel that has nothing to show
            watch.warn(f"the page has nothing in {', '.join(sections)}: {reason}")
    write_atomically(output, page.html())
    return output


def follow(
    paths: Sequence[Path],
    output: Path | None,
    watch: Watcher,
    trust: bool = False,
    wait: Callable[[float], None] = time.sleep,
    paper: PaperFigures | None = None,
) -> Path:
    """Writes the page again when a run has written something, until all are finished or Ctrl-C; an open page follows.

    Runs that have not begun are waited for.
    """
    if output is not None:
        check_output(output, SUFFIXES)
    file, page, before = output or _default_file(paths), None, None
    try:
        _await(paths, watch, wait)
        while True:
            begun, now = time.monotonic(), [_stamp(path / name) for path in paths for name in WATCHED]
            if now != before:
                records = read_all(paths, lenient=True)
                if all(record.finished for record in records):
                    return report(paths, file, watch, trust, paper)
                if page is None:
                    watch.say(f"{file} follows the run until it is finished; Ctrl-C ends this")
                with warnings.catch_warnings(action="ignore"):  # what is wrong with a run is reported once
                    page, before = make_any_page(records, Silent() if page else watch, trust, look=False), now
                write_atomically(file, dataclasses.replace(page, refresh=REFRESH).html())
            wait(max(POLL, PAUSE * (time.monotonic() - begun)))
    except (KeyboardInterrupt, UserError) as end:
        if page is not None and file.parent.is_dir():
            write_atomically(file, page.html())  # it stays, and no longer loads itself again
        if page is None or isinstance(end, UserError):
            raise
        return file


def _await(paths: Sequence[Path], watch: Watcher, wait: Callable[[float], None]) -> None:
    """Waits until all runs have begun."""
    reported = False
    while absent := [path for path in paths if not RunFolder(path).exists()]:
        for path in absent:
            RunFolder(path).refuse_other_content()  # in which no run can begin
        if not reported:
            watch.say(f"waiting for {absent[0]} to begin; Ctrl-C ends this")
            reported = True
        wait(POLL)


def make_any_page(
    records: Sequence[Record], watch: Watcher, trust: bool, look: bool = True, paper: PaperFigures | None = None
) -> Page:
    """The page of one run, or the comparison of several."""
    runs = [ShownRun(record, watch, trust, look, paper) for record in records]
    return make_page(runs[0]) if len(runs) == 1 else make_comparison(runs)


def _default_file(paths: Sequence[Path]) -> Path:
    return (paths[0] if len(paths) == 1 else paths[0].parent) / "report.html"


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        state = os.stat(file)
    except FileNotFoundError:
        return None
    return state.st_mtime_ns, state.st_size
