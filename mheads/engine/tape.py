"""Forward and backward of one stage on one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mheads import values
from mheads.engine.sums import Gradients
from mheads.models.layers import keyed_masks
from mheads.tree import Stage, canonical
from mheads.values import Value

ROW_MULTIPLE = 8  # a convolution that meets a new row count spends 1 to 2 ms on building a primitive for it


@dataclass(frozen=True)
class Rows:
    """Some rows of a micro-batch, padded by repeating one to a multiple of ROW_MULTIPLE."""

    index: Tensor
    count: int
    total: int

    @staticmethod
    def where(mask: Tensor) -> Rows | None:
        """The rows where the mask is true; None for all of them, or so many that leaving some out gains nothing."""
        total = len(mask)
        index = mask.nonzero().flatten()
        count = len(index)
        padded = max(ROW_MULTIPLE, -(-count // ROW_MULTIPLE) * ROW_MULTIPLE)
        if padded >= total:
            return None
        filler = index.new_full((padded - count,), int(index[0]) if count else 0)
        return Rows(torch.cat([index, filler]), count, total)

    def take(self, value: Value) -> Value:
        return values.map_leaves(lambda t: canonical(t[self.index.to(t.device)]), value)

    def take_gradient(self, value: Value) -> Value:
        """As `take`, with zeros in the rows that only fill up."""

        def pick(t: Tensor) -> Tensor:
            t = canonical(t[self.index.to(t.device)])
            t[self.count :] = 0
            return t

        return values.map_leaves(pick, value)

    def put(self, value: Value) -> Value:
        """Back to all rows, with zeros in the others."""

        def spread(t: Tensor) -> Tensor:
            full = canonical(t.new_zeros((self.total, *t.shape[1:])))
            full[self.index[: self.count].to(t.device)] = t[: self.count]
            return full

        return values.map_leaves(spread, value)


class Tape:
    """One forward of a stage, recorded so that it can be taken back once.

    `output` carries no graph; `backward` turns its gradient into those of the input and of the stage's parameters, and
    frees what was kept. With `rows`, only these rows are computed, and the others get zeros.
    """

    def __init__(
        self,
        stage: Stage,
        x: Value,
        key: tuple[int | str, ...],
        side: dict[str, Value],
        input_gradient: bool,
        rows: Rows | None = None,
    ) -> None:
        self.rows = rows
        self.parameters = [p for p in stage.parameters() if p.requires_grad]
        num_rows = values.num_rows(x)
        if rows is not None:
            x = rows.take(x)
        # A fresh leaf with canonical strides, whatever the engine that brought the value did with it.
        self.input = values.map_leaves(lambda t: canonical(t.detach()), x)
        self.wanted: list[Tensor] = []
        if input_gradient:
            self.wanted = [t.requires_grad_() for t in values.leaves(self.input) if t.is_floating_point()]
        with torch.enable_grad(), keyed_masks(key, num_rows, None if rows is None else rows.index):
            self._graph: Value | None = stage(self.input, side)
        self.output = values.map_leaves(lambda t: canonical(t.detach()), self._graph)
        if rows is not None:
            self.output = rows.put(self.output)

    def backward(self, d_output: Value) -> tuple[Value | None, Gradients]:
        graph, self._graph = self._graph, None
        if self.rows is not None:
            d_output = self.rows.take_gradient(d_output)
        pairs = [
            (y, canonical(d))
            for y, d in zip(values.leaves(graph), values.leaves(d_output), strict=True)
            if y.requires_grad
        ]
        sources = [*self.wanted, *self.parameters]
        gradients: Gradients = [None] * len(sources)
        if pairs and sources:
            ys, ds = zip(*pairs, strict=True)
            gradients = list(torch.autograd.grad(ys, sources, ds, allow_unused=True))
        d_input = None
        if self.wanted:
            d_leaves = [torch.zeros_like(x) if d is None else d for x, d in zip(self.wanted, gradients, strict=False)]
            queue = iter(d_leaves)
            d_input = values.map_leaves(lambda t: next(queue) if t.requires_grad else torch.zeros_like(t), self.input)
            if self.rows is not None:
                d_input = self.rows.put(d_input)
        del self.input
        return d_input, gradients[len(self.wanted) :]


def trainable(stage: nn.Module) -> list[Tensor]:
    """The parameters that a tape's gradients stand for, in their order."""
    return [p for p in stage.parameters() if p.requires_grad]
