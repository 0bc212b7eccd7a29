"""Losses of the ensemble's mean: the members answer together and learn together."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.losses.base_loss import BaseLossSpec
from mheads.losses.ensemble_loss import Loss, LossValue
from mheads.problems import BaseLoss, cross_entropies

CAFFE_LOG_THRESHOLD = 1e-20


def score_averaged(base_loss: BaseLossSpec = None) -> Loss:
    """The loss of the mean output; for classes the cross-entropy of its softmax: -log softmax(mean_m outputs_m)_y."""
    return Loss("score_averaged", _score_averaged, averaged=True, of_scores=True, base_loss=base_loss, masks=True)


def prob_averaged(
    stable: Annotated[
        bool, Field(description="in log space; false is the direct, unstable form of Caffe's layers")
    ] = True,
) -> Loss:
    """Cross-entropy of the mean probabilities: -log mean_m softmax(outputs_m)_y.

    In log space, log sum_m exp(log p_y^m) - log M, which is finite with a finite gradient for scores of any size.
    `stable=False` is what Caffe's layers compute (softmax, average, MultinomialLogisticLoss), which underflows: the
    mean p_y is clamped at 1e-20, -log max(p_y, 1e-20) with the gradient -1 / max(p_y, 1e-20), so that a member sure of
    a wrong class gets next to nothing, and nothing at all where its p_y is 0 in its precision.
    """
    return Loss(
        "prob_averaged", partial(_prob_averaged, stable=stable), averaged=True, options={"stable": stable}, masks=True
    )


def _score_averaged(
    outputs: Value, y: Tensor, sample_weights: Tensor | None, ties: Tensor | None, base_loss: BaseLoss
) -> LossValue:
    _refuse(sample_weights)
    mean = nested_values.map_leaves(lambda t: t.mean(0, keepdim=True), outputs)
    return _value(base_loss(mean, y).sum(), outputs, y, base_loss)


def _prob_averaged(
    outputs: Value, y: Tensor, sample_weights: Tensor | None, ties: Tensor | None, stable: bool
) -> LossValue:
    _refuse(sample_weights)
    if y.is_floating_point() or y.dim() != 1:
        kind = "floats (numbers, soft labels or several)" if y.is_floating_point() else "classes of pixels"
        raise UserError(
            f"prob_averaged averages probabilities of one class for each example, and the targets are {kind}: "
            "use score_averaged"
        )
    if stable:
        losses = cross_entropies(outputs, y)
        total = (torch.logsumexp(-losses, 0) - math.log(len(losses))).neg().sum()
    elif not isinstance(outputs, Tensor):
        raise UserError(f"prob_averaged(stable=False) takes scores, not a {type(outputs).__name__}: use stable=True")
    else:
        p_y = outputs.softmax(-1).mean(0).gather(1, y[:, None])
        clamped = p_y.detach().clamp_min(CAFFE_LOG_THRESHOLD)
        # Caffe's gradient goes through the clamp: -1 / clamped, also where it is the threshold.
        total = (-clamped.log() - (p_y - p_y.detach()) / clamped).sum()
    return _value(total, outputs, y, cross_entropies)


def _value(total: Tensor, outputs: Value, y: Tensor, base_loss: BaseLoss) -> LossValue:
    with torch.no_grad():
        losses = base_loss(outputs, y)
    return LossValue(total, torch.ones_like(losses), losses)


def _refuse(sample_weights: Tensor | None) -> None:
    if sample_weights is not None:
        raise UserError("an averaged loss has no use for sample weights: with it, sampling must be full")
