"""The collectives of a step and their order, the same on all ranks: the engine runs what the simulation plays.

down   the output of a shared stage, all-gathered to the ranks that hold it, round by round: in round j each rank
       gives its j-th micro-batch
loss   the outputs of the members on a micro-batch, all-gathered; every rank then computes the loss by itself
up     the gradients of a shared stage's output, summed over the children on a rank: each sum goes to the rank that
       runs the micro-batch
sum    the gradients of a stage's weights, summed over all ranks that share it
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from mheads.distributed.planning.placement import Division
from mheads.trees.tree_spec import Tree

Key = tuple[Any, ...]  # of a collective: its kind, then what tells it from others of that kind
Order = tuple[Any, ...]


def plan_step(
    tree: Tree,
    division: Division,
    replica: int,
    stages: Iterable[str],
    summed: Container[str],
    groups: Mapping[str, int] | None,
) -> Iterator[tuple[Key, Order]]:
    """The collectives that these stages of a replica take part in, and their order.

    `summed` are the stages whose gradients of weights several ranks have parts of. `groups` numbers the stages that
    have nothing in common with others, where each member has a loss of its own; None if the loss needs all members.
    """
    placement, rank = division.placement, replica * division.placement.slots
    for name in stages:
        depth, first = tree.depths[name], () if groups is None else (groups[name],)
        for j in range(len(division.rounds(name, rank)) if len(placement.stages[name]) > 1 else 0):
            if division.whole:  # every rank runs the stage itself, and micro-batches follow one another
                yield ("up", name, j), (j, 2, -depth, name)
            else:
                yield ("down", name, j), (*first, 0, depth, j, name)
                yield ("up", name, j), (*first, 2, -depth, j, name)
        if name in summed and not division.whole:
            yield ("sum", name), (*first, 3, -depth, name)
    if groups is None and placement.slots > 1:
        turns = division.turns(rank)
        for i in division.share(rank):
            yield ("loss", i), (turns[i], 1) if division.whole else (1, turns[i])
