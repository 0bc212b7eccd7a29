"""The tasks of a step that belong to one rank, and what the ranks exchange between them.

down   the output of a shared stage, all-gathered to the ranks that hold it, round by round: in round j each rank
       gives its j-th micro-batch
loss   the outputs of the members on a micro-batch, all-gathered; every rank then computes the loss by itself
up     the gradients of a shared stage's output: each goes to the rank that runs the micro-batch
sum    the gradients of a stage's weights, summed over all ranks that share it
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.memory_layout import canonical
from mheads.common.nested_values import Value
from mheads.data.batches import Batch
from mheads.distributed.collectives import Collective, Key, add_fast, add_ordered, exchange
from mheads.distributed.planning.placement import Division
from mheads.engine.gradient_sums import PairwiseSum, Subtrees, add_in_order, subtrees
from mheads.engine.training_step import BACKWARD, PREPARE, TrainingStep
from mheads.losses import Loss
from mheads.trees.tree_spec import Node

if TYPE_CHECKING:
    from mheads.distributed.ranks_engine import RanksEngine


class SharedOutputs:
    """Hands outputs down: those of shared stages are gathered round by round, and each is delivered."""

    def __init__(self, engine: RanksEngine, division: Division, deliver: Callable[[int, Node, Value], None]) -> None:
        self.engine, self.division, self.deliver = engine, division, deliver
        me = engine.world.rank
        self.planned: dict[Key, Collective] = {}
        for name in engine.shared if not division.whole else ():
            for j, owned in enumerate(division.rounds(name, me)):
                order, run = (0, engine.net.tree.depths[name], j, name), partial(self._gather, name, owned)
                self.planned["down", name, j] = Collective(order, int(me in owned), run)

    def hand_down(self, i: int, node: Node, output: Value) -> None:
        if not self.engine.collectives.give(("down", node.name, self.division.round_of(node.name, i)), i, output):
            self.deliver(i, node, output)

    def _gather(self, name: str, owned: dict[int, int], own: dict[int, Value]) -> None:
        engine, node, output = self.engine, self.engine.net.tree.nodes[name], next(iter(own.values()), None)
        group = engine.groups[engine.placement.holders(name, engine.replica)]
        values = engine.gathering.gather(("down", name), group, output)
        for rank, i in owned.items():
            self.deliver(i, node, own[i] if i in own else engine.to_device(values[rank]))


class RankStep(TrainingStep):
    """The tasks of a step that belong to this rank."""

    def __init__(self, engine: RanksEngine, step: int, batch: Batch, loss: Loss, division: Division) -> None:
        self.engine, self.division, self.me = engine, division, engine.world.rank
        spawn, share = engine.workers.spawn, division.share(self.me)
        super().__init__(
            engine.stages, loss, batch, division.parts, step, spawn, engine.gradients, engine.options, share
        )
        self.down = SharedOutputs(engine, division, self.deliver)
        self.sums = {name: PairwiseSum(division.parts, division.runs(name, self.me)) for name in self.stages.facts}
        self._forms: dict[tuple[str, int], Value] = {}  # of the gradients of shared outputs
        self._turn = division.turns(self.me)

    # The collectives of the step, in an order that is the same on all ranks.

    def _plan(self) -> dict[Key, Collective]:
        engine, depth = self.engine, self.tree.depths
        planned = dict(self.down.planned)
        for name in engine.shared:
            children = self.tree.nodes[name].children
            for j, owned in enumerate(self.division.rounds(name, self.me)):
                owners = [self.division.owner(child, i) for i in set(owned.values()) for child in children]
                run = partial(self._exchange_gradients, name, owned)
                planned["up", name, j] = Collective((2, -depth[name], j, name), owners.count(self.me), run)
        if not self.loss.separable and engine.placement.slots > 1:
            leaves = len(self.stages.here(tuple(leaf.name for leaf in self.tree.leaves)))
            for i in self.mine:
                planned["loss", i] = Collective((1, self._turn[i]), leaves, partial(self._gather_outputs, i))
        for name, facts in self.stages.facts.items() if not self.division.whole else ():
            if facts.parameters and len(engine.placement.all_holders(name)) > 1:
                given = int(bool(self.division.runs(name, self.me)))
                planned["sum", name] = Collective((3, -depth[name], name), given, partial(self._sum_gradients, name))
        for key, one in planned.items():
            one.order = (*self._first(key), *one.order)
        return planned

    def _first(self, key: Key) -> tuple[int, ...]:
        """What orders collectives before their kind does."""
        if self.stages.statistics:  # micro-batches follow one another
            return (key[2] if key[0] == "up" else self._turn[key[1]],)
        if self.loss.separable:  # so do members that have nothing in common
            return (self.stages.groups[key[1]],)
        return ()

    def start(self) -> None:
        self.engine.collectives.plan(self._plan())
        super().start()

    def runs(self, node: Node, i: int) -> bool:
        return i in self.division.runs(node.name, self.me)

    def _spawn(self, phase: int, i: int, node: Node | None, function: Callable[..., None], *args: object) -> None:
        """Shared stages run first, since others wait for them, and are taken back last, while gradients travel."""
        group = self.stages.groups[node.name] if node is not None and self.loss.separable else 0
        wide = node is not None and self.stages[node.name].threads > self.stages.threads
        shared = phase == PREPARE or (node is not None and node.name in self.engine.shared and not self.division.whole)
        when = 0 if not shared else 1 if phase == BACKWARD else -1
        priority = group, when, self._turn[i], phase
        self.spawn(priority, function, i, *(() if node is None else (node,)), *args, wide=wide)

    # Outputs go down.

    def hand_down(self, i: int, node: Node, output: Value) -> None:
        self.down.hand_down(i, node, output)

    def deliver(self, i: int, node: Node, output: Value) -> None:
        if node.name in self.engine.shared:
            wanted = self.stages.wanted[node.children[0]]
            form = nested_values.map_leaves(lambda t: canonical(t.to("meta")), output)
            self._forms[node.name, i] = form if wanted else ()
        super().hand_down(i, node, output)

    # The loss.

    def hand_over(self, i: int, leaf: Node, output: Value) -> None:
        if not self.engine.collectives.give(("loss", i), leaf.name, output):
            super().hand_over(i, leaf, output)

    def _gather_outputs(self, i: int, own: dict[str, Value]) -> None:
        outputs: dict[str, Value] = {}
        group = self.engine.groups[self.engine.placement.ranks_of(self.engine.replica)]
        for value in self.engine.gathering.gather("loss", group, own).values():
            outputs |= self.engine.to_device(value)
        for name, output in (outputs | own).items():
            super().hand_over(i, self.stages.nodes[name], output)

    def hand_back(self, i: int, leaf: Node, d_output: Value, learn: Tensor | None) -> None:
        if leaf.name in self.stages:
            super().hand_back(i, leaf, d_output, learn)

    # Gradients of outputs go up.

    def hand_up(self, i: int, node: Node, d_input: Value) -> None:
        assert node.parent is not None
        if node.parent not in self.engine.shared:
            super().hand_up(i, node, d_input)
        elif self.division.owner(node.name, i) == self.me:  # of those that run it whole, the first one gives it
            key = ("up", node.parent, self.division.round_of(node.parent, i))
            self.engine.collectives.give(key, (i, node.name), d_input)

    def _terms_of(self, name: str, i: int, rank: int) -> dict[str, list[str]]:
        """The gradients that a rank gives for a micro-batch of a stage: the children of each sum, by the first."""
        terms = self.division.terms(self.tree.nodes[name].children, i).get(rank, [])
        if self.options.precision != torch.float32:  # the sum of all is rounded once
            terms = [[child] for term in terms for child in term]
        return {term[0]: term for term in terms}

    def _exchange_gradients(self, name: str, owned: dict[int, int], own: dict[tuple[int, str], Value]) -> None:
        """Gives each rank the gradients for the micro-batch that it runs, and takes those for its own."""
        engine, parent, mine = self.engine, self.tree.nodes[name], owned.get(self.me)
        holders = engine.placement.holders(name, engine.replica)
        added = {i: self._add_terms(name, i, own) for i in owned.values()}
        given = {
            rank: nested_values.map_leaves(_as_form, added[i], self._form(name, i, self.me))
            for rank, i in owned.items()
            if rank != self.me
        }
        forms = {rank: self._form(name, mine, rank) for rank in holders if mine is not None and rank != self.me}
        taken = exchange(engine.groups[holders], given, forms, engine.wire)
        if mine is not None:
            for value in taken.values():
                added[mine] |= engine.to_device(value)
            self.collect(mine, parent, {child: added[mine].get(child) for child in parent.children})

    def _form(self, name: str, i: int, rank: int) -> dict[str, Value]:
        """What a rank gives for a micro-batch of a stage, without its content, by the first child of each sum."""
        return dict.fromkeys(self._terms_of(name, i, rank), self._forms[name, i])

    def _add_terms(self, name: str, i: int, given: dict[tuple[int, str], Value]) -> dict[str, Value]:
        """The gradients that this rank gives, by the first child of each sum."""
        return {
            first: nested_values.map_leaves(add_in_order, *(given[i, child] for child in term))
            for first, term in self._terms_of(name, i, self.me).items()
        }

    # Gradients of weights are summed.

    def keep(self, name: str, sums: Subtrees) -> None:
        if self.stages[name].parameters and not self.engine.collectives.give(("sum", name), "sums", sums):
            super().keep(name, sums)

    def _sum_gradients(self, name: str, own: dict[str, Subtrees]) -> None:
        engine, kept, holders = self.engine, self.gradients[name], self.engine.placement.all_holders(name)
        held = {rank: subtrees(self.division.parts, self.division.runs(name, rank)) for rank in holders}
        sizes = [tensor.numel() for tensor in kept]
        given = torch.empty(len(held[self.me]), sum(sizes), dtype=kept[0].dtype, device=engine.wire)
        for row, subtree in zip(given, held[self.me], strict=True):
            for piece, gradient in zip(row.split(sizes), own["sums"][subtree], strict=True):
                # -0.0 for a gradient that is not there: adding it changes nothing.
                piece.fill_(-0.0) if gradient is None else piece.copy_(gradient.reshape(-1))
        group = engine.groups[holders]
        total = add_fast(group, given) if engine.sums == "fast" else add_ordered(group, given, held)
        for tensor, piece in zip(kept, total.split(sizes), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def _as_form(gradient: Tensor, form: Tensor) -> Tensor:
    return canonical(gradient.to(form.dtype))
