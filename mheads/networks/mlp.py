"""Fully connected layers, for tables of numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mheads.common.errors import UserError
from mheads.networks.caffe_style_layers import network


def mlp(
    features: int, outputs: int = 1, hidden: Sequence[int] = (64, 64), dropout: float = 0.0, layer_norm: bool = False
) -> nn.Sequential:
    """Vectors [B, features] -> [B, outputs]: scores of classes, or numbers."""
    if features < 1 or outputs < 1 or any(size < 1 for size in hidden):
        raise UserError(f"mlp: features={features}, hidden={list(hidden)} and outputs={outputs} must be 1 or more")
    layers: dict[str, nn.Module] = {}
    for i, (inputs, size) in enumerate(zip([features, *hidden], hidden, strict=False), 1):
        layers[f"fc{i}"] = nn.Linear(inputs, size)
        if layer_norm:
            layers[f"norm{i}"] = nn.LayerNorm(size)
        layers[f"relu{i}"] = nn.ReLU()
        if dropout:
            layers[f"drop{i}"] = nn.Dropout(dropout)
    return network(**layers, out=nn.Linear([features, *hidden][-1], outputs))
