"""The tasks of a step and of an evaluation that belong to one rank: what a stage elsewhere needs is sent to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.nested_values import Value
from mheads.common.number_ranges import cuts
from mheads.data.batches import Batch
from mheads.distributed.placement import num_first_together
from mheads.engine.forward_pass import ForwardPass
from mheads.engine.gradient_sums import Gradients, PairwiseSum
from mheads.engine.training_step import TrainingStep, add_in_order
from mheads.losses import Loss
from mheads.trees.tree_spec import Node

if TYPE_CHECKING:
    from mheads.distributed.ranks_engine import RanksEngine

SUM = -1  # the phase of sums over replicas: before everything else, since others wait for them


class RankStep(TrainingStep):
    """The tasks of a step that belong to this rank."""

    def __init__(self, engine: RanksEngine, step: int, batch: Batch, loss: Loss, parts: int, mine: range) -> None:
        spawn, gradients = engine.workers.spawn, engine.gradients
        super().__init__(engine.stages, loss, batch, parts, step, spawn, gradients, engine.options, mine)
        self.channel = f"step {step}"
        self.placement, self.courier, self.workers = engine.placement, engine.courier, engine.workers
        self.me, self.replica = engine.world.rank, engine.replica
        self.loss_rank = self.placement.loss_rank(self.tree, self.replica)
        self.replicas = self.placement.replicas
        self._prefix: dict[tuple[str, int], dict[str, Value]] = defaultdict(dict)
        self._parts = {name: PairwiseSum(self.replicas) for name in self.stages.facts}
        self._totals_here: dict[str, dict[int, Tensor]] = defaultdict(dict)
        losses = len(mine) if self.me == self.loss_rank and not loss.separable else 0
        self.workers.hold(len(self.stages.facts) + losses)

    def start(self) -> None:
        super().start()
        self.courier.listen(self.channel, self.receive)

    def block(self, member: int, i: int) -> tuple[slice, slice]:
        """Where in [M, B] the losses of a micro-batch go, of one member if they are separable."""
        return slice(member, member + 1) if self.loss.separable else slice(None), self.slices[i]

    def receive(self, key: list[Any], value: Value) -> None:
        """Takes a message of another rank, and does with it what the tasks here would do with a value of their own."""
        value = move_to_device(value, self.options.device)
        kind, *rest = key
        if kind == "down":
            i, name = rest
            super().hand_down(i, self.tree.nodes[name], value)
        elif kind == "over":
            i, name = rest
            super().hand_over(i, self.stages.nodes[name], value)
        elif kind == "back":
            i, name = rest
            super().hand_back(i, self.stages.nodes[name], value["d"], value.get("learn"))
        elif kind == "up":
            i, name, children = rest
            self.collect(i, self.tree.nodes[name], {c: value if c == children[0] else None for c in children})
        elif kind == "part":
            self.spawn((SUM,), self.add_part, *rest, value)
        else:
            self.spawn((SUM,), self.add_total, *rest, value)

    def _send(self, to: int, key: list[Any], value: Value) -> None:
        self.courier.send(to, [self.channel, *key], value)

    def _rank(self, stage: str) -> int:
        return self.placement.rank(stage, self.replica)

    def hand_down(self, i: int, node: Node, output: Value) -> None:
        for rank in sorted({self._rank(child) for child in node.children} - {self.me}):
            self._send(rank, ["down", i, node.name], output)  # once, however many children are there
        super().hand_down(i, node, output)

    def hand_over(self, i: int, leaf: Node, output: Value) -> None:
        if self.loss_rank == self.me:
            super().hand_over(i, leaf, output)
        else:
            self._send(self.loss_rank, ["over", i, leaf.name], output)

    def apply_loss(self, i: int) -> None:
        super().apply_loss(i)
        self.workers.release()

    def hand_back(self, i: int, leaf: Node, d_output: Value, learn: Tensor | None) -> None:
        rank = self._rank(leaf.name)
        if rank == self.me:
            super().hand_back(i, leaf, d_output, learn)
        else:
            self._send(rank, ["back", i, leaf.name], {"d": d_output} | ({} if learn is None else {"learn": learn}))

    def hand_up(self, i: int, node: Node, d_input: Value) -> None:
        assert node.parent is not None
        parent = self.tree.nodes[node.parent]
        rank = self._rank(parent.name)
        if rank == self.me:
            super().hand_up(i, node, d_input)
            return
        children = parent.children
        prefix = list(children[: num_first_together([self.placement.stages[child] for child in children])])
        if node.name not in prefix:
            self._send(rank, ["up", i, parent.name, [node.name]], d_input)
            return
        # The sum goes through the children in member order: that of the first ones can be begun where they are.
        with self._lock:
            d_inputs = self._prefix[parent.name, i]
            d_inputs[node.name] = d_input
            complete = len(d_inputs) == len(prefix)
        if complete:
            del self._prefix[parent.name, i]
            total = nested_values.map_leaves(add_in_order, *(d_inputs[child] for child in prefix))
            self._send(rank, ["up", i, parent.name, prefix], total)

    # Sums over replicas: each adds one part of the gradients of all, in the order of one process, and tells the others.

    def keep(self, name: str, total: Gradients) -> None:
        if self.replicas == 1:
            super().keep(name, total)
            self.workers.release()
            return
        pairs = zip(self.gradients[name], total, strict=True)
        # -0.0 for a gradient that is not there: adding it changes nothing.
        flat = [torch.full((k.numel(),), -0.0, dtype=k.dtype) if g is None else g.reshape(-1) for k, g in pairs]
        whole = torch.cat(flat) if flat else torch.empty(0)
        own = None
        for replica, (start, stop) in enumerate(cuts(len(whole), self.replicas)):
            if replica == self.replica:
                own = whole[start:stop]
            else:
                self._send(self.placement.rank(name, replica), ["part", name, self.replica], whole[start:stop])
        self.add_part(name, self.replica, own)

    def add_part(self, name: str, replica: int, part: Tensor | None) -> None:
        total = self._parts[name].add(replica, [part])
        if total is None:
            return
        for other in range(self.replicas):
            if other != self.replica:
                self._send(self.placement.rank(name, other), ["total", name, self.replica], total[0])
        assert total[0] is not None
        self.add_total(name, self.replica, total[0])

    def add_total(self, name: str, replica: int, total: Tensor) -> None:
        with self._lock:
            totals = self._totals_here[name]
            totals[replica] = total
            complete = len(totals) == self.replicas
        if not complete:
            return
        kept = self.gradients[name]
        whole = torch.cat([totals[r] for r in range(self.replicas)])
        for tensor, piece in zip(kept, whole.split([k.numel() for k in kept]), strict=True):
            tensor.copy_(piece.view(tensor.shape))
        self.workers.release()


class RankPass(ForwardPass):
    """One batch of an evaluation, on the ranks of one replica."""

    def __init__(self, engine: RanksEngine, channel: str, read: Callable[[], Batch], index: int) -> None:
        options = engine.options
        super().__init__(engine.stages, read, index, engine.workers.spawn, options.device, options.views)
        self.engine, self.channel = engine, channel
        self.placement, self.me = engine.placement, engine.world.rank
        self.replica = index % self.placement.replicas

    def begin(self) -> None:
        """Starts this batch, by a message to each rank that has a root; the main rank calls it."""
        roots = {self.placement.rank(root.name, self.replica) for root in self.stages.tree.roots}
        for rank in sorted(roots - {self.me}):
            self._send(rank, ["start", self.index], self._batch() if self.engine.lead_reads else None)
        if self.me in roots:
            self.start()

    def _batch(self) -> dict[str, Value]:
        batch = self.read()
        return {"inputs": batch.inputs, "side": batch.side_inputs()}

    def receive(self, kind: str, rest: list[Any], value: Value) -> None:
        value = move_to_device(value, self.device)
        if kind == "start":
            if value is not None:
                preprocess = self.read.preprocess  # type: ignore[attr-defined]
                batch = Batch(value["inputs"], torch.empty(0), preprocess, side=value["side"])
                self.read = lambda: batch
            self.start()
        elif kind == "down":
            super().hand_down(self.stages.tree.nodes[rest[0]], value["x"], value["side"])
        else:
            self.spawn((self.index, 0), super().hand_over, self.stages.nodes[rest[0]], value)

    def _send(self, to: int, key: list[Any], value: Value) -> None:
        self.engine.courier.send(to, [self.channel, *key], value)

    def hand_down(self, node: Node, output: Value, side: dict[str, Value]) -> None:
        ranks = {self.placement.rank(child, self.replica) for child in node.children}
        for rank in sorted(ranks - {self.me}):
            self._send(rank, ["down", self.index, node.name], {"x": output, "side": side})
        super().hand_down(node, output, side)

    def hand_over(self, leaf: Node, output: Value) -> None:
        if self.engine.is_main:
            super().hand_over(leaf, output)
        else:
            self._send(0, ["over", self.index, leaf.name], output)


def move_to_device(value: Value, device: torch.device) -> Value:
    """Moves a received value, which arrives on the CPU, to the device of this rank."""
    return value if value is None or device.type == "cpu" else nested_values.map_leaves(lambda t: t.to(device), value)
