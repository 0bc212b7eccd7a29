"""Finds members that are the same network, which a loss that treats all alike would keep identical for ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mheads.trees.freezing import frozen_stages
from mheads.trees.treenet import TreeNet

Contents = tuple[Any, list[Tensor]]  # a key that stages of the same contents have in common, and their tensors


def find_identical_members(net: TreeNet) -> Iterator[tuple[int, int]]:
    """Pairs of members that are the same network: equal weights, buffers and layers, shared by as many members.

    Where stages are in other processes, two members are drawn to see whether their weights follow the seed.
    """
    whole = len(net.stages) == len(net.tree.nodes)
    alike: dict[Any, list[int]] = defaultdict(list)
    for m in range(net.num_members):
        alike[tuple((node.layers, len(node.members)) for node in net.tree.path(m))].append(m)
    stages: dict[str, Contents] = {}
    for members in alike.values():
        first: dict[Any, int] = {}
        for m in members if whole else members[:2]:
            path = net.tree.path(m)
            for node in path:
                if node.name not in stages:
                    stages[node.name] = _contents(net.stage(node.name) if whole else net.draw_stage(node))
            other = first.setdefault(tuple(stages[node.name][0] for node in path), m)
            mine, theirs = ([t for node in net.tree.path(k) for t in stages[node.name][1]] for k in (m, other))
            if other != m and all(map(torch.equal, mine, theirs)):
                yield other, m


def _contents(stage: nn.Module) -> Contents:
    tensors = [t.detach() for t in (*stage.parameters(), *stage.buffers())]
    return (repr(stage), tuple((t.shape, t.sum().item()) for t in tensors)), tensors


def are_parted_by_dropout(net: TreeNet, a: int, b: int) -> bool:
    """Whether two members draw masks of their own: dropout in a stage that they do not share."""
    own = [node for node in net.tree.path(a) if b not in node.members]
    return any(name in net.facts.dropout for node in own for name in node.layers)


def are_parted_by_freezing(net: TreeNet, a: int, b: int) -> bool:
    """Whether one of two members learns where the other is frozen, in a stage that they do not share."""

    stages = frozen_stages(net)

    def frozen(m: int, other: int) -> list[bool]:
        return [node.name in stages for node in net.tree.path(m) if other not in node.members]

    return frozen(a, b) != frozen(b, a)
