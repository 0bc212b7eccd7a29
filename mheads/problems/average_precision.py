"""Average precision of detections, as PASCAL VOC's development kit measures it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mheads.problems import boxes as box

OVERLAP = 0.5  # from here on a detection is right
POINTS = np.linspace(0, 1, 11)  # the recalls of 2007, in floats as the kit has them: its 0.3 is above 3 / 10, too
WRONG, IGNORED = -1, -2  # what a detection found, if it is no object that counts


@dataclass(frozen=True, eq=False)  # arrays have no truth value to compare by
class Truth:
    """The objects of one image: boxes [K, 4], classes [K], and which are too difficult to count; the image's size."""

    boxes: np.ndarray
    classes: np.ndarray
    difficult: np.ndarray
    width: int
    height: int


def matches(boxes: np.ndarray, class_number: int, truth: Truth) -> np.ndarray:
    """What detections [N, 4] of a class found in an image: the number of the object that each overlaps most, WRONG if
    that is by less than half, IGNORED if the object is difficult."""
    own = np.flatnonzero(truth.classes == class_number)
    if not len(own):
        return np.full(len(boxes), WRONG)
    shared = box.overlaps(boxes, truth.boxes[own])
    best = own[shared.argmax(1)]
    return np.where(shared.max(1) < OVERLAP, WRONG, np.where(truth.difficult[best], IGNORED, best))


def curve(scores: np.ndarray, hits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Precision and recall after each detection that counts, the best score first; equal scores keep their order.

    `hits` [N] says what each found, with a number of its own for every object; only the first to find one is right.
    """
    hits = hits[np.argsort(-scores, kind="stable")]
    hits = hits[hits != IGNORED]
    right = np.zeros(len(hits))
    right[np.unique(hits, return_index=True)[1]] = 1
    right_so_far = np.cumsum(right * (hits != WRONG))
    return right_so_far / np.arange(1, len(hits) + 1), right_so_far / count


def eleven_points(precision: np.ndarray, recall: np.ndarray) -> float:
    """VOC 2007: the mean over the recalls 0, 0.1, ..., 1 of the best precision at that recall or above."""
    return float(np.mean([precision[recall >= point].max(initial=0.0) for point in POINTS]))


def all_points(precision: np.ndarray, recall: np.ndarray) -> float:
    """VOC 2010 and later: the area under the best precision at each recall or above."""
    best = np.maximum.accumulate(precision[::-1])[::-1]
    return float((best * np.diff(recall, prepend=0.0)).sum())


MEASURES = {"11-point": eleven_points, "all-point": all_points}


def average_precisions(scores: np.ndarray, hits: np.ndarray, count: int) -> dict[str, float]:
    """Both measures of a class with `count` objects to find, in percent; NaN where there is none."""
    if not count:
        return dict.fromkeys(MEASURES, np.nan)
    precision, recall = curve(scores, hits, count)
    return {name: 100 * area(precision, recall) for name, area in MEASURES.items()}
