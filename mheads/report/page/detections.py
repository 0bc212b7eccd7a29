"""What a page shows of detectors alone."""

from __future__ import annotations

from typing import Any

from mheads.common.table import Cell, Table
from mheads.runs.record import Record


def class_table(record: Record, result: dict[str, Any]) -> Table:
    """The average precision of every class: of the mean of all members and of one on average, with both kinds of
    boxes."""
    regressed, proposed = (result["classes"][which]["11-point"] for which in ("regressed", "proposals"))
    columns = [
        regressed["ensemble_mean"], _of_members(regressed), proposed["ensemble_mean"], _of_members(proposed)
    ]  # fmt: skip
    head = [
        "class",
        "Ensemble-Mean",
        "mean member",
        "Ensemble-Mean, boxes as proposed",
        "mean member, boxes as proposed",
    ]
    rows = [
        [Cell(name), *(_cell(column[c]) for column in columns)] for c, name in enumerate(record.data.problem.groups[1:])
    ]
    return Table(
        "Average precision of each class, %",
        head,
        rows,
        sortable=True,
        note="VOC 2007's 11 points. A class of which no image has an object has none.",
    )


def _of_members(found: dict[str, Any]) -> list[float | None]:
    each = [[value for value in values if value is not None] for values in zip(*found["members"], strict=True)]
    return [sum(values) / len(values) if values else None for values in each]


def _cell(value: float | None) -> Cell:
    return Cell("" if value is None else f"{value:.2f}", -1.0 if value is None else value)
