"""Caffe's fillers: the first values of weights, drawn from torch's global generator."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from mheads.caffe.text import Layer

FILLERS = ("constant", "uniform", "gaussian", "positive_unitball", "xavier", "msra", "bilinear")


@torch.no_grad()
def fill(tensor: Tensor, filler: Any, layer: Layer) -> None:
    """Gives a weight the values that a FillerParameter says. n is what Caffe counts: fan-in is count / shape[0]."""
    kind = filler.type
    if kind == "constant":
        tensor.fill_(filler.value)
    elif kind == "uniform":
        if not filler.min <= filler.max:
            raise layer.refuse(f"a uniform filler from {filler.min:g} to {filler.max:g}: min is above max")
        tensor.uniform_(filler.min, filler.max)
    elif kind == "gaussian":
        if not filler.std >= 0:
            raise layer.refuse(f"a gaussian filler with std: {filler.std:g}: give 0 or more")
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
    elif kind == "bilinear":
        if tensor.dim() != 4 or tensor.shape[2] != tensor.shape[3]:
            raise layer.refuse(f"a bilinear filler is for square kernels, and this weight is {list(tensor.shape)}")
        tensor.copy_(_bilinear(tensor.shape[3]).expand_as(tensor))
    else:
        raise layer.refuse(f"there is no filler {kind!r}: it is one of {', '.join(FILLERS)}")


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
