"""`mheads report`: one HTML file of a run or of several."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mheads.errors import UserError
from mheads.files import write_atomically
from mheads.pages.one import page_of
from mheads.pages.several import page_of_all
from mheads.progress import Watcher
from mheads.record import Record, read_all
from mheads.report.page import Cell, Page, Section, Table
from mheads.suites import findings, results, tables
from mheads.suites.jobs import FOLDER, Job, Options, Planner
from mheads.suites.suite import Suite, read

REFRESH = 5  # seconds after which an open page of a run that goes on is loaded again
POLL = 1.0  # seconds between two looks at its folder


def report(paths: Sequence[Path], output: Path | None, watch: Watcher, trust: bool = False) -> Path:
    """Writes the page of a run to report.html in its folder, or of several beside the first; returns where it is."""
    output = _file(output or _usual(paths))
    write_atomically(output, _page(read_all(paths, lenient=True), watch, trust).html())
    return output


def follow(
    paths: Sequence[Path],
    output: Path | None,
    watch: Watcher,
    trust: bool = False,
    wait: Callable[[float], None] = time.sleep,
) -> Path:
    """Writes the page anew whenever the runs go on, until all are finished or Ctrl-C; an open page follows."""
    output = _file(output or _usual(paths))
    told, before = False, None
    try:
        while True:
            now = [_stamp(path / name) for path in paths for name in WATCHED]
            if now != before:
                records = read_all(paths, lenient=True)
                if all(record.finished for record in records):
                    break
                page = _page(records, watch, trust, look=False)
                write_atomically(output, dataclasses.replace(page, refresh=REFRESH).html())
                before = now
                if not told:
                    watch.say(f"{output} follows the run until it is finished; Ctrl-C ends this")
                    told = True
            wait(POLL)
    except KeyboardInterrupt:
        pass  # the page stays, and no longer loads itself again
    return report(paths, output, watch, trust)


WATCHED = ("metrics.jsonl", "assignments.npz", "result.json", "config.yaml")


def report_suite(name: str, options: Options, output: Path | None, watch: Watcher, folder: Path = FOLDER) -> Path:
    """Writes the page of a suite: its table beside the paper's, and the runs of `mheads reproduce` that are there."""
    suite, planner = read(name), Planner(options, folder)
    table = planner.table(suite)
    output = _file(output or folder / results.file_name(suite.name, options).replace(".json", ".html"))
    document = results.make(table, planner, 1)
    records: dict[Path, Record] = {}
    for row in table.names:
        for job in _trials(planner, suite, row):
            if job.path not in records:
                title = job.row if job.seed == options.seed else f"{job.row}, seed {job.seed}"
                records[job.path] = Record.read(job.folder.path, title, lenient=True)
                if job.finished():
                    results.add(document, job, planner, suite)
    if not records:
        again = results.command(name, options, [options.seed])
        raise UserError(f"{folder} holds no run of {suite.name} on {options.short}: train them, {again}")
    page = page_of_all(
        list(records.values()), watch, title=tables.title(document), about=suite.about, further=_beside(document)
    )
    write_atomically(output, page.html())
    return output


def _trials(planner: Planner, suite: Suite, row: str) -> list[Job]:
    """The runs of a row that are there, one for each seed."""
    found, seed = [], planner.options.seed
    while (job := planner.job(suite, row, seed)).folder.exists():
        found.append(job)
        seed += 1
    return found


def _beside(document: results.Document) -> list[Section]:
    """The table beside the paper's, and what it claims."""
    rows = []
    for entry in document["rows"]:
        trials = findings.num_trials(document, entry["name"])
        cells = [Cell(text) for text in tables.cells(document, entry["name"])]
        rows.append([Cell(entry["name"]), Cell(str(trials) if trials else ""), *cells])
    heads = ["row", "trials", *tables.heads(document)]
    found = [Section("table", "Beside the paper", [Table("Our runs and the paper's figures", heads, rows)])]
    if claims := findings.verdicts(document):
        lines = [[Cell(claim.claim), Cell(claim.word), Cell(claim.figures)] for claim in claims]
        table = Table("What the paper claims, and whether it holds here", ["claim", "here", "figures"], lines)
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


def _file(path: Path) -> Path:
    """Refuses a file that cannot be written, before any work is done."""
    if path.suffix not in (".html", ".htm"):
        raise UserError(f"{path}: give a file that ends in .html")
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}")
    return path
