"""The diabetes table that comes with scikit-learn (Efron et al., 2004): real numbers to be predicted, no network."""

from __future__ import annotations

import numpy as np

from mheads.common import seeds
from mheads.data.arrays import ArraySplit
from mheads.data.python_data import read_arrays
from mheads.problems import Problem


def read_diabetes() -> tuple[ArraySplit, ArraySplit, Problem]:
    """Ten numbers of each of 442 patients, and how far the disease went within a year: 354 train and 88 test."""
    from sklearn.datasets import load_diabetes  # slow to import, needed only here

    x, y = load_diabetes(return_X_y=True, scaled=False)
    mixed = seeds.numpy_generator("diabetes", "split").permutation(len(y))
    test, train = mixed[: len(y) // 5], mixed[len(y) // 5 :]
    x = x.astype(np.float32)
    return read_arrays((x[train], y[train]), (x[test], y[test]), "diabetes")
