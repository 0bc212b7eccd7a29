"""The page of a suite: its table beside the paper's, what it claims, and its runs."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

from mheads.common.atomic_files import check_output, write_atomically
from mheads.common.errors import UserError
from mheads.common.progress import Watcher
from mheads.problems.metric_text import format_metric, label
from mheads.report.page.html import Headline, PageSection
from mheads.report.page.report import SUFFIXES
from mheads.report.page.several_runs import find_best, make_comparison
from mheads.report.shown_run import ShownRun
from mheads.runs.read_run import Record
from mheads.suites import findings, results, tables
from mheads.suites.compute import add_costs, compute_table
from mheads.suites.jobs import Options
from mheads.suites.planner import FOLDER, Planner
from mheads.suites.run_entries import add_run
from mheads.suites.suite import read_suite
from mheads.suites.verdicts import TEST


def report_suite(name: str, options: Options, output: Path | None, watch: Watcher, folder: Path = FOLDER) -> Path:
    """Writes the page of a suite: its table beside the paper's, and the runs of `mheads reproduce` that are there."""
    suite, planner = read_suite(name), Planner(options, folder)
    table = planner.expand(suite)
    if output is not None:
        check_output(output, SUFFIXES)
    document = results.make_document(table, planner)
    records: dict[Path, Record] = {}
    for row in table.names:
        for job in sorted(planner.jobs_with_folders(suite, row), key=lambda job: job.seed):
            if job.path not in records and job.folder.exists():
                try:
                    finished = job.is_finished()
                except UserError as error:  # a run of another config, which `reproduce` does not show either
                    watch.warn(f"left out: {error}")
                    continue
                title = job.row if job.seed == options.seed else f"{job.row}, seed {job.seed}"
                records[job.path] = Record.read(job.folder.path, title, lenient=True)
                if finished:
                    add_run(document, job, planner, suite)
    if not records:
        again = results.command(name, options, [options.seed], planner.held_out(suite))
        again += "" if folder == FOLDER else f" -f {shlex.quote(str(folder))}"
        raise UserError(f"{folder} holds no run of {suite.name} on {options.short}: train them, {again}")
    add_costs(document, planner, suite)
    page = make_comparison(
        [ShownRun(record, watch) for record in records.values()],
        title=tables.title(document),
        about=suite.about,
        further=_beside(document),
        best=_best(document),
    )
    output = output or folder / results.file_name(suite.name, options).replace(".json", ".html")
    write_atomically(output, page.html())
    return output


def _best(document: results.Document) -> Headline:
    """The rows with the best means over their trials: all that have them."""
    facts, percent = [], findings.in_percent(document)
    for metric in ("ensemble_mean", "oracle"):
        rows = {entry["name"]: findings.trials(document, entry["name"], metric) for entry in document["rows"]}
        means = {row: trials.mean for row, trials in rows.items() if trials is not None}
        if metric == "oracle":  # that of members which always give one class each is no merit
            chances = {row: findings.trials(document, row, "oracle_chance") for row in means}
            means = {row: mean for row, mean in means.items() if not ((c := chances[row]) and c.mean == 100)}
        if means:
            higher = findings.higher_is_better(document, metric)
            value, who = find_best(means, higher, partial(format_metric, metric=metric, percent=percent))
            value = findings.format_ours(document, who[0], metric) if len(who) == 1 else value
            facts.append((f"Best {label(metric)}", value, "%" if percent else "", ", ".join(who)))
    return facts


def _beside(document: results.Document) -> list[PageSection]:
    """The table beside the paper's, and what it claims."""
    table, claims = tables.suite_table(document), tables.claims_table(document)
    sections = [PageSection("table", "The table" if table.note else "Beside the paper", [table])]
    if claims is not None:
        sections.append(PageSection("claims", "What holds", [replace(claims, note=f"{claims.note} {TEST}".strip())]))
    if (compute := compute_table(document)) is not None:
        sections.append(PageSection("compute", "What it takes", [compute]))
    return sections
