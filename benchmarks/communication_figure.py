"""The figure of what goes between ranks: how long the bytes take, and by how much they make a step longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from mheads.report.figures.figure import Figure


def communication_figure(networks: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure:
    """The share of the forward-backward pass against the floats of the shared layer.

    networks: by title, then by layer, what `python -m benchmarks comm` found (`floats_forward`, `transfer_fraction`,
    `exposed_fraction_median` and the quartiles). Above: the time of the bytes alone, while ranks may compute, and
    the line closest to it. Below: by how much they make the step longer.
    """
    figure = Figure(4.6 * len(networks), 6.4)
    panels = figure.subplots(2, len(networks), squeeze=False, sharex="col")
    for column, (title, layers) in zip(panels.T, networks.items(), strict=True):
        above, below = column
        floats = np.array([layer["floats_forward"] for layer in layers.values()]) / 1e6
        transfer = 100 * np.array([layer["transfer_fraction"] for layer in layers.values()])
        middle, low, high = (
            100 * np.array([layer[f"exposed_{key}_ms"] / layer["median_ms"] for layer in layers.values()])
            for key in ("median", "quarter", "three_quarters")
        )
        above.set_title(title, fontsize=10)
        above.plot(floats, transfer, "o", color="C0")
        below.errorbar(floats, middle, yerr=(middle - low, high - middle), fmt="o", color="C1", capsize=3)
        below.axhline(0, color="0.7", linewidth=0.8, zorder=0)
        slope, start = np.polyfit(floats, transfer, 1)
        explained = np.corrcoef(floats, transfer)[0, 1] ** 2 if np.ptp(transfer) else 1.0
        note = f"least squares, R² = {explained:.2f}"
        above.text(0.97, 0.05, note, transform=above.transAxes, ha="right", fontsize=8, color="0.4")
        ends = np.array([0.0, 1.12 * floats.max()])
        above.plot(ends, start + slope * ends, color="C0", linewidth=1, alpha=0.5)
        for panel in (above, below):
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(labelsize=8)
        above.set_ylim(0, 1.2 * transfer.max())
        above.set_xlim(-0.1 * floats.max(), 1.2 * floats.max())
        _name_points(above, list(layers), floats, transfer, (slope, start))
        below.set_xlabel("million floats per batch to the other rank", fontsize=8)
    panels[0, 0].set_ylabel("transfer alone,\n% of the forward-backward pass", fontsize=8)
    panels[1, 0].set_ylabel("exposed (median, quartiles),\n% of the forward-backward pass", fontsize=8)
    return figure


def _name_points(panel: Axes, names: Sequence[str], x: np.ndarray, y: np.ndarray, line: Sequence[float]) -> None:
    """Puts names beside their points, where they cover no point or other name, and the line (slope, start) least."""
    (left, right), (bottom, top) = panel.get_xlim(), panel.get_ylim()
    points = np.stack([(x - left) / (right - left), (y - bottom) / (top - bottom)], 1)  # all in parts of the panel
    slope, start = line
    taken = [(px - 0.02, py - 0.025, px + 0.02, py + 0.025) for px, py in points]
    for i in np.argsort(x):
        px, py = points[i]
        width, height = 0.02 * len(names[i]), 0.05
        corners = [
            (px + 0.025, py - height / 2),
            (px - 0.025 - width, py - height / 2),
            (px - width / 2, py + 0.03),
            (px - width / 2, py - 0.03 - height),
        ]

        def covered(corner: tuple[float, float], i: int = i, width: float = width, height: float = height) -> int:
            x0, y0 = corner
            x1, y1 = x0 + width, y0 + height
            others = [box for j, box in enumerate(taken) if j != i]
            hits = sum(x0 < b[2] and b[0] < x1 and y0 < b[3] and b[1] < y1 for b in others)
            ends = [(start + slope * (left + e * (right - left)) - bottom) / (top - bottom) for e in (x0, x1)]
            crossed = min(ends) < y1 and max(ends) > y0
            score: int = 10 * (hits + (x0 < 0 or x1 > 1 or y0 < 0)) + crossed
            return score

        x0, y0 = min(corners, key=covered)
        taken.append((x0, y0, x0 + width, y0 + height))
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "transform": panel.transAxes}
        panel.text(x0 + width / 2, y0 + height / 2, names[i], **style)
