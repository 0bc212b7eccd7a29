"""Layers on stacked weights: each takes inputs [S, b, ...] and tensors [S, ...], and computes S layers at once.

Written out for the layers of small networks, since `vmap` costs more than their arithmetic. Autograd takes them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mheads.common.modules import children, is_hooked
from mheads.networks.dropout import Dropout, draw_stacked_masks
from mheads.networks.member_scaling import OwnCopy

Tensors = Mapping[str, Tensor]  # the weights and buffers of a layer by their own names
ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus,
)  # fmt: skip


def linear(layer: nn.Linear, weights: Tensors, x: Tensor) -> Tensor:
    weight, bias = weights["weight"].transpose(1, 2), weights.get("bias")
    rows = x if x.dim() == 3 else x.flatten(1, -2)
    y = torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight)
    return y if x.dim() == 3 else y.unflatten(1, x.shape[1:-1])


def layer_norm(layer: nn.LayerNorm, weights: Tensors, x: Tensor) -> Tensor:
    y = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    between = (len(x),) + (1,) * (x.dim() - 1 - len(layer.normalized_shape)) + tuple(layer.normalized_shape)
    return _scale_and_shift(weights, y, between)


def _scale_and_shift(weights: Tensors, x: Tensor, shape: Sequence[int]) -> Tensor:
    if "weight" in weights:
        x = x * weights["weight"].view(shape)
    return x + weights["bias"].view(shape) if "bias" in weights else x


def batch_norm(
    layer: nn.BatchNorm1d | nn.BatchNorm2d, weights: Tensors, x: Tensor, rows: Tensor | None = None
) -> Tensor:
    """Each stage by its own statistics, x [S, b, C, ...] as [b, S C, ...].

    `rows` [S, b] marks the rows that a stage takes the statistics of a batch over; None for all.
    """
    running = [weights[name] for name in ("running_mean", "running_var") if name in weights]
    of_batch = layer.training or not running
    if of_batch and rows is not None:
        y, *seen = _normalise_by_rows(x, rows, layer.eps)
        y = _scale_and_shift(weights, y, (len(x), 1, -1, *[1] * (x.dim() - 3))).to(x.dtype)
    else:
        # With a momentum of 1, tensors of zeros become the mean and the variance of the batch.
        seen = [torch.zeros_like(t) for t in running] if of_batch else running
        mean, variance = (t.flatten() for t in seen) if seen else (None, None)
        scale, shift = (weights[name].flatten() if name in weights else None for name in ("weight", "bias"))
        channels = x.transpose(0, 1).flatten(1, 2)
        y = F.batch_norm(channels, mean, variance, scale, shift, of_batch, 1.0, layer.eps)
        # Products and activations would take longer on strided numbers than the copy does.
        y = y.unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1).contiguous()
    if running and layer.training and layer.track_running_stats:
        count = weights["num_batches_tracked"].add_(1).unsqueeze(1)
        factor = count.to(running[0].dtype).reciprocal() if layer.momentum is None else layer.momentum
        for kept, new in zip(running, seen, strict=True):
            kept.lerp_(new, factor)
    return y


def _normalise_by_rows(x: Tensor, rows: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [S, b, C, ...] by the mean and variance [S, C] of each stage's rows [S, b]; these, the variance unbiased."""
    x = x.float() if x.dtype == torch.bfloat16 else x
    dims, rows = (1, *range(3, x.dim())), rows.to(x.dtype).view(*rows.shape, *[1] * (x.dim() - 2))
    count = rows.sum(1, keepdim=True) * x[0, 0, 0].numel()
    share = rows / count
    mean = (share * x).sum(dims, keepdim=True)
    centred = x - mean
    variance = (share * centred.square()).sum(dims, keepdim=True)
    y = centred * (variance + eps).rsqrt()
    unbiased = variance * (count / (count - 1))
    return y, mean.detach().flatten(1), unbiased.detach().flatten(1)


def embedding(layer: nn.Embedding, weights: Tensors, x: Tensor) -> Tensor:
    first = torch.arange(len(x), device=x.device).view(-1, *[1] * (x.dim() - 1)) * layer.num_embeddings
    padding = layer.padding_idx
    y = F.embedding(x + first, weights["weight"].flatten(0, 1))
    # A row of padding learns nothing, as in torch.
    return y if padding is None else torch.where((x == padding).unsqueeze(-1), y.detach(), y)


def flatten(layer: nn.Flatten, weights: Tensors, x: Tensor) -> Tensor:
    def behind(dim: int) -> int:
        return dim if dim < 0 else dim + 1  # S is before what the layer knows

    return x.flatten(behind(layer.start_dim), behind(layer.end_dim))


def dropout(layer: Dropout, weights: Tensors, x: Tensor) -> Tensor:
    if not layer.training or layer.p == 0:
        return x
    return x * draw_stacked_masks(layer.mask_shape(x[0]), layer.p, x)


def own_copy(layer: OwnCopy, weights: Tensors, x: Tensor) -> Tensor:
    return x[torch.arange(len(x), device=x.device), :, weights["index"][:, 0]]


FORMS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: linear,
    nn.LayerNorm: layer_norm,
    nn.Embedding: embedding,
    nn.Flatten: flatten,
    Dropout: dropout,
    OwnCopy: own_copy,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    **dict.fromkeys(ELEMENTWISE, lambda layer, weights, x: layer(x)),
}


def find_layers(stage: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The layers of a chain with their paths, in order; None if one of them has no form here, or two share a weight."""
    layers = _walk(stage) if isinstance(stage, nn.Sequential) and not is_hooked(stage) else None
    if layers is None:
        return None
    own = {name for name, _ in (*stage.named_parameters(), *stage.named_buffers())}  # each tensor once
    return layers if all(f"{path}.{name}" in own for path, layer in layers for name in _tensor_names(layer)) else None


def _walk(chain: nn.Module) -> list[tuple[str, nn.Module]] | None:
    layers: list[tuple[str, nn.Module]] = []
    for name, child in children(chain):
        if is_hooked(child):
            return None
        if type(child) is nn.Sequential:
            inner = _walk(child)
            if inner is None:
                return None
            layers += [(f"{name}.{path}", layer) for path, layer in inner]
        elif type(child) in FORMS and not torch.nn.utils.parametrize.is_parametrized(child) and is_plain(child):
            layers.append((name, child))
        else:
            return None
    return layers


def is_plain(layer: nn.Module) -> bool:
    """Whether the layer does what its form does, and takes no side inputs."""
    if hasattr(layer, "takes"):
        return False
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    weighted = nn.Linear | nn.LayerNorm | nn.BatchNorm1d | nn.BatchNorm2d
    return not isinstance(layer, weighted) or set(layer._parameters) == {"weight", "bias"}


def _tensor_names(layer: nn.Module) -> list[str]:
    return [name for name, t in (*layer._parameters.items(), *layer._buffers.items()) if t is not None]


def run(layers: Sequence[tuple[str, nn.Module]], tensors: Tensors, x: Tensor, rows: Tensor | None = None) -> Tensor:
    """The outputs [S, b, ...] of a chain of layers with these weights, by path and name; `rows`: see `batch_norm`."""
    for path, layer in layers:
        weights = {name: tensors[f"{path}.{name}"] for name in _tensor_names(layer)}
        form = FORMS[type(layer)]
        x = form(layer, weights, x, *((rows,) if form is batch_norm else ()))
    return x
