"""What detectors find, and how well, as the terminal shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.table
from rich import box
from rich.console import Group

from mheads.common.table import Head, Table, text_rows
from mheads.common.terminal_table import terminal_table

WHO = {"ensemble_mean": "Ensemble-Mean", "single": "mean member", "oracle": "Oracle"}
WHICH = {"regressed": "regressed boxes", "proposals": "boxes as proposed"}


def precision_table(
    columns: Mapping[str, Any], measure: str, boxes: str, beside: dict[str, Any] | None, row: str | None
) -> Group:
    """A line for each class: what each predictor reaches, mean and deviation over runs, and the paper's value."""
    first = next(iter(columns.values()))
    runs = "" if len(first.values) == 1 else f", {len(first.values)} runs"
    title = f"average precision in %, {measure}, {WHICH[boxes]}{runs}"
    table = rich.table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("class")
    for name in columns:
        table.add_column(name, justify="right")
    if beside is not None:
        table.add_column(f"paper, {row}", justify="right")
    for c, name in enumerate(first.classes):
        theirs = [] if beside is None else [f"{beside['ap'][c]:.2f} ± {beside['std'][c]:.2f}"]
        table.add_row(name, *(_said(column, column.values[:, c]) for column in columns.values()), *theirs)
    table.add_section()
    theirs = [] if beside is None else ["{:.2f} ± {:.2f}".format(*beside["mean"])]
    table.add_row("mean", *(_said(column, column.means) for column in columns.values()), *theirs, style="bold")
    return Group(title, table)


def _said(column: Any, values: np.ndarray) -> str:
    if np.isnan(values).any():
        return "none there"
    spread = column.spread(values)
    return f"{values.mean():.2f}" + ("" if math.isnan(spread) else f" ± {spread:.2f}")


def verdict(one: Any, other: Any, test: dict[str, float]) -> str:
    """The paired test in words."""
    means = f"{one.means.mean():.2f} and {other.means.mean():.2f}"
    if math.isnan(test["p"]):
        return (
            f"Ensemble-Mean {means}: a difference of {test['difference']:+.2f} points, the same in each of the "
            f"{test['classes']} classes: a paired test says nothing of it"
        )
    sure = "more than chance" if test["p"] < 0.05 else "not to be told from chance"
    return (
        f"Ensemble-Mean {means}: a difference of {test['difference']:+.2f} points, {sure} "
        f"(paired t-test over {test['classes']} classes, p = {test['p']:.2g})"
    )


def object_table(found: Mapping[str, Sequence[tuple[str, float, np.ndarray]]], least: float) -> rich.table.Table:
    """The objects that each member and their mean found."""
    rows = []
    for who, objects in found.items():
        if not objects:
            rows.append([who, f"nothing from {least:g} on", "", ""])
        for i, (name, score, corners) in enumerate(objects):
            rows.append(["" if i else who, name, f"{score:.2f}", ", ".join(f"{x:.0f}" for x in corners)])
    head: list[str | Head] = ["", "object", Head("score", right=True), "left, top, right, bottom"]
    return terminal_table(Table("Objects", head, text_rows(rows)))
