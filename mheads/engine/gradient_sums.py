"""Sums whose bits depend neither on who finishes first nor on who adds which part."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Gradients = list[Tensor | None]
Subtrees = dict[range, Gradients]  # sums of aligned parts of the tree: all of it, or those of one of several processes


class PairwiseSum:
    """The sum of n lists of tensors, given in any order from any thread, added in one fixed pairwise tree.

    Level by level, entries 2j and 2j+1 are added into entry j of the next level; an odd last one moves up alone. Two
    entries are added as soon as both are there, so no more than log2(n) of them wait when they come in order. None
    stands for zero. Where only the entries of some `parts` of the tree come, it adds each of these.
    """

    def __init__(self, n: int, parts: Sequence[range] | None = None) -> None:
        self.sizes = [n]
        while self.sizes[-1] > 1:
            self.sizes.append((self.sizes[-1] + 1) // 2)
        self.subtrees = [range(n)] if parts is None else parts
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], Gradients] = {}
        self._sums: Subtrees = {}

    def add(self, index: int, terms: Gradients) -> Subtrees | None:
        """Takes over entry `index`, a list that is emptied on the way; returns the sums if this was the last entry."""
        for level, size in enumerate(self.sizes):
            part = range(index << level, min(index + 1 << level, self.sizes[0]))
            if part in self.subtrees:
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
        with self._lock:
            self._sums[part] = terms
            return self._sums if len(self._sums) == len(self.subtrees) else None


def subtrees(n: int, own: range) -> list[range]:
    """The largest subtrees of the pairwise sum of n entries that lie within a range."""
    roots: list[range] = []
    start = own.start
    while start < own.stop:
        size = 1
        while start % (2 * size) == 0 and min(start + 2 * size, n) <= own.stop and start + size < n:
            size *= 2
        roots.append(range(start, min(start + size, n)))
        start = roots[-1].stop
    return roots


def add_subtrees(sums: Mapping[range, Tensor]) -> Tensor:
    """The whole sum, of all subtrees."""
    starts = {part.start: part for part in sums}

    def add(start: int, stop: int) -> Tensor:
        if starts[start].stop == stop:
            return sums[starts[start]]
        half = 1 << (stop - start - 1).bit_length() - 1
        return add(start, start + half) + add(start + half, stop)

    return add(0, max(part.stop for part in sums))


def widen(t: Tensor) -> Tensor:
    """The gradient of a child at a split as it is added: bfloat16 in float32. The stage above rounds the sum once."""
    return t.float() if t.dtype == torch.bfloat16 else t


@torch.no_grad()
def _add(left: Gradients, right: Gradients) -> Gradients:
    """The sum, in tensors of its own: gradients may be views of one buffer, of a parameter or of what another stage
    was given, so adding in place would change others. One by one, so that each pair is freed before the next."""
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        left[i] = b if a is None else a if b is None else a + b
        right[i] = None
        del a, b
    return left
