"""What a step is: the tasks (stage, micro-batch, forward or backward) and what each of them spawns.

An engine may run the tasks in any order: each is spawned when what it needs is there, and every sum has an
order of its own. M members, B batch, b micro-batch, C classes.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.nested_values import Value
from mheads.common.number_ranges import cuts
from mheads.data.batches import Batch
from mheads.engine.engine_options import EngineOptions
from mheads.engine.gradient_sums import PairwiseSum, Subtrees, widen
from mheads.engine.large_outputs import MemberLosses, gives_losses
from mheads.engine.rows import Rows
from mheads.engine.stacked_stages import repeat_for
from mheads.engine.stages import Stages
from mheads.engine.tape import Context, Tape, record
from mheads.losses import Loss, LossValue
from mheads.trees.tree_spec import Node

# Phases of a micro-batch, the most advanced first: tasks that free memory go before those that take it.
BACKWARD, LOSS, FORWARD, PREPARE = range(4)


class Spawn(Protocol):
    """Hands a task to the engine; tasks with lower priority tuples go first. A wide one computes on several threads."""

    def __call__(
        self, priority: tuple[int, ...], function: Callable[..., None], *args: object, wide: bool = False
    ) -> None: ...


@dataclass(frozen=True)
class StepReport:
    """What a training step reports: the loss, the signal that asks to stop after it (0: none), and, where
    the step is logged, [M, B] losses and assignment."""

    loss: float
    losses: Tensor
    assignment: Tensor
    stop: int = 0


class TrainingStep:
    """Forward, loss and backward of one batch; leaves every stage's gradients in `gradients`.

    It runs the stages that the net holds, on the micro-batches `mine` of all. Whatever goes from one stage
    to another is handed on by a method of its own, so that an engine of several processes can send it instead.
    """

    def __init__(
        self,
        stages: Stages,
        loss: Loss,
        batch: Batch,
        micro_batches: int,
        step: int,
        spawn: Spawn,
        gradients: dict[str, list[Tensor]],
        options: EngineOptions,
        mine: range | None = None,
    ) -> None:
        self.stages, self.tree = stages, stages.tree
        self.loss = loss
        self.num_rows = batch.num_rows
        self.mine = range(micro_batches) if mine is None else mine
        parts = cuts(len(batch), micro_batches)
        self.slices = [batch.rows(*part) for part in parts]
        self.batches = {i: batch.cut(*parts[i]).to(options.device) for i in self.mine}
        self.step, self.options = step, options
        self.spawn = spawn
        self.gradients = gradients
        self.dtype = stages.net.dtype
        self.sums = {name: PairwiseSum(micro_batches) for name in stages.facts}
        # The part of the examples that a member learns from, where the loss tells.
        members = self.tree.num_members
        self.share = min(1.0, (loss.winners or members) / members)
        # An accelerator takes all rows back: to choose some, the host would have to wait for it.
        self.on_host = options.device.type == "cpu"
        if not self.on_host:
            self.share = 1.0
        self.sample_weights = batch.sample_weights  # on the host, which chooses rows by them
        self._lock = threading.Lock()
        self._tapes: dict[tuple[str, int], Tape] = {}
        self._outputs: dict[int, list[tuple[Node, Value]]] = defaultdict(list)
        self._graphs: dict[tuple[str, int], tuple[Value, Tensor]] = {}  # outputs and losses of members, for autograd
        self._splits: dict[tuple[str, int], PairwiseSum] = {}  # of the gradients of a stage's children
        self._roots_left = dict.fromkeys(self.mine, len(stages.roots))
        self.totals: dict[tuple[int, int], float | Tensor] = {}  # on an accelerator, tensors until the report
        self.losses = torch.zeros(members, self.num_rows, dtype=self.dtype, device=options.device)
        self.assignment = torch.zeros_like(self.losses)
        self._of_mean = self.losses.new_ones(()) / max(1, self.num_rows)  # the gradient of the rows' mean by their sum

    def start(self) -> None:
        # Running statistics are updated in the order of the micro-batches, so these run one after the other.
        for i in self.mine[:1] if self.stages.statistics else self.mine:
            if any(self.runs(root, i) for root in self.stages.roots):
                self._spawn(PREPARE, i, None, self.prepare)

    def runs(self, node: Node, i: int) -> bool:
        """Whether a stage that is here runs a micro-batch here."""
        return True

    def _spawn(self, phase: int, i: int, node: Node | None, function: Callable[..., None], *args: object) -> None:
        # Members that have nothing in common are finished one after the other: only those running are in memory.
        group = self.stages.groups[node.name] if node is not None and self.loss.separable else 0
        wide = node is not None and self.stages[node.name].threads > self.stages.threads
        self.spawn((group, i, phase), function, i, *(() if node is None else (node,)), *args, wide=wide)

    # The tasks, in the order in which a micro-batch meets them.

    def prepare(self, i: int) -> None:
        x = self.batches[i].network_inputs(self.dtype)
        for root in self.stages.roots:
            if self.runs(root, i):
                self._spawn(FORWARD, i, root, self.forward, x)

    def forward(self, i: int, node: Node, x: Value) -> None:
        batch, facts, stack = self.batches[i], self.stages[node.name], self.stages.stacks.get(node.name)
        num_rows, rows = nested_values.num_rows(x), None
        # Rows can be left out where those of the input are those of the loss; stacked stages compute all of them.
        by_row = not node.children and not facts.sided and num_rows == batch.num_rows
        if by_row and self.sample_weights is not None and self.loss.skips_rows:
            may_learn = self.sample_weights[node.members[0] : node.members[-1] + 1, self.slices[i]] > 0
            if stack is None:
                rows = Rows.where(may_learn[0], exactly=facts.mixing)
                rows = None if rows is None else rows.to(self.options.device)
            elif facts.mixing:
                facts = replace(facts, module=partial(stack, rows=self._rows_of_statistics(may_learn)))
        key = (self.options.seed, "dropout", self.step, i, node.name)
        wanted = self.stages.wanted[node.name]
        context = Context(key, num_rows, batch.side_inputs(), wanted)
        if stack is not None:
            x, context = repeat_for(stack, x), replace(context, key=key[:-1], stacked=stack.names)
        share = self.share if by_row and stack is None and not facts.mixing else 1.0
        tape = record(facts, x, context, rows, share)
        if node.children:
            self._tapes[node.name, i] = tape
            self.hand_down(i, node, tape.output)
        elif self.loss.separable:
            d_output = self._apply_loss(i, node.members, self._members_first(node, tape.output))
            self._take_back(i, node, tape, self._as_output(node, d_output))
        else:
            self._tapes[node.name, i] = tape
            outputs = self._members_first(node, tape.output)
            self.hand_over(
                i, node, self._take_losses(i, node, outputs) if gives_losses(self.loss, outputs) else outputs
            )

    def _take_losses(self, i: int, leaf: Node, outputs: Value) -> MemberLosses:
        """The losses of a leaf's members; the way back to their outputs is kept."""
        with torch.enable_grad():
            outputs = nested_values.map_leaves(lambda t: t.detach().to(self.dtype).requires_grad_(), outputs)
            losses = self.loss.base_losses(outputs, self.batches[i].targets)
        self._graphs[leaf.name, i] = outputs, losses
        return MemberLosses(losses.detach())

    def _rows_of_statistics(self, may_learn: Tensor) -> Tensor | None:
        """The rows [S, b] whose statistics each stage of a stack takes, as `Rows.where` chooses those of a stage."""
        rows = may_learn | (may_learn.sum(1, keepdim=True) < 2)
        return None if rows.all() else rows.to(self.options.device, non_blocking=True)

    def apply_loss(self, i: int) -> None:
        parts = sorted(self._outputs.pop(i), key=lambda part: part[0].members)
        d_outputs = self._apply_loss(i, None, join_members(parts))
        learn = self.assignment[:, self.slices[i]] > 0 if self.share < 1 else None
        for leaf, _ in parts:
            which = slice(leaf.members[0], leaf.members[-1] + 1)
            d_output = nested_values.map_leaves(lambda t, which=which: t[which], d_outputs)
            self.hand_back(i, leaf, d_output, None if learn is None else learn[which])

    def backward(self, i: int, node: Node, d_output: Value, learn: Tensor | None = None) -> None:
        self._take_back(i, node, self._tapes.pop((node.name, i)), d_output, learn)

    def backward_of_losses(self, i: int, leaf: Node, d_losses: Tensor, learn: Tensor | None) -> None:
        outputs, losses = self._graphs.pop((leaf.name, i))
        leaves = nested_values.leaves(outputs)
        d_leaves = torch.autograd.grad(losses, leaves, d_losses, allow_unused=True)
        self.backward(i, leaf, self._as_output(leaf, nested_values.rebuild(outputs, fill(d_leaves, leaves))), learn)

    def _take_back(self, i: int, node: Node, tape: Tape, d_output: Value, learn: Tensor | None = None) -> None:
        d_input, gradients = tape.backward(d_output, learn)
        sums = self.sums[node.name].add(i, gradients)
        if sums is not None:
            self.keep(node.name, sums)
        if node.parent is not None:
            self._hand_up_each(i, node, () if d_input is None else d_input)  # whoever is above waits, learning or not
            return
        with self._lock:
            self._roots_left[i] -= 1
            finished = self._roots_left[i] == 0
        if finished and self.stages.statistics and i + 1 in self.mine:
            self._spawn(PREPARE, i + 1, None, self.prepare)

    # What goes from one stage to another.

    def hand_down(self, i: int, node: Node, output: Value) -> None:
        """Gives the output of a stage to those of its children that are here."""
        for child in self.stages.here(node.children):
            if self.runs(child, i):
                self._spawn(FORWARD, i, child, self.forward, output)

    def hand_over(self, i: int, leaf: Node, output: Value) -> None:
        """Gives the outputs of a leaf's members, M first, to the loss."""
        with self._lock:
            parts = self._outputs[i]
            parts.append((leaf, output))
            complete = sum(len(part.members) for part, _ in parts) == self.tree.num_members
        if complete:
            self._spawn(LOSS, i, None, self.apply_loss)

    def hand_back(self, i: int, leaf: Node, d_output: Value, learn: Tensor | None) -> None:
        """Gives a leaf the gradients of its members' outputs from the loss; `learn` marks the rows that have one."""
        rows = None if learn is None or leaf.name in self.stages.stacks else learn[0]
        if isinstance(d_output, MemberLosses):
            self._spawn(BACKWARD, i, leaf, self.backward_of_losses, d_output.losses, rows)
            return
        self._spawn(BACKWARD, i, leaf, self.backward, self._as_output(leaf, d_output), rows)

    def _members_first(self, leaf: Node, output: Value) -> Value:
        """The output of a leaf as the loss takes it; a stack gives it so."""
        if leaf.name in self.stages.stacks:
            return output
        return nested_values.map_leaves(lambda t: t.unsqueeze(0), output)

    def _as_output(self, leaf: Node, d_outputs: Value) -> Value:
        return d_outputs if leaf.name in self.stages.stacks else nested_values.map_leaves(lambda t: t[0], d_outputs)

    def _hand_up_each(self, i: int, node: Node, d_input: Value) -> None:
        stack = self.stages.stacks.get(node.name)
        if stack is None:
            self.hand_up(i, node, d_input)
            return
        for j, name in enumerate(stack.names):
            d = () if d_input == () else nested_values.map_leaves(lambda t, j=j: t[j], d_input)
            self.hand_up(i, self.tree.nodes[name], d)

    def hand_up(self, i: int, node: Node, d_input: Value) -> None:
        """Adds the gradient of a stage's input to those of its siblings: the adjoint of handing all the same value."""
        assert node.parent is not None
        parent = self.tree.nodes[node.parent]
        with self._lock:
            if (parent.name, i) not in self._splits:
                self._splits[parent.name, i] = PairwiseSum(len(parent.children), self.parts_of_split(i, parent))
            split = self._splits[parent.name, i]
        sums = split.add(self.tree.child_index[node.name], [widen(d) for d in nested_values.leaves(d_input)])
        if sums is not None:
            del self._splits[parent.name, i]
            self.hand_up_sums(i, parent, sums)

    def parts_of_split(self, i: int, parent: Node) -> Sequence[range] | None:
        """Which parts of the sum over a stage's children are added here; None for all of it."""
        return None

    def hand_up_sums(self, i: int, parent: Node, sums: Subtrees) -> None:
        (total,) = sums.values()
        d_output = nested_values.rebuild(self._tapes[parent.name, i].output, total) if total else ()  # none is wanted
        self._spawn(BACKWARD, i, parent, self.backward, d_output)

    def keep(self, name: str, sums: Subtrees) -> None:
        """Keeps the gradients of a stage, summed over the micro-batches, in tensors that outlive the step.

        A sum that stayed where it was would split the memory of activations that the next member could use again.
        Nothing learned is -0.0, which changes no sum that it is added to.
        """
        (total,) = sums.values()
        for kept, gradient in zip(self.gradients[name], total, strict=True):
            kept.fill_(-0.0) if gradient is None else kept.copy_(gradient)

    def _apply_loss(self, i: int, members: tuple[int, ...] | None, outputs: Value) -> Value:
        """The gradient of the loss with respect to the outputs of all members, or of some if the loss is separable."""
        if members is not None and len(members) > 1 and self.loss.has_own_function:  # which takes one member at a time
            each = [
                self._apply_loss(i, (m,), nested_values.map_leaves(lambda t, j=j: t[j : j + 1], outputs))
                for j, m in enumerate(members)
            ]
            return nested_values.map_leaves(lambda *ts: torch.cat(ts), *each)
        batch = self.batches[i]
        which = slice(None) if members is None else slice(members[0], members[-1] + 1)
        with torch.enable_grad():
            stacked = nested_values.map_leaves(lambda t: t.detach().to(self.dtype).requires_grad_(), outputs)
            of_losses = isinstance(stacked, MemberLosses)
            value = (self.loss.given_losses() if of_losses else self.loss)(
                stacked.losses if of_losses else stacked,
                batch.targets,
                None if batch.sample_weights is None else batch.sample_weights[which],
                None if batch.ties is None else batch.ties[which],
            )
            leaves = nested_values.leaves(stacked)
            gradients = torch.autograd.grad(value.total, leaves, self._of_mean.to(value.total), allow_unused=True)
        if members is None or len(members) == 1:
            self.totals[members[0] if members else 0, i] = value.total.item() if self.on_host else value.total.detach()
        else:
            self.totals |= {(m, i): total for m, total in zip(members, self._member_totals(value), strict=True)}
        self.losses[which, self.slices[i]] = value.losses
        self.assignment[which, self.slices[i]] = value.assignment
        return nested_values.rebuild(stacked, fill(gradients, leaves))

    def _member_totals(self, value: LossValue) -> Sequence[float | Tensor]:
        """What each member adds to the total of a separable loss."""
        totals = (value.assignment * value.losses).sum(1)
        return totals.tolist() if self.on_host else totals.detach().unbind()

    def report(self, stop: int = 0) -> StepReport:
        """The report of the step, once no task is left."""
        self.bring_to_host()
        total = sum(float(self.totals[key]) for key in sorted(self.totals))  # an order of its own, as every sum
        return StepReport(total / max(1, self.num_rows), self.losses, self.assignment, stop)

    def bring_to_host(self) -> None:
        """Brings what the step reports from an accelerator, in one copy: each would make the host wait."""
        if self.on_host:
            return
        places = sorted(self.totals)
        totals = [torch.as_tensor(self.totals[place]) for place in places]
        together = torch.cat([t.flatten() for t in (self.losses, self.assignment, *totals)]).cpu()
        sizes = [self.losses.numel(), self.assignment.numel(), len(totals)]
        losses, assignment, sums = together.split(sizes)
        self.losses, self.assignment = (t.to(self.dtype).view_as(self.losses) for t in (losses, assignment))
        self.totals = dict(zip(places, sums.tolist(), strict=True))
        self.on_host = True


def fill(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """Gradients, zeros where there are none."""
    return [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, like, strict=True)]


def join_members(parts: Sequence[tuple[Node, Value]]) -> Value:
    """The outputs of all members, M first, of leaves in member order."""
    if len(parts) == 1:
        return parts[0][1]
    outputs = [output for _, output in parts]
    if all(len(leaf.members) == 1 for leaf, _ in parts):  # stack and cat lay out images in other strides
        return nested_values.map_leaves(lambda *ts: torch.stack([t[0] for t in ts]), *outputs)
    return nested_values.map_leaves(lambda *ts: torch.cat(ts), *outputs)
