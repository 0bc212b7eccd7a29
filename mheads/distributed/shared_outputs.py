"""The outputs of stages that ranks share go down, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mheads.common.nested_values import Value
from mheads.data.batches import Batch
from mheads.data.views import stack_views
from mheads.distributed.planning.placement import Division
from mheads.engine.forward_pass import ForwardPass
from mheads.engine.training_step import FORWARD
from mheads.trees.tree_spec import Node

if TYPE_CHECKING:
    from mheads.distributed.ranks_engine import RanksEngine

Key = tuple[Any, ...]


class SharedOutputs:
    """Hands the outputs of shared stages down: collects those of a round, gathers them, and delivers each."""

    def __init__(self, engine: RanksEngine, division: Division, deliver: Callable[[int, Node, Value], None]) -> None:
        self.engine, self.division, self.deliver = engine, division, deliver
        self.me, self.tree = engine.world.rank, engine.net.tree
        self.rounds = {
            name: division.rounds(name, self.me)
            for name, node in self.tree.nodes.items()
            if node.children and name in engine.stages and not division.whole and engine.is_shared(name)
        }

    def keys(self) -> list[tuple[Key, Key]]:
        """Each collective: when it comes in the order of all, and its key."""
        depth = self.engine.depth
        return [
            ((0, depth[name], j, name), ("down", name, j))
            for name, rounds in self.rounds.items()
            for j in range(len(rounds))
        ]

    def start(self) -> None:
        """Offers the rounds to which this rank gives nothing."""
        for name, rounds in self.rounds.items():
            for j, owned in enumerate(rounds):
                if self.me not in owned:
                    self._offer(name, j, ())

    def give(self, i: int, node: Node, output: Value) -> None:
        j = next(j for j, owned in enumerate(self.rounds[node.name]) if owned.get(self.me) == i)
        self._offer(node.name, j, output)

    def _offer(self, name: str, j: int, output: Value) -> None:
        engine, node = self.engine, self.tree.nodes[name]

        def run() -> None:
            group = engine.replica_group(name)
            values = engine.gathering.gather(("down", name), group, output)
            for rank, value in zip(group.ranks, values, strict=True):
                if rank in self.rounds[name][j]:
                    own = rank == self.me
                    self.deliver(self.rounds[name][j][rank], node, output if own else engine.to_device(value))
            engine.workers.release()

        engine.collectives.offer(("down", name, j), run)


class EvaluationWindow:
    """Some batches of an evaluation, divided among the ranks as micro-batches are."""

    def __init__(self, engine: RanksEngine, readers: Sequence[Callable[[], Batch]]) -> None:
        self.engine, self.readers, self.me = engine, readers, engine.world.rank
        self.division = Division(engine.placement, len(readers))
        self.passes = {i: RankPass(self, i) for i in self.division.share(self.me)}
        self.down = SharedOutputs(engine, self.division, self.deliver)
        self.outputs: dict[int, dict[str, Value]] = {i: {} for i in self.passes}

    def start(self) -> None:
        planned = self.down.keys()
        self.engine.workers.hold(len(planned))
        self.engine.collectives.plan(key for _, key in sorted(planned))
        self.down.start()
        for i, one in self.passes.items():
            if any(i in self.division.runs(root.name, self.me) for root in self.engine.stages.roots):
                one.start()

    def deliver(self, i: int, node: Node, output: Value) -> None:
        for child in self.engine.stages.here(node.children):
            if i in self.division.runs(child.name, self.me):
                self.passes[i].spawn((i, FORWARD), self.passes[i].forward, child, output, self.passes[i].side())


class RankPass(ForwardPass):
    """The part of a batch that is this rank's."""

    def __init__(self, window: EvaluationWindow, index: int) -> None:
        engine = window.engine
        options = engine.options
        super().__init__(
            engine.stages, window.readers[index], index, engine.workers.spawn, options.device, options.views
        )
        self.window = window
        self._side: dict[str, Value] | None = None if any(f.sided for f in engine.stages.facts.values()) else {}

    @torch.inference_mode()
    def prepare(self) -> None:
        batch = self.read().to(self.device)
        x, self._side = batch.network_inputs(self.stages.net.dtype), batch.side_inputs()
        if self.views:
            x = stack_views(x, self.views)
        for root in self.stages.roots:
            if self.index in self.window.division.runs(root.name, self.window.me):
                self.spawn((self.index, FORWARD), self.forward, root, x, self._side)

    def side(self) -> dict[str, Value]:
        """Side inputs; another rank may have prepared the batch."""
        if self._side is None:
            self._side = self.read().to(self.device).side_inputs()
        return self._side

    def hand_down(self, node: Node, output: Value, side: dict[str, Value]) -> None:
        shared = node.name in self.window.down.rounds
        (self.window.down.give if shared else self.window.deliver)(self.index, node, output)

    def hand_over(self, leaf: Node, output: Value) -> None:
        self.window.outputs[self.index][leaf.name] = output
