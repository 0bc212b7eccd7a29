"""The results of a run as tables: beside the paper's, and of each class that a detector finds."""

from __future__ import annotations

from typing import Any

from mheads.common.errors import UserError
from mheads.common.table import Cell, Table
from mheads.problems import finds_objects
from mheads.problems.metric_text import format_metric, label
from mheads.report.shown_run import PaperFigures
from mheads.runs.read_run import Record
from mheads.runs.result_rows import result_rows


def tabulate_result(record: Record, paper: PaperFigures | None) -> Table:
    """All measures of a run; those of a finished one beside the paper's, where the paper has its config."""
    result = record.result
    if result is None:
        raise UserError("The run was not evaluated yet")
    measures = result_rows(record.data.problem, result)
    beside = paper(record.config) if paper and record.finished else None
    note = f"On {result['examples']:,} examples of the {result['split']} set."
    if beside is None:
        return Table("The result of this run", ["measure", "here"], measures, note=note)
    row, figures = beside
    metrics = {label(metric): metric for metric in figures}
    rows = []
    for name, text in measures:
        metric = metrics.get(name.text, "")
        figure = figures.get(metric, {})
        known = "mean" in figure and isinstance(result.get(metric), int | float)
        difference = f"{result[metric] - figure['mean']:+.2f}" if known else ""
        rows.append([name, text, Cell(_write_figure(figure, metric)), Cell(difference)])
    note += f" The paper's figures are those of the row {row}."
    return Table("This run beside the paper", ["measure", "here", "paper", "difference"], rows, note=note)


def _write_figure(figure: dict[str, Any], metric: str) -> str:
    if "members" in figure:
        return "  ".join(f"{value:.2f}" for value in figure["members"])
    if "mean" not in figure:
        return ""
    spread = f" ± {format_metric(figure['std'], metric)}" if figure.get("std") else ""
    return format_metric(figure["mean"], metric) + spread


def tabulate_precisions(record: Record) -> list[Table]:
    """The average precision of every class of a detector: of the mean of all members and of one on average, with both
    kinds of boxes."""
    problem = record.data.problem
    if not finds_objects(problem) or record.result is None:
        return []
    columns: dict[str, list[float | None]] = {}
    for boxes, kind in (("regressed", ""), ("proposals", ", boxes as proposed")):
        precisions = record.result["classes"][boxes]["11-point"]
        columns[f"Ensemble-Mean{kind}"] = precisions["ensemble_mean"]
        columns[f"mean member{kind}"] = [_mean(values) for values in zip(*precisions["members"], strict=True)]
    rows = [
        [Cell(name), *(_cell(column[c]) for column in columns.values())] for c, name in enumerate(problem.groups[1:])
    ]
    note = "VOC 2007's 11 points. A class of which no image has an object has none."
    return [Table("Average precision of each class, %", ["class", *columns], rows, sortable=True, note=note)]


def _mean(values: tuple[float | None, ...]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _cell(value: float | None) -> Cell:
    return Cell("" if value is None else f"{value:.2f}", -1.0 if value is None else value)
