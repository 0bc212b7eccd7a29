"""`mheads report`: one HTML file of a run or of several."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from mheads.common.atomic_files import check_output, check_place, write_atomically
from mheads.common.errors import UserError
from mheads.common.progress import Silent, Watcher
from mheads.report.page.html import Cell, Page, Section, Table
from mheads.report.page.one_run import page_of
from mheads.report.page.several_runs import Fact, best_of, page_of_all
from mheads.runs.folder import RunFolder
from mheads.runs.record import Record, read_all
from mheads.suites import findings, results, tables
from mheads.suites.jobs import FOLDER, Options, Planner
from mheads.suites.suite import read
from mheads.suites.verdicts import TEST, how_tested, verdicts

REFRESH = 5  # seconds after which an open page of a run that goes on is loaded again
POLL = 1.0  # seconds between two looks at its folder, at least
PAUSE = 5  # times as long as a page took: the network of a large run is built for each, beside its training


def report(paths: Sequence[Path], output: Path | None, watch: Watcher, trust: bool = False) -> Path:
    """Writes the page of a run to report.html in its folder, or of several beside the first; returns where it is."""
    if output is not None:
        check_output(output, SUFFIXES)
    records = read_all(paths, lenient=True)
    output = check_place(output or _usual(paths))
    write_atomically(output, _page(records, watch, trust).html())
    return output


def follow(
    paths: Sequence[Path],
    output: Path | None,
    watch: Watcher,
    trust: bool = False,
    wait: Callable[[float], None] = time.sleep,
) -> Path:
    """Writes the page anew whenever the runs go on, until all are finished or Ctrl-C; an open page follows.

    Runs that have not begun are waited for.
    """
    if output is not None:
        check_output(output, SUFFIXES)
    file, page, before = output or _usual(paths), None, None
    try:
        _await(paths, watch, wait)
        while True:
            begun, now = time.monotonic(), [_stamp(path / name) for path in paths for name in WATCHED]
            if now != before:
                records = read_all(paths, lenient=True)
                if all(record.finished for record in records):
                    return report(paths, file, watch, trust)
                if page is None:
                    watch.say(f"{file} follows the run until it is finished; Ctrl-C ends this")
                with warnings.catch_warnings(action="ignore"):  # what is wrong with a run is told once
                    page, before = _page(records, Silent() if page else watch, trust, look=False), now
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
    told = False
    while absent := [path for path in paths if not RunFolder(path).exists()]:
        for path in absent:
            RunFolder(path).refuse_other_content()  # in which no run can begin
        if not told:
            watch.say(f"waiting for {absent[0]} to begin; Ctrl-C ends this")
            told = True
        wait(POLL)


WATCHED = ("metrics.jsonl", "assignments.npz", "result.json", "config.yaml")
SUFFIXES = (".html", ".htm")


def report_suite(name: str, options: Options, output: Path | None, watch: Watcher, folder: Path = FOLDER) -> Path:
    """Writes the page of a suite: its table beside the paper's, and the runs of `mheads reproduce` that are there."""
    suite, planner = read(name), Planner(options, folder)
    table = planner.table(suite)
    if output is not None:
        check_output(output, SUFFIXES)
    document = results.make(table, planner, 1)
    records: dict[Path, Record] = {}
    for row in table.names:
        for job in sorted(planner.jobs_there(suite, row), key=lambda job: job.seed):
            if job.path not in records and job.folder.exists():
                title = job.row if job.seed == options.seed else f"{job.row}, seed {job.seed}"
                records[job.path] = Record.read(job.folder.path, title, lenient=True)
                if job.finished():
                    results.add(document, job, planner, suite)
    if not records:
        again = results.command(name, options, [options.seed])
        raise UserError(f"{folder} holds no run of {suite.name} on {options.short}: train them, {again}")
    page = page_of_all(
        list(records.values()),
        watch,
        title=tables.title(document),
        about=suite.about,
        further=_beside(document),
        best=_best(document),
    )
    output = output or folder / results.file_name(suite.name, options).replace(".json", ".html")
    write_atomically(output, page.html())
    return output


def _best(document: results.Document) -> list[Fact]:
    """The rows with the best means over their trials: all that have them."""
    found, percent = [], findings.in_percent(document)
    for metric in ("ensemble_mean", "oracle"):
        rows = {entry["name"]: findings.trials(document, entry["name"], metric) for entry in document["rows"]}
        means = {row: trials.mean for row, trials in rows.items() if trials is not None}
        if means:
            higher = findings.higher_is_better(document, metric)
            value, who = best_of(means, higher, partial(findings.number, metric=metric, percent=percent))
            value = findings.ours(document, who[0], metric) if len(who) == 1 else value
            found.append((f"Best {findings.label(metric)}", value, "%" if percent else "", ", ".join(who)))
    return found


def _beside(document: results.Document) -> list[Section]:
    """The table beside the paper's, and what it claims."""
    rows = []
    for entry in document["rows"]:
        trials = findings.num_trials(document, entry["name"])
        cells = [Cell(text) for text in tables.cells(document, entry["name"])]
        rows.append([Cell(entry["name"]), Cell(str(trials) if trials else ""), *cells])
    heads = ["row", "trials", *tables.heads(document)]
    why = findings.why_no_paper(document)
    title, what = ("The table", "Our runs") if why else ("Beside the paper", "Our runs and the paper's figures")
    found = [Section("table", title, [Table(what, heads, rows, note=why)])]
    if claims := verdicts(document):
        lines = [[Cell(claim.claim), Cell(claim.word), Cell(claim.figures)] for claim in claims]
        tested = f"{how_tested(claims)} {TEST}".strip()
        table = Table("What is claimed, and what our runs say of it", ["claim", "here", "figures"], lines, note=tested)
        found.append(Section("claims", "What holds", [table]))
    return found


def _page(records: Sequence[Record], watch: Watcher, trust: bool, look: bool = True) -> Page:
    return page_of(records[0], watch, trust, look) if len(records) == 1 else page_of_all(records, watch, look)


def _usual(paths: Sequence[Path]) -> Path:
    return (paths[0] if len(paths) == 1 else paths[0].parent) / "report.html"


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
