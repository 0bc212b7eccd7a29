"""A page as plain data, and as one HTML file that loads nothing."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mheads.common.table import Table
from mheads.report.charts.chart import HeatMap, LineChart
from mheads.report.evidence import HardExample
from mheads.report.page.stage_tree import StageBox
from mheads.report.page.svg import draw_chart, name_style
from mheads.report.page.templates import render

NOTHING = 255  # in the cells of a heat map: nothing to show
MOST_COLUMNS = 60  # of a heat map; of more, those that change most are shown
MOST_CELLS = 300_000  # of all moments of a heat map together

# What sections are made of, beside charts of lines and tables. The template shows each by the name of its class.


@dataclass(frozen=True)
class HeatMaps:
    """Maps that change together: by a slider over time, by a choice, or (only one moment each) not at all."""

    maps: Sequence[HeatMap]
    by: str = "time"
    note: str = ""

    @property
    def moments(self) -> int:
        return max(len(chart.moments) for chart in self.maps)


@dataclass(frozen=True)
class FactList:
    """Names and texts."""

    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class StageTree:
    """The stages of a network, below an input of this shape."""

    title: str
    shape: str
    roots: Sequence[StageBox]
    note: str = ""


@dataclass(frozen=True)
class Gallery:
    """Pictures with their titles and alternative texts: (title, data URI, text)."""

    pictures: Sequence[tuple[str, str, str]]
    note: str = ""


@dataclass(frozen=True)
class Hardest:
    """Examples with everybody's answer."""

    examples: Sequence[HardExample]


@dataclass(frozen=True)
class CodeBlock:
    title: str
    text: str
    folded: bool = False


@dataclass(frozen=True)
class Missing:
    """Why something is not there."""

    text: str


Part = LineChart | HeatMaps | Table | FactList | StageTree | Gallery | Hardest | CodeBlock | Missing


@dataclass(frozen=True)
class PageSection:
    name: str
    title: str
    parts: Sequence[Part]
    lead: str = ""


Headline = Sequence[tuple[str, str, str, str]]  # a name, its value, the unit, and what it means or whose it is


@dataclass(frozen=True)
class Page:
    """All of a page. state: how far a run is that is not finished; notes: what is wrong with the run; lacking: the
    sections that lack something, by the reason."""

    title: str
    about: str
    headline: Headline
    sections: Sequence[PageSection]
    state: str = ""
    notes: Sequence[str] = ()
    made: str = ""
    lacking: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refresh: int = 0  # seconds after which the page is loaded again; 0: never

    def html(self) -> str:
        functions: dict[str, Any] = {"draw_chart": draw_chart, "name_style": name_style, "encode": encode_cells}
        functions |= {"cells": cells, "kind_of": lambda part: type(part).__name__}
        # Half a surrogate pair is how Python shows a byte of a file's name that is not UTF-8.
        return str(render("template.html", page=self, **functions)).encode("utf-8", "replace").decode()


def cells(chart: HeatMap) -> np.ndarray:
    """The percents as uint8 [T, R, C], `NOTHING` for none."""
    percents = np.nan_to_num(chart.percents).round().clip(0, 100)
    return np.where(np.isnan(chart.percents), NOTHING, percents).astype(np.uint8)


def encode_cells(chart: HeatMap) -> dict[str, Any]:
    """What the script of the page needs to show another moment."""
    return {"labels": list(chart.moments), "cells": base64.b64encode(cells(chart).tobytes()).decode()}


def thin_out(chart: HeatMap) -> HeatMap:
    """A map that a page has room for: the columns that change most, and moments evenly spread."""
    values = np.nan_to_num(chart.percents)
    moments, rows, columns = values.shape
    chosen = np.arange(columns)
    if columns > MOST_COLUMNS:
        chosen = np.sort(np.argsort(-np.ptp(values, axis=0).max(0), kind="stable")[:MOST_COLUMNS])
    most = max(2, MOST_CELLS // (rows * len(chosen)))
    kept = np.unique(np.linspace(0, moments - 1, min(most, moments)).round().astype(int))
    return replace(
        chart,
        columns=[chart.columns[c] for c in chosen],
        percents=chart.percents[np.ix_(kept, np.arange(rows), chosen)],
        moments=[chart.moments[t] for t in kept],
        pictures=[chart.pictures[c] for c in chosen] if chart.pictures else (),
    )
