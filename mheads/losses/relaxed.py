"""Relaxed winner-takes-all: the best member learns most, the others a little, so that none is forgotten."""

from __future__ import annotations

from functools import partial
from numbers import Real
from typing import Annotated

from pydantic import Field
from torch import Tensor

from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.losses.base_loss import BaseLossSpec
from mheads.losses.ensemble_loss import Loss, LossValue, ones_or
from mheads.losses.normalize import Normalize, check_normalize, normalize_assignment
from mheads.losses.winners import assign
from mheads.problems import BaseLoss


def relaxed(
    epsilon: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="the share of each example's weight that goes to the members other than the best one",
        ),
    ] = 0.05,
    normalize: Normalize = "batch",
    base_loss: BaseLossSpec = None,
) -> Loss:
    """Sum over i of (1 - epsilon) * w l of the best member + epsilon / (M - 1) * the sum of w l of the others.

    l is the problem's own loss or `base_loss`, w the sample weights. Members whose sample weight is 0 count neither
    among the best nor in M; where only one is left, its weight is 1. `normalize` as in `mcl`.
    """
    if not isinstance(epsilon, Real) or not 0 <= epsilon <= 1:
        raise UserError(f"loss.epsilon is a part of an example, from 0 to 1, not {epsilon!r}")
    return Loss(
        "relaxed",
        partial(_relaxed, epsilon=epsilon, normalize=normalize),
        winners=None if epsilon else 1,
        whole_batch=check_normalize(normalize),
        options={"epsilon": epsilon, "normalize": normalize},
        base_loss=base_loss,
        masks=True,
        of_losses=True,
    )


def _relaxed(
    outputs: Value,
    y: Tensor,
    sample_weights: Tensor | None,
    ties: Tensor | None,
    base_loss: BaseLoss,
    epsilon: float,
    normalize: str,
) -> LossValue:
    losses = base_loss(outputs, y)
    fixed = losses.detach()
    best, weights = assign(fixed, 1, sample_weights, ties), ones_or(sample_weights, fixed)
    others = (weights > 0).to(fixed.dtype) - best
    num_others = others.sum(0)
    share = epsilon * (num_others > 0).to(fixed.dtype)  # of each example: there may be nobody else to learn from it
    assignment = (best * (1 - share) + others * (share / num_others.clamp_min(1))) * weights
    return LossValue((normalize_assignment(assignment, normalize) * losses).sum(), assignment, fixed)
