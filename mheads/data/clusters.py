"""K-means, by the seed alone: of examples by their inputs, and of classes that are taken for each other."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mheads.common import seeds
from mheads.common.errors import UserError
from mheads.data.preprocessing import Preprocess
from mheads.data.resampling import order
from mheads.data.splits import Split

LARGE = 2**26  # values: with more, mini-batches are read one after the other instead of everything at once
ROWS = 1024  # of a mini-batch
PASSES = 3  # of mini-batches over the examples


def confusable(scores: Any, members: int, seed: int = 0) -> list[list[int]]:
    """M groups of classes that are often predicted together, from the class probabilities [N, C] of a generalist.

    K-means on the columns of their covariance [C, C], as Hinton, Vinyals and Dean (2015) do. Every class is in one
    group, the groups may differ in size, and the one with the lowest class comes first. No labels are used.
    """
    values = np.asarray(scores, np.float64)
    if values.ndim != 2 or len(values) < 2 or not np.isfinite(values).all():
        raise UserError(f"scores of shape {list(values.shape)}: give finite class scores [N, C] of 2 examples or more")
    classes = values.shape[1]
    if not 1 <= members <= classes:
        raise UserError(f"{members} members cannot share {classes} classes; train 1 to {classes} members")
    columns = np.cov(values, rowvar=False).reshape(classes, classes)
    from sklearn.cluster import KMeans

    # The best of many starts, while there are few classes: each may end in another local optimum.
    means = KMeans(members, n_init=max(10, 1000 // classes), tol=0, random_state=_seed(seed, "classes"))
    with _alone():
        label = means.fit_predict(columns)
    groups = sorted(np.flatnonzero(label == k).tolist() for k in np.unique(label))
    if len(groups) < members:
        raise UserError(
            f"the scores tell only {len(groups)} groups of classes apart, for {members} members: the generalist "
            "predicts several classes alike; train it longer, or train fewer members"
        )
    return groups


def input_distances(split: Split, preprocess: Preprocess, members: int, seed: int) -> torch.Tensor:
    """Distances [M, N] of the examples, as the network sees them, to the centres of M clusters of them."""
    from sklearn.cluster import KMeans, MiniBatchKMeans

    def read(rows: np.ndarray) -> np.ndarray:
        return preprocess(split.read(rows, None)).reshape(len(rows), -1).numpy()

    def chunks(rows: np.ndarray) -> Iterator[np.ndarray]:
        return (read(rows[start : start + size]) for start in range(0, len(rows), size))

    every, size = np.arange(len(split)), max(ROWS, members)
    with _alone():
        if len(split) * int(np.prod(split.shape)) <= LARGE:
            inputs = np.concatenate(list(chunks(every)))
            means = KMeans(members, n_init=10, random_state=_seed(seed, "inputs")).fit(inputs)
            distances = [means.transform(inputs)]
        else:
            means = MiniBatchKMeans(members, n_init=10, random_state=_seed(seed, "inputs"))
            for epoch in range(PASSES):
                for inputs in chunks(order(seed, epoch, len(split))):
                    if len(inputs) >= members:  # the last one may be shorter
                        means.partial_fit(inputs)
            distances = [means.transform(inputs) for inputs in chunks(every)]
    return torch.from_numpy(np.concatenate(distances).T.copy())


def _seed(seed: int, what: str) -> int:
    return seeds.derive(seed, "k-means", what) % 2**32


@contextmanager
def _alone() -> Iterator[None]:
    """Inside, k-means uses one thread, since the order of sums decides bits, and does not warn of equal examples."""
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # scikit-learn brings it

    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield
