"""What a stage costs: multiply-adds counted from shapes, never from a clock."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from mheads.common import nested_values
from mheads.common.nested_values import Value
from mheads.trees.multiply_adds import multiply_adds
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


def costs_on(net: TreeNet, example: Value, side: dict[str, Value] | None = None) -> dict[str, StageCost]:
    """The cost of each stage of the tree: of its products, whatever computes them.

    `example` is what the first stage is given for one example, and `side` its side inputs: all its regions, say.
    """
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


def _multiply_adds(layer: nn.Module, y: Value) -> int:
    num_outputs: int = nested_values.leaves(y)[0][0].numel()  # of one example
    if isinstance(layer, nn.Conv2d):
        kernel = layer.kernel_size[0] * layer.kernel_size[1]
        return num_outputs * layer.in_channels // layer.groups * kernel
    assert isinstance(layer, nn.Linear)
    return num_outputs * layer.in_features
