"""Which example comes when, and which member learns from it: all of it a function of the seed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from mheads.common import seeds
from mheads.common.errors import UserError
from mheads.data.sample_weights import check_priors

PRIORS = ("full", "bagging", "subset", "specialists", "clustered", "file", "array")


def order(seed: int, epoch: int, n: int) -> np.ndarray:
    """The permutation of 0..n-1 in which this epoch visits the examples, int64 [n]."""
    return seeds.numpy_generator(seed, "order", epoch).permutation(n)


_recent_order = lru_cache(maxsize=4)(order)


def stream(seed: int, n: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows at positions start..stop-1 of all epochs' orders laid end to end, and the epoch of each.

    Two int64 arrays [stop - start]. Only the position matters, so a resumed run needs no state.
    """
    if n < 1:
        raise UserError(f"there are {n} examples to draw from; give a dataset with at least one")
    positions = np.arange(start, stop)
    epochs = positions // n
    rows = np.empty_like(positions)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        rows[now] = _recent_order(seed, int(epoch), n)[positions[now] - epoch * n]
    return rows, epochs


def priors(
    name: str,
    *,
    seed: int,
    members: int,
    labels: np.ndarray,
    num_classes: int,
    fraction: float = 0.63,
    groups: Sequence[Sequence[int]] | Literal["random"] | None = None,
    given: Any = None,
    where: str = "sampling",
) -> np.ndarray | None:
    """How much each member learns from each training example, float32 [M, N] with rows of mean 1.

    full: everything alike (None). bagging: as often as the example was drawn in N draws with replacement.
    subset: a random `fraction` of the examples, each once. specialists: the examples of the member's own
    classes; `groups` lists these classes for each member, or "random" (the default) deals them out evenly. clustered:
    the same, with groups that a run has found (`clusters.py`). file, array: the array `given`, which is from `where`.
    """
    if name not in PRIORS:
        raise UserError(f"sampling is {name!r}; it can be {', '.join(PRIORS)}")
    if name in ("file", "array"):
        return check_priors(given, members, len(labels), where)
    if groups is not None and name not in ("specialists", "clustered"):
        raise UserError(f"sampling groups are for 'specialists', but sampling is {name!r}; leave the groups out")
    if name == "full":
        return None
    if name == "bagging":
        return _bagging(seed, members, len(labels))
    if name == "subset":
        return _subset(seed, members, len(labels), fraction)
    if groups is None or groups == "random":
        groups = deal(seed, members, num_classes)
    return _specialists(groups, members, labels, num_classes)


def weighted(prior: np.ndarray | None, weights: np.ndarray | None, members: int) -> np.ndarray | None:
    """The priors [M, N] times weights [N] common to all members, with rows of mean 1 again."""
    if weights is None:
        return prior
    both = np.tile(weights, (members, 1)) if prior is None else prior * weights
    totals = both.mean(axis=1, keepdims=True, dtype=np.float64)
    if not totals.all():
        raise UserError(
            f"member {int(np.argmin(totals))} would learn from examples of weight 0 only; "
            "give some of its examples a weight above 0"
        )
    normalized: np.ndarray = (both / totals).astype(np.float32)
    return normalized


def _bagging(seed: int, members: int, n: int) -> np.ndarray:
    draws = (seeds.numpy_generator(seed, "bagging", m).integers(n, size=n) for m in range(members))
    return np.stack([np.bincount(drawn, minlength=n) for drawn in draws]).astype(np.float32)


def _subset(seed: int, members: int, n: int, fraction: float) -> np.ndarray:
    if not 0 < fraction <= 1:
        raise UserError(f"sampling fraction is {fraction}; give a part of the training set, above 0 and up to 1")
    count = max(1, round(fraction * n))
    chosen = np.zeros((members, n), np.float32)
    for m in range(members):
        chosen[m, seeds.numpy_generator(seed, "subset", m).permutation(n)[:count]] = n / count
    return chosen


def deal(seed: int, members: int, num_classes: int) -> list[list[int]]:
    """Deals every class to one member; 10 classes over 4 members are dealt 3, 3, 2 and 2."""
    if members > num_classes:
        raise UserError(
            f"{members} specialists cannot share {num_classes} classes; train at most {num_classes} members,"
            " or name overlapping groups of classes"
        )
    dealt = seeds.numpy_generator(seed, "specialists").permutation(num_classes)
    return [sorted(map(int, part)) for part in np.array_split(dealt, members)]


def _specialists(groups: Sequence[Sequence[int]], members: int, labels: np.ndarray, num_classes: int) -> np.ndarray:
    if len(groups) != members:
        raise UserError(f"sampling has {len(groups)} groups of classes for {members} members; give one to each")
    owned = np.zeros((members, len(labels)), np.float32)
    for m, group in enumerate(groups):
        if len(group) == 0:
            raise UserError(f"sampling group {m} is empty; give member {m} at least one class")
        wrong = [c for c in group if c not in range(num_classes)]
        if wrong:
            raise UserError(f"sampling group {m} names class {wrong[0]!r}; the classes are 0 to {num_classes - 1}")
        mine = np.isin(labels, group)
        if not mine.any():
            raise UserError(
                f"sampling group {m} is {list(group)}, but no training example has such a class;"
                f" give member {m} classes that occur"
            )
        owned[m, mine] = len(labels) / mine.sum()
    return owned
