"""Layers with weights, or with statistics."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mheads.caffe import message_schema
from mheads.caffe.layers.layer_modules import LayerModules, Shape, axis_of, per_axis
from mheads.caffe.prototxt import CaffeLayer

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
DECONVOLUTIONS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def convolution(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    return _convolution(layer, shapes[0], CONVOLUTIONS)


def deconvolution(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    return _convolution(layer, shapes[0], DECONVOLUTIONS)


def _convolution(layer: CaffeLayer, shape: Shape, classes: dict[int, Any]) -> LayerModules:
    p = layer.message.convolution_param
    axes = len(shape) - 2
    if axes not in classes:
        raise layer.refuse(
            f"its bottom has the shape {list(shape)}: it takes examples x channels x 1 to 3 spatial axes"
        )
    if axis_of(layer, p.axis, len(shape)) != 1:
        raise layer.refuse(f"axis: {p.axis}: channels other than axis 1 are not supported")
    kernel = per_axis(layer, p, "kernel_size", axes, None, 1)
    stride, pad = per_axis(layer, p, "stride", axes, 1, 1), per_axis(layer, p, "pad", axes, 0, 0)
    dilation = per_axis(layer, p, "dilation", axes, 1, 1)
    channels, outputs, group = shape[1], _outputs(layer, p), p.group
    if group < 1 or channels % group or outputs % group:
        raise layer.refuse(
            f"group: {group} does not divide {channels} channels and {outputs} outputs: give one that does"
        )
    made = classes[axes](
        channels, outputs, kernel, stride=stride, padding=pad, dilation=dilation, groups=group, bias=p.bias_term
    )
    return LayerModules([made], _fillers(p))


def _outputs(layer: CaffeLayer, p: Any) -> int:
    count: int = p.num_output
    if count < 1:
        raise layer.refuse("num_output is missing or 0: give the number of outputs")
    return count


def _fillers(p: Any) -> dict[str, Any]:
    return {"weight": p.weight_filler, **({"bias": p.bias_filler} if p.bias_term else {})}


class TransposedLinear(nn.Module):
    """An inner product whose weight is inputs x outputs."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


def inner_product(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p, shape = layer.message.inner_product_param, shapes[0]
    axis = axis_of(layer, p.axis, len(shape))
    if axis == 0:
        raise layer.refuse("axis: 0 multiplies all examples together: give 1 or more")
    kind = TransposedLinear if p.transpose else nn.Linear
    rows: list[nn.Module] = [nn.Flatten(axis)] if axis < len(shape) - 1 else []
    return LayerModules([*rows, kind(math.prod(shape[axis:]), _outputs(layer, p), bias=p.bias_term)], _fillers(p))


def prelu(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p = layer.message.prelu_param
    if len(shapes[0]) < 2:
        raise layer.refuse(f"its bottom has the shape {list(shapes[0])}: it takes examples x channels")
    filler = p.filler if p.HasField("filler") else _constant(0.25)
    made = nn.PReLU(1 if p.channel_shared else shapes[0][1])
    made.scalar = p.channel_shared  # its blob has no axes in Caffe's files
    return LayerModules([made], {"weight": filler})


class BatchNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) for each channel; no scale and no bias, which Caffe leaves to a Scale layer.

    In training mean and variance are the batch's, and the buffers, which are Caffe's blobs, gather sums that fade:
    mean <- fraction * mean + the batch's, factor <- fraction * factor + 1. What they stand for is their quotient.
    """

    blobs = ("mean", "variance", "factor")
    mean: Tensor
    variance: Tensor
    factor: Tensor

    def __init__(self, channels: int, eps: float, fraction: float, fixed: bool | None) -> None:
        super().__init__()
        self.eps, self.fraction, self.fixed = eps, fraction, fixed
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.zeros(channels))
        self.register_buffer("factor", torch.zeros(1))
        self.batch_statistics = fixed is not True

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *(1,) * (x.dim() - 2))
        if not (self.training if self.fixed is None else not self.fixed):
            factor = self.factor.where(self.factor != 0, torch.ones_like(self.factor))
            mean, variance = self.mean / factor, self.variance / factor
        else:
            axes = [i for i in range(x.dim()) if i != 1]
            variance, mean = torch.var_mean(x, axes, correction=0)
            if self.training:
                with torch.no_grad():
                    count = x.numel() // x.shape[1]
                    unbiased = count / (count - 1) if count > 1 else 1.0
                    self.mean.mul_(self.fraction).add_(mean.detach())
                    self.variance.mul_(self.fraction).add_(variance.detach(), alpha=unbiased)
                    self.factor.mul_(self.fraction).add_(1)
        return (x - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)

    def extra_repr(self) -> str:
        return f"{len(self.mean)}, eps={self.eps:g}, fraction={self.fraction:g}, fixed={self.fixed}"


def batch_norm(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p, shape = layer.message.batch_norm_param, shapes[0]
    if len(shape) < 2:
        raise layer.refuse(f"its bottom has the shape {list(shape)}: it takes examples x channels")
    if not p.eps > 0:
        raise layer.refuse(f"eps: {p.eps:g}: give a number above 0")
    params = layer.message.param
    # Of three Caffe takes the learning rates for 0, whatever they say.
    if len(params) != 3 and any(spec.HasField("lr_mult") and spec.lr_mult for spec in params):
        raise layer.refuse(
            "its blobs are statistics, which no learning rate applies to: give lr_mult: 0, or leave param out"
        )
    if shared := [spec.name for spec in params if spec.name]:
        raise layer.refuse(f"it shares {shared[0]!r}: statistics cannot be shared here: leave the names out")
    fixed = p.use_global_stats if p.HasField("use_global_stats") else None
    return LayerModules([BatchNorm(shape[1], p.eps, p.moving_average_fraction, fixed)])


class Scale(nn.Module):
    """x times a weight, plus a bias, each spread over the axes before `axis` and after its own."""

    def __init__(self, shape: Shape, axis: int, bias: bool) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x * expand_axes(self.weight, self.axis, x.dim())
        return y if self.bias is None else y + expand_axes(self.bias, self.axis, x.dim())

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, axis={self.axis}, bias={self.bias is not None}"


class ScaleBy(nn.Module):
    """The first bottom times the second, plus a bias of its own where there is one."""

    def __init__(self, axis: int, bias: Shape | None) -> None:
        super().__init__()
        self.axis = axis
        self.bias = None if bias is None else nn.Parameter(torch.empty(bias))

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        y = x * expand_axes(by, self.axis, x.dim())
        return y if self.bias is None else y + expand_axes(self.bias, self.axis, x.dim())


class Bias(nn.Module):
    """x plus a bias."""

    def __init__(self, shape: Shape, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.bias = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + expand_axes(self.bias, self.axis, x.dim())

    def extra_repr(self) -> str:
        return f"{list(self.bias.shape)}, axis={self.axis}"


class BiasBy(nn.Module):
    """The first bottom plus the second."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return x + expand_axes(by, self.axis, x.dim())


def expand_axes(weight: Tensor, axis: int, dims: int) -> Tensor:
    """A weight with axes of size 1 before and after its own, for a value of so many axes."""
    before, after = (axis, dims - axis - weight.dim()) if weight.dim() else (0, 0)
    return weight.reshape((1,) * before + tuple(weight.shape) + (1,) * after)


def scale(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p = layer.message.scale_param
    axis = axis_of(layer, p.axis, len(shapes[0]))
    fillers = {"bias": p.bias_filler} if p.bias_term else {}
    if len(shapes) == 2:
        covered = _check_second_bottom(layer, shapes, axis)
        return LayerModules([ScaleBy(axis, covered if p.bias_term else None)], fillers)
    shape = _weight_shape(layer, p, shapes[0], axis)
    filler = p.filler if p.HasField("filler") else _constant(1)
    return LayerModules([Scale(shape, axis, p.bias_term)], {"weight": filler, **fillers})


def bias(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p = layer.message.bias_param
    axis = axis_of(layer, p.axis, len(shapes[0]))
    if len(shapes) == 2:
        _check_second_bottom(layer, shapes, axis)
        return LayerModules([BiasBy(axis)])
    return LayerModules([Bias(_weight_shape(layer, p, shapes[0], axis), axis)], {"bias": p.filler})


def _weight_shape(layer: CaffeLayer, p: Any, shape: Shape, axis: int) -> Shape:
    """The shape of a learned weight: `num_axes` axes from `axis` on."""
    if p.num_axes < -1 or axis + p.num_axes > len(shape):
        raise layer.refuse(f"num_axes: {p.num_axes} from axis {axis} on: its bottom has {len(shape)} axes")
    if axis == 0 and p.num_axes != 0:
        raise layer.refuse("axis: 0 gives each example of a batch a weight of its own: give 1 or more")
    return shape[axis:] if p.num_axes == -1 else shape[axis : axis + p.num_axes]


def _check_second_bottom(layer: CaffeLayer, shapes: list[Shape], axis: int) -> Shape:
    of, by = shapes
    start = 0 if len(by) == len(of) else axis
    if by and of[axis : axis + len(by)] != by and of[start : start + len(by)] != by:
        raise layer.refuse(f"its bottoms are {list(of)} and {list(by)}, which does not fit from axis {axis} on")
    return by


def _constant(value: float) -> Any:
    return message_schema.message("FillerParameter")(type="constant", value=value)
