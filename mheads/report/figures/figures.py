"""Figures, as matplotlib objects: nothing here touches pyplot's state or needs a display."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure as PlainFigure
from matplotlib.font_manager import fontManager
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from mheads.common.atomic_files import write_atomically
from mheads.problems.baselines import top
from mheads.report.figures.overlaps import hidden

# Okabe and Ito's colours, which every kind of colour vision can tell apart; their yellow, too pale for a line on white,
# is darker here, and their black is for what all members do together.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#A89900", "#555A63")
COLOURS = "Blues"  # one hue from light to dark, which every kind of colour vision can order
MANY_CLASSES = 30  # from here on cells are too narrow for a value, and ensembles stand one above the other
MOST_LABELS = 150  # with more classes, only every second or third, ... is named
LONGEST = 24  # letters of a name
WIDEST, LEAST_HEIGHT = 15.0, 1.4  # inches of panels side by side, and of those that leave room for the bar's text
MANY_MEMBERS = 12  # from here on lines have no names, and cells of pairs no values
# For letters that the font of a figure lacks, on the systems that have them.
FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Microsoft YaHei", "PingFang SC", "Hiragino Sans", "Arial Unicode MS")
DPI = 150


class Figure(PlainFigure):
    """A figure that a notebook shows when it is the value of a cell, whatever the backend is."""

    def savefig(self, *args: Any, **options: Any) -> None:
        """In fonts that have most letters; one that none has is a box, without a warning. No name is a formula."""
        for text in self.findobj(Text):
            text.set_fontfamily(list(dict.fromkeys([*text.get_fontfamily(), *further_fonts()])))
            text.set_parse_math(False)
            text.set_text(written(text.get_text()))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Glyph .* missing from font")
            super().savefig(*args, **options)

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
    names = [shorten(name) for name in classes]
    many = len(names) > MANY_CLASSES
    turned = max(len(name) for name in names) > 4
    cell_width, cell_height = (0.14, 0.3) if many else (0.36, 0.36)  # inches, as all sizes here
    label_height = max(len(name) for name in names) * (0.06 if many else 0.055) + 0.6  # with the title
    # A name that is turned begins to the left of its cell, and may need more room than the members' names do.
    left = max(0.7, 0.055 * len(names[0]) if turned and not many else 0)
    panel_width = max(2.0, min(len(names), MOST_LABELS) * cell_width + left)
    rows = -(-len(tables) // max(1, 1 if many else int(WIDEST / panel_width)))
    columns = -(-len(tables) // rows)
    num_members = [len(counts) for counts in tables.values()]
    tallest = [max(num_members[i : i + columns]) for i in range(0, len(tables), columns)]  # of each row
    height = max(sum(tallest) * cell_height, LEAST_HEIGHT) + rows * label_height

    figure = Figure(figsize=(columns * panel_width + 0.8, height), dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, height_ratios=tallest).ravel()
    for panel, (title, counts) in zip(panels, tables.items(), strict=False):
        shares = _shares(counts)
        image = panel.imshow(shares, cmap=COLOURS, vmin=0, vmax=100, aspect="auto")
        panel.set_title(written(title), fontsize=10, parse_math=False)
        _label(panel, len(counts), names, many, turned)
        if not many:
            _write_values(panel, shares)
    for panel in panels[len(tables) :]:
        panel.set_axis_off()
    add_bar(figure, image, panels, "owned by the member, %")
    return figure


def add_bar(figure: Figure, image: Any, panels: Any, label: str) -> None:
    """A bar of colours beside panels, as wide whatever their height."""
    height = figure.get_size_inches()[1]
    bar = figure.colorbar(image, ax=list(panels), pad=0.01, aspect=max(8.0, 6 * height))
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)


def in_full(axis: Axis) -> None:
    """Its numbers as they are: 1476.2, not 0.2 beside +1.476e3."""
    formatter = axis.get_major_formatter()
    if isinstance(formatter, ScalarFormatter):
        formatter.set_useOffset(False)


def history_figure(
    steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], measure: str = "accuracy, %"
) -> Figure:
    """How training went: the losses on the training batches, and the `measure` of the evaluations.

    steps: `iteration`, `loss` (what is trained) and `member_losses` of each logged step; evaluations: `iteration`,
    `members`, `ensemble_mean` and `oracle` of each evaluation.
    """
    figure = Figure(figsize=(9 if steps else 5, 3.4), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, 2 if steps else 1, squeeze=False)[0]
    if steps:
        at = [line["iteration"] for line in steps]
        for m, losses in enumerate(np.array([line["member_losses"] for line in steps], float).T):
            panels[0].plot(at, losses, **line_style(m), **dots(at), linewidth=1, label=f"member {m}")
        if trained := trained_loss(steps):
            panels[0].plot(at, trained[1], color="black", linewidth=2, **dots(at), label=trained[0])
        if spans_decades([y for line in panels[0].lines for y in line.get_ydata()]):
            panels[0].set_yscale("log")
            panels[0].yaxis.set_major_formatter("{x:g}")  # no formula is drawn as one, see `Figure`
        panels[0].set_ylabel("loss on the training batches", fontsize=8)
    right, at = panels[-1], [line["iteration"] for line in evaluations]
    marker = "o" if len(at) < 30 else ""
    members = np.array([line["members"] for line in evaluations], float).T
    for m, accuracies in enumerate(members):
        label = None if steps and len(members) > 1 else f"member {m}"  # they are named once
        right.plot(at, accuracies, **line_style(m), linewidth=1, marker=marker, markersize=2, label=label)
    answers = (("ensemble_mean", "Ensemble-Mean", "-"), ("ensemble_scored", "Ensemble-Scored", ":"))
    for key, name, dashes in (*answers, ("oracle", "Oracle", "--")):
        if len(members) == 1 or not all(key in line for line in evaluations):
            continue  # one member is all of these
        values = [line[key] for line in evaluations]
        ring: dict[str, Any] = {"markersize": 7, "fillstyle": "none"} if key == "oracle" else {"markersize": 4}
        right.plot(at, values, dashes, color="black", linewidth=2, marker=marker, label=name, **ring)
    beside = [top(line, len(members)) for line in evaluations]
    if len(members) > 1 and evaluations and None not in beside:
        name = f"top-{len(members)} of Ensemble-Mean"
        right.plot(at, beside, "-.", color="0.55", linewidth=1.5, marker=marker, markersize=3, label=name)
    right.set_ylabel(measure, fontsize=8)
    for panel in panels:
        panel.set_xlabel("iteration", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.xaxis.set_major_locator(whole_ticks())
        in_full(panel.yaxis)
        show_hidden(panel)
        name_lines(panel, len(members))
    return figure


def trained_loss(steps: Sequence[Mapping[str, Any]]) -> tuple[str, list[float]] | None:
    """What the optimizer makes smaller, at each logged step, and what to call it; None in logs that do not have it.

    Under MCL that is the winners' losses: it falls while the members' own rise, on examples that are not theirs. Where
    all members learn from everything it is their sum, and is shown for one of them, so that both can be seen.
    """
    if not steps or not all("loss" in line for line in steps):
        return None
    found, members = [round(line["loss"], 6) for line in steps], len(steps[0]["member_losses"])  # as theirs are
    summed = all(line["loss"] > 0.8 * sum(line["member_losses"]) for line in steps)
    if members == 1 or not summed:
        return "trained loss", found
    return f"trained loss / {members}", [loss / members for loss in found]


def spans_decades(values: Sequence[Any]) -> bool:
    """Whether an axis by the logarithm shows them better: what is small would lie on the floor of another."""
    found = np.array(values, float).ravel()
    found = found[np.isfinite(found)]
    return len(found) > 1 and found.min() > 0 and found.max() > 30 * found.min()


def whole_ticks() -> MaxNLocator:
    """Of iterations: there is no half one."""
    return MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def name_lines(panel: Axes, members: int) -> None:
    """Names the lines of a panel: inside where few leave room, beside it, or of very many members not at all."""
    lines = [line for line in panel.lines if not str(line.get_label()).startswith("_")]
    full = len(lines) > 5  # whether it has lines everywhere
    if members > MANY_MEMBERS:
        lines = [line for line in lines if not str(line.get_label()).startswith("member ")]
        full = True
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if full else {}
    if lines:
        panel.legend(handles=lines, fontsize=7, frameon=False, **beside)


def show_hidden(panel: Axes) -> None:
    """Draws lines that others lie on once more, in wide dashes; call it when the panel has its lines and its range."""
    lines = [line for line in panel.lines if line.get_linestyle() != "None"]
    scale = panel.yaxis.get_transform()  # which is that of a logarithm, perhaps
    points = [(np.asarray(line.get_xdata(), float).tolist(),
               scale.transform(np.asarray(line.get_ydata(), float)).tolist()) for line in lines]  # fmt: skip
    low, high = scale.transform(panel.get_ylim())
    for part in hidden(points, abs(high - low)):
        line, (offset, dashes) = lines[part.line], part.dashes
        y = scale.inverted().transform(part.y)
        shown: dict[str, Any] = {"color": line.get_color(), "zorder": 4}
        if len(part.x) == 1:
            panel.scatter(part.x, y, (line.get_markersize() * part.size) ** 2, **shown)
            continue
        wide = line.get_linewidth() + 2
        dashed = offset / wide, tuple(length / wide for length in dashes)  # which are counted in widths
        path = np.column_stack([part.x, y])
        panel.add_collection(LineCollection([path], linewidths=wide, linestyles=[dashed], **shown))


def dots(at: Sequence[int]) -> dict[str, Any]:
    """For a line of one point, which would not be seen."""
    return {"marker": "o", "markersize": 4} if len(at) == 1 else {}


def line_style(member: int) -> dict[str, Any]:
    """Colour and dashes of a member's line: no two of 16 are alike."""
    return {"color": colour(member), "linestyle": "--" if member // len(PALETTE) % 2 else "-"}


def colour(member: int) -> str:
    return PALETTE[member % len(PALETTE)]


def suite_figure(rows: Sequence[str], panels: Mapping[str, Sequence[Sequence[float | None]]], title: str) -> Figure:
    """Rows from above to below, a panel for each metric: (ours, deviation, the paper's, deviation) for each row.

    What is None is left out, and so are metrics and rows of which nothing is known.
    """
    known = [i for i in range(len(rows)) if any({*points[i]} != {None} for points in panels.values())]
    if known:
        rows = [rows[i] for i in known]
        panels = {metric: [points[i] for i in known] for metric, points in panels.items()}
        panels = {metric: points for metric, points in panels.items() if {*chain(*points)} != {None}}
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
        in_full(panel.xaxis)
        panel.tick_params(labelsize=8)
        panel.grid(axis="y", color="0.9", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [written(row) for row in rows], fontsize=8, parse_math=False)
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    if compared:
        axes[-1].legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Writes the figure in the format of the path's suffix; an older file there stays whole until it is done."""
    path = Path(path)
    write_atomically(path, lambda file: figure.savefig(file, format=path.suffix[1:]))


def written(text: str) -> str:
    """Text that can be drawn: names of files and classes may hold bytes that are no character."""
    return text.encode(errors="replace").decode()


def shorten(name: str, length: int = LONGEST) -> str:
    """A name in one line, cut if it is long."""
    name = " ".join(written(name).split())
    return name if len(name) <= length else f"{name[: length - 1]}…"


@cache
def further_fonts() -> list[str]:
    """Those of `FONTS` that are there: matplotlib complains of others."""
    there = {font.name for font in fontManager.ttflist}
    return [name for name in FONTS if name in there]


def _shares(counts: np.ndarray) -> np.ma.MaskedArray:
    """Counts [M, C] -> percent of each column, masked where a column is empty."""
    totals = counts.sum(0, keepdims=True)
    shares = 100 * counts / np.maximum(totals, 1)
    return np.ma.masked_where(np.broadcast_to(totals == 0, counts.shape), shares)


def _label(panel: Axes, num_members: int, classes: Sequence[str], many: bool, turned: bool) -> None:
    """Adds the names of members and classes, and white lines between the cells."""
    if many:
        style: dict[str, Any] = {"fontsize": 6, "rotation": 90}
    elif turned:
        style = {"fontsize": 8, "rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    else:
        style = {"fontsize": 8}
    step = -(-len(classes) // MOST_LABELS)
    panel.set_xticks(range(0, len(classes), step), classes[::step], parse_math=False, **style)
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
