"""Generated sets in which a question has several right answers, for losses that give several hypotheses."""

from __future__ import annotations

import numpy as np

from mheads.common import seeds
from mheads.data.arrays import ArraySplit
from mheads.data.python_data import read_arrays
from mheads.problems import Problem

TRAIN, TEST = 2000, 1000
POINTS = 12  # of a way
SIDE = 16  # pixels of an image
Parts = tuple[ArraySplit, ArraySplit, Problem]


def read_two_roots() -> Parts:
    """x uniform in 0..1; y is +sqrt(x), three times in four, or -sqrt(x), plus noise of standard deviation 0.05."""
    rng = seeds.numpy_generator("two_roots")
    x = rng.uniform(0, 1, (TRAIN + TEST, 1))
    sign = np.where(rng.random((TRAIN + TEST, 1)) < 0.75, 1, -1)
    return _split(x.astype(np.float32), sign * np.sqrt(x) + 0.05 * rng.normal(size=x.shape), "two_roots")


def read_three_futures() -> Parts:
    """Speed and a number a; the way of the next 12 steps [12, 2]: straight on with probability 0.4, a quarter turn to
    the left with 0.6 a, to the right with 0.6 (1 - a), plus noise of standard deviation 0.02 at every point."""
    rng = seeds.numpy_generator("three_futures")
    speed, a = rng.uniform(0.5, 1.5, TRAIN + TEST), rng.uniform(0, 1, TRAIN + TEST)
    u = rng.random(TRAIN + TEST)
    turn = np.where(u < 0.4, 0.0, np.where(u < 0.4 + 0.6 * a, 1.0, -1.0))
    angles = turn[:, None] * np.pi / 2 * np.arange(1, POINTS + 1) / POINTS
    steps = (speed / POINTS)[:, None, None] * np.stack([np.cos(angles), np.sin(angles)], -1)
    ways = steps.cumsum(1) + 0.02 * rng.normal(size=(TRAIN + TEST, POINTS, 2))
    return _split(np.stack([speed, a], 1).astype(np.float32), ways, "three_futures")


def read_ambiguous_masks() -> Parts:
    """Images uint8 [16, 16] of a spot that fades from its centre; its mask ends at one of three radii, as if by three
    people who draw its border differently. 500 train, 250 test."""
    rng = seeds.numpy_generator("ambiguous_masks")
    count = (TRAIN + TEST) // 4
    centre, radius = rng.uniform(5, SIDE - 5, (2, count, 1, 1)), rng.uniform(2.5, 4, (count, 1, 1))
    rows, columns = np.mgrid[:SIDE, :SIDE]
    distance = np.hypot(rows - centre[0], columns - centre[1]) / radius
    images = 200 * np.exp(-(distance**2)) + 10 * rng.normal(size=distance.shape) + 30
    border = rng.choice([0.6, 1.0, 1.5], (count, 1, 1))
    x, y = images.clip(0, 255).astype(np.uint8), (distance < border).astype(np.int64)
    return _split(x[:, None], y, "ambiguous_masks", TRAIN // 4)


def _split(x: np.ndarray, y: np.ndarray, name: str, train: int = TRAIN) -> Parts:
    return read_arrays((x[:train], y[:train]), (x[train:], y[train:]), name)
