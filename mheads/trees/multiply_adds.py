"""Counts the multiply-adds of a module on an example, operation by operation, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.trees.treenet import TreeNet


def _recurrent_flops(x: Sequence[int], w_x: Sequence[int], w_h: Sequence[int], *_: Any, **__: Any) -> int:
    """Of oneDNN's LSTM: one layer in one direction over [T, B, F], with the shapes of its two matrices."""
    return 2 * x[0] * x[1] * (math.prod(w_x) + math.prod(w_h))


_UNKNOWN = {torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops}  # to torch's counter


@torch.no_grad()
def multiply_adds(stage: nn.Module, x: Value, side: dict[str, Value] | None = None) -> tuple[int, Value]:
    """Those of a forward, per example, and the output of the stage; with side inputs x is one example.

    Attention is computed by operations that torch's counter knows.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False, custom_mapping=_UNKNOWN) as counter, sdpa_kernel(SDPBackend.MATH):
            y = stage(x) if side is None else stage(x, side)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops() // 2 // (nested_values.num_rows(x) if side is None else 1), y


def make_example(net: TreeNet, shape: tuple[int, ...]) -> Tensor:
    """One example of this shape that the network takes: numbers, or else tokens. Raises what a probe raises."""
    first_error: UserError | None = None
    for dtype in (net.dtype, torch.int64):
        try:
            net.probe(torch.zeros(2, *shape, dtype=dtype))
        except UserError as error:
            first_error = first_error or error
        else:
            return torch.zeros(1, *shape, dtype=dtype)
    assert first_error is not None
    raise first_error
