"""What can be asked of any torch module."""

from __future__ import annotations

from typing import Any

from torch import nn

from mheads.errors import UserError


def call(layer: nn.Module, x: Any, side: dict[str, Any] | None = None) -> Any:
    """The layer on x, and on the side inputs that it asks for: its attribute `takes` is a name, or a tuple of names."""
    takes = getattr(layer, "takes", None)
    if takes is None:
        return layer(x)
    names = (takes,) if isinstance(takes, str) else takes
    lacking = [name for name in names if name not in (side or {})]
    if lacking:
        raise UserError(
            f"a {type(layer).__name__} takes the side input {lacking[0]!r}, which is not given (there is "
            f"{', '.join(side or {}) or 'none'}): give the data as (examples, labels, {{{lacking[0]!r}: array}})"
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


def children(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and children in order; unlike named_children, one that occurs twice (a ReLU, often) is listed twice."""
    return [(name, child) for name, child in network._modules.items() if child is not None]
