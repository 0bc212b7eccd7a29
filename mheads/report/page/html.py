"""The HTML page: one file that asks nobody for anything. Names come from data, so every text in it is escaped."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from mheads.common.table import Table

NOTHING = 255  # in a grid: a cell without examples
MOST_CLASSES = 60  # in a grid; of more, the ones that are contested most are shown
MOST_CELLS = 300_000  # of all moments of a grid together


def render(template: str, **values: Any) -> str:
    """The page of a template in this folder, which has all it shows in `values`."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)


@dataclass(frozen=True)
class Grid:
    """A table of percents, shaded: rows by columns at several moments, of which one is shown first.

    cells: uint8 [T, R, C], 255 for none; labels: what the moments are called; pictures: of columns, as data URIs.
    """

    name: str
    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: np.ndarray
    labels: Sequence[str]
    corner: str = ""
    pictures: Sequence[str] = field(default_factory=tuple)
    shown: int = -1

    @property
    def short(self) -> bool:
        """Whether the names of columns have room above them without being turned."""
        return all(len(name) <= 3 for name in self.columns)

    @property
    def table(self) -> list[list[int | None]]:
        """What is shown first."""
        return [[None if cell == NOTHING else int(cell) for cell in row] for row in self.cells[self.shown]]

    @property
    def data(self) -> dict[str, Any]:
        """What the script of the page needs to show another moment."""
        return {"labels": list(self.labels), "cells": base64.b64encode(self.cells.tobytes()).decode()}


# What sections are made of. `kind` says how the template shows it.


@dataclass(frozen=True)
class Chart:
    """A chart of lines; legend: style and name of each."""

    title: str
    svg: Markup
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""
    below: Markup | None = None
    kind: str = "chart"


@dataclass(frozen=True)
class Grids:
    """Grids that change together: by a slider over time, by a choice, or (only one moment each) not at all."""

    grids: Sequence[Grid]
    by: str = "time"
    note: str = ""
    kind: str = "grids"

    @property
    def moments(self) -> int:
        return max(len(grid.labels) for grid in self.grids)


@dataclass(frozen=True)
class Facts:
    """Names and texts."""

    facts: Sequence[tuple[str, str]]
    kind: str = "facts"


@dataclass(frozen=True)
class Drawing:
    """A drawing that is as wide as it is, and on a small screen at least `least` pixels."""

    title: str
    svg: Markup
    note: str = ""
    least: int = 0
    kind: str = "drawing"


@dataclass(frozen=True)
class Gallery:
    """Pictures with their titles and alternative texts: (title, data URI, text)."""

    pictures: Sequence[tuple[str, str, str]]
    note: str = ""
    kind: str = "gallery"


@dataclass(frozen=True)
class Hardest:
    """Examples with everybody's answer, see `report/page/evidence.py`."""

    examples: Sequence[Any]
    note: str = ""
    kind: str = "hardest"


@dataclass(frozen=True)
class Code:
    title: str
    text: str
    folded: bool = False
    kind: str = "code"


@dataclass(frozen=True)
class Missing:
    """Why something is not there."""

    text: str
    kind: str = "missing"


Part = Chart | Grids | Table | Facts | Drawing | Gallery | Hardest | Code | Missing


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    parts: Sequence[Part]
    lead: str = ""


@dataclass(frozen=True)
class Page:
    """All of a page. headline: (name, value, unit, what it means); state: what is going on, if something is; notes:
    what is wrong with the run."""

    title: str
    about: str
    headline: Sequence[tuple[str, str, str, str]]
    sections: Sequence[Section]
    state: str = ""
    notes: Sequence[str] = ()
    made: str = ""
    refresh: int = 0  # seconds after which the page is loaded again; 0: never

    def html(self) -> str:
        # Half a surrogate pair is how Python shows a byte of a file's name that is not UTF-8.
        return render("template.html", page=self).encode("utf-8", "replace").decode()


def percents(parts: np.ndarray) -> np.ndarray:
    """Parts of 1, NaN for none, as the cells of a grid."""
    return np.where(np.isnan(parts), NOTHING, np.nan_to_num(parts * 100).round().clip(0, 100)).astype(np.uint8)


def shares(counts: np.ndarray, lasting: bool = False) -> np.ndarray:
    """Counts [T, M, C] to each member's part of each class; NaN where a class has none, or if `lasting` what was."""
    totals = counts.sum(1, keepdims=True)
    found = np.where(totals > 0, counts / np.where(totals > 0, totals, 1), np.nan)
    for t in range(1, len(found) if lasting else 0):
        found[t] = np.where(np.isnan(found[t]), found[t - 1], found[t])
    return found


def ownership_grid(
    name: str,
    title: str,
    moments: np.ndarray,
    counts: np.ndarray,
    classes: Sequence[str],
    pictures: Sequence[str] = (),
    lasting: bool = False,
) -> Grid:
    """Who owns which class over time: moments [T], counts [T, M, C]. Classes and moments are thinned if too many."""
    found = shares(counts, lasting)
    chosen = np.arange(found.shape[2])
    if len(chosen) > MOST_CLASSES:
        spread = np.nan_to_num(found).max(0) - np.nan_to_num(found).min(0)
        chosen = np.sort(np.argsort(-spread.max(0), kind="stable")[:MOST_CLASSES])
    most = max(2, MOST_CELLS // (found.shape[1] * len(chosen)))
    kept = np.unique(np.linspace(0, len(found) - 1, min(most, len(found))).round().astype(int))
    return Grid(
        name,
        title,
        [f"member {m}" for m in range(found.shape[1])],
        [classes[int(c)] for c in chosen],
        percents(found[np.ix_(kept, np.arange(found.shape[1]), chosen)]),
        [f"iteration {moments[t]:,}" for t in kept],
        "",
        [pictures[int(c)] for c in chosen] if pictures else (),
    )


def picture(image: np.ndarray, most: int = 64) -> str:
    """An image uint8 [H, W, 3] as a PNG in a data URI, at most so many pixels wide and high."""
    shown = Image.fromarray(image)
    shown.thumbnail((most, most))
    content = io.BytesIO()
    shown.save(content, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
