"""Layers that bring values together, take them apart or give them another shape. The first axis holds examples."""

from __future__ import annotations

import math
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor, nn

from mheads.caffe.layers.layer_modules import LayerModules, Shape, axis_of
from mheads.caffe.prototxt import CaffeLayer

PROD, SUM, MAX = range(3)


class Eltwise(nn.Module):
    """The product, the sum with coefficients, or the maximum of several values."""

    def __init__(self, operation: int, coefficients: tuple[float, ...]) -> None:
        super().__init__()
        self.operation, self.coefficients = operation, coefficients

    def forward(self, *xs: Tensor) -> Tensor:
        if self.operation == PROD:
            return reduce(torch.mul, xs)
        if self.operation == MAX:
            # Caffe gives the gradient to the first of equals, torch.maximum shares it out.
            return reduce(lambda a, b: torch.where(b > a, b, a), xs)
        pairs = zip(xs, self.coefficients, strict=True)
        return reduce(torch.add, (x if c == 1 else x * c for x, c in pairs))

    def extra_repr(self) -> str:
        coefficients = ", ".join(f"{c:g}" for c in self.coefficients)
        return ("product", f"sum, {coefficients}", "maximum")[self.operation]


def eltwise(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p = layer.message.eltwise_param
    coefficients = tuple(p.coeff) or (1.0,) * len(shapes)
    if len(coefficients) != len(shapes):
        raise layer.refuse(f"it has {len(coefficients)} coeff for {len(shapes)} bottoms: give one for each, or none")
    if p.operation != SUM and p.coeff:
        raise layer.refuse("coeff is for operation: SUM: leave it out")
    other = next((shape for shape in shapes if shape != shapes[0]), None)
    if other is not None:
        raise layer.refuse(f"its bottoms have the shapes {list(shapes[0])} and {list(other)}: they must be equal")
    return LayerModules([Eltwise(p.operation, coefficients)])


class Concat(nn.Module):
    """Values one after the other along an axis."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.cat(xs, self.axis)

    def extra_repr(self) -> str:
        return f"axis={self.axis}"


def concat(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p = layer.message.concat_param
    axis = axis_of(layer, p.concat_dim if p.HasField("concat_dim") else p.axis, len(shapes[0]))
    for shape in shapes:
        if len(shape) != len(shapes[0]) or any(
            a != b for i, (a, b) in enumerate(zip(shape, shapes[0], strict=False)) if i != axis
        ):
            raise layer.refuse(
                f"its bottoms have the shapes {list(shapes[0])} and {list(shape)}: only axis {axis} may differ"
            )
    _not_examples(layer, axis, len(shapes) > 1)
    return LayerModules([Concat(axis)])


class Slice(nn.Module):
    """Parts of a value along an axis."""

    def __init__(self, axis: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.axis, self.sizes = axis, sizes

    def forward(self, x: Tensor) -> tuple[Tensor, ...] | Tensor:
        parts: tuple[Tensor, ...] = x.split(self.sizes, self.axis)
        return parts if len(parts) > 1 else parts[0]

    def extra_repr(self) -> str:
        return f"axis={self.axis}, sizes={self.sizes}"


def slices(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p, shape, tops = layer.message.slice_param, shapes[0], len(layer.tops)
    axis = axis_of(layer, p.slice_dim if p.HasField("slice_dim") else p.axis, len(shape))
    _not_examples(layer, axis, tops > 1)
    points = list(p.slice_point)
    if points and len(points) != tops - 1:
        raise layer.refuse(
            f"it has {len(points)} slice_point for {tops} tops: give {tops - 1}, or none for equal parts"
        )
    if not points:
        if shape[axis] % tops:
            raise layer.refuse(
                f"{shape[axis]} along axis {axis} cannot be cut into {tops} equal parts: give slice_point"
            )
        points = [shape[axis] // tops * i for i in range(1, tops)]
    stops = [0, *points, shape[axis]]
    if any(a >= b for a, b in pairwise(stops)):
        raise layer.refuse(f"slice_point {points} must rise between 0 and {shape[axis]}")
    return LayerModules([Slice(axis, tuple(b - a for a, b in pairwise(stops)))])


def _not_examples(layer: CaffeLayer, axis: int, several: bool) -> None:
    if axis == 0 and several:
        raise layer.refuse("axis: 0 holds the examples of a batch, which stay together here: give 1 or more")


def flatten(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p, dims = layer.message.flatten_param, len(shapes[0])
    start, end = axis_of(layer, p.axis, dims), axis_of(layer, p.end_axis, dims, "end_axis")
    if start > end:
        raise layer.refuse(f"axis: {p.axis} is after end_axis: {p.end_axis}")
    if start == 0 and end > 0:
        raise layer.refuse("axis: 0 would mix the examples of a batch: give 1 or more")
    return LayerModules([nn.Flatten(start, end)])


class Reshape(nn.Module):
    """Another shape of each example."""

    def __init__(self, sizes: Shape) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], *self.sizes)

    def extra_repr(self) -> str:
        return f"{list(self.sizes)}"


def reshape(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p, shape = layer.message.reshape_param, shapes[0]
    dims = len(shape)
    start = p.axis if p.axis >= 0 else dims + 1 + p.axis
    stop = dims if p.num_axes == -1 else start + p.num_axes
    if not 0 <= start <= stop <= dims or p.num_axes < -1:
        raise layer.refuse(f"axis: {p.axis} and num_axes: {p.num_axes} do not fit a bottom of {dims} axes")
    given = list(p.shape.dim)
    if given.count(-1) > 1 or any(dim < -1 for dim in given):
        raise layer.refuse(f"shape {given}: give sizes, 0 for that of the bottom, and at most one -1")
    if any(dim == 0 and start + i >= dims for i, dim in enumerate(given)):
        raise layer.refuse(f"shape {given}: a 0 stands for the axis of the bottom at its place, and it has {dims}")
    made = [*shape[:start], *(shape[start + i] if dim == 0 else dim for i, dim in enumerate(given)), *shape[stop:]]
    if start == 0 and given and given[0] not in (0, -1) and given[0] != shape[0]:
        made[0] = shape[0]  # a batch size that is written down: examples stay as many as they are
    if -1 in made:
        count, rest = math.prod(shape), -math.prod(made)
        if rest == 0 or count % rest:
            raise layer.refuse(f"shape {given}: {list(shape)} cannot be given that shape")
        made[made.index(-1)] = count // rest
    if not made or made[0] != shape[0]:
        raise layer.refuse(f"shape {given} makes {made} of {list(shape)}: the first axis holds the examples and stays")
    if math.prod(shape) != math.prod(made):
        raise layer.refuse(f"shape {given} makes {made} of {list(shape)}, which holds other numbers of values")
    return LayerModules([Reshape(tuple(made[1:]))])


class ArgMax(nn.Module):
    """Where the k largest values are, along an axis or in each example as a whole; or the values, or both."""

    def __init__(self, k: int, axis: int | None, values: bool) -> None:
        super().__init__()
        self.k, self.axis, self.values = k, axis, values

    def forward(self, x: Tensor) -> Tensor:
        if self.axis is not None:
            largest = x.topk(self.k, self.axis)
            return largest.values if self.values else largest.indices.to(x.dtype)
        largest = x.flatten(1).topk(self.k, 1)
        places = largest.indices.to(x.dtype)
        parts = torch.stack([places, largest.values], 1) if self.values else places.unsqueeze(1)
        return parts.reshape(*parts.shape, *(1,) * (x.dim() - 3))

    def extra_repr(self) -> str:
        return f"k={self.k}, axis={self.axis}, values={self.values}"


def argmax(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p, shape = layer.message.argmax_param, shapes[0]
    axis = axis_of(layer, p.axis, len(shape)) if p.HasField("axis") else None
    if axis == 0:
        raise layer.refuse("axis: 0 goes over the examples of a batch: give 1 or more")
    count = math.prod(shape[1:]) if axis is None else shape[axis]
    if not 1 <= p.top_k <= count:
        raise layer.refuse(f"top_k: {p.top_k} of {count} values: give 1 to {count}")
    return LayerModules([ArgMax(p.top_k, axis, p.out_max_val)])


class Crop(nn.Module):
    """The part of the first bottom, at an offset, that has the sizes of the second from an axis on."""

    def __init__(self, axis: int, offsets: tuple[int, ...]) -> None:
        super().__init__()
        self.axis, self.offsets = axis, offsets

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        for i, offset in enumerate(self.offsets, self.axis):
            x = x.narrow(i, offset, like.shape[i])
        return x

    def extra_repr(self) -> str:
        return f"axis={self.axis}, offsets={self.offsets}"


def crop(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p, (of, like) = layer.message.crop_param, shapes
    axis, offsets = axis_of(layer, p.axis, len(of)), list(p.offset) or [0]
    if len(of) != len(like):
        raise layer.refuse(f"its bottoms have {len(of)} and {len(like)} axes: they must have as many")
    _not_examples(layer, axis, True)
    if len(offsets) not in (1, len(of) - axis):
        raise layer.refuse(f"it has {len(offsets)} offset for {len(of) - axis} axes: give one, or one for each")
    offsets = offsets * (len(of) - axis) if len(offsets) == 1 else offsets
    for i, offset in enumerate(offsets, axis):
        if offset + like[i] > of[i]:
            raise layer.refuse(
                f"offset {offset} and size {like[i]} along axis {i} are more than the {of[i]} that are there"
            )
    return LayerModules([Crop(axis, tuple(offsets))])
