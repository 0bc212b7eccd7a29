"""A first layer that whitens patches of the images: its filters are measured on the training examples, and frozen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def whitening(channels: int, kernel: int, examples: int = 5000, epsilon: float = 5e-4) -> nn.Conv2d:
    """A convolution with 2 d filters, where d = channels * kernel^2, whose bias learns and whose weights do not.

    Its weights are zeros until training begins: `whiten` then fills them, from the first `examples` training examples.
    The attribute `whitening` marks it for that; the layer must be the first one.
    """
    layer = nn.Conv2d(channels, 2 * channels * kernel**2, kernel)
    nn.init.zeros_(layer.weight).requires_grad_(False)
    layer.whitening = {"examples": examples, "epsilon": epsilon}  # type: ignore[assignment]  # not a tensor
    return layer


def needs_whitening(layer: nn.Module) -> bool:
    """Whether the layer whitens and has no weights yet; those of a run or of a file are kept."""
    return hasattr(layer, "whitening") and not bool(layer.get_parameter("weight").any())


def sum_patch_products(images: Tensor, layer: nn.Conv2d) -> tuple[Tensor, int]:
    """The sum of p p^T over all patches p of the images [B, C, H, W], float64 [d, d], and their number."""
    patches = F.unfold(images.double(), layer.kernel_size)
    return torch.einsum("bil,bjl->ij", patches, patches), patches.shape[0] * patches.shape[2]


@torch.no_grad()
def whiten(layer: nn.Conv2d, covariance: Tensor) -> None:
    """Fills the filters with e_i / sqrt(lambda_i + epsilon), from the patches' covariance, and with -1 times these."""
    values, vectors = torch.linalg.eigh(covariance)
    epsilon: float = layer.whitening["epsilon"]  # type: ignore[index,assignment]
    filters = (vectors / (values + epsilon).sqrt()).T
    layer.weight.copy_(torch.cat([filters, -filters]).reshape(layer.weight.shape))
