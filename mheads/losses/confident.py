"""Confident Multiple Choice Learning: members that do not win an example are taught to say that they do not know."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated

from pydantic import Field
from torch import Tensor

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.losses.check_function import check_not_negative
from mheads.losses.ensemble_loss import Loss, LossValue, ones_or
from mheads.losses.mcl import K, check_k
from mheads.losses.winners import assign
from mheads.problems import cross_entropies
from mheads.problems.member_losses import mean_of_pixels


def confident(
    k: K = 1,
    beta: Annotated[
        float,
        Field(
            ge=0, description="how strongly members are pulled to equal probabilities on examples that they do not win"
        ),
    ] = 0.75,
) -> Loss:
    """Sum over i and m of w_mi * (a_mi * ce_mi + (1 - a_mi) * beta * KL(U || p_mi)).

    ce is the cross-entropy, KL(U || p) = -log C - mean_c log p_c the distance from equal probabilities, w the sample
    weights. a_mi is 1 for the k members with the lowest ce - beta KL, which makes the sum smallest, and 0 for the
    others.
    """
    check_not_negative("loss.beta", beta)
    return Loss(
        "confident",
        partial(_confident, k=k, beta=beta),
        options={"k": k, "beta": beta},
        check_members=check_k(k),
        masks=True,
    )


def _confident(
    outputs: Value, y: Tensor, sample_weights: Tensor | None, ties: Tensor | None, k: int, beta: float
) -> LossValue:
    if y.is_floating_point():
        raise UserError(
            "confident teaches probabilities of classes, and the targets are floats (numbers, soft labels or "
            "several): use relaxed, evolving, annealed or mcl"
        )
    losses, far = cross_entropies(outputs, y), _from_uniform(nested_values.leaves(outputs)[0], y)
    fixed, weights = losses.detach(), ones_or(sample_weights, losses.detach())
    won = assign(fixed - beta * far.detach(), k, sample_weights, ties)
    total = (weights * (won * losses + beta * (1 - won) * far)).sum()
    return LossValue(total, won * weights, fixed)


def _from_uniform(scores: Tensor, y: Tensor) -> Tensor:
    """KL(U || p) of every member on every example, the mean over the pixels that count where there are some."""
    far = -math.log(scores.shape[2]) - scores.log_softmax(2).mean(2)
    return mean_of_pixels(far, y) if far.dim() > 2 else far
