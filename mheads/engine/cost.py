"""What a stage costs: multiply-adds counted from shapes, never from a clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.trees.treenet import TreeNet


@dataclass(frozen=True)
class StageCost:
    """Multiply-adds of one example: forward, gradients of the weights, gradient of the layers' inputs.

    `first_input` is the part of `inputs` that belongs to the first layer with weights: a root stage is not asked for
    it. `output_floats` is what the stage hands on.
    """

    forward: int
    weights: int
    inputs: int
    first_input: int
    output_floats: int

    def step(self, root: bool) -> int:
        """Multiply-adds of a training step; nobody needs the gradient of the data."""
        return self.forward + self.weights + self.inputs - (self.first_input if root else 0)


def stage_costs(net: TreeNet, shape: tuple[int, ...]) -> dict[str, StageCost]:
    """The cost of each stage of the tree on examples of this shape: of its products, whatever computes them."""
    return costs_on(net, torch.zeros((1, *shape), dtype=next(net.parameters()).dtype))


def costs_on(net: TreeNet, example: Value, side: dict[str, Value] | None = None) -> dict[str, StageCost]:
    """The same for what the first stage is given for one example, and its side inputs: all its regions, say."""
    given: dict[str | None, Value] = {None: example}
    costs = {}
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    for name, node in net.tree.nodes.items():
        counted: list[int] = []
        handles = [
            module.register_forward_hook(lambda m, args, y, counted=counted: counted.append(_multiply_adds(m, y)))
            for module in net.stage(name).modules()
            if isinstance(module, nn.Conv2d | nn.Linear)
        ]
        total, given[name] = multiply_adds(net.stage(name), given[node.parent], side)
        for handle in handles:
            handle.remove()
        floats = sum(t.numel() for t in nested_values.leaves(given[name]))
        costs[name] = StageCost(total, total, total, counted[0] if counted else 0, floats)
    for module, mode in modes:
        module.training = mode
    return costs


def _recurrent_flops(x: Sequence[int], w_x: Sequence[int], w_h: Sequence[int], *_: Any, **__: Any) -> int:
    """Of oneDNN's LSTM: one layer in one direction over [T, B, F], with the shapes of its two matrices."""
    return 2 * x[0] * x[1] * (math.prod(w_x) + math.prod(w_h))


_UNKNOWN = {torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops}  # to torch's counter


@torch.no_grad()
def multiply_adds(stage: nn.Module, x: Value, side: dict[str, Value] | None = None) -> tuple[int, Value]:
    """Those of a forward, per example, and what the stage gives; with side inputs x is one example.

    Torch counts them operation by operation, so attention is computed by operations that it knows.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False, custom_mapping=_UNKNOWN) as counter, sdpa_kernel(SDPBackend.MATH):
            y = stage(x) if side is None else stage(x, side)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops() // 2 // (nested_values.num_rows(x) if side is None else 1), y


def example_of(net: TreeNet, shape: tuple[int, ...]) -> Tensor:
    """One example of this shape that the network takes: numbers, or else tokens. Refuses what a probe refuses."""
    refused: UserError | None = None
    for dtype in (net.dtype, torch.int64):
        try:
            net.probe(torch.zeros(2, *shape, dtype=dtype))
        except UserError as error:
            refused = refused or error
        else:
            return torch.zeros(1, *shape, dtype=dtype)
    assert refused is not None
    raise refused


def step_multiply_adds(net: TreeNet, shape: tuple[int, ...], side: dict[str, Value] | None = None) -> int:
    """Useful multiply-adds of a training step, per example."""
    costs = costs_on(net, torch.zeros((1, *shape), dtype=next(net.parameters()).dtype), side)
    return sum(costs[name].step(node.parent is None) for name, node in net.tree.nodes.items())


def _multiply_adds(layer: nn.Module, y: Value) -> int:
    num_outputs: int = nested_values.leaves(y)[0][0].numel()  # of one example
    if isinstance(layer, nn.Conv2d):
        kernel = layer.kernel_size[0] * layer.kernel_size[1]
        return num_outputs * layer.in_channels // layer.groups * kernel
    assert isinstance(layer, nn.Linear)
    return num_outputs * layer.in_features
