"""What a step is: the tasks (stage, micro-batch, forward or backward) and what each of them sets off.

An engine runs the tasks in any order that it likes: each is spawned when what it needs is there, and every sum has an
order of its own. M members, B batch, b micro-batch, C classes.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mheads import values
from mheads.data.batch import Batch
from mheads.engine import sliced
from mheads.engine.rows import Rows
from mheads.engine.sums import PairwiseSum
from mheads.engine.tape import Context, Tape, record
from mheads.losses import Loss
from mheads.models.layers import has_batch_statistics
from mheads.tree import Node, TreeNet, canonical
from mheads.values import Value

# Phases of a micro-batch, the most advanced first: what frees memory goes before what takes it.
BACKWARD, LOSS, FORWARD, PREPARE = range(4)


class Spawn(Protocol):
    """Hands a task to the engine; tasks with lower priority tuples go first."""

    def __call__(self, priority: tuple[int, ...], function: Callable[..., None], *args: object) -> None: ...


@dataclass(frozen=True)
class StepReport:
    """What a training step says of itself: the loss, and [M, B] losses and assignment."""

    loss: float
    losses: Tensor
    assignment: Tensor


def cuts(num_rows: int, parts: int) -> list[tuple[int, int]]:
    """Consecutive slices whose sizes differ by at most one, the larger ones first."""
    size, extra = divmod(num_rows, parts)
    stops = [(i + 1) * size + min(i + 1, extra) for i in range(parts)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


class TrainingStep:
    """Forward, loss and backward of one batch, which leave every stage's gradients in `gradients`."""

    def __init__(
        self,
        net: TreeNet,
        loss: Loss,
        batch: Batch,
        micro_batches: int,
        key: tuple[int, int],
        spawn: Spawn,
        gradients: dict[str, list[Tensor]],
    ) -> None:
        self.net = net
        self.tree = net.tree
        self.loss = loss
        self.batch_size = len(batch)
        self.slices = [slice(start, stop) for start, stop in cuts(len(batch), micro_batches)]
        self.batches = [batch.cut(s.start, s.stop) for s in self.slices]
        self.key = key
        self.spawn = spawn
        self.gradients = gradients
        like = next(net.parameters())
        self.dtype, self.device = like.dtype, like.device
        self.sums = {name: PairwiseSum(micro_batches) for name in self.tree.nodes}
        # Members that have nothing in common are finished one after the other: only those running are in memory.
        order = {root.name: i for i, root in enumerate(self.tree.roots)} if loss.separable else {}
        self.group_order = {n: order.get(self._root(n), 0) for n in self.tree.nodes}
        # The part of the examples that a member learns from, where the loss tells.
        self.share = min(1.0, (loss.winners or net.num_members) / net.num_members)
        self.statistics = {name for name in self.tree.nodes if has_batch_statistics(net.stage(name))}
        # Their rows cannot be told apart: batch statistics, and side inputs, whose rows only the batch knows.
        self.dense = self.statistics | {
            n for n in self.tree.nodes if any(hasattr(m, "takes") for m in net.stage(n).modules())
        }
        self.known = {name: sliced.supports(net.stage(name)) for name in self.tree.nodes}
        self._lock = threading.Lock()
        self._tapes: dict[tuple[str, int], Tape] = {}
        self._outputs: dict[int, dict[int, Value]] = defaultdict(dict)
        self._d_children: dict[tuple[str, int], dict[str, Value]] = defaultdict(dict)
        self._roots_left = [len(self.tree.roots)] * micro_batches
        self._totals: dict[tuple[int, int], float] = {}
        self.losses = torch.zeros(net.num_members, len(batch), dtype=self.dtype, device=self.device)
        self.assignment = torch.zeros_like(self.losses)

    def _root(self, name: str) -> str:
        node = self.tree.nodes[name]
        return name if node.parent is None else self._root(node.parent)

    def start(self) -> None:
        # Running statistics are updated in the order of the micro-batches, so these follow one another.
        for i in range(1 if self.statistics else len(self.batches)):
            self._spawn(PREPARE, i, None, self.prepare)

    def _spawn(self, phase: int, i: int, node: Node | None, function: Callable[..., None], *args: object) -> None:
        group = 0 if node is None else self.group_order[node.name]
        self.spawn((group, i, phase), function, i, *(() if node is None else (node,)), *args)

    # The tasks, in the order in which a micro-batch meets them.

    def prepare(self, i: int) -> None:
        batch = self.batches[i] = self.batches[i].to(self.device)
        x = batch.network_inputs(self.dtype)
        for root in self.tree.roots:
            self._spawn(FORWARD, i, root, self.forward, x)

    def forward(self, i: int, node: Node, x: Value) -> None:
        batch = self.batches[i]
        rows = None
        if not node.children and batch.prior is not None and node.name not in self.dense:
            rows = Rows.where(batch.prior[node.members[0]] > 0)
        key = (self.key[0], "dropout", self.key[1], i, node.name)
        context = Context(
            key, values.num_rows(x), batch.side, input_gradient=node.parent is not None, known=self.known[node.name]
        )
        share = 1.0 if node.children or node.name in self.dense else self.share
        tape = record(self.net.stage(node.name), x, context, rows, share)
        if node.children:
            self._tapes[node.name, i] = tape
            for child in node.children:
                self._spawn(FORWARD, i, self.tree.nodes[child], self.forward, tape.output)
        elif self.loss.separable:
            member = node.members[0]
            d_outputs = self._apply_loss(i, member, [tape.output])
            self._take_back(i, node, tape, values.map_leaves(lambda t: t[0], d_outputs))
        else:
            self._tapes[node.name, i] = tape
            with self._lock:
                outputs = self._outputs[i]
                outputs[node.members[0]] = tape.output
                complete = len(outputs) == self.tree.num_members
            if complete:
                self._spawn(LOSS, i, None, self.apply_loss)

    def apply_loss(self, i: int) -> None:
        outputs = self._outputs.pop(i)
        d_outputs = self._apply_loss(i, None, [outputs[m] for m in range(len(outputs))])
        learn = self.assignment[:, self.slices[i]] > 0 if self.share < 1 else None
        for leaf in self.tree.leaves:
            m = leaf.members[0]
            d_output = values.map_leaves(lambda t, m=m: t[m], d_outputs)
            self._spawn(BACKWARD, i, leaf, self.backward, d_output, None if learn is None else learn[m])

    def backward(self, i: int, node: Node, d_output: Value, learn: Tensor | None = None) -> None:
        self._take_back(i, node, self._tapes.pop((node.name, i)), d_output, learn)

    def _take_back(self, i: int, node: Node, tape: Tape, d_output: Value, learn: Tensor | None = None) -> None:
        d_input, gradients = tape.backward(d_output, learn)
        total = self.sums[node.name].add(i, gradients)
        if total is not None:
            # Into tensors that outlive the step: a sum that stayed where it was would split the memory of activations
            # that the next member could use again.
            for kept, found in zip(self.gradients[node.name], total, strict=True):
                kept.zero_() if found is None else kept.copy_(found)
        if node.parent is not None:
            parent = self.tree.nodes[node.parent]
            with self._lock:
                d_children = self._d_children[parent.name, i]
                d_children[node.name] = d_input
                complete = len(d_children) == len(parent.children)
            if complete:
                del self._d_children[parent.name, i]
                # The sum of the children's gradients, in member order: the adjoint of handing all the same value.
                d_total = values.map_leaves(_add_in_order, *(d_children[c] for c in parent.children))
                self._spawn(BACKWARD, i, parent, self.backward, d_total)
            return
        with self._lock:
            self._roots_left[i] -= 1
            finished = self._roots_left[i] == 0
        if finished and self.statistics and i + 1 < len(self.batches):
            self._spawn(PREPARE, i + 1, None, self.prepare)

    def _apply_loss(self, i: int, member: int | None, outputs: Sequence[Value]) -> Value:
        """The gradient of the loss with respect to the outputs of all members, or of one if they are separable."""
        batch = self.batches[i]
        which = slice(None) if member is None else slice(member, member + 1)
        with torch.enable_grad():
            stacked = values.map_leaves(lambda *parts: torch.stack(parts).requires_grad_(), *outputs)
            value = self.loss(
                stacked,
                batch.targets,
                None if batch.prior is None else batch.prior[which],
                None if batch.ties is None else batch.ties[which],
            )
            leaves = values.leaves(stacked)
            gradients = torch.autograd.grad(value.total / self.batch_size, leaves, allow_unused=True)
        self._totals[member or 0, i] = value.total.item()
        self.losses[which, self.slices[i]] = value.losses
        self.assignment[which, self.slices[i]] = value.assignment
        filled = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, gradients, strict=True)]
        return values.rebuild(stacked, filled)

    def report(self) -> StepReport:
        """When no task is left."""
        total = sum(self._totals[key] for key in sorted(self._totals))  # an order of its own, as every sum
        return StepReport(total / self.batch_size, self.losses, self.assignment)


class ForwardPass:
    """Outputs of all members on one batch without graph, for evaluation; `outputs` [M, b, C] when all is done."""

    def __init__(self, net: TreeNet, read: Callable[[], Batch], index: int, spawn: Spawn) -> None:
        self.net = net
        self.read = read
        self.index = index
        self.spawn = spawn
        self.targets: Value = None
        self._lock = threading.Lock()
        self._outputs: dict[int, Value] = {}
        self.outputs: Value = None

    def start(self) -> None:
        self.spawn((self.index, PREPARE), self.prepare)

    def done(self) -> bool:
        return self.outputs is not None

    @torch.inference_mode()
    def prepare(self) -> None:
        like = next(self.net.parameters())
        batch = self.read().to(like.device)
        self.targets = batch.targets
        x = batch.network_inputs(like.dtype)
        for root in self.net.tree.roots:
            self.spawn((self.index, FORWARD), self.forward, root, x, batch.side)

    @torch.inference_mode()
    def forward(self, node: Node, x: Value, side: dict[str, Value]) -> None:
        stage, x = self.net.stage(node.name), values.map_leaves(canonical, x)
        y = sliced.outputs(stage, x) if sliced.takes(x) and sliced.supports(stage) else stage(x, side)
        for child in node.children:
            self.spawn((self.index, FORWARD), self.forward, self.net.tree.nodes[child], y, side)
        if node.children:
            return
        with self._lock:
            self._outputs[node.members[0]] = y
            complete = len(self._outputs) == self.net.num_members
        if complete:
            parts = [self._outputs[m] for m in range(self.net.num_members)]
            self._outputs = {}
            self.outputs = values.map_leaves(lambda *ts: torch.stack(ts), *parts)


def _add_in_order(*terms: Tensor) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
