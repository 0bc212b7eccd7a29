"""The figure of a suite: its rows, with our results beside those of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from matplotlib.ticker import MaxNLocator

from mheads.report.charts.chart import printable
from mheads.report.figures.figure import PALETTE, Figure, label_axes

Point = Sequence[float | None]  # our mean and its standard deviation, then the paper's


def draw_suite(rows: Sequence[str], metrics: Mapping[str, Sequence[Point]], title: str) -> Figure:
    """Rows from above to below, with a panel for each metric and in it a point for each row.

    What is None is left out, and so are metrics and rows of which nothing is known.
    """
    known = [i for i in range(len(rows)) if any({*points[i]} != {None} for points in metrics.values())]
    if known:
        rows = [rows[i] for i in known]
        metrics = {metric: [points[i] for i in known] for metric, points in metrics.items()}
        metrics = {metric: points for metric, points in metrics.items() if {*chain(*points)} != {None}}
    width = 1.4 + 0.07 * max(len(row) for row in rows)
    figure = Figure(width + 2.6 * len(metrics), 1.2 + 0.26 * len(rows))
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(1, len(metrics), squeeze=False, sharey=True)[0]
    compared = any(point[2] is not None for points in metrics.values() for point in points)
    ours: dict[str, Any] = {"fmt": "o", "color": PALETTE[0], "label": "here"}
    theirs: dict[str, Any] = {"fmt": "D", "color": PALETTE[5], "label": "paper", "markerfacecolor": "white"}
    for panel, (metric, points) in zip(panels, metrics.items(), strict=True):
        for column, shift, style in ((0, -0.12, ours), (2, 0.12, theirs)) if compared else ((0, 0.0, ours),):
            at = [i for i, point in enumerate(points) if point[column] is not None]
            means = [points[i][column] for i in at]
            spreads = [points[i][column + 1] or 0 for i in at]
            panel.errorbar(means, [i + shift for i in at], xerr=spreads, markersize=4, capsize=2, **style)
        label_axes(panel, metric, "")
        panel.xaxis.set_major_locator(MaxNLocator(5))  # more would run into one another
        panel.grid(axis="y", color="0.9", linewidth=0.8)
        panel.set_axisbelow(True)
    panels[0].set_yticks(range(len(rows)), [printable(row) for row in rows], fontsize=8, parse_math=False)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    if compared:
        panels[-1].legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure
