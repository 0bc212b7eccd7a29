"""Fully connected layers, for tables of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from mheads.common.errors import UserError
from mheads.networks.caffe_style_layers import network
from mheads.networks.member_scaling import OwnCopy, ScaledCopies


class MeanAndLogVariance(nn.Module):
    """[B, 2 D] -> a pair of [B, D]: the mean, and log (softplus(v) + 0.0001), so that variances do not vanish."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = x.chunk(2, -1)
        return mean, (F.softplus(raw) + 1e-4).log()


def mlp(
    features: int,
    outputs: int = 1,
    hidden: Sequence[int] = (64, 64),
    dropout: float = 0.0,
    layer_norm: bool = False,
    variance: bool = False,
    member_scaling: int = 0,
) -> nn.Sequential:
    """Vectors [B, features] -> [B, outputs]: scores of classes, or numbers.

    With `variance` it gives numbers and logarithms of variances, each [B, outputs], as gaussian_nll takes them.
    `member_scaling` is a number of members: the hidden layers take the input as each of these scales it
    (`member_scaling.py`). Split after the last hidden layer, so that all members share them.
    """
    if features < 1 or outputs < 1 or any(size < 1 for size in hidden):
        raise UserError(f"mlp: features={features}, hidden={list(hidden)} and outputs={outputs} must be 1 or more")
    if member_scaling < 0:
        raise UserError(f"mlp: member_scaling={member_scaling}: give the number of members, or 0 for none")
    layers: dict[str, nn.Module] = {"scale": ScaledCopies(features, member_scaling)} if member_scaling else {}
    for i, (inputs, size) in enumerate(zip([features, *hidden], hidden, strict=False), 1):
        layers[f"fc{i}"] = nn.Linear(inputs, size)
        if layer_norm:
            layers[f"norm{i}"] = nn.LayerNorm(size)
        layers[f"relu{i}"] = nn.ReLU()
        if member_scaling and i == len(hidden):
            layers["own"] = OwnCopy(member_scaling)
        if dropout:
            layers[f"drop{i}"] = nn.Dropout(dropout)
    if member_scaling and not hidden:
        layers["own"] = OwnCopy(member_scaling)
    last = nn.Linear([features, *hidden][-1], outputs * (2 if variance else 1))
    return network(**layers, out=last, **({"pair": MeanAndLogVariance()} if variance else {}))
