"""What detectors find, and how well, as the terminal shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.table
from rich.console import Group

from mheads.common.table import Cell, Head, Table, text_rows
from mheads.common.terminal_table import terminal_table
from mheads.suites.detectors import Difference, Precisions

WHICH = {"regressed": "regressed boxes", "proposals": "boxes as proposed"}


def precision_table(
    columns: Mapping[str, Precisions], measure: str, boxes: str, paper: tuple[str, dict[str, Any]] | None
) -> Group:
    """A line for each class: what each predictor reaches, mean and standard deviation over runs, and the paper's."""
    first = next(iter(columns.values()))
    runs = "" if len(first.values) == 1 else f", {len(first.values)} runs"
    title = f"average precision in %, {measure}, {WHICH[boxes]}{runs}"
    head: list[str | Head] = ["class", *(Head(name, right=True) for name in columns)]
    lines = [[name, *(_format(p.values[:, c]) for p in columns.values())] for c, name in enumerate(first.classes)]
    lines.append(["mean", *(_format(p.means) for p in columns.values())])
    if paper is not None:
        row, figures = paper
        head.append(Head(f"paper, {row}", right=True))
        theirs = [*zip(figures["ap"], figures["std"], strict=True), figures["mean"]]
        lines = [[*line, f"{mean:.2f} ± {std:.2f}"] for line, (mean, std) in zip(lines, theirs, strict=True)]
    rows = [*text_rows(lines[:-1]), [Cell(text, strong=True) for text in lines[-1]]]
    return Group(title, terminal_table(Table(title, head, rows)))


def _format(values: np.ndarray) -> str:
    if np.isnan(values).any():
        return "none there"
    return f"{values.mean():.2f}" + (f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else "")


def verdict(ours: Precisions, others: Precisions, test: Difference) -> str:
    """The paired test in words."""
    means = f"Ensemble-Mean {ours.means.mean():.2f} and {others.means.mean():.2f}"
    text = f"{means}: a difference of {test.mean:+.2f} points"
    if math.isnan(test.p):
        return f"{text}, the same in each of the {test.num_classes} classes: a paired test says nothing of it"
    sure = "more than chance" if test.p < 0.05 else "not to be told from chance"
    return f"{text}, {sure} (paired t-test over {test.num_classes} classes, p = {test.p:.2g})"


def object_table(objects: Mapping[str, Sequence[tuple[str, float, np.ndarray]]], least: float) -> rich.table.Table:
    """The objects that each member and their mean found."""
    rows = []
    for who, hits in objects.items():
        if not hits:
            rows.append([who, f"nothing from {least:g} on", "", ""])
        for i, (name, score, corners) in enumerate(hits):
            rows.append(["" if i else who, name, f"{score:.2f}", ", ".join(f"{x:.0f}" for x in corners)])
    head: list[str | Head] = ["", "object", Head("score", right=True), "left, top, right, bottom"]
    return terminal_table(Table("Objects", head, text_rows(rows)))
