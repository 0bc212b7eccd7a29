"""Batches of an evaluation on ranks, divided among them as the micro-batches of a step are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mheads.common.nested_values import Value
from mheads.data.batches import Batch
from mheads.distributed.planning.placement import Division
from mheads.distributed.planning.step_plan import plan_step
from mheads.distributed.rank_training_step import SharedOutputs
from mheads.engine.forward_pass import ForwardPass
from mheads.engine.training_step import FORWARD
from mheads.trees.tree_spec import Node

if TYPE_CHECKING:
    from mheads.distributed.ranks_engine import RanksEngine


class EvaluationWindow:
    """Some batches of an evaluation; `outputs` has those of the members here, by batch."""

    def __init__(self, engine: RanksEngine, readers: Sequence[Callable[[], Batch]]) -> None:
        self.engine, self.me = engine, engine.world.rank
        self.division = Division(engine.placement, len(readers))
        self.down = SharedOutputs(engine, self.division, self.deliver)
        self.passes = {i: RankPass(self, readers[i], i) for i in self.division.share(self.me)}
        self.outputs: dict[int, dict[str, Value]] = {i: {} for i in self.passes}

    def start(self) -> None:
        engine, division = self.engine, self.division
        steps = plan_step(engine.net.tree, division, engine.replica, engine.stages.facts, (), None)
        engine.collectives.plan({key: self.down.plan(order, *key[1:]) for key, order in steps if key[0] == "down"})
        for i in sorted({i for root in engine.net.tree.roots for i in division.runs(root.name, self.me)}):
            self.passes[i].start()

    def deliver(self, i: int, node: Node, output: Value) -> None:
        for child in self.engine.stages.here(node.children):
            if i in self.division.runs(child.name, self.me):
                self.passes[i].spawn((i, FORWARD), self.passes[i].forward, child, output)


class RankPass(ForwardPass):
    """The part of a batch that is this rank's."""

    def __init__(self, window: EvaluationWindow, read: Callable[[], Batch], index: int) -> None:
        engine, options = window.engine, window.engine.options
        super().__init__(engine.stages, read, index, engine.workers.spawn, options.device, options.views)
        self.window = window
        self.roots = [root for root in self.roots if index in window.division.runs(root.name, window.me)]

    def hand_down(self, node: Node, output: Value) -> None:
        self.window.down.hand_down(self.index, node, output)

    def hand_over(self, leaf: Node, output: Value) -> None:
        self.window.outputs[self.index][leaf.name] = output
