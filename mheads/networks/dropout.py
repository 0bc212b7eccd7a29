"""Dropout whose masks are keyed, not drawn from a generator that threads share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mheads.common import seeds
from mheads.common.errors import UserError
from mheads.common.modules import is_hooked


@dataclass
class _Masks:
    key: tuple[int | str, ...]
    num_rows: int
    rows: Tensor | None
    stacked: tuple[str, ...] = ()
    drawn: int = 0


_local = threading.local()


@contextmanager
def keyed_masks(
    key: tuple[int | str, ...], num_rows: int, rows: Tensor | None = None, stacked: tuple[str, ...] = ()
) -> Iterator[None]:
    """Inside, the i-th dropout that this thread applies draws its mask from the key `(*key, i)`.

    Of stages that run `stacked`, each has the key `(*key, its name, i)`, as when it runs by itself.

    `rows` are the computed ones of `num_rows`, None for all. Masks are drawn for all rows and then cut to `rows`, so
    that an example meets the same mask whether its neighbours are computed or not.
    """
    previous = getattr(_local, "masks", None)
    _local.masks = _Masks(key, num_rows, rows, stacked)
    try:
        yield
    finally:
        _local.masks = previous


def draw_mask(shape: torch.Size, p: float, like: Tensor) -> Tensor | None:
    """The next keyed mask, already scaled by 1/(1-p), or None where no engine has set a key.

    It has the rows of what reaches the layer: one before it may have turned images into regions.
    """
    masks: _Masks | None = getattr(_local, "masks", None)
    if masks is None:
        return None
    number, masks.drawn = masks.drawn, masks.drawn + 1
    if masks.stacked:
        stacked: Tensor = _StackedMasks.apply(like, number, shape, p)  # type: ignore[no-untyped-call]
        return stacked
    return _draw(masks, seeds.generator(*masks.key, number), shape, p, like)


def draw_stacked_masks(shape: torch.Size, p: float, like: Tensor) -> Tensor:
    """The next masks of stages that run as one, [S, ...]: each that of its own key."""
    masks: _Masks = _local.masks
    number, masks.drawn = masks.drawn, masks.drawn + 1
    return _draw_each(masks, number, shape, p, like)


def _draw_each(masks: _Masks, number: int, shape: torch.Size, p: float, like: Tensor) -> Tensor:
    generators = (seeds.generator(*masks.key, name, number) for name in masks.stacked)
    return torch.stack([_draw(masks, generator, shape, p, like) for generator in generators])


def _draw(masks: _Masks, generator: torch.Generator, shape: torch.Size, p: float, like: Tensor) -> Tensor:
    computed, each = (shape[0], 1) if masks.rows is None else (len(masks.rows), shape[0] // len(masks.rows))
    if computed * each != shape[0]:
        raise UserError(
            f"dropout meets {shape[0]} rows where {computed} examples of {masks.num_rows} are computed: a layer before "
            "it makes several rows per example, but not equally many; let that layer take a side input"
        )
    num_rows = shape[0] if masks.rows is None else masks.num_rows * each
    mask = torch.empty((num_rows, *shape[1:]), dtype=like.dtype)
    if mask.dim() == 4:
        mask = mask.to(memory_format=torch.channels_last)
    mask.bernoulli_(1 - p, generator=generator).mul_(1 / (1 - p))
    mask = mask.to(like.device, non_blocking=True)
    if masks.rows is not None:
        mask = mask[masks.rows] if each == 1 else mask.unflatten(0, (-1, each))[masks.rows].flatten(0, 1)
    return mask


class _StackedMasks(torch.autograd.Function):
    """Inside vmap, gives each of the stacked stages the mask of its own key."""

    @staticmethod
    def forward(like: Tensor, number: int, shape: torch.Size, p: float) -> Tensor:
        raise RuntimeError("masks of stacked stages are drawn inside vmap alone")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, like: Tensor, number: int, shape: torch.Size, p: float) -> tuple[Tensor, int]:
        return _draw_each(_local.masks, number, shape, p, like)[: info.batch_size], 0


def skip_mask() -> None:
    """Counts a mask that is drawn elsewhere, so that those after it have the numbers that they have in one process."""
    masks: _Masks | None = getattr(_local, "masks", None)
    if masks is not None:
        masks.drawn += 1


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


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As torch's function of this name, with keyed masks inside an engine."""
    return _drop(x, p, training, False)


def channelwise_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As torch's dropout1d, dropout2d and dropout3d, with keyed masks inside an engine."""
    return _drop(x, p, training, True)


def _drop(x: Tensor, p: float, training: bool, channelwise: bool) -> Tensor:
    return x * 0 if training and p >= 1 else Dropout(p, channelwise).train(training)(x)


FUNCTIONS = {
    F.dropout: dropout,
    torch.dropout: dropout,
    F.dropout1d: channelwise_dropout,
    F.dropout2d: channelwise_dropout,
    F.dropout3d: channelwise_dropout,
}


class KeyedFunctions(TorchFunctionMode):
    """Inside, torch's functions for dropout draw keyed masks; it slows down all others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FUNCTIONS.get(func, func)(*args, **(kwargs or {}))


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
