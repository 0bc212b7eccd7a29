"""Layers that need more than torch.nn gives: dropout whose masks are keyed, not drawn from a shared generator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mheads import seeds


@dataclass
class _Masks:
    key: tuple[int | str, ...]
    num_rows: int
    rows: Tensor | None
    drawn: int = 0


_local = threading.local()


@contextmanager
def keyed_masks(key: tuple[int | str, ...], num_rows: int, rows: Tensor | None = None) -> Iterator[None]:
    """Inside, the i-th dropout that this thread applies draws its mask from the key `(*key, i)`.

    Masks are drawn for all `num_rows` rows of the micro-batch and then cut to `rows`, so that an example
    meets the same mask whether its neighbours are computed or not.
    """
    previous = getattr(_local, "masks", None)
    _local.masks = _Masks(key, num_rows, rows)
    try:
        yield
    finally:
        _local.masks = previous


def draw_mask(shape: torch.Size, p: float, like: Tensor) -> Tensor | None:
    """The next keyed mask, already scaled by 1/(1-p), or None where no engine has set a key."""
    masks: _Masks | None = getattr(_local, "masks", None)
    if masks is None:
        return None
    generator = seeds.generator(*masks.key, masks.drawn)
    masks.drawn += 1
    mask = torch.empty((masks.num_rows, *shape[1:]), dtype=like.dtype)
    if mask.dim() == 4:
        mask = mask.to(memory_format=torch.channels_last)
    mask.bernoulli_(1 - p, generator=generator).mul_(1 / (1 - p))
    if masks.rows is not None:
        mask = mask[masks.rows]
    return mask.to(like.device)


class Dropout(nn.Module):
    """Zeroes each value with probability p in training and scales the rest by 1/(1-p).

    `channelwise` drops whole channels, as torch's Dropout2d. Inside an engine the mask depends on the seed,
    the step, the micro-batch and the stage alone; outside it is torch's own dropout.
    """

    def __init__(self, p: float = 0.5, channelwise: bool = False) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout needs 0 <= p < 1, not {p}")
        self.p = p
        self.channelwise = channelwise

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        mask = draw_mask(self.mask_shape(x), self.p, x)
        if mask is None:
            return F.dropout2d(x, self.p) if self.channelwise else F.dropout(x, self.p)
        return x * mask

    def mask_shape(self, x: Tensor) -> torch.Size:
        return torch.Size((*x.shape[:2], *(1,) * (x.dim() - 2))) if self.channelwise else x.shape

    def extra_repr(self) -> str:
        return f"p={self.p}" + (", channelwise=True" if self.channelwise else "")


CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def replace_dropout(module: nn.Module) -> nn.Module:
    """The module with every plain dropout of torch.nn in it, at any depth, replaced by the keyed one.

    Subclasses and hooked ones may do anything, so they stay as they are.
    """
    if type(module) in (nn.Dropout, *CHANNELWISE) and module.p < 1 and not is_hooked(module):  # type: ignore[operator]
        return Dropout(module.p, channelwise=type(module) in CHANNELWISE).train(module.training)  # type: ignore[arg-type]
    for name, child in module.named_children():
        replaced = replace_dropout(child)
        if replaced is not child:
            setattr(module, name, replaced)
    return module


def is_dropout(module: nn.Module) -> bool:
    """Whether this is a dropout layer, or a parameterless block with one inside."""
    return any(isinstance(m, Dropout | nn.modules.dropout._DropoutNd) for m in module.modules())


def is_hooked(module: nn.Module) -> bool:
    """Whether calling this module does more than its class says."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__


def has_batch_statistics(module: nn.Module) -> bool:
    """Whether training it on some rows depends on the others, or on the order of calls: BatchNorm and its like.

    A module of the user's own says so by an attribute `batch_statistics = True`.
    """

    def depends(m: nn.Module) -> bool:
        running = isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats
        return running or isinstance(m, nn.modules.batchnorm._BatchNorm) or getattr(m, "batch_statistics", False)

    return any(depends(m) for m in module.modules())


def children(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and children in order; unlike named_children, one that occurs twice (a ReLU, often) is listed twice."""
    return [(name, child) for name, child in network._modules.items() if child is not None]
