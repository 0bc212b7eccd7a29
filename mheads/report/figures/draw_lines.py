"""Charts of lines, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from mheads.report.charts.chart import Line, LineChart, Mark, find_hidden_lines, printable, shorten
from mheads.report.figures.figure import PALETTE, Figure, label_axes

ROLES = {"ink": "black", "faint": "0.55"}
DASHES = {"": "-", "dashed": "--", "dotted": ":"}
MARKS: dict[Mark, dict[str, Any]] = {
    "": {},
    "point": {"marker": "o", "markersize": 2.5},
    "dot": {"marker": "o", "markersize": 4},
    "ring": {"marker": "o", "markersize": 8, "fillstyle": "none"},  # around what may lie on it
    "square": {"marker": "s", "markersize": 5},
}
# Where a name may stand beside its point: the first place that is free is taken.
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
SIDEWAYS, UPWARD = {-1: "right", 0: "center", 1: "left"}, {-1: "top", 0: "center", 1: "bottom"}


def draw_line_charts(charts: Sequence[LineChart]) -> Figure:
    """Charts side by side, each with the chart below it; a line that is in several is named in the first."""
    figure = Figure(sum(chart.size[0] for chart in charts), max(chart.size[1] for chart in charts))
    deep = any(chart.below for chart in charts)
    panels = figure.subplots(
        2 if deep else 1, len(charts), squeeze=False, sharex="col", height_ratios=(3, 1) if deep else None
    )
    named: set[str] = set()
    for chart, (panel, *beneath) in zip(charts, panels.T, strict=True):
        _draw_chart(panel, chart)
        if chart.below is not None:
            panel.set_xlabel("")
            _draw_chart(beneath[0], chart.below)
            figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=2, **LEGEND)
        elif not chart.named_points:
            _name_lines(panel, chart, named)
            named |= set() if chart.own_names else {line.name for line in chart.lines}
    for chart, panel in zip(charts, panels[0], strict=True):
        if chart.marks:
            keys = [
                Line2D([], [], color="0.4", linestyle="", label=name, **MARKS[m]) for m, name in chart.marks.items()
            ]
            figure.legend(handles=keys, loc="outside upper right", ncols=2, **LEGEND)
        if chart.named_points:
            _name_points(figure, panel, chart)
    return figure


LEGEND: dict[str, Any] = {"fontsize": 8, "frameon": False}


def _draw_chart(panel: Axes, chart: LineChart) -> None:
    if chart.log_scale:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")  # no formula is drawn as one, see `Figure`
    if chart.bars is not None:
        _draw_bars(panel, *chart.bars)
    for i, line in enumerate(chart.lines):
        above = sum((list(other.x), list(other.y)) == (list(line.x), list(line.y)) for other in chart.lines[i + 1 :])
        _draw_line(panel, line, 0 if line.joined else 1 + 4 * above)  # points that others lie on are seen around them
    if chart.level is not None:
        name, value = chart.level
        panel.axhline(value, color="0.35", linestyle=":", linewidth=1.2, zorder=2, label=printable(name))
    label_axes(panel, chart.x_label, chart.y_label)
    _scale_axes(panel, chart)
    _draw_hidden(panel, chart)


def _draw_line(panel: Axes, line: Line, larger: float) -> None:
    style = _style(line)
    if "markersize" in style:
        style["markersize"] += larger
    if line.joined and len(line.x) == 1:
        style = {**MARKS["dot"], **style}  # a line of one point would not be seen
    y = np.array(line.y, float)
    if line.errors:
        panel.errorbar(line.x, y, yerr=line.errors, capsize=3, **style)
    else:
        panel.plot(line.x, y, **style)


def _style(line: Line) -> dict[str, Any]:
    dashes = DASHES[line.pattern] if line.joined else "None"
    width = 0.8 if line.thin else {"ink": 2.0, "faint": 1.3}.get(str(line.colour), 1.4)
    style = {"color": _colour(line), "linestyle": dashes, "linewidth": width, "label": printable(line.name)}
    return style | MARKS[line.mark]


def _colour(line: Line) -> str:
    return PALETTE[line.colour % len(PALETTE)] if isinstance(line.colour, int) else ROLES[line.colour]


def _draw_bars(panel: Axes, label: str, bars: Sequence[float]) -> None:
    beside = panel.twinx()
    panel.set_zorder(beside.get_zorder() + 1)
    panel.patch.set_visible(False)
    beside.bar(range(len(bars)), bars, width=0.6, color="0.9", zorder=0)
    beside.set_ylabel(label, fontsize=8, color="0.45")
    beside.tick_params(labelsize=8, colors="0.45")
    beside.spines[["top", "right"]].set_visible(False)


def _scale_axes(panel: Axes, chart: LineChart) -> None:
    """Ranges and ticks: an x axis without a range counts, so that it has no halves."""
    if chart.x_range is not None:
        low, high = chart.x_range
        panel.set_xlim(low, high + 0.02 * (high - low))  # marks at the end are whole
    elif not chart.named_points and len(only := {x for line in chart.lines for x in line.x}) == 1:
        panel.set_xticks(list(only))  # around one point there is nothing to count
    elif not chart.named_points:
        panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    if chart.y_range is not None:
        low, top = chart.y_range
        panel.set_ylim(low, None if top is None else top + 0.02 * (top - low))
    if chart.x_names:
        turned: dict[str, Any] = {}
        if max(map(len, chart.x_names)) * len(chart.x_names) > 50:
            turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
        panel.set_xticks(range(len(chart.x_names)), chart.x_names, parse_math=False, fontsize=8, **turned)
        panel.tick_params(axis="x", length=0)
    if chart.named_points:
        panel.margins(x=0.14, y=0.08)
        panel.grid(color="0.93", linewidth=0.8)
        panel.set_axisbelow(True)


def _draw_hidden(panel: Axes, chart: LineChart) -> None:
    """Draws lines that others lie on once more, in wide dashes; the panel has its lines and its range."""
    low, high = np.log10(panel.get_ylim()) if chart.log_scale else panel.get_ylim()
    lines = [line.on_log_scale() if chart.log_scale else line for line in chart.lines]
    for line, part in find_hidden_lines(lines, abs(high - low)):
        offset, dashes = part.dashes
        y = 10 ** np.array(part.y) if chart.log_scale else np.array(part.y)
        style: dict[str, Any] = {"color": _colour(line), "zorder": 4}
        if len(part.x) == 1:
            panel.scatter(part.x, y, (MARKS["dot"]["markersize"] * part.size) ** 2, **style)
            continue
        wide = _style(line)["linewidth"] + 2
        dashed = offset / wide, tuple(length / wide for length in dashes)  # which are counted in widths
        path = np.column_stack([part.x, y])
        panel.add_collection(LineCollection([path], linewidths=wide, linestyles=[dashed], **style))


def _name_lines(panel: Axes, chart: LineChart, elsewhere: set[str]) -> None:
    """Names the lines of a panel: inside where few leave room, else beside it. Thin lines have no names."""
    without = {line.name for line in chart.lines if line.thin} | elsewhere
    handles, labels = panel.get_legend_handles_labels()
    named = [(handle, label) for handle, label in zip(handles, labels, strict=True) if label not in without]
    full = len(named) > 5 or any(line.thin for line in chart.lines)
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if full else {}
    if named:
        panel.legend(*zip(*named, strict=True), fontsize=7, frameon=False, **beside)


def _name_points(figure: Figure, panel: Axes, chart: LineChart) -> None:
    """Puts names beside points, where they cover no point and no other name."""
    place: dict[str, Any]
    if chart.level is not None:
        name, value = chart.level
        place = {"xy": (1, value), "xycoords": ("axes fraction", "data"), "xytext": (0, 2)}
        place |= {"textcoords": "offset points", "ha": "right", "va": "bottom"}
        panel.annotate(printable(name), **place, fontsize=7.5, color="0.35", parse_math=False)
    figure.draw_without_rendering()  # from here on the panel has its place, so that names can have theirs
    places = [(float(line.x[0]), float(np.array(line.y, float)[0])) for line in chart.lines]
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in map(panel.transData.transform, places)]
    for line, point in zip(chart.lines, places, strict=True):
        for far, (across, up) in product((6, 16, 28, 40), SIDES):
            place = {"xy": point, "xytext": (far * across, far * up), "textcoords": "offset points"}
            style: dict[str, Any] = {"ha": SIDEWAYS[across], "va": UPWARD[up], "color": _colour(line), "fontsize": 7.5}
            text = panel.annotate(shorten(line.name), **place, **style, parse_math=False)
            text.set_in_layout(False)  # which would move the panel, and all points with it
            box = text.get_window_extent()
            inside = panel.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and panel.bbox.y0 <= box.y0
            if inside and box.y1 <= figure.bbox.y1 and not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        else:  # it is more crowded than that
            panel.add_artist(text)
        taken.append(box)
        if far > 6:
            panel.annotate("", **place, arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.6, "shrinkB": 2})
