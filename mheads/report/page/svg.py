"""Charts of lines as plain SVG: sharp at any size, small, and in the colours of the page, light or dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from markupsafe import Markup

from mheads.report.charts.chart import NUM_COLOURS, Line, LineChart, find_hidden_lines
from mheads.report.page.templates import render

WIDTH, HEIGHT, LOW_HEIGHT = 520, 300, 150  # of a chart, and of one below another
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 44
MOST_POINTS = 400  # of a line
DOT = 8  # width of a point that has no line, as in style.css

Place = Callable[[float, float], tuple[float, float]]


def draw_chart(chart: LineChart) -> Markup:
    """A chart, with the chart below it; the text that describes it is the first and the last value of each line."""
    below = draw_lines(chart.below, LOW_HEIGHT) if chart.below is not None else Markup("")
    return draw_lines(chart) + below


def draw_lines(chart: LineChart, height: int = HEIGHT) -> Markup:
    x0, x1 = chart.x_range or _range([x for line in chart.lines for x in line.x])
    margin = 0.5 if chart.x_names else 0 if x1 > x0 else 1  # one evaluation stands in the middle
    x0, x1 = x0 - margin, x1 + margin
    level = [Line(chart.level[0], [x0, x1], [chart.level[1]] * 2, "faint", "dotted")] if chart.level else []
    lines = [_thin_out(line.on_log_scale() if chart.log_scale else line) for line in (*chart.lines, *level)]
    low, high = _range([y for line in lines for y in line.y if y is not None and math.isfinite(y)])
    if chart.y_range is not None:
        low, high = chart.y_range[0], high if chart.y_range[1] is None else chart.y_range[1]
    rules = _powers_of_ten(low, high) if chart.log_scale else _ticks(low, high, 5 if height == HEIGHT else 3)
    y0, y1 = (low, high) if chart.log_scale else (rules[0], rules[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT), 1),
            round(height - BOTTOM - (y - y0) / ((y1 - y0) or 1) * (height - TOP - BOTTOM), 1),
        )

    paths = [(name_style(line), line.name, [(kind, "", d) for kind, d in _paths(line, place)]) for line in lines]
    for line in lines:
        spread = zip(line.x, line.y, line.errors, strict=False)  # most lines have no errors
        errors = [Line("", [x, x], [y - error, y + error]) for x, y, error in spread if y is not None]
        paths += [(name_style(line), line.name, [("", "", d) for _, d in _paths(error, place)]) for error in errors]
    for line, part in find_hidden_lines(lines, y1 - y0):
        offset, dashes = part.dashes
        dashed = f"stroke-dasharray: {dashes[0]} {dashes[1]}; stroke-dashoffset: {offset}"
        style = dashed if len(part.x) > 1 else f"stroke-width: {round(DOT * part.size, 1)}"
        ((kind, d),) = _paths(replace(line, x=part.x, y=part.y), place)
        paths.append((f"{name_style(line)} again", line.name, [(kind, style, d)]))
    ticks: list[tuple[float, str]] = [(x, _number(x)) for x in _ticks(x0, x1) if x0 <= x <= x1]
    if chart.x_names:
        ticks = [(float(x), name) for x, name in enumerate(chart.x_names)]
    bars = chart.bars[1] if chart.bars else ()
    return render(
        "line_chart.svg",
        chart=chart,
        width=WIDTH,
        height=height,
        text=f"{chart.y_label} against {chart.x_label}. {_describe(chart.lines)}",
        rules=[(*place(x0, y), f"{10**y:.6g}" if chart.log_scale else _number(y)) for y in rules],
        ticks=[(*place(x, y0), name) for x, name in ticks],
        bars=[(*place(x - 0.3, y0 + bar / max(bars) * (y1 - y0)), *place(x + 0.3, y0)) for x, bar in enumerate(bars)],
        points=[(*place(line.x[0], line.y[0] or 0), line.name) for line in chart.lines if chart.named_points],
        left=LEFT,
        right=WIDTH - RIGHT,
        middle=(height - BOTTOM + TOP) / 2,
        lines=paths,
    )


def name_style(line: Line) -> str:
    """The classes of a line in style.css: s0 to s7, ink or faint, and dashed, dotted, thin or small."""
    colour = f"s{line.colour % NUM_COLOURS}" if isinstance(line.colour, int) else line.colour
    small = "small" if line.mark == "point" and not line.joined else ""
    return " ".join(filter(None, (colour, line.pattern, "thin" if line.thin else "", small)))


def _describe(lines: Sequence[Line]) -> str:
    texts = []
    for line in lines[:20]:
        known = [y for y in line.y if y is not None and math.isfinite(y)]
        texts.append(f"{line.name}: from {known[0]:.4g} to {known[-1]:.4g}" if known else f"{line.name}: no value")
    return "; ".join(texts)


def _thin_out(line: Line) -> Line:
    """At most `MOST_POINTS` points, the last among them."""
    if len(line.x) <= MOST_POINTS:
        return line
    chosen = np.unique(np.linspace(0, len(line.x) - 1, MOST_POINTS).round().astype(int))
    return replace(line, x=[line.x[i] for i in chosen], y=[line.y[i] for i in chosen])


def _paths(line: Line, place: Place) -> list[tuple[str, str]]:
    """A class and a path for each part of the line without a gap; a lone point is drawn as a dot."""
    parts: list[list[str]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if y is None or not math.isfinite(y) or not line.joined:
            parts.append([])
        if y is not None and math.isfinite(y):
            parts[-1].append("{} {}".format(*place(x, y)))
    return [
        ("" if len(points) > 1 else "dot", f"M{points[0]}L{' '.join(points[1:] or points)}")
        for points in parts
        if points
    ]


def _range(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 1.0)


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that enclose the range."""
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def _powers_of_ten(low: float, high: float) -> list[float]:
    """The logarithms of powers of ten in the range, of at most about eight."""
    powers = range(math.ceil(low), math.floor(high) + 1)
    return [float(power) for power in powers[:: len(powers) // 8 + 1]]


def _number(value: float) -> str:
    if abs(value) >= 1e8:
        return f"{value:.3g}"
    if abs(value) >= 10_000:
        return f"{value / 1000:,.10g}k"
    return f"{value:,.10g}"
