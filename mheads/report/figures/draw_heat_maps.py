"""Heat maps side by side, with one bar of colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from mheads.report.charts.chart import HeatMap, printable, shorten
from mheads.report.figures.figure import Figure

COLOURS = "Blues"  # one hue from light to dark, which every kind of colour vision can order
MANY_COLUMNS = 30  # from here on cells are too narrow for a value, and maps stand one above the other
MOST_LABELS = 150  # with more columns, only every second or third, ... is named
WIDEST, LEAST_HEIGHT = 15.0, 1.4  # inches of maps side by side, and of those that leave room for the bar's text
TALLEST = 12.0  # inches of the rows of a map
LABEL = 0.14  # inches that the name of a row needs


def draw_heat_maps(maps: Sequence[HeatMap]) -> Figure:
    """The moment of each map that is shown first. All have the same columns, or equally many."""
    names = [[shorten(name) for name in chart.columns] for chart in maps]
    longest, most = max(len(name) for row in names for name in row), max(map(len, names))
    many, turned = most > MANY_COLUMNS, longest > 4
    cell_width, cell_height = (0.14, 0.3) if many else (0.36, 0.36)  # inches, as all sizes here
    cell_height = min(cell_height, TALLEST / max(len(chart.rows) for chart in maps))
    label_height = longest * (0.06 if many else 0.055) + 0.6  # with the title
    # A name that is turned begins to the left of its cell, and may need more room than the names of rows do.
    left = max(0.7, 0.055 * len(names[0][0]) if turned and not many else 0)
    panel_width = max(2.0, min(most, MOST_LABELS) * cell_width + left)
    rows = -(-len(maps) // max(1, 1 if many else int(WIDEST / panel_width)))
    columns = -(-len(maps) // rows)
    num_rows = [len(chart.rows) for chart in maps]
    tallest = [max(num_rows[i : i + columns]) for i in range(0, len(maps), columns)]  # of each row
    height = max(sum(tallest) * cell_height, LEAST_HEIGHT) + rows * label_height

    figure = Figure(columns * panel_width + 0.8, height)
    panels = figure.subplots(rows, columns, squeeze=False, height_ratios=tallest).ravel()
    for panel in panels[len(maps) :]:
        panel.set_axis_off()
    for panel, chart, labels in zip(panels, maps, names, strict=False):
        percents = np.ma.masked_invalid(chart.percents[chart.shown])
        image = panel.imshow(percents, cmap=COLOURS, vmin=0, vmax=100, aspect="auto")
        panel.set_title(printable(chart.title), fontsize=10, parse_math=False)
        _label(panel, chart.rows, labels, many, turned, -(-LABEL // cell_height))
        if not many:
            _write_values(panel, percents)
    bar = figure.colorbar(image, ax=list(panels), pad=0.01, aspect=max(8.0, 6 * height))  # as wide whatever the height
    bar.set_label(maps[0].label, fontsize=8)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)
    return figure


def _label(panel: Axes, rows: Sequence[str], columns: Sequence[str], many: bool, turned: bool, every: float) -> None:
    """Adds the names of columns and of every so many rows, and white lines between the cells."""
    if many:
        style: dict[str, Any] = {"fontsize": 6, "rotation": 90}
    elif turned:
        style = {"fontsize": 8, "rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    else:
        style = {"fontsize": 8}
    step, row_step = -(-len(columns) // MOST_LABELS), max(1, int(every))
    panel.set_xticks(range(0, len(columns), step), columns[::step], parse_math=False, **style)
    panel.set_yticks(range(0, len(rows), row_step), rows[::row_step], fontsize=8)
    panel.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
    panel.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
    panel.grid(which="minor", color="white", linewidth=0.4 / step if many else 1.2)
    panel.tick_params(which="both", length=0)
    panel.spines[:].set_visible(False)


def _write_values(panel: Axes, percents: np.ma.MaskedArray) -> None:
    """Writes each percent as a whole number in its cell: light on dark, and pale for zero."""
    for row, column in zip(*np.nonzero(~np.ma.getmaskarray(percents)), strict=True):
        value = round(percents[row, column])
        colour = "white" if value > 55 else "black" if value > 0 else "0.6"
        panel.text(column, row, str(value), ha="center", va="center", fontsize=7, color=colour)
