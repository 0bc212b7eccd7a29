"""First weights that are measured on the training examples: those of whitening layers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from mheads.common.errors import UserError
from mheads.data import Data
from mheads.networks.whitening import needs_whitening, sum_patch_products, whiten
from mheads.trees.treenet import TreeNet

CHUNK = 500  # examples read at a time


def whiten_first_layers(net: TreeNet, covariance: Tensor | None) -> None:
    """Fills the whitening layers here that have no weights yet."""
    for layer in net.modules():
        if needs_whitening(layer):
            assert isinstance(layer, nn.Conv2d) and covariance is not None
            whiten(layer, covariance)


def measure_covariance(network: nn.Module, data: Data) -> Tensor | None:
    """The covariance float64 [d, d] of patches of the first training examples, as the network sees them unaugmented.

    None where no layer waits for it. All of it on one thread: the number of threads decides the last bits.
    """
    layer = next((module for module in network.modules() if needs_whitening(module)), None)
    if layer is None:
        return None
    assert isinstance(layer, nn.Conv2d)
    channels = layer.in_channels
    if len(data.train.shape) != 3 or data.train.shape[0] != channels:
        raise UserError(
            f"the first layer whitens images of {channels} channels, and examples have the shape {data.train.shape}: "
            "give such images, or model_args.channels"
        )
    examples: int = layer.whitening["examples"]  # type: ignore[index,assignment]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _average_products(layer, data, min(examples, len(data.train)))
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def _average_products(layer: nn.Conv2d, data: Data, count: int) -> Tensor:
    total, patches = torch.zeros((), dtype=torch.float64), 0
    for start in range(0, count, CHUNK):
        rows = np.arange(start, min(start + CHUNK, count))
        images = data.preprocess(data.train.read(rows, None), torch.float32)
        products, number = sum_patch_products(images, layer)
        total, patches = total + products, patches + number
    return total / patches
