"""A figure as a matplotlib object: nothing here touches pyplot's state or needs a display."""

from __future__ import annotations

import warnings
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as PlainFigure
from matplotlib.font_manager import fontManager
from matplotlib.text import Text
from matplotlib.ticker import ScalarFormatter

from mheads.common.atomic_files import write_atomically
from mheads.report.charts.chart import printable

# Okabe and Ito's colours, which every kind of colour vision can tell apart; their yellow, too pale for a line on white,
# is darker here, and their black is for what all members do together.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#A89900", "#555A63")
# For letters that the font of a figure lacks, on the systems that have them.
FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Microsoft YaHei", "PingFang SC", "Hiragino Sans", "Arial Unicode MS")
DPI = 150
SUFFIXES = (".png", ".svg", ".pdf")  # of the files that `save` writes


class Figure(PlainFigure):
    """A figure that a notebook shows when it is the value of a cell, whatever the backend is."""

    def __init__(self, width: float, height: float) -> None:
        """Inches."""
        super().__init__(figsize=(width, height), dpi=DPI, layout="constrained")

    def savefig(self, *args: Any, **options: Any) -> None:
        """In fonts that have most letters; one that none has is a box, without a warning. No name is a formula."""
        for text in self.findobj(Text):
            text.set_fontfamily(list(dict.fromkeys([*text.get_fontfamily(), *further_fonts()])))
            text.set_parse_math(False)
            text.set_text(printable(text.get_text()))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Glyph .* missing from font")
            super().savefig(*args, **options)

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def save(figure: PlainFigure, path: str | Path) -> None:
    """Writes the figure in the format of the path's suffix; an older file there stays whole until it is done."""
    path = Path(path)
    write_atomically(path, lambda file: figure.savefig(file, format=path.suffix[1:]))


def label_axes(panel: Axes, x: str, y: str) -> None:
    """Names the axes, which have small numbers and no frame."""
    panel.set_xlabel(x, fontsize=8)
    panel.set_ylabel(y, fontsize=8)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    for formatter in (panel.xaxis.get_major_formatter(), panel.yaxis.get_major_formatter()):
        if isinstance(formatter, ScalarFormatter):
            formatter.set_useOffset(False)  # 1476.2, not 0.2 beside +1.476e3


@cache
def further_fonts() -> list[str]:
    """Those of `FONTS` that are there: matplotlib complains of others."""
    known = {font.name for font in fontManager.ttflist}
    return [name for name in FONTS if name in known]
