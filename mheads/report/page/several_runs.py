"""The page that sets several runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mheads.common.errors import UserError
from mheads.common.progress import Watcher
from mheads.common.table import Cell, Table
from mheads.config import schema
from mheads.problems.baselines import top
from mheads.problems.metric_text import label
from mheads.report.page import curves, describe
from mheads.report.page.evidence import pictures
from mheads.report.page.html import Grids, Missing, Page, Part, Section
from mheads.report.page.one_run import OWNED, owned_title, ownership
from mheads.runs.record import Record, one_network

Fact = tuple[str, str, str, str]  # what, its value, the unit, and whose it is
MEASURES = ("ensemble_mean", "ensemble_scored", "oracle", "single", "disagreement")


def page_of_all(
    records: Sequence[Record],
    watch: Watcher,
    look: bool = True,
    title: str | None = None,
    about: str | None = None,
    further: Sequence[Section] = (),
    best: list[Fact] | None = None,
) -> Page:
    """The runs in one table, their curves over each other, their ownership side by side; `further` sections first.

    `best` is the headline, by default the best run's.
    """
    for record in records[1:]:
        if record.data.problem.measure != records[0].data.problem.measure:
            raise UserError(
                f"{record.folder.path} measures {record.data.problem.measure}, {records[0].folder.path} "
                f"{records[0].data.problem.measure}: report them one by one"
            )
    sections = [
        *further,
        Section("runs", "The runs", [_table(records)], "A click on the head of a column sorts by it."),
        Section("settings", "What is different", [_settings(records)]),
        Section("curves", "Over training", [
            curves.one_answer(records),
            curves.compared(records, "oracle", "Oracle"),
            curves.compared(records, "single", "Mean member"),
        ]),
        Section("ownership", owned_title(records), _ownership(records, watch, look), OWNED),
        Section("repeat", "How to repeat it", [_commands(records)]),
    ]  # fmt: skip
    notes = [
        f"{record.title}: something is wrong in the run folder, {path.name} {problem}."
        for record in records
        for path, problem in record.folder.problems().items()
    ]
    open_runs = [f"{record.title}, iteration {record.iteration:,}" for record in records if not record.finished]
    return Page(
        title or f"{len(records)} runs",
        about or f"Side by side: {', '.join(record.title for record in records)}.",
        best if best is not None else _headline(records) if _alike(records) else [],
        sections,
        f"Not finished: {'; '.join(open_runs)}" if open_runs else "",
        notes,
        "Made by mheads.",
    )


def _alike(records: Sequence[Record]) -> bool:
    """Whether all are measured on the same examples, so that one can be the best."""
    marks = {(record.data.name, record.data.problem.groups, record.measured) for record in records if record.result}
    return len(marks) < 2


def _headline(records: Sequence[Record]) -> list[Fact]:
    """The best of the two measures, and whose they are: all that have it."""
    problem, found = records[0].data.problem, []
    form = ".2f" if problem.unit else ".4g"
    results = {record.title: record.result for record in records if record.result}
    scored = [title for title, result in results.items() if "ensemble_scored" in result]
    for key in ("ensemble_mean", "oracle"):
        name, known = label(key), {title: result.get(key) for title, result in results.items()}
        if scored and key == "ensemble_mean":
            answer = {title: "ensemble_scored" if title in scored else key for title in results}
            name = "one answer"
            known = {f"{title} ({label(answer[title])})": results[title].get(answer[title]) for title in results}
        if there := {title: value for title, value in known.items() if value is not None}:
            value, who = best_of(there, bool(problem.unit), lambda value: format(value, form))
            found.append((f"Best {name}", value, problem.unit, ", ".join(who)))
    most = _most_members(records)
    if most > 1 and (baseline := one_network(records, most)):
        whose, top_k = baseline
        found.append((f"One network's top-{most}", format(top_k, ".2f"), problem.unit, whose))
    return found


def _most_members(records: Sequence[Record]) -> int:
    return max(record.config.members for record in records)


def best_of(values: Mapping[str, float], higher: bool, shown: Callable[[float], str]) -> tuple[str, list[str]]:
    """The best value as it is shown, and all whose value is shown so."""
    best = shown((max if higher else min)(values.values()))
    return best, [name for name, value in values.items() if shown(value) == best]


def _table(records: Sequence[Record]) -> Table:
    shown = [key for key in MEASURES if any(key in (record.result or {}) for record in records)]
    data = not _alike(records)
    marked = len(set(map(_data, records))) < len({record.measured for record in records})
    most = _most_members(records)
    beside = [top(record.result or {}, most) for record in records]
    fair = [f"top-{most}"] if most > 1 and any(value is not None for value in beside) else []
    after = shown.index("oracle") + 1 if "oracle" in shown else len(shown)  # where top-M stands
    names = list(map(label, shown))
    head = ["run", *["data"] * data, *names[:after], *fair, *names[after:], "members", "loss", "parameters", "seconds"]
    if open_runs := not all(record.finished for record in records):
        head.append("state")
    rows = []
    for record, value in zip(records, beside, strict=True):
        result, loss = record.result or {}, record.config.loss
        k = f",\N{NO-BREAK SPACE}k={loss.options['k']}" if "k" in loss.options else ""
        cells = [_number(result.get(key), ".2f" if record.data.problem.unit else ".4g") for key in shown]
        rows.append(
            [
                Cell(record.title),
                *[Cell(_data(record, marked))] * data,
                *cells[:after],
                *(_number(value, ".2f") for _ in fair),
                *cells[after:],
                Cell(str(record.config.members), record.config.members),
                Cell(f"{loss.name}{k}"),
                _number(result.get("parameters"), ",.0f"),
                _number(result.get("seconds"), ",.1f"),
                *([Cell("finished" if record.finished else f"iteration {record.iteration:,}")] if open_runs else []),
            ]
        )
    unit = records[0].data.problem.measure
    splits = sorted({record.result["split"] for record in records if record.result})
    note = f"{unit[0].upper()}{unit[1:]}, on the {' and '.join(splits)} set." if splits else ""
    if fair:
        note += (
            f" Top-{most}: the truth is among the {most} best classes of the run's one answer. An Oracle of {most} "
            f"members gives {most} answers too, so it compares with the top-{most} of one network."
        )
    return Table("All runs", head, rows, sortable=True, note=note)


def _data(record: Record, marked: bool = False) -> str:
    """What a run was measured on, with a mark of the examples where the rest does not tell runs apart."""
    groups = len(record.data.problem.groups)
    classes = f", {groups:,}\N{NO-BREAK SPACE}classes" if groups > 1 else ""
    if not record.result:
        return f"{record.data.name}{classes}"
    known = not marked and "examples" in record.result
    examples = f"{record.result['examples']:,} examples" if known else record.measured
    return f"{record.data.name}{classes}, {record.result['split']} set, {examples}"


def _number(value: Any, form: str) -> Cell:
    return Cell(format(value, form), value) if isinstance(value, int | float) else Cell("")


def _settings(records: Sequence[Record]) -> Part:
    flat = [schema.flatten(record.config) for record in records]
    keys = [key for key in flat[0] if any(other[key] != flat[0][key] for other in flat)]
    if not keys:
        return Missing("Nothing: all have the same settings.")
    rows = [[Cell(key), *(Cell(describe.short(values[key])) for values in flat)] for key in keys]
    return Table("Settings that differ", ["key", *(record.title for record in records)], rows)


def _ownership(records: Sequence[Record], watch: Watcher, look: bool) -> list[Part]:
    shown: dict[str, list[str]] = {}
    grids, missing = [], []
    for i, record in enumerate(records):
        if record.config.members == 1:
            continue  # it owns everything
        data = record.data.fingerprint
        if look and data not in shown:
            shown[data] = pictures(record, watch)
        grid = ownership(record, shown.get(data, []), f"owned-{i}", record.title)
        if isinstance(grid, str):
            missing.append(Missing(f"{record.title}: {grid}"))
        else:
            grids.append(grid)
    found: list[Part] = [Grids(grids)] if grids else []
    return [*found, *missing] or [Missing("No run has several members.")]


def _commands(records: Sequence[Record]) -> Table:
    rows = [
        [Cell(record.title), Cell(describe.command(record.config)), Cell(str(record.config.seed), record.config.seed)]
        for record in records
    ]
    versions = {", ".join(f"{name} {version}" for name, version in record.result["versions"].items())
                for record in records if record.result and "versions" in record.result}  # fmt: skip
    return Table("Commands", ["run", "command", "seed"], rows, note="; ".join(sorted(versions)))
