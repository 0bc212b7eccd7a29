"""Tapes: one forward of a stage on a micro-batch, recorded so that it can be taken back once.

`output` carries no graph, and has the precision that the stage computes in. `backward` turns its gradient into those of
the input (None if it is not wanted) and of the stage's parameters, and frees what was kept. `learn`, where given, is a
mask over the rows that says where the gradient is not zero; a tape may leave out the others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.memory_layout import canonical
from mheads.common.nested_values import Value
from mheads.engine import row_backward
from mheads.engine.gradient_sums import Gradients
from mheads.engine.rows import Rows
from mheads.engine.stages import StageFacts
from mheads.networks.dropout import keyed_masks

# Forward is a third of a step: computing it twice for a member's own rows pays while these are less than two thirds.
RECOMPUTE_BELOW = 0.6


class Tape(Protocol):
    output: Value

    def backward(self, d_output: Value, learn: Tensor | None = None) -> tuple[Value | None, Gradients]: ...


@dataclass(frozen=True)
class Context:
    """What a stage runs with: the key of its dropout masks, which are drawn for all rows of the micro-batch and cut to
    `rows`; side inputs; whether the gradient of its input is wanted."""

    key: tuple[int | str, ...]
    num_rows: int
    side: dict[str, Value]
    input_gradient: bool
    rows: Tensor | None = None
    stacked: tuple[str, ...] = ()  # the names of stages that run as one: each has masks of its own

    def masks(self) -> AbstractContextManager[None]:
        return keyed_masks(self.key, self.num_rows, self.rows, self.stacked)

    def only(self, index: Tensor) -> Context:
        return replace(self, rows=index if self.rows is None else self.rows[index])


def record(stage: StageFacts, x: Value, context: Context, rows: Rows | None = None, share: float = 1.0) -> Tape:
    """Runs the stage on x and records it; with `rows`, only these are computed, and the others get zeros.

    `share` is the part of the rows that the stage can be expected to learn from.
    """
    if rows is not None:
        return PartialTape(record(stage, rows.take(x), context.only(rows.index), None, share), rows)
    x = nested_values.map_leaves(canonical, x)  # whatever strides the engine gave it
    if not stage.parameters and not context.input_gradient:
        return FrozenTape(stage, x, context)
    if stage.run_by_row(x):
        return SlicedTape(stage, x, context)
    if share < RECOMPUTE_BELOW and not stage.mixing:
        return RecomputingTape(stage, x, context)
    return AutogradTape(stage, x, context)


class FrozenTape:
    """A stage that has nothing to learn, nor has anything above it: its output is all there is."""

    def __init__(self, stage: StageFacts, x: Value, context: Context) -> None:
        with torch.no_grad(), context.masks():
            self.output = nested_values.map_leaves(canonical, stage.outputs(x, context.side))

    def backward(self, d_output: Value, learn: Tensor | None = None) -> tuple[Value | None, Gradients]:
        return None, []


class AutogradTape:
    """Takes all rows of any stage back."""

    def __init__(self, stage: StageFacts, x: Value, context: Context) -> None:
        self.stage, self.input_gradient = stage, context.input_gradient
        self.input = nested_values.map_leaves(Tensor.detach, x)
        self.wanted: list[Tensor] = []
        if context.input_gradient or stage.normed:
            self.wanted = [t.requires_grad_() for t in nested_values.leaves(self.input) if t.is_floating_point()]
        with torch.enable_grad(), stage.context(), context.masks():
            self._graph: Value | None = stage.module(self.input, context.side)
        self.output = nested_values.map_leaves(lambda t: canonical(t.detach()), self._graph)

    def backward(self, d_output: Value, learn: Tensor | None = None) -> tuple[Value | None, Gradients]:
        graph, self._graph = self._graph, None
        pairs = [
            (y, canonical(d.to(y.dtype)))
            for y, d in zip(nested_values.leaves(graph), nested_values.leaves(d_output), strict=True)
            if y.requires_grad
        ]
        sources = [*self.wanted, *self.stage.parameters]
        gradients: Gradients = [None] * len(sources)
        if pairs and sources:
            ys, ds = zip(*pairs, strict=True)
            with self.stage.context():
                computed = torch.autograd.grad(ys, sources, ds, allow_unused=True)
            gradients = [g.to_dense() if g is not None and g.is_sparse else g for g in computed]  # of embeddings
        d_input = None
        if self.wanted and self.input_gradient:
            queue = iter(gradients)

            def gradient_of(t: Tensor) -> Tensor:
                d = next(queue) if t.requires_grad else None
                return torch.zeros_like(t) if d is None else d

            d_input = nested_values.map_leaves(gradient_of, self.input)
        del self.input
        return d_input, gradients[len(self.wanted) :]


class RecomputingTape:
    """Computes outputs of all rows without a graph; then forward and backward again for the rows that learn."""

    def __init__(self, stage: StageFacts, x: Value, context: Context) -> None:
        self.stage, self.input, self.context = stage, x, context
        # no_grad, not inference mode: what is computed here meets autograd later.
        with torch.no_grad(), stage.context(), context.masks():
            self.output = nested_values.map_leaves(canonical, stage.module(x, context.side))

    def backward(self, d_output: Value, learn: Tensor | None = None) -> tuple[Value | None, Gradients]:
        x = self.input
        del self.input
        rows = None if learn is None else Rows.where(learn)
        if rows is None:
            return AutogradTape(self.stage, x, self.context).backward(d_output)
        tape = AutogradTape(self.stage, rows.take(x), self.context.only(rows.index))
        d_input, gradients = tape.backward(rows.take_gradient(d_output))
        return None if d_input is None else rows.put(d_input), gradients


class SlicedTape:
    """For stages of known layers: the one forward keeps what each layer needs, and only rows that learn go back."""

    def __init__(self, stage: StageFacts, x: Tensor, context: Context) -> None:
        self.stage, self.input_gradient = stage, context.input_gradient
        with torch.no_grad(), stage.context(), context.masks():
            output, self._backwards = row_backward.forward(stage.module, x, context.input_gradient)
        self.output = canonical(output)

    def backward(self, d_output: Tensor, learn: Tensor | None = None) -> tuple[Tensor | None, Gradients]:
        rows = None if learn is None else Rows.where(learn)
        with torch.no_grad(), self.stage.context():
            d_output = d_output.to(self.output.dtype)
            d = canonical(d_output) if rows is None else rows.take_gradient(d_output)
            d_input, learned = row_backward.backward(self._backwards, d, rows, self.input_gradient)
        # By identity: parameters may stand in any order in their layer, and it may hold some that it does not use.
        by_parameter = {id(parameter): gradient for parameter, gradient in learned}
        gradients: Gradients = [by_parameter.get(id(parameter)) for parameter in self.stage.parameters]
        return d_input if d_input is None or rows is None else rows.put(d_input), gradients


class PartialTape:
    """Makes a tape of some rows look like one of all rows."""

    def __init__(self, tape: Tape, rows: Rows) -> None:
        self.tape, self.rows = tape, rows
        self.output = rows.put(tape.output)

    def backward(self, d_output: Value, learn: Tensor | None = None) -> tuple[Value | None, Gradients]:
        inner = None if learn is None else self.rows.within(learn)
        d_input, gradients = self.tape.backward(self.rows.take_gradient(d_output), inner)
        return None if d_input is None else self.rows.put(d_input), gradients
