"""Pooling with Caffe's sizes, and local response normalisation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mheads.caffe.layers.layer_modules import LayerModules, Shape, per_axis
from mheads.caffe.prototxt import CaffeLayer

MAX, AVE, STOCHASTIC = range(3)
WITHIN_CHANNEL = 1


class Pool(nn.Module):
    """Pooling where torch's own does not know Caffe's sizes: a pad of more than half the kernel.

    The input is padded as far as the windows reach. Maxima ignore the padding; means divide by what a window covers of
    the input and its pad, which may be less than the kernel at the far edge.
    """

    def __init__(self, average: bool, kernel: Shape, stride: Shape, pad: Shape, sizes: Shape) -> None:
        super().__init__()
        self.average, self.kernel, self.stride, self.pad, self.sizes = average, kernel, stride, pad, sizes

    def forward(self, x: Tensor) -> Tensor:
        axes = list(zip(x.shape[2:], self.kernel, self.stride, self.pad, self.sizes, strict=True))
        reach = [(size - 1) * stride + kernel - pad - length for length, kernel, stride, pad, size in axes]
        sides = (self.pad[1], reach[1], self.pad[0], reach[0])
        if not self.average:
            return F.max_pool2d(F.pad(x, sides, value=-torch.inf), self.kernel, self.stride)
        sums = F.avg_pool2d(F.pad(x, sides), self.kernel, self.stride, divisor_override=1)
        counts = [
            [min(i * stride - pad + kernel, length + pad) - (i * stride - pad) for i in range(size)]
            for length, kernel, stride, pad, size in axes
        ]
        rows, columns = (torch.tensor(count, dtype=x.dtype, device=x.device) for count in counts)
        return sums / (rows[:, None] * columns)

    def extra_repr(self) -> str:
        kind = "average" if self.average else "max"
        return f"{kind}, kernel={self.kernel}, stride={self.stride}, pad={self.pad}, sizes={self.sizes}"


def pooling(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p, shape = layer.message.pooling_param, shapes[0]
    if len(shape) != 4:
        raise layer.refuse(
            f"its bottom has the shape {list(shape)}: it takes images, examples x channels x rows x columns"
        )
    if p.pool == STOCHASTIC:
        raise layer.refuse("pool: STOCHASTIC is not supported: use MAX or AVE")
    if p.global_pooling:
        if p.HasField("kernel_size") or p.HasField("kernel_h") or p.HasField("kernel_w"):
            raise layer.refuse("global_pooling takes the whole image, and a kernel is given too: leave one out")
        if per_axis(layer, p, "pad", 2, 0, 0) != (0, 0) or per_axis(layer, p, "stride", 2, 1, 1) != (1, 1):
            raise layer.refuse("global_pooling takes pad 0 and stride 1: leave the others out")
        return LayerModules([nn.AdaptiveAvgPool2d(1) if p.pool == AVE else nn.AdaptiveMaxPool2d(1)])
    kernel = per_axis(layer, p, "kernel_size", 2, None, 1)
    stride, pad = per_axis(layer, p, "stride", 2, 1, 1), per_axis(layer, p, "pad", 2, 0, 0)
    if any(p_ >= k for p_, k in zip(pad, kernel, strict=True)):
        raise layer.refuse(
            f"pad {_by(pad)} is not below the kernel {_by(kernel)}: windows would see nothing but padding"
        )
    ceil = p.round_mode == 0
    sizes = tuple(size_of(*of, ceil, any(pad)) for of in zip(shape[2:], kernel, stride, pad, strict=True))
    for length, size, k, s, p_ in zip(shape[2:], sizes, kernel, stride, pad, strict=True):
        if size < 1:
            raise layer.refuse(f"a kernel of {k} does not fit an image of {length} with pad {p_}")
        if (size - 1) * s - p_ >= length:
            raise layer.refuse(
                f"its last window begins at {(size - 1) * s - p_}, beyond an image of {length}, where Caffe gives "
                f"garbage (kernel {k}, stride {s}): use a kernel of at least the stride, or round_mode: FLOOR"
            )
    if all(2 * p_ <= k for p_, k in zip(pad, kernel, strict=True)):
        of = torch_sizes(shape[2:], kernel, stride, pad, ceil)
        if of == sizes:
            # Equal sides are one number, as networks that are written by hand have it.
            args: list[Any] = [v[0] if v[0] == v[1] else v for v in (kernel, stride, pad)]
            kind: Any = nn.AvgPool2d if p.pool == AVE else nn.MaxPool2d
            return LayerModules([kind(*args, ceil_mode=ceil)])
    return LayerModules([Pool(p.pool == AVE, kernel, stride, pad, sizes)])


def size_of(length: int, kernel: int, stride: int, pad: int, ceil: bool, padded: bool) -> int:
    """Caffe's size: it rounds up, and where there is padding no window begins in what is beyond the input."""
    reach = length + 2 * pad - kernel
    if reach < 0:
        return 0
    size = (-(-reach // stride) if ceil else reach // stride) + 1
    return size - 1 if padded and (size - 1) * stride >= length + pad else size


def torch_sizes(lengths: Shape, kernel: Shape, stride: Shape, pad: Shape, ceil: bool) -> Shape:
    """torch's sizes, which look at the last window with or without padding."""
    return tuple(size_of(*of, ceil, ceil) for of in zip(lengths, kernel, stride, pad, strict=True))


def _by(pair: Shape) -> str:
    return " x ".join(map(str, pair))


class WithinChannelNorm(nn.Module):
    """x / (1 + alpha * mean of x^2 over a square around each pixel)^beta; beyond the edge there are zeros."""

    def __init__(self, size: int, alpha: float, beta: float) -> None:
        super().__init__()
        self.size, self.alpha, self.beta = size, alpha, beta

    def forward(self, x: Tensor) -> Tensor:
        around = F.avg_pool2d(x.square(), self.size, 1, self.size // 2)
        return x * (1 + self.alpha * around).pow(-self.beta)

    def extra_repr(self) -> str:
        return f"{self.size}, alpha={self.alpha:g}, beta={self.beta:g}"


def lrn(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p = layer.message.lrn_param
    if p.local_size % 2 == 0:
        raise layer.refuse(f"local_size: {p.local_size}: give an odd number, so that there is a middle")
    if len(shapes[0]) != 4:
        raise layer.refuse(f"its bottom has the shape {list(shapes[0])}: it takes images")
    if p.norm_region == WITHIN_CHANNEL:
        return LayerModules([WithinChannelNorm(p.local_size, p.alpha, p.beta)])
    return LayerModules([nn.LocalResponseNorm(p.local_size, p.alpha, p.beta, k=p.k)])
