"""A chart as plain data: what it shows, not how it is drawn.

`figures/` draws charts with matplotlib, for files; `page/svg.py` draws them for the page, in its themes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from mheads.report.charts.overlaps import Hidden, Points, find_hidden_parts, name_equal_lines

NUM_COLOURS = 8  # of members and runs; further ones take them again, dashed
MANY_MEMBERS = 12  # from here on the lines of members are thin and have no names
LONGEST = 24  # letters of a name

Colour = int | Literal["ink", "faint"]
Mark = Literal["", "point", "dot", "ring", "square"]


@dataclass(frozen=True)
class Line:
    """A line, or points if it is not `joined`.

    `colour` is the number of a member or a run, "ink" for what all members do together, or "faint" for what is there to
    compare with. `errors` are standard deviations of y.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: Colour = 0
    dashes: Literal["", "dashed", "dotted"] = ""
    mark: Mark = ""
    joined: bool = True
    thin: bool = False  # one of so many that they have no names
    errors: Sequence[float] = ()

    @property
    def pattern(self) -> str:
        """Its dashes: those of a member beyond the colours that there are tell it from the first of its colour."""
        again = isinstance(self.colour, int) and self.colour // NUM_COLOURS % 2
        return self.dashes or ("dashed" if again else "")

    def on_log_scale(self) -> Line:
        return replace(self, y=[math.log10(y) if y is not None and y > 0 else None for y in self.y])


@dataclass(frozen=True)
class LineChart:
    """Lines against one axis. `None` in a range is up to the values."""

    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float | None] | None = None
    log_scale: bool = False  # of the y axis
    x_names: Sequence[str] = ()  # of x = 0, 1, ..., where x is no number
    level: tuple[str, float] | None = None  # a horizontal line to compare with: its name and height
    bars: tuple[str, Sequence[float]] | None = None  # behind the lines, on an axis of their own: its label and the bars
    named_points: bool = False  # names stand beside the points, not in a legend
    own_names: bool = False  # names hold for this chart alone, so charts beside it do not spare them
    marks: Mapping[Mark, str] = field(default_factory=dict)  # what marks mean, where that is not in the legend
    note: str = ""
    below: LineChart | None = None  # another chart, smaller, along the same x axis
    size: tuple[float, float] = (5.0, 3.5)  # inches on paper

    @property
    def legend(self) -> list[Line]:
        """The lines that are named beside the chart, the level among them."""
        level = [Line(self.level[0], [], [], "faint", "dotted")] if self.level is not None else []
        lines = [line for line in self.lines if not line.thin and not self.named_points]
        return [*lines, *level] if len(self.lines) > 1 else []

    @property
    def equal_lines(self) -> str:
        """Which lines are the same from end to end, in words."""
        return name_equal_lines([line.name for line in self.lines], [(line.x, line.y) for line in self.lines])


def find_hidden_lines(lines: Sequence[Line], height: float) -> list[tuple[Line, Hidden]]:
    """The parts of lines that others hide, in a chart whose y axis is so high."""
    joined = [line for line in lines if line.joined]
    points: list[Points] = [(line.x, line.y) for line in joined]
    return [(joined[part.line], part) for part in find_hidden_parts(points, height)]


def spans_decades(lines: Sequence[Line]) -> bool:
    """Whether a log scale shows them better: small values would lie on the floor of another."""
    values = np.array([y for line in lines for y in line.y], float)
    values = values[np.isfinite(values)]
    return len(values) > 1 and values.min() > 0 and values.max() > 30 * values.min()


@dataclass(frozen=True)
class HeatMap:
    """Percents by row and column, shaded, at several moments (or of several kinds), of which one is shown first."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    percents: np.ndarray  # [T, R, C], NaN where there is nothing
    label: str = ""  # what the percents are
    moments: Sequence[str] = ("",)  # names, T of them
    shown: int = -1
    corner: str = ""
    pictures: Sequence[str] = ()  # of the columns, as data URIs
    name: str = ""  # on a page, where no other has it


Chart = LineChart | HeatMap


def shorten(name: str, length: int = LONGEST) -> str:
    """A name in one line, cut if it is long."""
    name = " ".join(printable(name).split())
    return name if len(name) <= length else f"{name[: length - 1]}…"


def printable(text: str) -> str:
    """Text that can be drawn: names of files and classes may hold bytes that are no character."""
    return text.encode(errors="replace").decode()
