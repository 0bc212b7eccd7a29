"""Views of an image, over which answers are averaged at evaluation: mirrored, and moved by some pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mheads.common.options import Section, option


class View(Section):
    """The image moved down and right, its reflection coming in at the edges, and then mirrored."""

    weight: float = option(1.0, "the weight of this view in the mean", gt=0)
    mirror: bool = option(False, "whether the image is mirrored")
    down: int = option(0, "pixels that the image is moved down; up if below 0")
    right: int = option(0, "pixels that the image is moved to the right; to the left if below 0")

    def __call__(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape."""
        height, width = images.shape[2:]
        if self.down or self.right:
            far = max(abs(self.down), abs(self.right))
            top, left = far - self.down, far - self.right
            images = F.pad(images, (far,) * 4, mode="reflect")[:, :, top : top + height, left : left + width]
        return images.flip(3) if self.mirror else images


def stack_views(images: Tensor, views: Sequence[View]) -> Tensor:
    """All views of images [B, C, H, W], one view after the other: [V B, C, H, W]; without views the images."""
    return torch.cat([view(images) for view in views]) if views else images


def average_views(outputs: Tensor, views: Sequence[View], dim: int) -> Tensor:
    """The mean of outputs on `stack_views`, weighted; their dimension `dim` goes from V B to B."""
    if not views:
        return outputs
    # Not `chunk`, which torch.export cannot follow for any number of rows.
    parts, total = outputs.unflatten(dim, (len(views), -1)).unbind(dim), sum(view.weight for view in views)
    mean: Tensor = parts[0] * (views[0].weight / total)
    for part, view in zip(parts[1:], views[1:], strict=True):
        mean = mean + part * (view.weight / total)
    return mean
