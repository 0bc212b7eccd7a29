"""What a step is: the tasks (stage, micro-batch, forward or backward) and what each of them spawns.

An engine may run the tasks in any order: each is spawned when what it needs is there, and every sum has an
order of its own. M members, B batch, b micro-batch, C classes.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from mheads.engine.micro_batches import count_pieces, cut_pieces
from mheads.engine.rows import Rows
from mheads.engine.stacked_stages import repeat_for
from mheads.engine.stages import Stages
from mheads.engine.step_results import StepResults, fill
from mheads.engine.tape import Context, Tape, record
from mheads.losses import Loss
from mheads.trees.tree_spec import Node

# Phases of a micro-batch, the most advanced first: tasks that free memory go before those that take it.
BACKWARD, LOSS, FORWARD, PREPARE = range(4)


class Spawn(Protocol):
    """Hands a task to the engine; tasks with lower priority tuples go first. A wide one computes on several threads."""

    def __call__(
        self, priority: tuple[int, ...], function: Callable[..., None], *args: object, wide: bool = False
    ) -> None: ...


class TrainingStep:
    """Forward, loss and backward of one batch; leaves every stage's gradients in `gradients`.

    It runs the stages that the net holds, on the micro-batches `mine` of all. Where shared stages run by pieces, the i
    of such a stage counts pieces. Whatever goes from one stage to another is handed on by a method of its own, so that
    an engine of several processes can send it instead.
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
        self.mine = range(micro_batches) if mine is None else mine
        parts = cuts(len(batch), micro_batches)
        self.slices = [batch.rows(*part) for part in parts]
        self.pieces = count_pieces(self.tree, options.pieces, len(batch), micro_batches)
        by_pieces = all(root.name in self.pieces for root in stages.roots)
        whole = replace(batch, inputs=None) if by_pieces else batch
        self.batches = {i: whole.cut(*parts[i]).to(options.device) for i in self.mine}
        self._batches_of_pieces = self._cut_by_pieces(batch, micro_batches, options.device) if self.pieces else {}
        self.step, self.options = step, options
        self.spawn = spawn
        self.gradients = gradients
        self.dtype = stages.net.dtype
        self.sums = {name: PairwiseSum(micro_batches * self.pieces[name]) for name in stages.facts}
        # The part of the examples that a member learns from, where the loss tells.
        members = self.tree.num_members
        self.share = min(1.0, (loss.winners or members) / members)
        if options.device.type != "cpu":  # it takes all rows back: to choose some, the host would have to wait for it
            self.share = 1.0
        self.sample_weights = batch.sample_weights  # on the host, which chooses rows by them
        self._lock = threading.Lock()
        self._tapes: dict[tuple[str, int], Tape] = {}
        self._outputs: dict[int, list[tuple[Node, Value]]] = defaultdict(list)
        self._graphs: dict[tuple[str, int], tuple[Value, Tensor]] = {}  # outputs and losses of members, for autograd
        self._joining: dict[tuple[str, int], dict[int, Value]] = defaultdict(dict)  # outputs by pieces
        self._splits: dict[tuple[str, int], PairwiseSum] = {}  # of the gradients of a stage's children
        self._roots_left = dict.fromkeys(self.mine, len(stages.roots))
        losses = torch.zeros(members, batch.num_rows, dtype=self.dtype, device=options.device)
        self.results = StepResults(loss, self.batches, self.slices, losses)

    def start(self) -> None:
        # Running statistics are updated in the order of the micro-batches, so these run one after the other.
        for i in self.mine[:1] if self.stages.statistics else self.mine:
            if any(self.runs(root, j) for root in self.stages.roots for j in self.pieces.of(root.name, i)):
                self._spawn(PREPARE, i, None, self.prepare)

    def runs(self, node: Node, i: int) -> bool:
        """Whether a stage that is here runs a micro-batch here."""
        return True

    def _cut_by_pieces(self, batch: Batch, micro_batches: int, device: torch.device) -> dict[int, Batch]:
        pieces = next(iter(self.pieces.values()))
        parts = cut_pieces(len(batch), micro_batches, pieces)
        mine = range(self.mine.start * pieces, self.mine.stop * pieces)
        inputs = replace(batch, sample_weights=None, ties=None)  # all that shared stages need
        return {i: inputs.cut(*parts[i]).to(device) for i in mine}

    def _batch(self, node: Node, i: int) -> Batch:
        return (self._batches_of_pieces if node.name in self.pieces else self.batches)[i]

    def _spawn(self, phase: int, i: int, node: Node | None, function: Callable[..., None], *args: object) -> None:
        # Members that have nothing in common are finished one after the other: only those running are in memory.
        group = self.stages.groups[node.name] if node is not None and self.loss.separable else 0
        wide = node is not None and self.stages[node.name].threads > self.stages.threads
        whole = i if node is None else self.pieces.whole(node.name, i)
        self.spawn((group, whole, phase), function, i, *(() if node is None else (node,)), *args, wide=wide)

    # The tasks, in the order in which a micro-batch meets them.

    def prepare(self, i: int) -> None:
        inputs: dict[tuple[bool, int], Value] = {}
        for root in self.stages.roots:
            for j in self.pieces.of(root.name, i):
                if self.runs(root, j):
                    of = root.name in self.pieces, j
                    if of not in inputs:
                        inputs[of] = self._batch(root, j).network_inputs(self.dtype)
                    self._spawn(FORWARD, j, root, self.forward, inputs[of])

    def forward(self, i: int, node: Node, x: Value) -> None:
        batch, facts, stack = self._batch(node, i), self.stages[node.name], self.stages.stacks.get(node.name)
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
            d_output = self.results.apply_loss(i, node.members, self._members_first(node, tape.output))
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
        d_outputs = self.results.apply_loss(i, None, join_members(parts))
        learn = self.results.assignment[:, self.slices[i]] > 0 if self.share < 1 else None
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
        if self.stages.statistics:
            with self._lock:
                self._roots_left[i] -= 1
                finished = self._roots_left[i] == 0
            if finished and i + 1 in self.mine:
                self._spawn(PREPARE, i + 1, None, self.prepare)

    # What goes from one stage to another.

    def hand_down(self, i: int, node: Node, output: Value) -> None:
        """Gives the output of a stage to those of its children that are here."""
        to_join = []
        for child in self.stages.here(node.children):
            if node.name in self.pieces and child.name not in self.pieces:
                to_join.append(child)
            elif self.runs(child, i):
                self._spawn(FORWARD, i, child, self.forward, output)
        self._join(i, node, output, to_join)

    def _join(self, i: int, node: Node, output: Value, children: Sequence[Node]) -> None:
        """Gives children that run whole micro-batches the output on one, once that on its last piece is there."""
        whole = self.pieces.whole(node.name, i)
        takers = [child for child in children if self.runs(child, whole)]
        if not takers:
            return
        with self._lock:
            outputs = self._joining[node.name, whole]
            outputs[i] = output
            if len(outputs) < self.pieces[node.name]:
                return
            del self._joining[node.name, whole]
        parts = [outputs[j] for j in sorted(outputs)]
        joined = nested_values.map_leaves(lambda *ts: torch.cat(ts), *parts)
        for child in takers:
            self._spawn(FORWARD, whole, child, self.forward, joined)

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
        if parent.name not in self.pieces or node.name in self.pieces:
            self._add_at_split(i, node, parent, d_input)
            return
        pieces = self.pieces.of(parent.name, i)
        rows = [self._batches_of_pieces[piece].num_rows for piece in pieces]
        leaves = [t.split(rows) for t in nested_values.leaves(d_input)]
        for piece, *own in zip(pieces, *leaves, strict=True):
            self._add_at_split(piece, node, parent, nested_values.rebuild(d_input, own))

    def _add_at_split(self, i: int, node: Node, parent: Node, d_input: Value) -> None:
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


def join_members(parts: Sequence[tuple[Node, Value]]) -> Value:
    """The outputs of all members, M first, of leaves in member order."""
    if len(parts) == 1:
        return parts[0][1]
    outputs = [output for _, output in parts]
    if all(len(leaf.members) == 1 for leaf, _ in parts):  # stack and cat lay out images in other strides
        return nested_values.map_leaves(lambda *ts: torch.stack([t[0] for t in ts]), *outputs)
    return nested_values.map_leaves(lambda *ts: torch.cat(ts), *outputs)
