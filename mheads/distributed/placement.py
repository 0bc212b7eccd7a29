"""Which rank holds which stage.

A mesh of replicas x slots: rank = replica * slots + slot. Each replica holds the whole tree, its stages spread over the
slots, and takes an equal share of the micro-batches. Ranks beyond the mesh have nothing to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mheads.common.errors import UserError
from mheads.engine.gradient_sums import divides_evenly
from mheads.trees.tree_spec import Node, Tree


@dataclass(frozen=True)
class Placement:
    """The slot of each stage, and how many slots and replicas there are."""

    stages: Mapping[str, int]
    slots: int
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks have something to do."""
        return self.slots * self.replicas

    def rank(self, stage: str, replica: int = 0) -> int:
        return replica * self.slots + self.stages[stage]

    def stages_on(self, rank: int) -> list[str]:
        """The stages of a rank, parents before children."""
        if rank >= self.ranks:
            return []
        return [name for name, slot in self.stages.items() if slot == rank % self.slots]

    def replica(self, rank: int) -> int:
        return rank // self.slots

    def loss_rank(self, tree: Tree, replica: int = 0) -> int:
        """Where the outputs are gathered for losses that need all members: beside the first root."""
        return self.rank(tree.roots[0].name, replica)


def place_stacks_whole(tree: Tree, stacked: Sequence[Sequence[str]], place: Callable[[Tree], Placement]) -> Placement:
    """Places a tree in which each stack of stages is one stage, and puts the stages of a stack where it is."""
    others = {name: names[0] for names in stacked for name in names[1:]}
    kept = {
        name: replace(node, children=tuple(child for child in node.children if child not in others))
        for name, node in tree.nodes.items()
        if name not in others
    }
    placement = place(Tree(kept))
    return replace(placement, stages={name: placement.stages[others.get(name, name)] for name in tree.nodes})


def num_first_together(slots: Sequence[int]) -> int:
    """How many of the first children of a stage are in one place: their gradients can be added there."""
    return len(list(itertools.takewhile(lambda slot: slot == slots[0], slots)))


def default(tree: Tree, ranks: int, micro_batches: int) -> Placement:
    """The trunk on the first rank and the branches spread over the others, several per rank if ranks are few.

    With more ranks than stages, as many replicas as fit the ranks and the micro-batches.
    """
    slots, replicas = max(meshes(len(tree.nodes), ranks, micro_batches), key=lambda mesh: (mesh[0] * mesh[1], mesh[0]))
    return Placement(spread_stages(tree, slots), slots, replicas)


def meshes(num_stages: int, ranks: int, micro_batches: int) -> list[tuple[int, int]]:
    """Every (slots, replicas) that gives each rank something to do."""
    if ranks < 1:
        raise UserError(f"there must be at least 1 rank, not {ranks}")
    return [
        (slots, replicas)
        for replicas in range(1, min(ranks, micro_batches) + 1)
        if divides_evenly(micro_batches, replicas)
        for slots in range(1, min(num_stages, ranks // replicas) + 1)
    ]


def spread_stages(tree: Tree, slots: int) -> dict[str, int]:
    """Consecutive stages in one group per slot, of about the same number of layers: all that a tree knows about work.

    Children come before their parent in these groups. So subtrees stay together, and the trunk is beside the last
    members: gradients are added in member order, and the first members', where they are together, before they are sent.
    """
    if slots >= len(tree.nodes):
        return {name: i for i, name in enumerate(tree.nodes)}
    queue = list(_children_first(tree))
    left = sum(len(node.layers) for node in queue)
    groups: list[list[str]] = []
    for more in range(slots - 1, -1, -1):  # slots to fill after this one
        share, size = left / (more + 1), 0
        group: list[str] = []
        # A stage goes where its middle falls, but every slot gets one.
        while len(queue) > more and (not group or not more or size + len(queue[0].layers) / 2 <= share):
            node = queue.pop(0)
            size += len(node.layers)
            group.append(node.name)
        left -= size
        groups.append(group)
    first = next(i for i, group in enumerate(groups) if tree.roots[0].name in group)
    groups.insert(0, groups.pop(first))
    slot_of = {name: slot for slot, group in enumerate(groups) for name in group}
    return {name: slot_of[name] for name in tree.nodes}


def _children_first(tree: Tree) -> Iterator[Node]:
    def walk(node: Node) -> Iterator[Node]:
        for child in node.children:
            yield from walk(tree.nodes[child])
        yield node

    for root in tree.roots:
        yield from walk(root)


def explicit(tree: Tree, given: Mapping[str, int], ranks: int, micro_batches: int) -> Placement:
    """As a recipe says; a stage that is not named goes where its parent is. More ranks hold replicas of these."""
    unknown = [name for name in given if name not in tree.nodes]
    if unknown:
        raise UserError(f"placement names {unknown[0]!r}, but the stages are {_some(list(tree.nodes))}")
    stages: dict[str, int] = {}
    for name, node in tree.nodes.items():
        if name in given:
            stages[name] = given[name]
        elif node.parent is not None:
            stages[name] = stages[node.parent]
        else:
            raise UserError(f"placement says nothing about {name!r}: give a rank for each of {_some(_roots(tree))}")
    bad = [name for name, slot in stages.items() if slot < 0]
    if bad:
        raise UserError(f"placement puts {bad[0]!r} on rank {stages[bad[0]]}: ranks are counted from 0")
    slots = max(stages.values()) + 1
    if slots > ranks:
        raise UserError(
            f"placement needs ranks 0 to {slots - 1}, but {ranks} are running: start {slots}, or change the placement"
        )
    empty = sorted(set(range(slots)) - set(stages.values()))
    if empty:
        raise UserError(
            f"placement uses rank {slots - 1}, but gives rank {empty[0]} nothing to do: count the ranks from 0 without "
            "gaps"
        )
    replicas = max(r for r in range(1, ranks // slots + 1) if divides_evenly(micro_batches, r))
    return Placement(stages, slots, replicas)


def _roots(tree: Tree) -> list[str]:
    return [root.name for root in tree.roots]


def _some(names: list[str]) -> str:
    """Names for a message, the first few of very many."""
    return ", ".join(names) if len(names) <= 20 else f"{', '.join(names[:20])}, ... ({len(names)} in all)"
