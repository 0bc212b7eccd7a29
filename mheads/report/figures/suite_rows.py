"""The figure of a suite: its rows, with our results beside those of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from mheads.problems.metric_text import label
from mheads.report.charts.chart import printable
from mheads.report.figures.figure import PALETTE, Figure, label_axes

Point = Sequence[float | None]  # our mean and its standard deviation, None of one seed, then the paper's
HOLLOW = "hollow: one seed"
SPAN = 20  # from the smallest to the largest mean, above which an axis is logarithmic
TOP_M, ORACLE = label("top_m"), label("oracle")
ONE_ANSWER = (label("single"), label("ensemble_mean"), ORACLE)  # which one network has alike


def draw_suite(rows: Sequence[str], metrics: Mapping[str, Sequence[Point]], title: str) -> Figure:
    """Rows from above to below, with a panel for each metric and in it a point for each row.

    What is None is left out, and so are metrics and rows of which nothing is known. What one network reaches with M
    guesses is a line in the panel of the Oracle.
    """
    known = [i for i in range(len(rows)) if any({*points[i]} != {None} for points in metrics.values())]
    if known:
        rows = [rows[i] for i in known]
        metrics = {metric: [points[i] for i in known] for metric, points in metrics.items()}
        metrics = {metric: points for metric, points in metrics.items() if {*chain(*points)} != {None}}
    width = 1.4 + 0.07 * max(len(row) for row in rows)
    figure = Figure(width + 2.6 * len(metrics), 1.4 + 0.26 * len(rows))
    figure.suptitle(with_note(title, chain(*metrics.values())), fontsize=10)
    panels = figure.subplots(1, len(metrics), squeeze=False, sharey=True)[0]
    compared = any(point[2] is not None for points in metrics.values() for point in points)
    ours: dict[str, Any] = {"fmt": "o", "color": PALETTE[0]}
    theirs: dict[str, Any] = {"fmt": "D", "color": PALETTE[5], "markerfacecolor": "white"}
    for panel, (metric, points) in zip(panels, metrics.items(), strict=True):
        for column, shift, style in ((0, -0.12, ours), (2, 0.12, theirs)) if compared else ((0, 0.0, ours),):
            for i, point in enumerate(points):
                mean, std = point[column : column + 2]
                if mean is not None:
                    face = {"markerfacecolor": "none"} if column == 0 and std is None else {}
                    panel.errorbar(mean, i + shift, xerr=std, markersize=4, capsize=2, **style | face)
        label_axes(panel, metric, "")
        panel.xaxis.set_major_locator(MaxNLocator(5))  # more would run into one another
        if not metric.startswith("NLL"):  # which is a logarithm
            _scale([mean for point in points for mean in (point[0], point[2]) if mean is not None], panel)
        panel.grid(axis="y", color="0.9", linewidth=0.8)
        panel.set_axisbelow(True)
        if metric == ORACLE and (level := _guesses_of_one_network(rows, metrics)) is not None:
            panel.axvline(level[1], color=PALETTE[7], linestyle="--", linewidth=1, label=f"{TOP_M} of {level[0]}")
    panels[0].set_yticks(range(len(rows)), [printable(row) for row in rows], fontsize=8, parse_math=False)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    if compared:
        for name, style in (("here", ours), ("paper", theirs)):
            panels[-1].errorbar([], [], xerr=[], markersize=4, capsize=2, label=name, **style)
    for panel in panels:
        if panel.get_legend_handles_labels()[1]:
            panel.legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    return figure


def with_note(title: str, points: Any) -> str:
    """The title of a figure, which says what hollow points are if it has some."""
    return f"{title}\n{HOLLOW}" if any(mean is not None and std is None for mean, std, *_ in points) else title


def _scale(means: Sequence[float], panel: Axes) -> None:
    """Means that lie far from one another are shown on a logarithmic axis, on which bars down to 0 end at the edge."""
    if means and min(means) > 0 and (span := max(means) / min(means)) > SPAN:
        panel.set_xscale("log")
        panel.set_xlim(left=max(panel.get_xlim()[0], min(means) / 3))
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if span < 1000 else (1.0,), numticks=6))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")


def _guesses_of_one_network(rows: Sequence[str], metrics: Mapping[str, Sequence[Point]]) -> tuple[str, float] | None:
    """The first row of one network, whose Oracle is its one answer, and its top-M."""
    answers = [metrics[metric] for metric in ONE_ANSWER if metric in metrics]
    for i, (row, (top_m, *_)) in enumerate(zip(rows, metrics.get(TOP_M, ()), strict=False)):
        if top_m is not None and len(answers) > 1 and len({points[i][0] for points in answers}) == 1:
            return row, top_m
    return None
