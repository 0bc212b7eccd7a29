"""The tasks of a step that belong to one rank, and what the ranks exchange between them (`planning/step_plan.py`)."""

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
from mheads.distributed.collectives import Collective, add_fast, add_ordered, exchange
from mheads.distributed.planning.placement import Division
from mheads.distributed.planning.step_plan import Key, Order, plan_step
from mheads.engine.gradient_sums import Gradients, PairwiseSum, Subtrees, add_subtrees, subtrees, widen
from mheads.engine.training_step import BACKWARD, PREPARE, TrainingStep
from mheads.losses import Loss
from mheads.trees.tree_spec import Node

if TYPE_CHECKING:
    from mheads.distributed.ranks_engine import RanksEngine


class SharedOutputs:
    """Hands outputs down: those of shared stages are gathered round by round, and each is delivered."""

    def __init__(self, engine: RanksEngine, division: Division, deliver: Callable[[int, Node, Value], None]) -> None:
        self.engine, self.division, self.deliver = engine, division, deliver

    def plan(self, order: Order, name: str, j: int) -> Collective:
        """One of the rounds."""
        owned = self.division.rounds(name, self.engine.rank)[j]
        return Collective(order, int(self.engine.rank in owned), partial(self._gather, name, owned))

    def hand_down(self, i: int, node: Node, output: Value) -> None:
        if not self.engine.collectives.give(("down", node.name, self.division.round_of(node.name, i)), i, output):
            self.deliver(i, node, output)

    def _gather(self, name: str, owned: dict[int, int], own: dict[int, Value]) -> None:
        engine, node, output = self.engine, self.engine.net.tree.nodes[name], next(iter(own.values()), ())
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
        held = {name: self._subtrees(name, self.me) for name in self.stages.facts}
        self.sums = {name: PairwiseSum(division.count(name), parts) for name, parts in held.items()}
        self._forms: dict[tuple[str, int], list[Tensor]] = {}  # of the gradients of shared outputs
        self._turn = division.turns(self.me)

    def _subtrees(self, name: str, rank: int) -> list[range]:
        """Which parts of the sum of a stage's gradients a rank has."""
        return subtrees(self.division.count(name), self.division.runs(name, rank))

    # The collectives of the step.

    def _plan(self) -> dict[Key, Collective]:
        placement, facts = self.engine.placement, self.stages.facts
        summed = {name for name in facts if facts[name].parameters and len(placement.all_holders(name)) > 1}
        groups = self.stages.groups if self.loss.separable else None
        plan = {"down": self.down.plan, "up": self._plan_up, "loss": self._plan_loss, "sum": self._plan_sum}
        steps = plan_step(self.tree, self.division, self.engine.replica, facts, summed, groups)
        return {key: plan[key[0]](order, *key[1:]) for key, order in steps}  # type: ignore[operator]

    def _plan_up(self, order: Order, name: str, j: int) -> Collective:
        node, owned = self.tree.nodes[name], self.division.rounds(name, self.me)[j]
        given = sum(self.me in self.division.parts_of_split(node, i) for i in set(owned.values()))
        return Collective(order, given, partial(self._exchange_gradients, node, owned))

    def _plan_loss(self, order: Order, i: int) -> Collective:
        leaves = self.stages.here(tuple(leaf.name for leaf in self.tree.leaves))
        return Collective(order, len(leaves), partial(self._gather_outputs, i))

    def _plan_sum(self, order: Order, name: str) -> Collective:
        return Collective(order, int(bool(self.division.runs(name, self.me))), partial(self._sum_gradients, name))

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
        whole = i if node is None else self.pieces.whole(node.name, i)
        priority = group, when, self._turn[whole], phase
        self.spawn(priority, function, i, *(() if node is None else (node,)), *args, wide=wide)

    # Outputs go down.

    def hand_down(self, i: int, node: Node, output: Value) -> None:
        self.down.hand_down(i, node, output)

    def deliver(self, i: int, node: Node, output: Value) -> None:
        if node.name in self.engine.shared:
            wanted = self.stages.wanted[node.children[0]]
            self._forms[node.name, i] = [canonical(t.to("meta")) for t in nested_values.leaves(output) if wanted]
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
        if self.division.owner(node.name, i) == self.me:  # of those that run it whole, the first one gives it
            super().hand_up(i, node, d_input)

    def parts_of_split(self, i: int, parent: Node) -> list[range]:
        return self.division.parts_of_split(parent, i)[self.me]

    def hand_up_sums(self, i: int, parent: Node, sums: Subtrees) -> None:
        key = ("up", parent.name, self.division.round_of(parent.name, i))
        if not self.engine.collectives.give(key, i, sums):
            super().hand_up_sums(i, parent, sums)

    def _exchange_gradients(self, node: Node, owned: dict[int, int], own: dict[int, Subtrees]) -> None:
        """Gives each rank the sums for the micro-batch that it runs, and takes those for its own."""
        engine, mine = self.engine, owned.get(self.me)
        holders = engine.placement.holders(node.name, engine.replica)
        given = {
            rank: nested_values.map_leaves(_as_form, self._form(node, i, self.me), own[i])
            for rank, i in owned.items()
            if rank != self.me and i in own
        }
        forms = {rank: self._form(node, mine, rank) for rank in holders if mine is not None and rank != self.me}
        taken = exchange(engine.groups[holders], given, forms, engine.wire)
        if mine is not None:
            sums = own.get(mine, {})
            for value in taken.values():
                sums |= engine.to_device(value)
            terms = [dict(zip(sums, column, strict=True)) for column in zip(*sums.values(), strict=True)]
            total: Gradients = [add_subtrees(nested_values.map_leaves(widen, term)) for term in terms]
            super().hand_up_sums(mine, node, {range(len(node.children)): total})

    def _form(self, node: Node, i: int, rank: int) -> Subtrees:
        """What a rank gives for a micro-batch of a stage, without its content; sums are wider than their terms."""
        parts = self.division.parts_of_split(node, i).get(rank, ())
        return {part: [widen(t) if len(part) > 1 else t for t in self._forms[node.name, i]] for part in parts}

    # Gradients of weights are summed.

    def keep(self, name: str, sums: Subtrees) -> None:
        if self.stages[name].parameters and not self.engine.collectives.give(("sum", name), "sums", sums):
            super().keep(name, sums)

    def _sum_gradients(self, name: str, own: dict[str, Subtrees]) -> None:
        engine, kept, holders = self.engine, self.gradients[name], self.engine.placement.all_holders(name)
        held = {rank: self._subtrees(name, rank) for rank in holders}
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


def _as_form(form: Tensor, gradient: Tensor) -> Tensor:
    return canonical(gradient.to(form.dtype))
