"""The loss of one member on one example, each a function of outputs [M, B, ...] and targets that gives [M, B].

Arguments that are annotated with a `Field` are options that a config may give, `loss.base_loss: {name: smooth_l1, beta:
0.5}`. Where a network gives several tensors, the first is the answer, and the only one that is looked at;
`gaussian_nll` takes two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value

BaseLoss = Callable[..., Tensor]  # of one member on one example: [M, B, ...], targets -> [M, B]
IGNORED = -100  # the class of pixels that do not count


def cross_entropies(
    outputs: Value,
    y: Tensor,
    smoothing: Annotated[float, Field(ge=0, lt=1, description="the part of each label that all classes share")] = 0.0,
) -> Tensor:
    """-log p_y of every member on every example: [M, B, C], [B] -> [M, B].

    With soft labels [B, C] it is - sum_c y_c log p_c. With a class for each pixel, [M, B, C, H, W] and [B, H, W], it is
    the mean over the pixels that count. `smoothing` s puts (1 - s) y + s / C in the place of the labels y.
    """
    scores = nested_values.leaves(outputs)[0]
    m, b = scores.shape[:2]
    labels = y.to(scores.dtype) if y.is_floating_point() else y.long()
    labels = labels if m == 1 else labels.repeat(m, *[1] * (y.dim() - 1))
    flat = scores.reshape(m * b, *scores.shape[2:])
    losses = F.cross_entropy(flat, labels, reduction="none", label_smoothing=smoothing)
    if losses.dim() > 1:
        losses = losses.flatten(1).sum(1) / (labels != IGNORED).flatten(1).sum(1).clamp_min(1)
    return losses.view(m, b)


def mean_of_pixels(values: Tensor, y: Tensor) -> Tensor:
    """The mean over the pixels that count: [M, B, H, W], [B, H, W] -> [M, B]."""
    counts = (y != IGNORED).flatten(1)
    return (values.flatten(2) * counts).sum(2) / counts.sum(1).clamp_min(1)


def binary_cross_entropies(outputs: Value, y: Tensor) -> Tensor:
    """mean_c of -log p_c where label c is there and -log(1 - p_c) where not: [M, B, C], [B, C] of 0 and 1 -> [M, B].

    p_c is the sigmoid of score c.
    """
    scores, y = _same_shape("bce", outputs, y)
    labels = y.to(scores.dtype).expand_as(scores)
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="none").mean(-1)


def squared_errors(outputs: Value, y: Tensor) -> Tensor:
    """mean_d (output_d - target_d)^2 of every member on every example: [M, B, D], [B, D] -> [M, B]."""
    answers, y = _same_shape("mse", outputs, y)
    return (answers - y).square().mean(-1)


def absolute_errors(outputs: Value, y: Tensor) -> Tensor:
    """mean_d |output_d - target_d| of every member on every example: [M, B, D], [B, D] -> [M, B]."""
    answers, y = _same_shape("mae", outputs, y)
    return (answers - y).abs().mean(-1)


def smooth_absolute_errors(
    outputs: Value,
    y: Tensor,
    beta: Annotated[float, Field(gt=0, description="errors below it count by their square")] = 1.0,
) -> Tensor:
    """mean_d of e^2 / (2 beta) where e = |output_d - target_d| is below beta, e - beta / 2 elsewhere -> [M, B]."""
    answers, y = _same_shape("smooth_l1", outputs, y)
    return F.smooth_l1_loss(answers, y.to(answers.dtype).expand_as(answers), reduction="none", beta=beta).mean(-1)


def gaussian_nlls(outputs: Value, y: Tensor) -> Tensor:
    """-log N(y; mean, variance) without its constant, mean_d (s_d + (mean_d - y_d)^2 exp(-s_d)) / 2 -> [M, B].

    The network gives a pair: the mean, which is the answer, and s, the logarithm of the variance, each [B, D].
    """
    mean, log_variance, y = mean_and_log_variance("gaussian_nll", outputs, y)
    return (log_variance + (mean - y).square() * (-log_variance).exp()).mean(-1) / 2


def mean_and_log_variance(name: str, outputs: Value, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two parts of outputs, each [M, B, D], and the targets; `name` is what messages call the loss."""
    parts = nested_values.leaves(outputs)
    if len(parts) != 2 or parts[0].shape != parts[1].shape:
        shapes = " and ".join(str(list(t.shape[2:])) for t in parts)
        raise UserError(
            f"{name}: the network gives outputs of shape {shapes} for an example; let it give a pair, the mean "
            "and the logarithm of the variance, both of the shape of the targets: model_args.variance=true of mlp, or "
            "a last layer that returns x.chunk(2, -1), say"
        )
    mean, y = _same_shape(name, outputs, y)
    return mean, _flat(parts[1]), y


def region_losses(
    outputs: Value,
    y: Value,
    box_weight: Annotated[float, Field(ge=0, description="how much boxes count beside classes")] = 1.0,
) -> Tensor:
    """Fast R-CNN: -log p_c of a region's class c and, unless it is background (0), sum_d smooth_l1(box_cd - target_d).

    Outputs are scores [M, B, C] and boxes [M, B, 4 C]; targets are classes [B] and boxes [B, 4], then what is not
    looked at here -> [M, B].
    """
    scores, boxes = nested_values.leaves(outputs)[:2]
    classes, wanted = nested_values.leaves(y)[:2]
    own = boxes.unflatten(-1, (-1, 4))[:, torch.arange(len(classes), device=classes.device), classes]
    far = F.smooth_l1_loss(own, wanted.to(own.dtype).expand_as(own), reduction="none").sum(-1)
    return cross_entropies(scores, classes) + box_weight * far * (classes > 0)


def _same_shape(name: str, outputs: Value, y: Tensor) -> tuple[Tensor, Tensor]:
    """The answer and targets of its shape: others would be spread over each other."""
    answers, y = _flat(nested_values.leaves(outputs)[0]), y.flatten(1) if y.dim() > 2 else y
    if answers.shape[1:] != y.shape:
        raise UserError(
            f"{name} compares outputs with targets of their shape, and these are {list(answers.shape[1:])} and "
            f"{list(y.shape)}: give both as [B, D]{', the targets as y[:, None]' if y.dim() == 1 else ''}"
        )
    return answers, y


def _flat(answers: Tensor) -> Tensor:
    """Answers of any shape, such as [M, B, T, 2], as targets have them: [M, B, D]."""
    return answers.flatten(2) if answers.dim() > 3 else answers


BASE_LOSSES: dict[str, BaseLoss] = {
    "cross_entropy": cross_entropies,
    "bce": binary_cross_entropies,
    "mse": squared_errors,
    "mae": absolute_errors,
    "smooth_l1": smooth_absolute_errors,
    "gaussian_nll": gaussian_nlls,
    "fast_rcnn": region_losses,
}
