"""Questions about any torch module."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mheads.common.errors import UserError


def call(layer: nn.Module, x: Any, side: dict[str, Any] | None = None) -> Any:
    """Calls the layer on x and the side inputs that its attribute `takes` asks for: a name, or a tuple of names."""
    takes = getattr(layer, "takes", None)
    if takes is None:
        return layer(x)
    names = (takes,) if isinstance(takes, str) else takes
    lacking = [name for name in names if name not in (side or {})]
    if lacking:
        raise UserError(
            f"a {type(layer).__name__} takes the side input {lacking[0]!r}, which is not given (there is "
            f"{', '.join(side or {}) or 'none'}): give the data as (examples, labels, {{{lacking[0]!r}: array}}), and "
            f"examples to answer with side={{{lacking[0]!r}: array}}"
        )
    return layer(x, *((side or {})[name] for name in names))


def is_hooked(module: nn.Module) -> bool:
    """Whether calling this module does more than its class says."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__


def has_batch_statistics(module: nn.Module) -> bool:
    """Whether training it on some rows depends on the others, or on the order of calls: BatchNorm and its like.

    A module of the user's own says so by an attribute `batch_statistics = True`. Frozen ones depend on nothing.
    """
    return any(takes_statistics(m) and not has_fixed_statistics(m) for m in module.modules())


def takes_statistics(module: nn.Module) -> bool:
    """Whether this very module does, if it is not frozen."""
    running = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
    batch = isinstance(module, nn.modules.batchnorm._BatchNorm) or getattr(module, "batch_statistics", False)
    return bool(running or batch)


def has_fixed_statistics(module: nn.Module) -> bool:
    """Whether this module is frozen, and normalises by what it has seen so far: see `TreeNet.freeze`."""
    return bool(module.__dict__.get("fixed_statistics", False))


class StridedPointwise(nn.Conv2d):
    """A 1x1 convolution with a stride: the pixels that it looks at, then one without.

    oneDNN's gradient of the weights writes past its memory if such a layer sees few channels of channels-last images
    (oneDNN issue 6035), which crashes the process or worse.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.stride
        return F.conv2d(x[..., ::rows, ::columns], self.weight, self.bias, groups=self.groups)


StridedPointwise.__name__ = "Conv2d"  # which it is to whoever prints or compares networks


def avoid_overruns(network: nn.Module) -> nn.Module:
    """The network, its strided 1x1 convolutions of few channels computed in a way that is safe."""
    for module in network.modules():
        if type(module) is nn.Conv2d and not isinstance(module.padding, str):
            strided = set(module.kernel_size) == {1} and set(module.stride) != {1} and set(module.padding) == {0}
            if strided and module.in_channels // module.groups < 16:
                module.__class__ = StridedPointwise
    return network


def children(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and children in order; unlike named_children, one that occurs twice (a ReLU, often) is listed twice."""
    return [(name, child) for name, child in network._modules.items() if child is not None]


def trainable(stage: nn.Module) -> list[Tensor]:
    """The parameters that a tape's gradients belong to, in the same order."""
    return [p for p in stage.parameters() if p.requires_grad]
