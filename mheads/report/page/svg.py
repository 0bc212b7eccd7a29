"""Charts as plain SVG: sharp at any size, small, and in the colours of the page, light or dark.

Every text goes through `Markup.format`, which escapes it: names come from data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

from mheads.report.figures.overlaps import equal, hidden

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 44
MOST_POINTS = 400  # of a line
DOT = 8  # width of a point that has no line, as in style.css
SERIES = 8  # colours that the page has; further lines take them again, dashed


@dataclass(frozen=True)
class Line:
    """A line of a chart; `style` is a class of the page: s0 to s7, ink, dashed, dotted, thin."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: str = "s0"


def series(number: int) -> str:
    """The style of the line of a member or a run."""
    return f"s{number % SERIES}" + (" dashed" if number // SERIES % 2 else "")


def line_chart(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    decades: bool = False,
) -> Markup:
    """Lines against one axis, with `decades` by its logarithm; the text that describes it is the first and the last
    value of each."""
    described = _described(lines)
    kept = [_thinned(replace(line, y=_logarithms(line.y)) if decades else line) for line in lines]
    x0, x1 = x_range or _range([x for line in kept for x in line.x])
    x0, x1 = (x0, x1) if x1 > x0 else (x0 - 1, x1 + 1)  # one evaluation stands in the middle
    found_range = _range([y for line in kept for y in line.y if y is not None and math.isfinite(y)])
    rules = _decades(*found_range) if decades else _ticks(*(y_range or found_range))
    y0, y1 = found_range if decades else y_range or (rules[0], rules[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            round(LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - (y - y0) / ((y1 - y0) or 1) * (HEIGHT - TOP - BOTTOM), 1),
        )

    parts = []
    for y in rules:
        px, py = at(x0, y)
        parts.append(Markup('<line class="rule" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(px, py, WIDTH - RIGHT, py))
        parts.append(Markup('<text x="{}" y="{}" class="end">{}</text>').format(
            px - 8, py + 4, f"{10**y:.6g}" if decades else _number(y)))  # fmt: skip
    for x in (tick for tick in _ticks(x0, x1) if x0 <= tick <= x1):
        px, py = at(x, y0)
        anchor = "end" if px > WIDTH - RIGHT - 12 else "middle"
        parts.append(Markup('<text x="{}" y="{}" class="{}">{}</text>').format(px, py + 19, anchor, _number(x)))
    middle = (HEIGHT - BOTTOM + TOP) / 2
    parts.append(
        Markup('<text class="middle dim" x="{}" y="{}">{}</text>').format(
            (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, x_label
        )
    )
    parts.append(
        Markup('<text class="middle dim" transform="rotate(-90 12 {0})" x="12" y="{0}">{1}</text>').format(
            middle, y_label
        )
    )
    for line in kept:
        found = Markup(" ").join(Markup('<path{} d="{}"/>').format(kind, path) for kind, path in _paths(line, at))
        parts.append(Markup('<g class="line {}"><title>{}</title>{}</g>').format(line.style, line.name, found))
    for part in hidden([(line.x, line.y) for line in kept], y1 - y0):
        line, (offset, dashes) = kept[part.line], part.dashes
        dashed = Markup("stroke-dasharray: {} {}; stroke-dashoffset: {}").format(*dashes, offset)
        style = dashed if len(part.x) > 1 else Markup("stroke-width: {}").format(round(DOT * part.size, 1))
        ((kind, path),) = _paths(Line("", part.x, part.y), at)
        found = Markup('<path{} style="{}" d="{}"/>').format(kind, style, path)
        parts.append(Markup('<g class="line {} again"><title>{}</title>{}</g>').format(line.style, line.name, found))
    return _figure(f"{y_label} against {x_label}. {described}", parts, WIDTH, HEIGHT)


def equal_lines(lines: Sequence[Line]) -> str:
    """Which of these are the same from end to end, in words."""
    return equal([line.name for line in lines], [(line.x, line.y) for line in lines])


def bars(values: Sequence[float], x_label: str, y_label: str) -> Markup:
    """Bars of equal width, from 0 to 100 on the x axis: how often which confidence occurs."""
    height, bottom = 110, 22
    top = max(values, default=0) or 1
    each = (WIDTH - LEFT - RIGHT) / max(1, len(values))
    parts = [
        Markup('<rect class="bar" x="{}" y="{}" width="{}" height="{}"/>').format(
            round(LEFT + i * each + 1, 1),
            round(height - bottom - value / top * (height - bottom - 6), 1),
            round(each - 2, 1),
            round(value / top * (height - bottom - 6), 1),
        )
        for i, value in enumerate(values)
    ]
    parts.append(Markup('<line class="rule" x1="{0}" y1="{1}" x2="{2}" y2="{1}"/>').format(
        LEFT, height - bottom, WIDTH - RIGHT))  # fmt: skip
    parts.append(Markup('<text class="middle dim" x="{}" y="{}">{}</text>').format(
        (LEFT + WIDTH - RIGHT) / 2, height - 5, x_label))  # fmt: skip
    parts.append(Markup('<text class="middle dim" transform="rotate(-90 12 {0})" x="12" y="{0}">{1}</text>').format(
        (height - bottom) / 2, y_label))  # fmt: skip
    return _figure(f"{y_label} against {x_label}", parts, WIDTH, height)


@dataclass(frozen=True)
class Stage:
    """A box of a drawn tree."""

    name: str
    layers: tuple[str, ...]
    members: tuple[int, ...]
    children: tuple[str, ...]
    parameters: int
    note: str = ""  # who holds it


BOX, GAP, PAD, LINE = 200, 40, 10, 17  # of a stage: width, between levels, inside, of a line of text
INPUT = 112  # width of what is given
MOST_LEAVES = 12  # with more members, leaves that are alike are drawn as one
LETTERS = 25  # of a line in a box


def tree(stages: Mapping[str, Stage], roots: Sequence[str], given: str) -> Markup:
    """Stages from the input on the left to the members on the right; `given` says what the input is."""
    drawing = _Tree(stages)
    boxes = drawing.below(roots, 0)
    middle = sum(y for _, y in boxes) / len(boxes)
    parts = [Markup('<g class="stage input"><rect x="0" y="{}" width="{}" height="26" rx="13"/>'
                    '<text class="middle" x="{}" y="{}">{}</text></g>').format(
                        round(middle - 13, 1), INPUT, INPUT / 2, round(middle + 4, 1), given)]  # fmt: skip
    parts += [drawing.edge(INPUT, middle, x, y) for x, y in boxes]
    described = "; ".join(
        f"{stage.name}: {' '.join(stage.layers)}, {stage.parameters:,} parameters, members "
        f"{', '.join(map(str, stage.members))}"
        for stage in stages.values()
    )
    return _figure(f"The tree of stages. {described}", [*parts, *drawing.parts], drawing.width, max(26, drawing.height))


class _Tree:
    """Places boxes: leaves one below the other, a stage beside the middle of its children."""

    def __init__(self, stages: Mapping[str, Stage]) -> None:
        self.stages, self.parts = stages, list[Markup]()
        self.height, self.width = 0.0, 0.0
        self.many = sum(not stage.children for stage in stages.values()) > MOST_LEAVES

    def below(self, names: Sequence[str], level: int) -> list[tuple[float, float]]:
        """Draws these stages and all below them; returns the middles of their left sides."""
        leaves = [name for name in names if not self.stages[name].children]
        if self.many and len(leaves) > 1:  # such a stage is drawn once for all
            found = [self.stages[name] for name in leaves]
            together = tuple(m for stage in found for m in stage.members)
            joined = Stage("alike", found[0].layers, together, (), found[0].parameters, "each with its own")
            others = [self.below([name], level)[0] for name in names if name not in leaves]
            return [*others, self._box(joined, level, [])]
        return [
            self._box(stage, level, self.below(stage.children, level + 1) if stage.children else [])
            for stage in (self.stages[name] for name in names)
        ]

    def _box(self, stage: Stage, level: int, children: list[tuple[float, float]]) -> tuple[float, float]:
        lines = _wrapped(stage.layers)
        size = 2 * PAD + LINE * (2 + len(lines) + bool(stage.note))
        x = INPUT + GAP + level * (BOX + GAP)
        if children:
            middle = sum(y for _, y in children) / len(children)
            top = max(0.0, middle - size / 2)
            self.height = max(self.height, top + size)
        else:
            top = self.height + (12 if self.height else 0)
            self.height = top + size
        middle = round(top + size / 2, 1)
        title = stage.name if children else _members(stage.members)
        texts = [(title, "strong"), *((line, "") for line in lines), (f"{stage.parameters:,} parameters", "dim")]
        texts += [(stage.note, "dim")] if stage.note else []
        inside = Markup("").join(
            Markup('<text class="{}" x="{}" y="{}">{}</text>').format(
                kind, x + PAD, round(top + PAD + LINE * (i + 0.75), 1), text
            )
            for i, (text, kind) in enumerate(texts)
        )
        kind, dot = "inner", Markup("")
        if not children:
            colour = f"s{stage.members[0] % SERIES}" if len(stage.members) == 1 else "s7"
            place = x + BOX - PAD - 5, round(top + PAD + 7, 1)
            kind, dot = "leaf", Markup('<circle class="{}" cx="{}" cy="{}" r="5"/>').format(colour, *place)
        self.parts.append(
            Markup(
                '<g class="stage {}"><title>{}</title><rect x="{}" y="{}" width="{}" height="{}" rx="8"/>{}{}</g>'
            ).format(kind, f"{stage.name}: {' '.join(stage.layers)}", x, round(top, 1), BOX, size, inside, dot)
        )
        self.width = max(self.width, x + BOX + 1)
        if children:
            self.parts += [self.edge(x + BOX, middle, *child) for child in children]
        return x, middle

    @staticmethod
    def edge(x0: float, y0: float, x1: float, y1: float) -> Markup:
        half = (x0 + x1) / 2
        return Markup('<path class="edge" d="M{} {}C{} {} {} {} {} {}"/>').format(x0, y0, half, y0, half, y1, x1, y1)


def _members(members: Sequence[int]) -> str:
    if len(members) == 1:
        return f"member {members[0]}"
    row = list(members) == list(range(members[0], members[-1] + 1))
    found = f"members {members[0]} to {members[-1]}" if row else f"members {', '.join(map(str, members))}"
    return found if len(found) <= LETTERS else f"{found[: LETTERS - 1]}…"


def _wrapped(layers: Sequence[str], most: int = 3) -> list[str]:
    """Names of layers in a few lines; what does not fit is counted."""
    lines: list[str] = []
    for i, layer in enumerate(layers):
        name = layer if len(layer) <= LETTERS else f"{layer[: LETTERS - 1]}…"
        if lines and len(lines[-1]) + 1 + len(name) <= LETTERS:
            lines[-1] += f" {name}"
        elif len(lines) < most:
            lines.append(name)
        else:
            left = f" … +{len(layers) - i}"
            lines[-1] = lines[-1][: LETTERS - len(left)] + left
            break
    return lines


def _figure(text: str, parts: Sequence[Markup], width: float, height: float) -> Markup:
    return Markup('<svg viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="img" aria-label="{2}">{3}</svg>').format(
        math.ceil(width), math.ceil(height), text, Markup("").join(parts)
    )


def _described(lines: Sequence[Line]) -> str:
    said = []
    for line in lines[:20]:
        there = [y for y in line.y if y is not None and math.isfinite(y)]
        said.append(f"{line.name}: from {there[0]:.4g} to {there[-1]:.4g}" if there else f"{line.name}: no value")
    return "; ".join(said)


def _thinned(line: Line) -> Line:
    """At most `MOST_POINTS` points, the last among them."""
    if len(line.x) <= MOST_POINTS:
        return line
    chosen = np.unique(np.linspace(0, len(line.x) - 1, MOST_POINTS).round().astype(int))
    return Line(line.name, [line.x[i] for i in chosen], [line.y[i] for i in chosen], line.style)


def _paths(line: Line, at: Callable[[float, float], tuple[float, float]]) -> list[tuple[Markup, str]]:
    """A path for each part of the line without a gap; a lone point is drawn as a dot."""
    found: list[list[str]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if y is not None and math.isfinite(y):
            found[-1].append("{} {}".format(*at(x, y)))
        elif found[-1]:
            found.append([])
    return [
        (Markup("" if len(points) > 1 else ' class="dot"'), f"M{points[0]}L{' '.join(points[1:] or points)}")
        for points in found
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


def _logarithms(values: Sequence[float | None]) -> list[float | None]:
    return [math.log10(y) if y is not None and y > 0 else None for y in values]


def _decades(low: float, high: float) -> list[float]:
    """The logarithms of powers of ten in the range, of at most about eight."""
    powers = range(math.ceil(low), math.floor(high) + 1)
    return [float(power) for power in powers[:: len(powers) // 8 + 1]]


def _number(value: float) -> str:
    if abs(value) >= 1e8:
        return f"{value:.3g}"
    if abs(value) >= 10_000:
        return f"{value / 1000:,.10g}k"
    return f"{value:,.10g}"
