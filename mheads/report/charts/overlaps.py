"""Where lines of a chart lie on each other, so that the last one drawn would hide the others.

There the hidden ones are drawn once more, in wide dashes that take turns, so that all are seen, also two of one colour.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Points = tuple[Sequence[float], Sequence[float | None]]  # x and y of a line
Piece = tuple[int, float, float]  # of a line between two places: its number, and its height at both
CLOSE = 0.004  # of the height of a chart, about the width of a line
MOST_LINES = 12  # with more, dashes everywhere would hide what they show
DASH = 8.0  # how long, in points or pixels


class Hidden(NamedTuple):
    """A part of a line that another hides: one point or more. It is number `turn` of those that take turns there."""

    line: int
    turn: int
    turns: int
    x: list[float]
    y: list[float]

    @property
    def dashes(self) -> tuple[float, tuple[float, float]]:
        """Where in a dash and its gap it begins, and how long these are; the line that hides it has the last turn."""
        return (self.turns - self.turn) * DASH, (DASH, (self.turns - 1) * DASH)

    @property
    def size(self) -> float:
        """Of a point: how large it is beside the one that hides it, which it is drawn into."""
        return 1 - (self.turn + 1) / self.turns


def find_hidden_parts(lines: Sequence[Points], height: float) -> list[Hidden]:
    """What is hidden of lines that are drawn in this order, in a chart whose y axis is so high."""
    if len(lines) > MOST_LINES:
        return []
    places: dict[tuple[float, float], list[Piece]] = defaultdict(list)
    for i, (x, y) in enumerate(lines):
        for (x0, y0), (x1, y1) in _pieces(x, y):
            places[x0, x1].append((i, y0, y1))
    parts: list[Hidden] = []
    growing: dict[tuple[tuple[int, ...], int], Hidden] = {}
    for x0, x1 in sorted(places):
        for group in _overlapping(places[x0, x1], CLOSE * height):
            members = tuple(i for i, _, _ in group)
            for turn, (i, y0, y1) in enumerate(group[:-1]):
                part = growing.get((members, i))
                if part is None or part.x[-1] != x0:
                    part = growing[members, i] = Hidden(i, turn, len(members), [x0], [y0])
                    parts.append(part)
                if x1 > x0:
                    part.x.append(x1)
                    part.y.append(y1)
    return parts


def name_equal_lines(names: Sequence[str], lines: Sequence[Points]) -> str:
    """Which lines have the same points from end to end, in words; empty if none do."""
    equal: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, (x, y) in zip(names, lines, strict=True):
        equal[tuple(_pieces(x, y))].append(name)
    return "; ".join(" = ".join(group) for points, group in equal.items() if points and len(group) > 1)


def _pieces(x: Sequence[float], y: Sequence[float | None]) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """From each point to the next; a point with none beside it goes to itself."""
    points = [(a, b) if b is not None and math.isfinite(b) else None for a, b in zip(x, y, strict=True)]
    for i, point in enumerate(points):
        after = points[i + 1] if i + 1 < len(points) else None
        if point is not None and after is not None:
            yield point, after
        elif point is not None and (i == 0 or points[i - 1] is None):
            yield point, point


def _overlapping(pieces: list[Piece], close: float) -> list[list[Piece]]:
    """Groups of pieces between the same two places that cannot be told apart."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        for group in groups:
            if abs(group[0][1] - piece[1]) <= close and abs(group[0][2] - piece[2]) <= close:
                group.append(piece)
                break
        else:
            groups.append([piece])
    return [group for group in groups if len(group) > 1]
