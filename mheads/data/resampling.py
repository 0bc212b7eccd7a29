"""Which example comes when, and which member learns from it: all of it a function of the seed.

Samplings are factories by name, whose annotated arguments are options of a config. To add one, write its factory and
its line in `SAMPLINGS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from mheads.common import seeds
from mheads.common.errors import UserError
from mheads.common.options import Location
from mheads.data.sample_weights import check_sample_weights


def order(seed: int, epoch: int, n: int) -> np.ndarray:
    """The permutation of 0..n-1 in which this epoch visits the examples, int64 [n]."""
    return seeds.numpy_generator(seed, "order", epoch).permutation(n)


_recent_order = lru_cache(maxsize=4)(order)


def stream(seed: int, n: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows at positions start..stop-1 of all epochs' orders laid end to end, and the epoch of each.

    Two int64 arrays [stop - start]. Only the position matters, so a resumed run needs no state.
    """
    positions = np.arange(start, stop)
    epochs = positions // n
    rows = np.empty_like(positions)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        rows[now] = _recent_order(seed, int(epoch), n)[positions[now] - epoch * n]
    return rows, epochs


@dataclass(frozen=True)
class Request:
    """What samplings look at: the class of each training example, int [N], among so many.

    `groups`: the classes of each member, where members have their own. `weights`: the array that `where` names.
    """

    seed: int
    members: int
    labels: np.ndarray
    num_classes: int
    groups: Sequence[Sequence[int]] | None = None
    weights: Any = None
    where: str = "sampling"


# How much each member learns from each training example, float32 [M, N] with rows of mean 1; None for all alike.
Sampling = Callable[[Request], np.ndarray | None]

Fraction = Annotated[float, Field(gt=0, le=1, description="the share of the examples that a member sees")]
Groups = Annotated[
    Literal["random"] | list[list[int]],
    Field(description="the classes of each member, or random for an even split by the seed"),
]
Generalist = Annotated[
    Location | None, Field(description="the folder of a finished run; classes that it confuses go to one member")
]
WeightsFile = Annotated[
    Location | None, Field(description="an .npz or .npy file of sample weights [M, N], per member and training example")
]


def full() -> Sampling:
    """Every member learns from every example."""
    return lambda request: None


def bagging() -> Sampling:
    """From an example as often as it was drawn in N draws with replacement."""

    def draw(request: Request) -> np.ndarray:
        seed, n = request.seed, len(request.labels)
        draws = (seeds.numpy_generator(seed, "bagging", m).integers(n, size=n) for m in range(request.members))
        return np.stack([np.bincount(drawn, minlength=n) for drawn in draws]).astype(np.float32)

    return draw


def subset(fraction: Fraction = 0.63) -> Sampling:
    """From a random fraction of the examples, each once."""

    def draw(request: Request) -> np.ndarray:
        n = len(request.labels)
        count = max(1, round(fraction * n))
        chosen = np.zeros((request.members, n), np.float32)
        for m in range(request.members):
            chosen[m, seeds.numpy_generator(request.seed, "subset", m).permutation(n)[:count]] = n / count
        return chosen

    return draw


def specialists(groups: Groups = "random") -> Sampling:
    """From the examples of the member's own classes."""
    return draw_by_class


def clustered(generalist: Generalist = None) -> Sampling:
    """As specialists, with groups of classes that another run confuses (`clusters.py`)."""
    return draw_by_class


def draw_by_class(request: Request) -> np.ndarray:
    assert request.groups is not None
    num_classes, labels = request.num_classes, request.labels
    owned = np.zeros((request.members, len(labels)), np.float32)
    for m, group in enumerate(request.groups):
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


def file(path: WeightsFile = None) -> Sampling:
    """By the sample weights in a file."""
    return array()


def array() -> Sampling:
    """By an array of sample weights."""
    return lambda request: check_sample_weights(request.weights, request.members, len(request.labels), request.where)


@dataclass(frozen=True)
class SamplingEntry:
    """`make` is the factory. `even`: every member learns from examples of all classes. `by_class`: members have classes
    of their own. `from_run`: another run decides these."""

    make: Callable[..., Sampling]
    even: bool = False
    by_class: bool = False
    from_run: bool = False


SAMPLINGS: dict[str, SamplingEntry] = {
    "full": SamplingEntry(full, even=True),
    "bagging": SamplingEntry(bagging, even=True),
    "subset": SamplingEntry(subset, even=True),
    "specialists": SamplingEntry(specialists, by_class=True),
    "clustered": SamplingEntry(clustered, by_class=True, from_run=True),
    "file": SamplingEntry(file),
    "array": SamplingEntry(array),
}
FACTORIES = {name: entry.make for name, entry in SAMPLINGS.items()}


def multiply_weights(sample_weights: np.ndarray | None, weights: np.ndarray | None, members: int) -> np.ndarray | None:
    """The sample weights [M, N] times weights [N] common to all members, with rows of mean 1 again."""
    if weights is None:
        return sample_weights
    both = np.tile(weights, (members, 1)) if sample_weights is None else sample_weights * weights
    totals = both.mean(axis=1, keepdims=True, dtype=np.float64)
    if not totals.all():
        raise UserError(
            f"member {int(np.argmin(totals))} would learn from examples of weight 0 only; "
            "give some of its examples a weight above 0"
        )
    normalized: np.ndarray = (both / totals).astype(np.float32)
    return normalized


def deal(seed: int, members: int, num_classes: int) -> list[list[int]]:
    """Deals every class to one member; 10 classes over 4 members are dealt 3, 3, 2 and 2."""
    if members > num_classes:
        raise UserError(
            f"{members} specialists cannot share {num_classes} classes; train at most {num_classes} members,"
            " or name overlapping groups of classes"
        )
    dealt = seeds.numpy_generator(seed, "specialists").permutation(num_classes)
    return [sorted(map(int, part)) for part in np.array_split(dealt, members)]
