"""Some rows of a micro-batch, taken out and put back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.memory_layout import canonical
from mheads.common.nested_values import Value

ROW_MULTIPLE = 4  # a convolution that meets a new row count spends 1 to 2 ms on building a primitive for it


@dataclass(frozen=True)
class Rows:
    """The rows `index[:count]` of `total`; the rest of the index fills up to a multiple of ROW_MULTIPLE."""

    index: Tensor
    count: int
    total: int

    @staticmethod
    def where(mask: Tensor, exactly: bool = False) -> Rows | None:
        """The rows where the mask is true; None for all, or if leaving the others out gains nothing.

        `exactly` adds no filling rows, for layers whose statistics would include them; since fewer than two rows have
        no statistics, all are then taken.
        """
        total = len(mask)
        index = mask.nonzero().flatten()
        count = len(index)
        if exactly:
            return Rows(index, count, total) if 2 <= count < total else None
        padded = max(ROW_MULTIPLE, -(-count // ROW_MULTIPLE) * ROW_MULTIPLE)
        if padded >= total:
            return None
        filler = index.new_full((padded - count,), int(index[0]) if count else 0)
        return Rows(torch.cat([index, filler]), count, total)

    def to(self, device: torch.device) -> Rows:
        return replace(self, index=self.index.to(device, non_blocking=True))

    def pick(self, t: Tensor) -> Tensor:
        """These rows of a tensor with canonical strides, in canonical strides: one copy of each row."""
        if t.dim() == 4:
            return t.permute(0, 2, 3, 1).index_select(0, self.index).permute(0, 3, 1, 2)
        return t.index_select(0, self.index)

    def take(self, value: Value) -> Value:
        return nested_values.map_leaves(lambda t: self.pick(canonical(t)), value)

    def take_gradient(self, value: Value) -> Value:
        """Like `take`, with zeros in the filling rows."""

        def pick(t: Tensor) -> Tensor:
            t = self.pick(canonical(t))
            t[self.count :] = 0
            return t

        return nested_values.map_leaves(pick, value)

    def put(self, value: Value) -> Value:
        """Puts a value of these rows back among all rows, with zeros in the others."""

        def spread(t: Tensor) -> Tensor:
            full = canonical(t.new_empty((self.total, *t.shape[1:]))).zero_()
            full[self.index[: self.count]] = t[: self.count]
            return full

        return nested_values.map_leaves(spread, value)

    def within(self, mask: Tensor) -> Tensor:
        """A mask over all rows cut to these rows, false in the filling ones."""
        mask = mask[self.index]
        mask[self.count :] = False
        return mask
