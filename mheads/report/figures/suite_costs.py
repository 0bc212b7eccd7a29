"""The figure of a suite by what its rows cost: better and cheaper are two directions of one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from mheads.report.charts.chart import printable
from mheads.report.figures.figure import PALETTE, Figure, label_axes
from mheads.report.figures.suite_rows import Point, with_note

MARKERS = "osD^v"  # as many as have no factor in common with the colours: each of 40 rows has a pair of its own
FAR = 3.0  # times the distance of the quartiles: how far outside them a point is left out of the axis
LEAST_ROWS = 5  # that have quartiles worth the name


def draw_costs(
    rows: Sequence[str], metrics: Mapping[str, Sequence[Point]], costs: Mapping[str, Sequence[float | None]], title: str
) -> Figure:
    """A panel for each metric (from above to below) and each kind of cost (side by side), in it a point for each row.

    Costs are shown as multiples of those of the first row that has some, on a logarithmic axis. Rows without a cost are
    left out. A point that is far from all others stands at the edge, with an arrow and its value.
    """
    first = next((i for i in range(len(rows)) if all(cost[i] for cost in costs.values())), 0)
    figure = Figure(2.4 + 3.4 * len(costs), 0.9 + 2.6 * len(metrics))
    figure.suptitle(with_note(title, chain(*metrics.values())), fontsize=10)
    panels = figure.subplots(len(metrics), len(costs), squeeze=False, sharex="col", sharey="row")
    for line, (metric, values) in zip(panels, metrics.items(), strict=True):
        shown = [point for i, point in enumerate(values) if any(cost[i] for cost in costs.values())]
        limits = find_limits(shown)
        if limits is not None:
            line[0].set_ylim(*limits)
        for panel, cost in zip(line, costs.values(), strict=True):
            for i, ((mean, std, *_), x) in enumerate(zip(values, cost, strict=True)):
                if mean is not None and x and (unit := cost[first]):
                    style = {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)], "markersize": 5}
                    style |= {"linestyle": "none", "label": printable(rows[i])}
                    style |= {"markerfacecolor": "none"} if std is None else {}
                    if limits is None or limits[0] <= mean <= limits[1]:
                        panel.errorbar(x / unit, mean, yerr=std, capsize=2, elinewidth=1.2, **style)
                    else:
                        _draw_at_edge(panel, x / unit, mean, limits, style)
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            panel.grid(color="0.92", linewidth=0.8)
            panel.set_axisbelow(True)
            label_axes(panel, "", metric if panel is line[0] else "")
    for panel, kind in zip(panels[-1], costs, strict=True):
        panel.set_xlabel(f"{kind}, {printable(rows[first])} = 1", fontsize=8)
    points = dict(zip(*reversed(panels[0][0].get_legend_handles_labels()), strict=True))
    points = {printable(row): points[printable(row)] for row in rows if printable(row) in points}
    figure.legend(points.values(), points.keys(), loc="outside right center", fontsize=7, frameon=False)
    return figure


def find_limits(points: Sequence[Point]) -> tuple[float, float] | None:
    """The ends of an axis that leaves out what is far from the middle half of all means; None if nothing is."""
    known = [(mean, std or 0.0) for mean, std, *_ in points if mean is not None]
    if len(known) < LEAST_ROWS:
        return None
    low, high = np.quantile([mean for mean, _ in known], [0.25, 0.75])
    reach = FAR * (high - low)
    near = [(mean, std) for mean, std in known if low - reach <= mean <= high + reach]
    if len(near) == len(known) or reach == 0:
        return None
    bottom, top = min(mean - std for mean, std in near), max(mean + std for mean, std in near)
    margin = 0.15 * (top - bottom)  # which has room for the arrow
    return bottom - margin, top + margin


def _draw_at_edge(panel: Axes, x: float, mean: float, limits: tuple[float, float], style: dict[str, Any]) -> None:
    """A point beyond the limits: inside the panel's edge, with an arrow across it and its value beside it."""
    place = panel.get_xaxis_transform()  # x of the data, and the part of the height
    edge, inside = (0.0, 0.07) if mean < limits[0] else (1.0, 0.93)
    panel.plot([x], [inside], transform=place, **style)
    arrow = {"arrowstyle": "->", "color": style["color"], "shrinkA": 4, "shrinkB": 0}
    panel.annotate("", (x, edge), (x, inside), xycoords=place, textcoords=place, arrowprops=arrow)
    beside: dict[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
    panel.annotate(f"{mean:.4g}", (x, inside), xycoords=place, **beside)
