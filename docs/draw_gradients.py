"""Draws docs/images/gradients.png: which layers of one network, four networks, a tree and MCL get a gradient from one
example. `python docs/draw_gradients.py`"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

PICTURE = Path(__file__).parent / "images/gradients.png"
BLUE, ORANGE, GREY, TEXT = "#cfe0f3", "#d95f02", "#e4e4e4", "#333333"
LOSSES = ("0.9", "0.2", "1.4", "0.6")  # of four members on the example; the second wins
LOW, MIDDLE, TOP, LOSS = 1.0, 2.2, 3.4, 4.6  # heights of three layers and of the losses
TITLES = {
    "single": ("one network", "one loss, one gradient"),
    "independent": ("independent, M = 4", "each member learns\nfrom every example"),
    "tree": ("TreeNet, M = 4", "gradients of the members\nare summed at the split"),
    "mcl": ("MCL, k = 1", "only the member with the\nlowest loss learns"),
}


def box(axes: Axes, x: float, y: float, learns: bool, width: float = 0.6) -> None:
    """A layer; those that learn from the example are coloured."""
    style = "round,pad=0.02,rounding_size=0.08"
    color = BLUE if learns else GREY
    axes.add_patch(FancyBboxPatch((x - width / 2, y - 0.3), width, 0.6, style, facecolor=color, edgecolor="#777777"))


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], learns: bool) -> None:
    """A gradient on its way down, or a thin line where a value went up and no gradient comes back."""
    look = {"arrowstyle": "-|>", "color": ORANGE, "lw": 2.0} if learns else {"arrowstyle": "-", "color": "#aaaaaa"}
    axes.annotate("", end, start, arrowprops={**look, "shrinkA": 0, "shrinkB": 0})


def draw(axes: Axes, kind: str) -> None:
    members = [1.5] if kind == "single" else [0.0, 1.0, 2.0, 3.0]
    for m, x in enumerate(members):
        learns = kind != "mcl" or m == 1
        loss = "0.4" if kind == "single" else LOSSES[m]
        axes.text(x, LOSS, loss, ha="center", va="center", color=ORANGE if learns else "#999999", fontsize=11)
        heights = [TOP, MIDDLE] if kind == "tree" else [TOP, MIDDLE, LOW]
        for above, height in zip([LOSS, *heights], heights, strict=False):
            arrow(axes, (x, above - (0.2 if above == LOSS else 0.32)), (x, height + 0.32), learns)
            box(axes, x, height, learns)
        if kind == "tree":
            arrow(axes, (x, MIDDLE - 0.32), (1.5 + (x - 1.5) * 0.75, LOW + 0.32), True)
    if kind == "tree":
        box(axes, 1.5, LOW, True, width=2.9)
    axes.text(1.5, 0.25, "an example", ha="center", va="center", color=TEXT, fontsize=10)
    title, words = TITLES[kind]
    axes.set_title(title, fontsize=13, color=TEXT, fontweight="bold")
    axes.text(1.5, -0.25, words, ha="center", va="top", color=TEXT, fontsize=10)
    axes.set(xlim=(-0.6, 3.6), ylim=(-1.1, 5.0))
    axes.axis("off")


def main() -> None:
    figure, panels = plt.subplots(1, 4, figsize=(11, 4.1), facecolor="white")
    for axes, kind in zip(panels, TITLES, strict=True):
        draw(axes, kind)
    panels[0].text(-0.6, LOSS, "losses", va="center", color=TEXT, fontsize=10)
    panels[0].text(-0.6, (TOP + LOW) / 2, "layers", va="center", color=TEXT, fontsize=10)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.9, bottom=0.02, wspace=0.05)
    figure.savefig(PICTURE, dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    main()
