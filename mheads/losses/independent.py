"""Independent cross-entropy: the classical ensemble."""

from __future__ import annotations

from torch import Tensor

from mheads.losses.loss import Loss, LossValue, cross_entropies, ones_or


def independent() -> Loss:
    """Each member by itself: sum over m and i of w_mi * -log p_y(m, i), with w the prior."""
    return Loss("independent", _independent, separable=True)


def _independent(outputs: Tensor, y: Tensor, prior: Tensor | None, ties: Tensor | None) -> LossValue:
    losses = cross_entropies(outputs, y)
    weights = ones_or(prior, losses.detach())
    total = losses.sum() if prior is None else (weights * losses).sum()
    return LossValue(total, weights, losses.detach())
