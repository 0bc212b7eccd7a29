"""Figures of what was learned: who wins, what k and sharing change, how far members disagree and can be trusted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from mheads.report.figures.figures import (
    COLOURS,
    DPI,
    MANY_MEMBERS,
    Figure,
    add_bar,
    colour,
    dots,
    in_full,
    line_style,
    name_lines,
    shorten,
    show_hidden,
    whole_ticks,
    written,
)

Results = Sequence[Mapping[str, Any]]  # what result.json holds, of one run or of several trials


def wins_figure(steps: Results) -> Figure:
    """Who wins over time: the part of the examples that each member won, in percent.

    steps: `iteration` and `wins` of each logged step, or `share` in runs that are older.
    """
    figure = Figure(figsize=(6, 3.4), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    at = [line["iteration"] for line in steps]
    won = 100 * np.array([line.get("wins", line["share"]) for line in steps]).reshape(len(at), -1)
    for m, parts in enumerate(won.T):
        panel.plot(at, parts, **line_style(m), **dots(at), linewidth=1.2, label=f"member {m}")
    panel.set_ylim(bottom=0)
    panel.xaxis.set_major_locator(whole_ticks())
    _finish(panel, "iteration", "examples won, %")
    show_hidden(panel)
    name_lines(panel, won.shape[1])
    return figure


Baseline = tuple[str, float] | None  # what an Oracle compares with, by name


def choices_figure(runs: Mapping[int, Results], measure: str = "accuracy, %", baseline: Baseline = None) -> Figure:
    """Oracle, Ensemble-Mean and members against k, how many members learn from an example.

    runs: the results of each k; several are trials, drawn as their mean and deviation.
    """
    figure = Figure(figsize=(5, 3.6), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    ks = sorted(runs)
    for k in ks:
        members = [accuracy for result in runs[k] for accuracy in result["members"]]
        label = "members" if k == ks[0] else None
        panel.plot([k] * len(members), members, "o", color="0.6", markersize=3, zorder=1, label=label)
    _measures(panel, ks, [runs[k] for k in ks])
    _draw_baseline(panel, baseline)
    panel.set_xticks(ks)
    _finish(panel, "k: members that learn from an example", measure)
    panel.legend(fontsize=8, frameon=False)
    return figure


def splits_figure(runs: Mapping[str, Results], measure: str = "accuracy, %") -> Figure:
    """Ensemble-Mean and mean member against the last layer that members share, over bars of parameters.

    runs: the results by the name of the place, in the order from sharing nothing to sharing everything.
    """
    figure = Figure(figsize=(max(5.0, 0.7 * len(runs) + 1.5), 3.8), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    beside = panel.twinx()
    panel.set_zorder(beside.get_zorder() + 1)
    panel.patch.set_visible(False)
    at = list(range(len(runs)))
    parameters = [np.mean([result["parameters"] for result in results]) for results in runs.values()]
    scale, unit = (1e6, "million parameters") if max(parameters) >= 1e6 else (1e3, "thousand parameters")
    beside.bar(at, [p / scale for p in parameters], width=0.6, color="0.9", zorder=0)
    beside.set_ylabel(unit, fontsize=8, color="0.45")
    beside.tick_params(labelsize=8, colors="0.45")
    beside.spines[["top", "right"]].set_visible(False)
    _measures(
        panel, at, list(runs.values()), (("ensemble_mean", "Ensemble-Mean", "-"), ("single", "mean member", "--"))
    )
    names = [shorten(name) for name in runs]
    turned: dict[str, Any] = {}
    if max(map(len, names)) * len(names) > 50:
        turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    panel.set_xticks(at, names, parse_math=False, fontsize=8, **turned)
    _finish(panel, "members share the layers up to", measure)
    panel.tick_params(axis="x", length=0)
    panel.legend(fontsize=8, frameon=False)
    return figure


def answers_figure(
    runs: Mapping[str, tuple[float, float]],
    measure: str = "accuracy, %",
    scored: Collection[str] = (),
    baseline: Baseline = None,
) -> Figure:
    """One answer or several: how good the one answer of each run is, and how good its Oracle.

    runs: both, by title; the answer is the Ensemble-Mean, and Ensemble-Scored of those that `scored` names. What gains
    on one side mostly loses on the other.
    """
    figure = Figure(figsize=(7, 4.4), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    for i, (name, point) in enumerate(runs.items()):
        above = list(runs.values())[i + 1 :].count(point)  # that would hide it
        panel.plot(*point, MARKERS[name in scored], color=colour(i), markersize=5 + 4 * above)
    _draw_baseline(panel, baseline)
    if baseline is not None:
        place: dict[str, Any] = {"xy": (1, baseline[1]), "xycoords": ("axes fraction", "data")}
        offset: dict[str, Any] = {"xytext": (0, 2), "textcoords": "offset points", "ha": "right", "va": "bottom"}
        panel.annotate(written(baseline[0]), **place, **offset, fontsize=7.5, color="0.35", parse_math=False)
    panel.margins(x=0.14, y=0.08)
    panel.grid(color="0.93", linewidth=0.8)
    panel.set_axisbelow(True)
    kinds = [ANSWERS[kind] for kind in (False, True) if kind in {name in scored for name in runs}]
    one = f"{kinds[0]} (one answer)" if len(kinds) == 1 else "one answer"
    _finish(panel, f"{one}, {measure}", f"Oracle (the best of M answers), {measure}")
    if len(kinds) > 1:
        shown = [Line2D([], [], color="0.4", linestyle="", marker=MARKERS[i], label=kinds[i]) for i in (False, True)]
        figure.legend(handles=shown, loc="outside upper right", ncols=2, fontsize=8, frameon=False)
    figure.draw_without_rendering()  # from here on the panel has its place, so that names can have theirs
    taken = [_box(panel, point) for point in runs.values()]
    for i, (name, point) in enumerate(runs.items()):
        for far, (across, up) in product((6, 16, 28, 40), SIDES):
            place = {"xy": point, "xytext": (far * across, far * up), "textcoords": "offset points"}
            style: dict[str, Any] = {"ha": SIDEWAYS[across], "va": UPWARD[up], "color": colour(i), "fontsize": 7.5}
            text = panel.annotate(written(shorten(name)), **place, **style, parse_math=False)
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
    return figure


ANSWERS, MARKERS = ("Ensemble-Mean", "Ensemble-Scored"), ("o", "s")  # what a run answers with, and its point
# Where a name may stand beside its point: the first place that is free is taken.
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
SIDEWAYS, UPWARD = {-1: "right", 0: "center", 1: "left"}, {-1: "top", 0: "center", 1: "bottom"}


def _box(panel: Axes, point: tuple[float, float]) -> Bbox:
    """The place of a dot, in pixels."""
    x, y = panel.transData.transform(point)
    return Bbox.from_extents(x - 4, y - 4, x + 4, y + 4)


def disagreement_figure(pairs: np.ndarray | Mapping[str, np.ndarray]) -> Figure:
    """How often two members answer differently, in percent: [M, M], or several of these by title."""
    tables = {
        title: np.asarray(table) for title, table in (pairs if isinstance(pairs, Mapping) else {"": pairs}).items()
    }
    largest = max(len(table) for table in tables.values())
    side = max(2.0, min(0.45, 8 / largest) * largest)
    figure = Figure(figsize=(len(tables) * (side + 0.7) + 0.8, side + 0.7), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, len(tables), squeeze=False).ravel()
    for panel, (title, table) in zip(panels, tables.items(), strict=True):
        image = panel.imshow(table, cmap=COLOURS, vmin=0, vmax=100)
        panel.set_title(written(title), fontsize=10, parse_math=False)
        ticks = range(0, len(table), -(-len(table) // 20))
        panel.set_xticks(ticks, [str(m) for m in ticks], fontsize=8)
        panel.set_yticks(ticks, [f"member {m}" for m in ticks], fontsize=8)
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
        if len(table) <= MANY_MEMBERS:
            for a, b in np.ndindex(table.shape):
                if a != b:
                    shade = "white" if table[a, b] > 55 else "black"
                    panel.text(b, a, f"{table[a, b]:.0f}", ha="center", va="center", fontsize=8, color=shade)
    add_bar(figure, image, panels, "different answers, %")
    return figure


def reliability_figure(bins: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Accuracy against confidence, and how often each confidence occurs.

    bins: by name of the predictor, `confidence`, `accuracy` (both in percent) and `examples` of its bins.
    """
    figure = Figure(figsize=(4.2, 4.6), dpi=DPI, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot([0, 100], [0, 100], color="0.7", linewidth=1, linestyle=":")
    for i, (name, found) in enumerate(bins.items()):
        examples = np.asarray(found["examples"], float)
        there = examples > 0
        confidence, accuracy = (np.asarray(found[key], float)[there] for key in ("confidence", "accuracy"))
        above.plot(confidence, accuracy, "o-", color=colour(i), linewidth=1.5, markersize=4, label=name)
        below.plot(confidence, 100 * examples[there] / examples.sum(), "o-", color=colour(i), linewidth=1, markersize=3)
    above.set(xlim=(0, 102), ylim=(0, 102))
    show_hidden(above)
    below.set_ylim(bottom=0)
    _finish(above, "", "right answers, %")
    _finish(below, "confidence, %", "examples, %")
    figure.legend(loc="outside upper center", ncols=2, fontsize=8, frameon=False)  # points may be anywhere inside
    return figure


def _measures(
    panel: Axes,
    at: Sequence[int],
    runs: Sequence[Results],
    measures: Sequence[tuple[str, str, str]] = (("oracle", "Oracle", "--"), ("ensemble_mean", "Ensemble-Mean", "-")),
) -> None:
    """Draws measures of several runs as lines, with the deviation over trials where there are some."""
    for i, (key, name, style) in enumerate(measures):
        values = [np.array([result[key] for result in results], float) for results in runs]
        means = [v.mean() for v in values]
        deviations = [v.std(ddof=1) if len(v) > 1 else 0.0 for v in values]
        spread: dict[str, Any] = {"yerr": deviations, "capsize": 3} if any(deviations) else {}
        ring: dict[str, Any] = {} if i else {"markersize": 8, "fillstyle": "none"}  # around what may lie on it
        drawn: dict[str, Any] = {"color": colour(i), "linewidth": 1.8, "marker": "o", "markersize": 4, "label": name}
        drawn |= ring
        panel.errorbar(at, means, linestyle=style, zorder=3, **drawn, **spread)
    show_hidden(panel)


def _draw_baseline(panel: Axes, baseline: Baseline) -> None:
    if baseline is not None:
        name, value = baseline
        panel.axhline(value, color="0.35", linestyle=":", linewidth=1.2, zorder=2, label=name)


def _finish(panel: Axes, x: str, y: str) -> None:
    panel.set_xlabel(x, fontsize=8)
    panel.set_ylabel(y, fontsize=8)
    in_full(panel.yaxis)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
