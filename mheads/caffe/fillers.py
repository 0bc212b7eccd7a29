"""Caffe's fillers: the first values of weights, drawn from torch's global generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mheads.caffe.prototxt import CaffeLayer

FILLERS = ("constant", "uniform", "gaussian", "positive_unitball", "xavier", "msra", "bilinear")


def check_filler(filler: Any, shape: Sequence[int], layer: CaffeLayer) -> None:
    """Refuses a filler that cannot fill a weight of this shape."""
    if filler.type not in FILLERS:
        raise layer.refuse(f"there is no filler {filler.type!r}: it is one of {', '.join(FILLERS)}")
    if filler.type == "uniform" and not filler.min <= filler.max:
        raise layer.refuse(f"a uniform filler from {filler.min:g} to {filler.max:g}: min is above max")
    if filler.type == "gaussian" and not filler.std >= 0:
        raise layer.refuse(f"a gaussian filler with std: {filler.std:g}: give 0 or more")
    if filler.type == "bilinear" and (len(shape) != 4 or shape[2] != shape[3]):
        raise layer.refuse(f"a bilinear filler is for square kernels, and this weight is {list(shape)}")
    for key in ("value", "min", "max", "mean", "std"):
        if not math.isfinite(getattr(filler, key)):
            raise layer.refuse(f"{key}: {getattr(filler, key):g} of its filler: give a number")


@torch.no_grad()
def fill(tensor: Tensor, filler: Any) -> None:
    """Gives a weight the values that a FillerParameter says. n is what Caffe counts: fan-in is count / shape[0]."""
    kind = filler.type
    if kind == "constant":
        tensor.fill_(filler.value)
    elif kind == "uniform":
        tensor.uniform_(filler.min, filler.max)
    elif kind == "gaussian":
        nn.init.normal_(tensor, filler.mean, filler.std)
        if filler.sparse >= 0:  # so many inputs of each output are expected to be other than zero
            tensor.mul_(torch.bernoulli(torch.full_like(tensor, min(1.0, filler.sparse / max(1, _outputs(tensor))))))
    elif kind == "positive_unitball":
        tensor.uniform_(0, 1)
        rows = tensor.view(_outputs(tensor), -1) if tensor.dim() else tensor.view(1, 1)
        rows.div_(rows.sum(1, keepdim=True))
    elif kind == "xavier":
        bound = math.sqrt(3 / _fan(tensor, filler))
        tensor.uniform_(-bound, bound)
    elif kind == "msra":
        nn.init.normal_(tensor, 0, math.sqrt(2 / _fan(tensor, filler)))
    else:
        tensor.copy_(_bilinear(tensor.shape[3]).expand_as(tensor))


def _outputs(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _fan(tensor: Tensor, filler: Any) -> float:
    count = tensor.numel()
    fan_in = count / _outputs(tensor)
    fan_out = count / tensor.shape[1] if tensor.dim() > 1 else count
    return max(1.0, (fan_in, fan_out, (fan_in + fan_out) / 2)[filler.variance_norm])


def _bilinear(size: int) -> Tensor:
    half = math.ceil(size / 2)
    centre = (size - 1) / (2 * half)
    row = 1 - (torch.arange(size) / half - centre).abs()
    return row[:, None] * row
