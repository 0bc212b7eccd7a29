"""Figures with matplotlib, from charts and pictures as plain data: no file here knows what a run is."""

from __future__ import annotations

from collections.abc import Sequence

from mheads.report.charts.chart import Chart, HeatMap, LineChart
from mheads.report.figures.draw_heat_maps import draw_heat_maps
from mheads.report.figures.draw_lines import draw_line_charts
from mheads.report.figures.figure import Figure

__all__ = ["Figure", "draw"]


def draw(charts: Sequence[Chart]) -> Figure:
    """One figure of several charts of one kind."""
    maps = [chart for chart in charts if isinstance(chart, HeatMap)]
    return draw_heat_maps(maps) if maps else draw_line_charts([c for c in charts if isinstance(c, LineChart)])
