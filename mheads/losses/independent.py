"""Each member by itself: the classical ensemble."""

from __future__ import annotations

from torch import Tensor

from mheads.common.nested_values import Value
from mheads.losses.base_loss import BaseLossSpec
from mheads.losses.ensemble_loss import Loss, LossValue, ones_or
from mheads.problems import BaseLoss


def independent(base_loss: BaseLossSpec = None) -> Loss:
    """Each member by itself: sum over m and i of w_mi * l_mi, with w the sample weights.

    l_mi is the problem's own loss, -log p_y(m, i) for classes, or `base_loss`.
    """
    return Loss(
        "independent", _independent, separable=True, base_loss=base_loss, masks=True, description="each by itself"
    )


def _independent(
    outputs: Value, y: Tensor, sample_weights: Tensor | None, ties: Tensor | None, base_loss: BaseLoss
) -> LossValue:
    losses = base_loss(outputs, y)
    weights = ones_or(sample_weights, losses.detach())
    total = losses.sum() if sample_weights is None else (weights * losses).sum()
    return LossValue(total, weights, losses.detach())
