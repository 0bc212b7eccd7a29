"""The page that sets several runs side by side: its panels, and what stands above them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from mheads.common.errors import UserError
from mheads.common.table import Cell, Table
from mheads.problems.baselines import tell_chance
from mheads.problems.metric_text import label
from mheads.report.charts.over_training import chart_runs
from mheads.report.compare import check_measure, most_members, on_same_examples, tabulate_results, tabulate_settings
from mheads.report.page import describe
from mheads.report.page.html import Headline, HeatMaps, Missing, Page, PageSection, Part
from mheads.report.page.one_run import map_run
from mheads.report.page.panels import Panel, make_sections
from mheads.report.shown_run import ShownRun
from mheads.runs.read_run import Record, one_network

Runs = Sequence[ShownRun]


def make_comparison(
    runs: Runs,
    title: str | None = None,
    about: str | None = None,
    further: Sequence[PageSection] = (),
    best: Headline | None = None,
) -> Page:
    """The runs in one table, their curves over each other, their ownership side by side; `further` sections first.

    `best` is the headline, by default the best run's.
    """
    records = [run.record for run in runs]
    check_measure(records)
    notes = [
        f"{record.title}: something is wrong in the run folder, {path.name} {problem}."
        for record in records
        for path, problem in record.folder.problems().items()
    ]
    unfinished = [
        f"{record.title}, iteration {record.iteration:,}{record.evaluated}" for record in records if not record.finished
    ]
    groups = max((record.data.problem.groups for record in records), key=len)
    sections, lacking = make_sections(COMPARISONS, runs, groups)
    return Page(
        title or f"{len(records)} runs",
        about or f"Side by side: {', '.join(record.title for record in records)}.",
        best if best is not None else headline(records) if on_same_examples(records) else [],
        [*further, *sections],
        f"Not finished: {'; '.join(unfinished)}" if unfinished else "",
        notes,
        "Made by mheads.",
        lacking,
    )


def headline(records: Sequence[Record]) -> Headline:
    """The best of the two measures, and whose they are: all that have it; an Oracle that chance has too is none."""
    problem, entries = records[0].data.problem, []
    form = ".2f" if problem.unit else ".4g"
    results = {record.title: record.result for record in records if record.result}
    scored = [title for title, result in results.items() if "ensemble_scored" in result]
    for key in ("ensemble_mean", "oracle"):
        name, values = label(key), {title: result.get(key) for title, result in results.items()}
        if key == "oracle":
            values = {
                title + tell_chance(result): result.get(key)
                for title, result in results.items()
                if result.get("oracle_chance") != 100
            }
        elif scored:
            answer = {title: "ensemble_scored" if title in scored else key for title in results}
            name = "one answer"
            values = {f"{title} ({label(answer[title])})": results[title].get(answer[title]) for title in results}
        if known := {title: value for title, value in values.items() if value is not None}:
            value, who = find_best(known, bool(problem.unit), lambda value: format(value, form))
            entries.append((f"Best {name}", value, problem.unit, ", ".join(who)))
    most = most_members(records)
    if most > 1 and (baseline := one_network(records, most)):
        whose, top_k = baseline
        entries.append((f"One network's top-{most}", format(top_k, ".2f"), problem.unit, whose))
    return entries


def find_best(values: Mapping[str, float], higher: bool, write: Callable[[float], str]) -> tuple[str, list[str]]:
    """The best value as it is written, and all whose value is written so."""
    best = write((max if higher else min)(values.values()))
    return best, [name for name, value in values.items() if write(value) == best]


def show_table(runs: Runs) -> Sequence[Part]:
    return [tabulate_results([run.record for run in runs])]


def show_settings(runs: Runs) -> Sequence[Part]:
    table = tabulate_settings([run.record for run in runs])
    if table is None:
        raise UserError("Nothing: all have the same settings")
    return [table]


def show_one_answer(runs: Runs) -> Sequence[Part]:
    """What each run answers with against the iteration: Ensemble-Scored where members have scores, else the mean."""
    keys = [
        "ensemble_scored" if any("ensemble_scored" in line for line in run.record.log.evaluations) else "ensemble_mean"
        for run in runs
    ]
    if "ensemble_scored" not in keys:
        return show_measure(runs, "ensemble_mean", "Ensemble-Mean")
    logs = [(run.record, key) for run, key in zip(runs, keys, strict=True)]
    named = [(f"{record.title}, {label(key)}", key, record.log.evaluations) for record, key in logs]
    return [chart_runs("One answer", named, runs[0].record.data.problem.measure)]


def show_measure(runs: Runs, key: str, title: str) -> Sequence[Part]:
    """One measure of the runs against the iteration."""
    logs = [(run.record.title, key, run.record.log.evaluations) for run in runs]
    return [chart_runs(title, logs, runs[0].record.data.problem.measure)]


def show_ownership(runs: Runs) -> Sequence[Part]:
    pictures: dict[str, list[str]] = {}  # of the classes of each dataset
    maps, missing = [], []
    for i, run in enumerate(runs):
        record, data = run.record, run.record.data.fingerprint
        if record.config.members == 1:
            continue  # it owns everything
        if data not in pictures:
            pictures[data] = run.class_pictures
        try:
            maps.append(map_run(record, f"owned-{i}", record.title, pictures[data]))
        except UserError as error:
            missing.append(Missing(f"{record.title}: {error}."))
    if not maps and not missing:
        raise UserError("No run has several members")
    return [*([HeatMaps(maps)] if maps else []), *missing]


def show_commands(runs: Runs) -> Sequence[Part]:
    records = [run.record for run in runs]
    rows = [
        [Cell(record.title), Cell(describe.command(record.config)), Cell(str(record.config.seed), record.config.seed)]
        for record in records
    ]
    versions = sorted({describe.versions(record) for record in records} - {""})
    return [Table("Commands", ["run", "command", "seed"], rows, note="; ".join(versions))]


COMPARISONS: dict[str, Panel[Runs]] = {
    "table": Panel("runs", show_table),
    "settings": Panel("settings", show_settings),
    "one answer": Panel("curves", show_one_answer),
    "oracle": Panel("curves", partial(show_measure, key="oracle", title="Oracle")),
    "mean member": Panel("curves", partial(show_measure, key="single", title="Mean member")),
    "ownership": Panel("ownership", show_ownership),
    "commands": Panel("repeat", show_commands),
}
