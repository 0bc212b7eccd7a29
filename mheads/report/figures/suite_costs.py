"""The figure of a suite by what its rows cost: better and cheaper are two directions of one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mheads.report.charts.chart import printable
from mheads.report.figures.figure import PALETTE, Figure, label_axes
from mheads.report.figures.suite_rows import Point

MARKERS = "osD^v"


def draw_costs(
    rows: Sequence[str], metrics: Mapping[str, Sequence[Point]], costs: Mapping[str, Sequence[float | None]], title: str
) -> Figure:
    """A panel for each metric (from above to below) and each kind of cost (side by side), in it a point for each row.

    Costs are shown as multiples of those of the first row that has some, on a logarithmic axis. Rows without a cost are
    left out.
    """
    first = next((i for i in range(len(rows)) if all(cost[i] for cost in costs.values())), 0)
    figure = Figure(2.4 + 3.4 * len(costs), 0.8 + 2.6 * len(metrics))
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(len(metrics), len(costs), squeeze=False, sharex="col", sharey="row")
    for line, (metric, values) in zip(panels, metrics.items(), strict=True):
        for panel, cost in zip(line, costs.values(), strict=True):
            for i, ((mean, std, *_), x) in enumerate(zip(values, cost, strict=True)):
                if mean is not None and x and (unit := cost[first]):
                    style = {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i // len(PALETTE) % len(MARKERS)]}
                    name = printable(rows[i])
                    panel.errorbar(x / unit, mean, yerr=std or 0, markersize=5, capsize=2, label=name, **style)
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            panel.grid(color="0.92", linewidth=0.8)
            panel.set_axisbelow(True)
            label_axes(panel, "", metric if panel is line[0] else "")
    for panel, kind in zip(panels[-1], costs, strict=True):
        panel.set_xlabel(f"{kind}, {printable(rows[first])} = 1", fontsize=8)
    points = dict(zip(*reversed(panels[0][0].get_legend_handles_labels()), strict=True))
    figure.legend(points.values(), points.keys(), loc="outside right center", fontsize=7, frameon=False)
    return figure
