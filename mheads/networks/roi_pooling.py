"""Region-of-interest max pooling: a grid of cells over each region of a feature map, the maximum of each cell.

The maximum over any window is that of four windows whose sides are powers of two, and those are looked up: tables of
all such windows are made once for an image, by doubling. So the work for a region does not grow with its size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

TABLE = 16_000_000  # numbers in the tables that are made at a time: as many channels as that allows
ROWS = 1024  # cells looked up at a time, so that what was looked up stays in the cache


Maxima = tuple[Tensor, Tensor | None]  # values, and where they are in the map, if that is wanted


class RegionPool(nn.Module):
    """[images, C, H, W] and regions of these images -> [R, C, size, size].

    Regions [R, 4] are the corners (left, top, right, bottom) of boxes in pixels of the network's input, both included,
    those of the first image first; counts [images] says how many each has. `scale` is the size of the map by that of
    the input. Corners are rounded to cells of the map; a region has at least one.
    """

    takes = ("regions", "counts")

    def __init__(self, size: int, scale: float) -> None:
        super().__init__()
        self.size, self.scale = size, scale

    def forward(self, x: Tensor, regions: Tensor, counts: Tensor) -> Tensor:
        parts = regions.split(counts.tolist())
        pooled = [_pool(one, part, self.size, self.scale) for one, part in zip(x, parts, strict=True)]
        return torch.cat(pooled) if len(pooled) != 1 else pooled[0]

    def extra_repr(self) -> str:
        return f"size={self.size}, scale={self.scale:g}"


def windows(regions: Tensor, size: int, scale: float, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Where the cells of regions [R, 4] begin and end in a map: int64 [2, R, size] of (down, right), twice.

    Cell i of a region of n rows has those from floor(i n / size) to ceil((i + 1) n / size) - 1, clipped to the map.
    """
    corners = (regions.double() * scale + 0.5).floor().long()  # halves go up, as C's round has it above 0
    first, last = corners[:, [1, 0]].T, corners[:, [3, 2]].T
    length = (last - first + 1).clamp_min(1)[..., None]
    steps = torch.arange(size)
    limits = torch.tensor([height, width])[:, None, None]
    begin = first[..., None] + steps * length // size
    end = first[..., None] - (-(steps + 1) * length).div(size, rounding_mode="floor")
    return begin.clamp_min(0).minimum(limits), end.clamp_min(0).minimum(limits)


class _Pooled(torch.autograd.Function):
    """Pools regions of one map [C, H, W]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, regions: Tensor, size: int, scale: float) -> Tensor:
        height, width = x.shape[1:]
        begin, end = windows(regions.cpu(), size, scale, height, width)
        cells, empty, levels = _lookups(begin, end, height, width)
        empty = empty.to(x.device, non_blocking=True)
        places = x.permute(1, 2, 0)
        out = x.new_empty(len(regions), size, size, len(x))
        flat = out.view(-1, len(x))
        where = torch.empty_like(flat, dtype=torch.int32) if ctx.needs_input_grad[0] else None
        step = max(1, TABLE // (levels[0] * levels[1] * height * width))
        for first in range(0, len(x), step):
            channels = slice(first, first + step)
            tables = _tables(places[..., channels], levels, where is not None)
            _look_up((flat[:, channels], None if where is None else where[:, channels]), tables, cells)
        flat.index_fill_(0, empty, 0)
        if where is not None:
            where.index_fill_(0, empty, -1)
            ctx.save_for_backward(where)
            ctx.shape = x.shape
        return out.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (where,) = ctx.saved_tensors
        channels, height, width = ctx.shape
        flat = gradients[0].permute(0, 2, 3, 1).reshape(-1, channels)
        gradient = flat.new_zeros(height * width + 1, channels)  # the last row is for cells outside of the map
        gradient.scatter_add_(0, where.long().remainder(height * width + 1), flat)
        return gradient[:-1].view(height, width, channels).permute(2, 0, 1), None, None, None


# torch has no annotations for `Function.apply`: its arguments are those of `forward` without `ctx`.
_pool: Callable[[Tensor, Tensor, int, float], Tensor] = _Pooled.apply


def _lookups(begin: Tensor, end: Tensor, height: int, width: int) -> tuple[list[Tensor], Tensor, tuple[int, int]]:
    """The rows of the tables that cover each cell of each region, four for all; which cells are empty; and how many
    doublings there are each way."""
    length = end - begin
    level = (length.clamp_min(1).double().log2() + 1e-9).floor().long()
    levels = (int(level[0].max()) + 1, int(level[1].max()) + 1) if level.numel() else (1, 1)
    again = end - (1 << level)  # the second window that ends where the cell does
    empty = ((length[0] <= 0)[:, :, None] | (length[1] <= 0)[:, None, :]).flatten()
    table = level[0][:, :, None] * levels[1] + level[1][:, None, :]

    def rows(down: Tensor, right: Tensor) -> Tensor:
        cells = (table * height + down[:, :, None]) * width + right[:, None, :]
        return cells.flatten().masked_fill(empty, 0)

    corners = [(begin[0], begin[1]), (begin[0], again[1]), (again[0], begin[1]), (again[0], again[1])]
    return [rows(*corner) for corner in corners], empty.nonzero()[:, 0], levels


def _tables(x: Tensor, levels: tuple[int, int], indexed: bool) -> Maxima:
    """The maxima of all windows of [H, W, c] that are 2^i high and 2^j wide, and where the first of each is.

    [levels * H * W, c]; rows of windows that would reach beyond the map are never looked up.
    """
    height, width, channels = x.shape
    values = x.new_empty(*levels, height, width, channels)
    values[0, 0] = x
    indices = None
    if indexed:
        indices = torch.empty_like(values, dtype=torch.int32)
        indices[0, 0] = torch.arange(height * width, dtype=torch.int32, device=x.device).view(height, width, 1)
    for i, j in itertools.product(range(levels[0]), range(levels[1])):
        if (i, j) != (0, 0):
            # Of two windows half as high or, in the first row of tables, half as wide.
            half, axis, step = ((i - 1, j), 0, 1 << (i - 1)) if i else ((0, j - 1), 1, 1 << (j - 1))
            count = (height, width)[axis] - step
            windows = (((i, j), 0), (half, 0), (half, step))
            _into(*(_part((values, indices), which, axis, at, count) for which, at in windows))
    return values.view(-1, channels), None if indices is None else indices.view(-1, channels)


def _part(tables: Maxima, which: tuple[int, int], axis: int, first: int, count: int) -> Maxima:
    values, indices = tables
    own = None if indices is None else indices[which].narrow(axis, first, count)
    return values[which].narrow(axis, first, count), own


def _into(out: Maxima, one: Maxima, other: Maxima) -> None:
    """The larger of two values; where they are equal, that which comes first in the map."""
    (a, i), (b, j) = one, other
    if out[1] is not None and i is not None and j is not None:
        first = (a > b) | ((a == b) & (i <= j))
        torch.where(first, i, j, out=out[1])
    torch.maximum(a, b, out=out[0])


def _look_up(out: Maxima, tables: Maxima, cells: list[Tensor]) -> None:
    """The maxima of cells, each the largest of four rows of the tables.

    The four are two or one where sides are powers of two, as most are in small maps, so cells alike go together.
    """
    across, down = cells[0] != cells[1], cells[0] != cells[2]
    for kind, corners in enumerate(([0], [0, 1], [0, 2], [0, 1, 2, 3])):
        alike = (across + 2 * down == kind).nonzero()[:, 0]
        for part in alike.split(ROWS):
            largest = _rows(tables, cells[0][part])
            for corner in corners[1:]:
                _into(largest, largest, _rows(tables, cells[corner][part]))
            part = part.to(out[0].device, non_blocking=True)
            out[0].index_copy_(0, part, largest[0])
            if out[1] is not None and largest[1] is not None:
                out[1].index_copy_(0, part, largest[1])


def _rows(tables: Maxima, rows: Tensor) -> Maxima:
    values, indices = tables
    rows = rows.to(values.device, non_blocking=True)
    return values.index_select(0, rows), None if indices is None else indices.index_select(0, rows)
