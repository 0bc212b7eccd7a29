"""Runs the backward of some rows only, layer by layer.

Autograd takes all rows back or none. For stages made of the layers below, the one forward keeps what each layer's
backward needs, and the backward runs on the rows that a member learns from. Each step is the adjoint that autograd
itself would call, so the gradients are those of autograd on these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mheads.common.modules import is_hooked
from mheads.engine.rows import Rows
from mheads.networks.dropout import Dropout, draw_mask

aten = torch.ops.aten
Pick = Callable[[Tensor], Tensor]  # the rows in question of what a forward kept, padded as the gradient is

# A layer's forward returns its output and its backward; backward(d_output, pick, input_gradient) returns the gradient
# of the input (None if it is not wanted) and the layer's parameters, each with its gradient.
Learned = list[tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Pick, bool], tuple[Tensor | None, Learned]]


def conv2d(layer: nn.Conv2d, x: Tensor, owned: bool) -> tuple[Tensor, Backward]:
    x, weight, bias = _cast(x), _cast(layer.weight), _cast(layer.bias)
    y = F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)

    def backward(d_y: Tensor, pick: Pick, input_gradient: bool) -> tuple[Tensor | None, Learned]:
        d_x, d_weight, d_bias = aten.convolution_backward(
            d_y,
            pick(x),
            weight,
            None if layer.bias is None else [layer.out_channels],
            layer.stride,
            layer.padding,
            layer.dilation,
            False,
            [0, 0],
            layer.groups,
            [input_gradient, layer.weight.requires_grad, layer.bias is not None and layer.bias.requires_grad],
        )
        return d_x, _pair_gradients(layer, d_weight, d_bias)

    return y, backward


def identity(layer: nn.Identity, x: Tensor, owned: bool) -> tuple[Tensor, Backward]:
    return x, lambda d_y, pick, input_gradient: (d_y, [])


def linear(layer: nn.Linear, x: Tensor, owned: bool) -> tuple[Tensor, Backward]:
    x, weight = _cast(x), _cast(layer.weight)
    y = F.linear(x, weight, _cast(layer.bias))

    def backward(d_y: Tensor, pick: Pick, input_gradient: bool) -> tuple[Tensor | None, Learned]:
        flat = d_y.flatten(0, -2)
        d_weight = flat.t() @ pick(x).flatten(0, -2) if layer.weight.requires_grad else None
        d_bias = flat.sum(0) if layer.bias is not None and layer.bias.requires_grad else None
        return d_y @ weight if input_gradient else None, _pair_gradients(layer, d_weight, d_bias)

    return y, backward


def relu(layer: nn.ReLU, x: Tensor, owned: bool) -> tuple[Tensor, Backward]:
    # `owned`: nobody else looks at x, so it may be overwritten.
    y = x.relu_() if owned else x.relu()

    def backward(d_y: Tensor, pick: Pick, input_gradient: bool) -> tuple[Tensor | None, Learned]:
        return aten.threshold_backward(d_y, pick(y), 0), []

    return y, backward


def max_pool2d(layer: nn.MaxPool2d, x: Tensor, owned: bool) -> tuple[Tensor, Backward]:
    window = [_pair(v) for v in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)]
    y, indices = aten.max_pool2d_with_indices(x, *window, layer.ceil_mode)
    like = _like(x)

    def backward(d_y: Tensor, pick: Pick, input_gradient: bool) -> tuple[Tensor | None, Learned]:
        rows = like(len(d_y))
        return aten.max_pool2d_with_indices_backward(d_y, rows, *window, layer.ceil_mode, pick(indices)), []

    return y, backward


def avg_pool2d(layer: nn.AvgPool2d, x: Tensor, owned: bool) -> tuple[Tensor, Backward]:
    window = [_pair(v) for v in (layer.kernel_size, layer.stride, layer.padding)]
    rest = (layer.ceil_mode, layer.count_include_pad, layer.divisor_override)
    y = aten.avg_pool2d(x, *window, *rest)
    like = _like(x, _wide(y[:0]).dtype)

    def backward(d_y: Tensor, pick: Pick, input_gradient: bool) -> tuple[Tensor | None, Learned]:
        # In bfloat16 it takes more than twice as long as in float32, conversions included.
        d_x = aten.avg_pool2d_backward(_wide(d_y), like(len(d_y)), *window, *rest)
        return d_x.to(d_y.dtype), []

    return y, backward


def adaptive_avg_pool2d(layer: nn.AdaptiveAvgPool2d, x: Tensor, owned: bool) -> tuple[Tensor, Backward]:
    y = layer(x)
    like = _like(x)

    def backward(d_y: Tensor, pick: Pick, input_gradient: bool) -> tuple[Tensor | None, Learned]:
        return aten._adaptive_avg_pool2d_backward(d_y, like(len(d_y))), []

    return y, backward


def local_response_norm(layer: nn.LocalResponseNorm, x: Tensor, owned: bool) -> tuple[Tensor, Backward]:
    """y = x s^-beta with s = k + alpha * mean of x^2 over `size` channels around each."""

    def around(t: Tensor) -> Tensor:
        """The mean over neighbouring channels, zeros beyond the ends."""
        padded = F.pad(t.unsqueeze(1), (0, 0, 0, 0, layer.size // 2, (layer.size - 1) // 2))
        return F.avg_pool3d(padded, (layer.size, 1, 1), stride=1).squeeze(1)

    def around_adjoint(t: Tensor) -> Tensor:
        padded = F.pad(t.unsqueeze(1), (0, 0, 0, 0, (layer.size - 1) // 2, layer.size // 2))
        return F.avg_pool3d(padded, (layer.size, 1, 1), stride=1).squeeze(1)

    s = around(x.float().square() if x.dtype == torch.bfloat16 else x.square()).mul_(layer.alpha).add_(layer.k)
    y = (x * s.pow(-layer.beta)).to(x.dtype)

    def backward(d_y: Tensor, pick: Pick, input_gradient: bool) -> tuple[Tensor | None, Learned]:
        x_, s_ = pick(x), pick(s)
        power = s_.pow(-layer.beta)
        inner = around_adjoint(d_y * x_ * power / s_)
        return (d_y * power - (2 * layer.alpha * layer.beta) * x_ * inner).to(d_y.dtype), []

    return y, backward


def dropout(layer: Dropout, x: Tensor, owned: bool) -> tuple[Tensor, Backward]:
    mask = draw_mask(layer.mask_shape(x), layer.p, x) if layer.training and layer.p > 0 else None
    y = x if mask is None else x * mask

    def backward(d_y: Tensor, pick: Pick, input_gradient: bool) -> tuple[Tensor | None, Learned]:
        return d_y if mask is None else d_y * pick(mask), []

    return y, backward


def flatten(layer: nn.Flatten, x: Tensor, owned: bool) -> tuple[Tensor, Backward]:
    y = x.flatten(layer.start_dim, layer.end_dim)
    shape, last = x.shape[1:], x.dim() == 4

    def backward(d_y: Tensor, pick: Pick, input_gradient: bool) -> tuple[Tensor | None, Learned]:
        d_x = d_y.reshape(len(d_y), *shape)
        return d_x.contiguous(memory_format=torch.channels_last) if last else d_x, []

    return y, backward


STEPS: dict[type[nn.Module], Callable[[Any, Tensor, bool], tuple[Tensor, Backward]]] = {
    nn.Conv2d: conv2d,
    nn.Identity: identity,
    nn.Linear: linear,
    nn.ReLU: relu,
    nn.MaxPool2d: max_pool2d,
    nn.AvgPool2d: avg_pool2d,
    nn.AdaptiveAvgPool2d: adaptive_avg_pool2d,
    nn.LocalResponseNorm: local_response_norm,
    Dropout: dropout,
    nn.Flatten: flatten,
}
# Their backward does not look at their own output, so what follows may overwrite it.
GIVES_AWAY = (nn.Conv2d, nn.Linear, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.LocalResponseNorm)


def layers(stage: nn.Module) -> Iterator[nn.Module]:
    """The layers of a stage in order, those of nested Sequentials among them."""
    for layer in stage._modules.values():
        if type(layer) is nn.Sequential:
            yield from layers(layer)
        elif layer is not None:
            yield layer


def supports(stage: nn.Module) -> bool:
    """Whether every layer of the stage has its step here, and nobody's hooks want to see it run."""
    if not isinstance(stage, nn.Sequential):
        return False  # a graph does more than its modules
    parts = list(layers(stage))
    parameters = [id(p) for layer in parts for p in layer.parameters()]
    tied = len(set(parameters)) < len(parameters)
    if tied or any(p._backward_hooks for p in stage.parameters()) or any(is_hooked(m) for m in stage.modules()):
        return False
    return all(type(layer) in STEPS and _plain(layer) for layer in parts)


def takes(x: object) -> bool:
    """Whether the layers here can take this input: images or vectors."""
    return isinstance(x, Tensor) and x.dim() in (2, 4)


def _plain(layer: nn.Module) -> bool:
    if hasattr(layer, "takes") or torch.nn.utils.parametrize.is_parametrized(layer):
        return False
    if isinstance(layer, nn.Conv2d | nn.Linear) and not {"weight", "bias"} <= layer._parameters.keys():
        return False  # computed from other tensors, which only autograd knows
    if isinstance(layer, nn.Conv2d):
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if isinstance(layer, nn.MaxPool2d):
        return not layer.return_indices
    if isinstance(layer, nn.Flatten):
        return layer.start_dim == 1 and layer.end_dim == -1
    return True


def forward(stage: nn.Module, x: Tensor, input_gradient: bool = True) -> tuple[Tensor, list[Backward]]:
    """The stage's output on x and the backward of each of its layers.

    Without `input_gradient`, of those from the first one that learns: nobody asks what is before it.
    """
    backwards: list[Backward] = []
    owned = False
    for layer in layers(stage):
        x, step = STEPS[type(layer)](layer, x, owned)
        owned = isinstance(layer, GIVES_AWAY)
        if backwards or input_gradient or any(p is not None and p.requires_grad for p in layer._parameters.values()):
            backwards.append(step)
    return x, backwards


def outputs(stage: nn.Module, x: Tensor) -> Tensor:
    """The stage's output on x alone: nothing is kept, and pooling need not say where its maxima were."""
    owned = False
    for layer in layers(stage):
        if isinstance(layer, nn.MaxPool2d) and not any(_pair(layer.padding)) and _pair(layer.dilation) == [1, 1]:
            x = max_pool_values(x, _pair(layer.kernel_size), _pair(layer.stride), layer.ceil_mode)
        else:
            x, _ = STEPS[type(layer)](layer, x, owned)
        owned = isinstance(layer, GIVES_AWAY)
    return x


def max_pool_values(x: Tensor, kernel: list[int], stride: list[int], ceil_mode: bool) -> Tensor:
    """Max pooling of channels-last images in two passes, down and across: half the time of the one with indices."""
    t = x.permute(0, 2, 3, 1)
    for dim, k, s in zip((1, 2), kernel, stride, strict=True):
        size = t.shape[dim]
        count = -(-(size - k) // s) + 1 if ceil_mode else (size - k) // s + 1
        # A slice ends where the image does, so no window starts beyond its end.
        windows = [t[(slice(None),) * dim + (slice(i, i + (count - 1) * s + 1, s),)] for i in range(min(k, size))]
        best = windows[0].clone()
        for other in windows[1:]:
            part = best.narrow(dim, 0, other.shape[dim])
            torch.maximum(part, other, out=part)
        t = best
    return t.permute(0, 3, 1, 2)


def backward(
    backwards: list[Backward], d: Tensor, rows: Rows | None, input_gradient: bool
) -> tuple[Tensor | None, Learned]:
    """Turns the gradient of the output (of `rows` only, if given) into those of the input and of each parameter.

    Empties the list as it goes, so that what a layer kept is freed as soon as it was used.
    """
    picked: dict[int, Tensor] = {}  # a layer's input is the output of the one before, and both may have kept it

    def pick(t: Tensor) -> Tensor:
        if rows is None:
            return t
        if id(t) not in picked:
            picked.clear()
            picked[id(t)] = rows.pick(t)
        return picked[id(t)]

    learned: Learned = []
    d_x: Tensor | None = d
    while backwards:
        step = backwards.pop()
        assert d_x is not None
        d_x, of_layer = step(d_x, pick, bool(backwards) or input_gradient)
        learned += of_layer
    return d_x if input_gradient else None, learned


def _pair_gradients(layer: nn.Conv2d | nn.Linear, d_weight: Tensor | None, d_bias: Tensor | None) -> Learned:
    pairs = ((layer.weight, d_weight), (layer.bias, d_bias))
    return [(p, d.to(p.dtype)) for p, d in pairs if p is not None and p.requires_grad and d is not None]


def _cast(t: Any) -> Any:
    """The tensor in the precision of autocast, where that is on: also what is kept for the backward is then smaller."""
    if t is None or not torch.is_autocast_enabled(t.device.type) or t.dtype != torch.float32:
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype == torch.bfloat16 else t


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Callable[[int], Tensor]:
    """A function that makes stand-ins of x with a given number of rows: pooling's backward looks only at the shape and
    strides of its input, so x itself need not be kept."""
    shape, strides, dtype, device = x.shape[1:], x.stride(), dtype or x.dtype, x.device
    return lambda num_rows: torch.empty_strided((num_rows, *shape), strides, dtype=dtype, device=device)


def _pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)
