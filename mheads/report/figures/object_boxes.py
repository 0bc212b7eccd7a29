"""Pictures of objects that members find in an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patheffects import withStroke

from mheads.report.charts.chart import shorten
from mheads.report.figures.figure import PALETTE, Figure

Objects = Sequence[tuple[str, float, np.ndarray]]  # class, score and box (left, top, right, bottom) of each


def draw_objects(image: np.ndarray, objects: Mapping[str, Objects]) -> Figure:
    """The image once for each member, or whoever else looked at it, with the objects that they found."""
    height, width = image.shape[:2]
    columns = min(len(objects), 3 if width >= height else 4)
    rows = -(-len(objects) // columns)
    side = 10 / columns
    tall = min(side * height / width, 20 / rows)  # a long image is drawn small, not on metres of paper
    figure = Figure(10, rows * (tall + 0.3))
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    names = sorted({name for boxes in objects.values() for name, _, _ in boxes})
    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}
    for panel in panels:
        panel.set_axis_off()
    for panel, (who, boxes) in zip(panels, objects.items(), strict=False):
        panel.imshow(image)
        panel.set_title(f"{who}: {len(boxes)} object{'' if len(boxes) == 1 else 's'}", fontsize=9, loc="left")
        for name, score, (left, top, right, bottom) in boxes:
            colour = colours[name]
            corners = ([left, right + 1, right + 1, left, left], [top, top, bottom + 1, bottom + 1, top])
            panel.plot(*(np.array(side) - 0.5 for side in corners), color="white", linewidth=2.6)
            panel.plot(*(np.array(side) - 0.5 for side in corners), color=colour, linewidth=1.6)
            above = top > 0.07 * height  # else the name stands inside of the box
            inwards = left > 0.6 * width  # else it would leave the image
            text = panel.text(
                right if inwards else left, top - 1 if above else top + 1, f"{shorten(name)} {score:.2f}", color=colour,
                fontsize=7, fontweight="bold", clip_on=True, ha="right" if inwards else "left",
                va="bottom" if above else "top",
            )  # fmt: skip
            text.set_path_effects([withStroke(linewidth=2, foreground="white")])
        panel.set_xlim(-0.5, width - 0.5)
        panel.set_ylim(height - 0.5, -0.5)
    return figure
