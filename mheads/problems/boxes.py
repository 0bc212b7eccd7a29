"""Boxes as arrays [..., 4] of (left, top, right, bottom) in pixels counted from 0, both ends included.

A box from 3 to 5 is therefore 3 pixels wide: that is the "+ 1" in every width here, as in PASCAL VOC and Fast R-CNN.
"""

from __future__ import annotations

import numpy as np

MOST = np.log(1000 / 16)  # how far a box may grow, as a logarithm: a wild answer must not become infinite


def areas(boxes: np.ndarray) -> np.ndarray:
    sizes: np.ndarray = (boxes[..., 2] - boxes[..., 0] + 1) * (boxes[..., 3] - boxes[..., 1] + 1)
    return sizes


def overlaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Intersection by union of all pairs: [..., N, 4] and [..., K, 4] -> [..., N, K]."""
    a, b = a[..., :, None, :], b[..., None, :, :]

    def overlap_along(first: int) -> np.ndarray:  # one way at a time: several times as fast as pairs of numbers
        size: np.ndarray = np.minimum(a[..., first + 2], b[..., first + 2]) - np.maximum(a[..., first], b[..., first])
        size += 1
        np.maximum(size, 0, out=size)
        return size

    common = overlap_along(0) * overlap_along(1)
    ratios: np.ndarray = common / (areas(a) + areas(b) - common)
    return ratios


def encode(boxes: np.ndarray, truths: np.ndarray) -> np.ndarray:
    """What turns boxes into truths, both [N, 4]: shifts of the centre by the box's size, and logarithms of growth."""
    size, wanted = boxes[:, 2:] - boxes[:, :2] + 1, truths[:, 2:] - truths[:, :2] + 1
    shift = (truths[:, :2] + wanted / 2 - boxes[:, :2] - size / 2) / size
    return np.concatenate([shift, np.log(wanted / size)], 1)


def decode(boxes: np.ndarray, deltas: np.ndarray) -> np.ndarray:
    """The inverse of `encode`, for deltas [..., 4] of boxes of a shape that goes with theirs."""
    size = boxes[..., 2:] - boxes[..., :2] + 1
    centre = boxes[..., :2] + size / 2 + deltas[..., :2] * size
    half = np.exp(np.minimum(deltas[..., 2:], MOST)) * size / 2
    return np.concatenate([centre - half, centre + half - 1], -1)


def clip(boxes: np.ndarray, width: int, height: int) -> np.ndarray:
    """The boxes inside of an image."""
    inside: np.ndarray = np.clip(boxes, 0, np.array([width, height, width, height]) - 1)
    return inside


def mirror(boxes: np.ndarray, width: int) -> np.ndarray:
    """The boxes in the image turned left to right."""
    return np.stack([width - 1 - boxes[..., 2], boxes[..., 1], width - 1 - boxes[..., 0], boxes[..., 3]], -1)


def suppress(boxes: np.ndarray, present: np.ndarray, threshold: float) -> np.ndarray:
    """Which boxes stay when those that overlap a better one by more than the threshold go: bools [..., N].

    Boxes [..., N, 4] come best first, and `there` [..., N] says which are any; all sets are worked on at once.
    """
    near = overlaps(boxes, boxes) > threshold
    stays = present.copy()
    for i in range(boxes.shape[-2]):
        stays[..., i + 1 :] &= ~(near[..., i, i + 1 :] & stays[..., i, None])
    return stays
