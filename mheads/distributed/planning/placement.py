"""Which rank holds which stage, and which rank runs which micro-batches of it.

A mesh of replicas x slots: rank = replica * slots + slot. Each replica holds the whole tree and takes a share of the
micro-batches. Its members are spread over the slots; a stage lives on every slot that holds one of its members, and
these slots divide its micro-batches. Ranks beyond the mesh have nothing to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mheads.common.errors import UserError
from mheads.common.number_ranges import cuts
from mheads.engine.gradient_sums import subtrees
from mheads.engine.micro_batches import Pieces, cut_pieces
from mheads.trees.tree_spec import Node, Tree


@dataclass(frozen=True)
class Placement:
    """The slots that hold each stage, parents before children, and how many slots and replicas there are."""

    stages: Mapping[str, tuple[int, ...]]
    slots: int
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks have something to do."""
        return self.slots * self.replicas

    def stages_on(self, rank: int) -> list[str]:
        """The stages of a rank, parents before children."""
        if rank >= self.ranks:
            return []
        return [name for name, slots in self.stages.items() if rank % self.slots in slots]

    def ranks_of(self, replica: int) -> tuple[int, ...]:
        return tuple(range(replica * self.slots, (replica + 1) * self.slots))

    def holders(self, stage: str, replica: int) -> tuple[int, ...]:
        """The ranks of a replica that hold a stage."""
        return tuple(replica * self.slots + slot for slot in self.stages[stage])

    def all_holders(self, stage: str) -> tuple[int, ...]:
        return tuple(rank for replica in range(self.replicas) for rank in self.holders(stage, replica))


class Division:
    """Who runs which of the n micro-batches of a step, or batches of an evaluation.

    Where batch statistics forbid to cut the batch, a stage is run `whole` on each of its ranks. Where `pieces` says so,
    a stage runs a micro-batch by pieces, and these are what its ranks divide and what i counts.
    """

    def __init__(self, placement: Placement, parts: int, whole: bool = False, pieces: Pieces | None = None) -> None:
        self.placement, self.parts, self.whole, self.pieces = placement, parts, whole, pieces or Pieces()
        self.shares = [range(*cut) for cut in cuts(parts, placement.replicas)]  # of each replica
        self._runs: dict[str, dict[int, range]] = {}
        for name in placement.stages:
            self._runs[name] = {}
            each_by = self.pieces[name]
            for replica, whole_ones in enumerate(self.shares):
                share = range(whole_ones.start * each_by, whole_ones.stop * each_by)
                ranks = placement.holders(name, replica)
                each = [(0, len(share))] * len(ranks) if whole else cuts(len(share), len(ranks))
                self._runs[name] |= {rank: share[a:b] for rank, (a, b) in zip(ranks, each, strict=True)}
        self._rounds: dict[tuple[str, int], list[dict[int, int]]] = {}
        self._parts_of_split: dict[tuple[str, int], dict[int, list[range]]] = {}
        self._owners = {
            name: {i: rank for rank, own in reversed(runs.items()) for i in own} for name, runs in self._runs.items()
        }

    def count(self, stage: str) -> int:
        """How many micro-batches, or pieces of them, a stage runs on all ranks."""
        return self.parts * self.pieces[stage]

    def share(self, rank: int) -> range:
        """The micro-batches of the replica that a rank belongs to."""
        return self.shares[rank // self.placement.slots] if rank < self.placement.ranks else range(0)

    def runs(self, stage: str, rank: int) -> range:
        """The micro-batches of a stage that a rank runs."""
        return self._runs[stage].get(rank, range(0))

    def owner(self, stage: str, i: int) -> int:
        """The rank that runs micro-batch i of a stage; the first where several do."""
        return self._owners[stage][i]

    def parts_of_split(self, stage: Node, i: int) -> dict[int, list[range]]:
        """By rank, the parts of the sum over the children of a stage that it adds for micro-batch i."""
        if (stage.name, i) not in self._parts_of_split:
            owners = [self.owner(child, self.pieces.below(stage.name, child, i)) for child in stage.children]
            self._parts_of_split[stage.name, i] = parts_by_rank(owners)
        return self._parts_of_split[stage.name, i]

    def rounds(self, stage: str, rank: int) -> list[dict[int, int]]:
        """What the ranks that share a stage with this one exchange together: by rank, its j-th micro-batch."""
        key = stage, rank // self.placement.slots
        if key not in self._rounds:
            runs = {other: self.runs(stage, other) for other in self.placement.holders(*key)}
            most = max(map(len, runs.values()))
            self._rounds[key] = [{other: own[j] for other, own in runs.items() if j < len(own)} for j in range(most)]
        return self._rounds[key]

    def round_of(self, stage: str, i: int) -> int:
        """The round in which micro-batch i of a stage is exchanged."""
        return self.runs(stage, self.owner(stage, i)).index(i)

    def turns(self, rank: int) -> dict[int, int]:
        """The order in which rounds bring the micro-batches of a rank's replica: the same on all its ranks."""
        widest = max(self.placement.stages, key=lambda name: len(self.placement.stages[name]))
        runs = [i for owned in self.rounds(widest, rank) for i in owned.values()]
        order = dict.fromkeys(self.pieces.whole(widest, i) for i in runs)
        return {i: turn for turn, i in enumerate(order)}

    def inputs_needed(self, tree: Tree, rank: int, batch_size: int) -> range:
        """The examples of a batch whose inputs a rank needs: those that it runs the first stage on."""
        needed = []
        for root in tree.roots:
            parts = cut_pieces(batch_size, self.parts, self.pieces[root.name])
            needed += [parts[i] for i in self.runs(root.name, rank)]
        return range(min(start for start, _ in needed), max(stop for _, stop in needed)) if needed else range(0)


def parts_by_rank(owners: Sequence[int]) -> dict[int, list[range]]:
    """By rank, the largest parts of the pairwise sum of so many terms that it has all terms of."""
    parts: dict[int, list[range]] = {}
    start = 0
    for rank, run in itertools.groupby(owners):
        stop = start + len(list(run))
        parts.setdefault(rank, []).extend(subtrees(len(owners), range(start, stop)))
        start = stop
    return parts


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


def default(tree: Tree, ranks: int, micro_batches: int) -> Placement:
    """The members spread evenly over the ranks; with more ranks than members, replicas of that."""
    if ranks < 1:
        raise UserError(f"there must be at least 1 rank, not {ranks}")
    slots = min(len(tree.leaves), ranks)
    sizes = [b - a for a, b in cuts(len(tree.leaves), slots)]
    return spread(tree, sizes, min(ranks // slots, micro_batches))


def meshes(tree: Tree, ranks: int, micro_batches: int) -> list[tuple[int, int]]:
    """Every (slots, replicas) that gives each rank something to do."""
    return [
        (slots, replicas)
        for replicas in range(1, min(ranks, micro_batches) + 1)
        for slots in range(1, min(len(tree.leaves), ranks // replicas) + 1)
    ]


def spread(tree: Tree, sizes: Sequence[int], replicas: int = 1) -> Placement:
    """Consecutive members on each slot, so many as `sizes` says."""
    slots = [slot for slot, size in enumerate(sizes) for _ in range(size)]
    given = {leaf.name: slot for leaf, slot in zip(tree.leaves, slots, strict=True)}
    return Placement(hold_members(tree, given), len(sizes), replicas)


def hold_members(tree: Tree, given: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The slots of each stage: its own, where it is given one, and those of all stages below it."""
    held: dict[str, set[int]] = {name: {given[name]} if name in given else set() for name in tree.nodes}
    for name in reversed(tree.nodes):  # children before parents
        parent = tree.nodes[name].parent
        if parent is not None:
            held[parent] |= held[name]
    return {name: tuple(sorted(slots)) for name, slots in held.items()}


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
            roots = [root.name for root in tree.roots]
            raise UserError(f"placement says nothing about {name!r}: give a rank for each of {_some(roots)}")
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
    return Placement(hold_members(tree, stages), slots, min(ranks // slots, micro_batches))


def _some(names: list[str]) -> str:
    """Names for a message, the first few of very many."""
    return ", ".join(names) if len(names) <= 20 else f"{', '.join(names[:20])}, ... ({len(names)} in all)"
