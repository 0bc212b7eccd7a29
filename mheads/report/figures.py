"""Figures, as matplotlib objects: nothing here touches pyplot's state or needs a display."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as PlainFigure

# Okabe and Ito's colours, which every kind of colour vision can tell apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
COLOURS = "Blues"  # one hue from light to dark, which every kind of colour vision can order
MANY_CLASSES = 30  # from here on cells are too narrow for a value, and ensembles stand one above the other
MOST_LABELS = 150  # with more classes, only every second or third, ... is named
DPI = 150


class Figure(PlainFigure):
    """A figure that a notebook shows when it is the value of a cell, whatever the backend is."""

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def ownership_figure(ownership: np.ndarray | Mapping[str, np.ndarray], classes: Sequence[str]) -> Figure:
    """Who owns which class: the share of each class's examples that each member owns, in percent.

    ownership: counts [M, C] of one ensemble, or several by title (their M may differ); classes: C names.
    The column of a class without examples stays empty.
    """
    ensembles = ownership if isinstance(ownership, Mapping) else {"": ownership}
    tables = {title: np.asarray(counts) for title, counts in ensembles.items()}
    for title, counts in tables.items():
        if counts.ndim != 2 or counts.shape[1] != len(classes):
            raise ValueError(f"ownership {title!r} is {counts.shape}, expected (M, {len(classes)})")
    many = len(classes) > MANY_CLASSES
    cell_width, cell_height = (0.14, 0.3) if many else (0.36, 0.36)  # inches, as all sizes here
    num_members = [len(counts) for counts in tables.values()]

    label_height = max(len(name) for name in classes) * (0.06 if many else 0.05) + 0.6  # with the title
    panel_width = min(len(classes), MOST_LABELS) * cell_width + 0.7
    if many:
        size = (panel_width + 0.8, sum(num_members) * cell_height + len(tables) * label_height)
        grid: dict[str, Any] = {"nrows": len(tables), "height_ratios": num_members}
    else:
        size = (len(tables) * panel_width + 0.8, max(num_members) * cell_height + label_height)
        grid = {"ncols": len(tables)}

    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    panels = figure.subplots(**grid, squeeze=False).ravel()
    for panel, (title, counts) in zip(panels, tables.items(), strict=True):
        shares = _shares(counts)
        image = panel.imshow(shares, cmap=COLOURS, vmin=0, vmax=100, aspect="auto")
        panel.set_title(written(title), fontsize=10, parse_math=False)
        _label(panel, len(counts), classes, many)
        if not many:
            _write_values(panel, shares)
    bar = figure.colorbar(image, ax=list(panels), pad=0.01, aspect=15)
    bar.set_label("owned by the member, %", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)
    return figure


def history_figure(
    steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], measure: str = "accuracy, %"
) -> Figure:
    """How training went: each member's loss on the training batches, and the `measure` of the evaluations.

    steps: `iteration` and `member_losses` of each logged step; evaluations: `iteration`, `members`, `ensemble_mean`
    and `oracle` of each evaluation.
    """
    figure = Figure(figsize=(9, 3.4), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    for m, losses in enumerate(np.array([line["member_losses"] for line in steps]).T):
        left.plot([line["iteration"] for line in steps], losses, color=colour(m), linewidth=1, label=f"member {m}")
    at = [line["iteration"] for line in evaluations]
    marker = "o" if len(at) < 30 else ""
    for m, accuracies in enumerate(np.array([line["members"] for line in evaluations]).T):
        right.plot(at, accuracies, color=colour(m), linewidth=1, marker=marker, markersize=2)
    answers = (("ensemble_mean", "Ensemble-Mean", "-"), ("ensemble_scored", "Ensemble-Scored", ":"))
    for key, name, style in (*answers, ("oracle", "Oracle", "--")):
        if not all(key in line for line in evaluations):
            continue
        values = [line[key] for line in evaluations]
        right.plot(at, values, style, color="black", linewidth=2, marker=marker, markersize=4, label=name)
    left.set_ylabel("loss on the training batches", fontsize=8)
    right.set_ylabel(measure, fontsize=8)
    for panel in (left, right):
        panel.set_xlabel("iteration", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=7, frameon=False, ncols=1 + len(panel.lines) // 8)
    return figure


def colour(member: int) -> str:
    return PALETTE[member % len(PALETTE)]


def communication_figure(networks: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure:
    """The share of the forward-backward pass against the floats of the shared layer.

    networks: by title, then by layer, what `mheads bench comm` found (`floats_forward`, `transfer_fraction`,
    `exposed_fraction_median` and the quartiles). Above: the time of the bytes alone, while ranks may compute, and
    the line closest to it. Below: by how much they make the step longer.
    """
    figure = Figure(figsize=(4.6 * len(networks), 6.4), dpi=DPI, layout="constrained")
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


def suite_figure(rows: Sequence[str], panels: Mapping[str, Sequence[Sequence[float | None]]], title: str) -> Figure:
    """Rows from above to below, a panel for each metric: (ours, deviation, the paper's, deviation) for each row.

    What is None is left out.
    """
    width = 1.4 + 0.07 * max(len(row) for row in rows)
    figure = Figure(figsize=(width + 2.6 * len(panels), 1.2 + 0.26 * len(rows)), dpi=DPI, layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    compared = any(point[2] is not None for points in panels.values() for point in points)
    sides: list[tuple[int, float, dict[str, Any]]] = [(0, 0.0, {"fmt": "o", "color": PALETTE[0], "label": "here"})]
    if compared:
        theirs = {"fmt": "D", "color": PALETTE[5], "label": "paper", "markerfacecolor": "white"}
        sides = [(0, -0.12, sides[0][2]), (2, 0.12, theirs)]
    for panel, (metric, points) in zip(axes, panels.items(), strict=True):
        for what, shift, style in sides:
            at = [i for i, point in enumerate(points) if point[what] is not None]
            means = [points[i][what] for i in at]
            spreads = [points[i][what + 1] or 0 for i in at]
            panel.errorbar(means, [i + shift for i in at], xerr=spreads, markersize=4, capsize=2, **style)
        panel.set_xlabel(metric, fontsize=8)
        panel.tick_params(labelsize=8)
        panel.grid(axis="y", color="0.9", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [written(row) for row in rows], fontsize=8, parse_math=False)
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    if compared:
        axes[-1].legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
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
            return 10 * (hits + (x0 < 0 or x1 > 1 or y0 < 0)) + crossed

        x0, y0 = min(corners, key=covered)
        taken.append((x0, y0, x0 + width, y0 + height))
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "transform": panel.transAxes}
        panel.text(x0 + width / 2, y0 + height / 2, names[i], **style)


def save(figure: Figure, path: str | Path) -> None:
    """Writes the figure in the format of the path's suffix; an older file there stays whole until it is done."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(partial, format=path.suffix[1:])
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def written(text: str) -> str:
    """Text that can be drawn: names of files and classes may hold bytes that are no character."""
    return text.encode(errors="replace").decode()


def _shares(counts: np.ndarray) -> np.ma.MaskedArray:
    """Counts [M, C] -> percent of each column, masked where a column is empty."""
    totals = counts.sum(0, keepdims=True)
    shares = 100 * counts / np.maximum(totals, 1)
    return np.ma.masked_where(np.broadcast_to(totals == 0, counts.shape), shares)


def _label(panel: Axes, num_members: int, classes: Sequence[str], many: bool) -> None:
    """Adds the names of members and classes, and white lines between the cells."""
    if many:
        style: dict[str, Any] = {"fontsize": 6, "rotation": 90}
    elif max(len(name) for name in classes) <= 4:
        style = {"fontsize": 8}
    else:
        style = {"fontsize": 8, "rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    step = -(-len(classes) // MOST_LABELS)
    panel.set_xticks(
        range(0, len(classes), step), [written(name) for name in classes[::step]], parse_math=False, **style
    )
    panel.set_yticks(range(num_members), [f"member {m}" for m in range(num_members)], fontsize=8)
    panel.set_xticks(np.arange(len(classes) + 1) - 0.5, minor=True)
    panel.set_yticks(np.arange(num_members + 1) - 0.5, minor=True)
    panel.grid(which="minor", color="white", linewidth=0.4 / step if many else 1.2)
    panel.tick_params(which="both", length=0)
    panel.spines[:].set_visible(False)


def _write_values(panel: Axes, shares: np.ma.MaskedArray) -> None:
    """Writes each share as a whole number in its cell: light on dark, and pale for zero."""
    for member, column in zip(*np.nonzero(~np.ma.getmaskarray(shares)), strict=True):
        share = round(shares[member, column])
        colour = "white" if share > 55 else "black" if share > 0 else "0.6"
        panel.text(column, member, str(share), ha="center", va="center", fontsize=7, color=colour)
