"""Sums whose bits do not depend on who finishes first."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

Gradients = list[Tensor | None]


class PairwiseSum:
    """The sum of n lists of tensors, given in any order from any thread, added in one fixed pairwise tree.

    Level by level, entries 2j and 2j+1 are added into entry j of the next level; an odd last one moves up alone. Two
    entries are added as soon as both are there, so no more than log2(n) of them wait when they come in order. None
    stands for zero.
    """

    def __init__(self, n: int) -> None:
        self.sizes = [n]
        while self.sizes[-1] > 1:
            self.sizes.append((self.sizes[-1] + 1) // 2)
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], Gradients] = {}

    def add(self, index: int, terms: Gradients) -> Gradients | None:
        """Takes over entry `index`, a list that is emptied on the way; returns the sum if this was the last entry."""
        for level, size in enumerate(self.sizes):
            if size == 1:
                break
            sibling = index ^ 1
            if sibling < size:
                with self._lock:
                    other = self._waiting.pop((level, sibling), None)
                    if other is None:
                        self._waiting[level, index] = terms
                        return None
                terms = _add(terms, other) if index < sibling else _add(other, terms)
            index //= 2
        return terms


@torch.no_grad()
def _add(left: Gradients, right: Gradients) -> Gradients:
    """The sum, in tensors of its own: gradients may be views of one buffer, of a parameter or of what another stage
    was given, so adding in place would change others. One by one, so that each pair is freed before the next."""
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        left[i] = b if a is None else a if b is None else a + b
        right[i] = None
        del a, b
    return left
