"""The figure of saliency: images beside what each member responds to in them."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

import numpy as np

from mheads.report.charts.chart import printable, shorten
from mheads.report.figures.figure import PALETTE, Figure

CELL = 0.86  # inches
LARGEST = 99.5  # percentile of a row's gradients that is shown as black or white: single pixels would dim all others
MARK = PALETTE[5]
CAPTION = f"Grey is zero, full contrast the {LARGEST:g}th percentile of all gradients in the row."
SHORT = 12  # letters of a name below an image


def saliency_figure(
    images: np.ndarray,
    classes: Sequence[str],
    maps: np.ndarray,
    columns: Sequence[str],
    probabilities: np.ndarray,
    owners: np.ndarray,
    caption: str = "",
) -> Figure:
    """A row for each image: the image, and a map for each column.

    images: 0..1 [N, H, W, 1 or 3]; classes: N names; maps: gradients [K, N, H, W, 1 or 3]; columns: K titles;
    probabilities: [K, N] of the class; owners: [N], the column that is marked, -1 for none. Grey is zero; the maps of
    a row are shown on one scale.
    """
    rows, num = len(images), len(columns)
    # A signal of one row, or a very long one, is stretched to a picture that can be seen.
    ratio = images.shape[1] / images.shape[2]
    shape = min(max(ratio, 0.3), 3.0)
    aspect = "equal" if shape == ratio else "auto"
    height = CELL * shape + 0.2
    lines = max(title.count("\n") for title in columns) + 1
    width = CELL * 1.06 * (num + 1) + 0.1
    note = wrap(f"{CAPTION} {caption}", int(19 * width))  # as many letters of this size stand side by side
    figure = Figure(width, height * rows + 0.2 * lines + 0.17 * len(note) + 0.1)
    figure.get_layout_engine().set(w_pad=0.015, h_pad=0.015, wspace=0, hspace=0)  # type: ignore[union-attr,call-arg]
    panels = figure.subplots(rows, num + 1, squeeze=False)
    for panel in panels.flat:
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(False)
    for title, panel in zip(("image", *columns), panels[0], strict=True):
        panel.set_title(printable(title), fontsize=8, pad=3, parse_math=False)
    for i in range(rows):
        panels[i, 0].imshow(_without_channel(images[i]), cmap="gray", vmin=0, vmax=1, aspect=aspect)
        panels[i, 0].set_xlabel(shorten(classes[i], SHORT), fontsize=8, labelpad=2, parse_math=False)
        for k, brightness in enumerate(scale_maps(maps[:, i])):
            panel, owns = panels[i, k + 1], k == owners[i]
            panel.imshow(_without_channel(brightness), cmap="gray", vmin=0, vmax=1, aspect=aspect)
            label = f"{100 * probabilities[k, i]:.0f} %" + (", owner" if owns else "")
            panel.set_xlabel(label, fontsize=8, labelpad=2, fontweight="bold" if owns else "normal")
            if owns:
                panel.spines[:].set(visible=True, color=MARK, linewidth=2)
    figure.supxlabel("\n".join(note), fontsize=7, color="0.35", parse_math=False)
    return figure


def scale_maps(maps: np.ndarray) -> np.ndarray:
    """The maps of a row as brightness: zero at 0.5, black and white at the same gradient in all of them."""
    largest = np.percentile(np.abs(maps), LARGEST) or np.abs(maps).max() or 1.0
    return np.clip(0.5 + 0.5 * maps / largest, 0, 1)


def _without_channel(picture: np.ndarray) -> np.ndarray:
    return picture[..., 0] if picture.shape[-1] == 1 else picture
