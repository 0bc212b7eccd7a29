"""The handwritten digits that come with scikit-learn: real images, no network, a minute of training."""

from __future__ import annotations

import numpy as np

from mheads.common import seeds
from mheads.data.arrays import ArraySplit
from mheads.problems import Classification, Problem

LEVELS = 16  # the brightest of their 17 levels of grey


def read_digits() -> tuple[ArraySplit, ArraySplit, Problem]:
    """1,437 training and 360 test images, uint8 0..16 [N, 8, 8, 1], with the same share of each class; ten classes.

    The split is the same for every run seed, so that runs can be compared.
    """
    from sklearn.datasets import load_digits  # slow to import, needed only here

    digits = load_digits()
    images, labels = digits.images.astype(np.uint8)[..., None], digits.target.astype(np.int64)
    mixed = seeds.numpy_generator("digits", "split").permutation(len(labels))
    by_class = mixed[np.argsort(labels[mixed], kind="stable")]
    held_out = np.zeros(len(labels), bool)
    held_out[by_class[::5]] = True  # every fifth of each class
    # Both stay in mixed order, so that the last n of them are a fair validation set.
    train, test = mixed[~held_out[mixed]], mixed[held_out[mixed]]
    problem = Classification(tuple(map(str, range(10))))
    return ArraySplit(images[train], labels[train]), ArraySplit(images[test], labels[test]), problem
