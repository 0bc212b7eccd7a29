"""Runs side by side as tables: their results, and the settings that differ.

    print(mheads.compare({"tree": run, "mcl": "runs/mcl"}))

`mheads compare` prints the same, and the page of several runs shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mheads.api.run import Run
from mheads.common.console import Console
from mheads.common.errors import UserError
from mheads.common.markdown_table import table_lines
from mheads.common.table import Cell, Table
from mheads.common.terminal_table import terminal_table
from mheads.config import schema
from mheads.problems import gives_numbers
from mheads.problems.baselines import near_chance, top
from mheads.problems.metric_text import label
from mheads.report.page import describe
from mheads.runs.read_run import Record, titles

MEASURES = ("ensemble_mean", "ensemble_scored", "oracle", "single", "disagreement")
# Of problems whose answers are numbers; those of classes have these for each predictor, which is too much for a column.
OF_HYPOTHESES = ("distortion", "min_ade", "min_fde", "nll")


@dataclass(frozen=True)
class Comparison:
    """Runs side by side. It prints as tables, and `rows` are plain dicts, as pandas.DataFrame takes them."""

    results: Table
    settings: Table | None  # None if all settings are equal

    @property
    def tables(self) -> list[Table]:
        return [self.results, *([self.settings] if self.settings else [])]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The results of each run, by the heads of the columns; None where it has none."""
        heads = [head.text for head in self.results.heads]
        values = [
            [cell.text or None if cell.value is None else cell.value for cell in row] for row in self.results.rows
        ]
        return [dict(zip(heads, row, strict=True)) for row in values]

    def __str__(self) -> str:
        parts = [part for table in self.tables for part in (terminal_table(table), table.note) if part]
        return "\n".join("".join(one.text for one in Console().render(part)).rstrip() for part in parts)

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        return "\n\n".join("\n".join(table_lines(table)) for table in self.tables)


def compare(runs: Mapping[str, Run | str | Path] | Sequence[Run | str | Path]) -> Comparison:
    """Sets runs side by side: runs in Python or their folders, with names of your own if you give a dict.

    Without those, runs in memory are `run 0`, `run 1`, ... by their place in the list.
    """
    if isinstance(runs, str | Path | Run):
        raise UserError("compare takes several runs: give a list of them, or a dict of names")
    given = list(runs.values() if isinstance(runs, Mapping) else runs)
    names = list(runs) if isinstance(runs, Mapping) else _name_runs(given)
    return compare_records(
        [
            run.record(name) if isinstance(run, Run) else Record.read(Path(run), name)
            for name, run in zip(names, given, strict=True)
        ]
    )


def _name_runs(runs: Sequence[Run | str | Path]) -> list[str]:
    """The names of their folders; runs in memory, whose folders have names of chance, by their place."""
    kept = [run for run in runs if not (isinstance(run, Run) and run.in_memory)]
    names = iter(titles([run.folder if isinstance(run, Run) else Path(run) for run in kept]))
    return [f"run {i}" if isinstance(run, Run) and run.in_memory else next(names) for i, run in enumerate(runs)]


def compare_records(records: Sequence[Record]) -> Comparison:
    check_measure(records)
    return Comparison(tabulate_results(records), tabulate_settings(records))


def show(comparison: Comparison, console: Console) -> None:
    for table in comparison.tables:
        console.print(terminal_table(table))
        if table.note:
            console.print(table.note)


def check_measure(records: Sequence[Record]) -> None:
    """Raises if there is no run, or if runs are not measured alike."""
    if not records:
        raise UserError("there is no run to compare: give at least one")
    first, measure = records[0].place, records[0].data.problem.measure
    for record in records[1:]:
        if record.data.problem.measure != measure:
            raise UserError(
                f"these runs have different metrics and cannot be compared: {record.place} has "
                f"{record.data.problem.measure}; {first} has {measure}"
            )


def on_same_examples(records: Sequence[Record]) -> bool:
    """Whether all are measured on the same examples, so that one can be the best."""
    marks = {(record.data.name, record.data.problem.groups, record.measured) for record in records if record.result}
    return len(marks) < 2


def most_members(records: Sequence[Record]) -> int:
    return max(record.config.members for record in records)


def tabulate_results(records: Sequence[Record]) -> Table:
    """A row for each run: what it is, and what it reaches."""
    problem, most = records[0].data.problem, most_members(records)
    form = ".2f" if problem.unit else ".4g"
    marked = len(set(map(_name_data, records))) < len({record.measured for record in records})
    columns: dict[str, Callable[[Record], Cell]] = {"run": lambda record: Cell(record.title)}
    if not on_same_examples(records):
        columns["data"] = lambda record: Cell(_name_data(record, marked))
    for key in (*MEASURES, *(OF_HYPOTHESES if gives_numbers(problem) else ())):
        if any((record.result or {}).get(key) is not None for record in records):
            columns[label(key)] = partial(_write_result, key=key, form=form)
        if key == "oracle" and most > 1 and any(top(record.result or {}, most) is not None for record in records):
            columns[f"top-{most}"] = lambda record: _write(top(record.result or {}, most), ".2f")
    columns["members"] = lambda record: Cell(str(record.config.members), record.config.members)
    columns["loss"] = _write_loss
    for key, digits in (("parameters", ",.0f"), ("seconds", ",.1f")):  # which are known in the end
        if any(key in (record.result or {}) for record in records):
            columns[key] = partial(_write_result, key=key, form=digits)
    if not all(record.finished for record in records):
        columns["state"] = lambda record: Cell(
            "finished" if record.finished else f"iteration {record.iteration:,}{record.evaluated}"
        )
    rows = [[write(record) for write in columns.values()] for record in records]
    splits = sorted({record.result["split"] for record in records if record.result})
    measure = problem.measure
    note = f"{measure[0].upper()}{measure[1:]}, on the {' and '.join(splits)} set." if splits else ""
    if f"top-{most}" in columns:
        note += (
            f" Top-{most}: the truth is among the {most} best classes of the run's one answer. An Oracle of {most} "
            f"members gives {most} answers too, so it compares with the top-{most} of one network."
        )
    chances = [f"{r.title} {r.result['oracle_chance']:.2f}" for r in records if r.result and near_chance(r.result)]
    if chances:
        note += f" The Oracle by chance: {', '.join(chances)}."
    return Table("All runs", list(columns), rows, sortable=True, note=note)


def _write(value: Any, form: str) -> Cell:
    return Cell(format(value, form), value) if isinstance(value, int | float) else Cell("")


def _write_result(record: Record, key: str, form: str) -> Cell:
    return _write((record.result or {}).get(key), form)


def _write_loss(record: Record) -> Cell:
    loss = record.config.loss
    options = [f",\N{NO-BREAK SPACE}{key}={describe.as_override(value)}" for key, value in loss.summary.items()]
    return Cell("".join([loss.name, *options]))


def _name_data(record: Record, marked: bool = False) -> str:
    """What a run was measured on, with a mark of the examples where the rest does not tell runs apart."""
    groups = len(record.data.problem.groups)
    classes = f", {groups:,}\N{NO-BREAK SPACE}classes" if groups > 1 else ""
    if not record.result:
        return f"{record.data.name}{classes}"
    known = not marked and "examples" in record.result
    examples = f"{record.result['examples']:,} examples" if known else record.measured
    return f"{record.data.name}{classes}, {record.result['split']} set, {examples}"


def tabulate_settings(records: Sequence[Record]) -> Table | None:
    """The keys of the configs that differ, with the value of each run."""
    flat = [schema.flatten(record.config) for record in records]
    keys = [key for key, value in flat[0].items() if any(_differ(key, value, other[key]) for other in flat)]
    rows = [[Cell(key), *(Cell(describe.as_override(values[key])) for values in flat)] for key in keys]
    return Table("Settings that differ", ["key", *(record.title for record in records)], rows) if keys else None


def _differ(key: str, one: Any, other: Any) -> bool:
    """Whether values of a key mean different things: `auto` of a run in memory is what its folder says."""
    return not (schema.same(key, one, other) or schema.same(key, other, one))
