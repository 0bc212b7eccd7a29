"""Evolving winner-takes-all: every example first teaches all members, then fewer and fewer, and at last the best."""

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

Until = Annotated[
    float,
    Field(gt=0, le=1, description="the fraction of the iterations after which each example teaches one member alone"),
]


def evolving(until: Until = 0.5, normalize: Normalize = "batch", base_loss: BaseLossSpec = None) -> Loss:
    """Sum over i of 1 / k * the sum of w l of the k members with the lowest loss on the example.

    l is the problem's own loss or `base_loss`, w the sample weights. k is M at first, falls by one at equal intervals,
    and is 1 from `until` of the iterations on: k(t) = max(1, M - floor((M - 1) t / (until N))). Where fewer than k
    members have a sample weight above 0, these learn and k is their number. `normalize` as in `mcl`.
    """
    check_until(until)
    return Loss(
        "evolving",
        partial(_evolving, k=None, normalize=normalize),
        whole_batch=check_normalize(normalize),
        options={"until": until, "normalize": normalize},
        base_loss=base_loss,
        schedule=partial(_fallen, until, normalize),
        masks=True,
        of_losses=True,
    )


def check_until(until: float) -> None:
    if not isinstance(until, Real) or not 0 < until <= 1:
        raise UserError(f"loss.until is a part of the iterations, above 0 and at most 1, not {until!r}")


def _fallen(until: float, normalize: str, iteration: int, iterations: int, members: int) -> Loss:
    # A little more, since 0.07 * 100 is above 7.
    k = max(1, members - int((members - 1) * iteration / (until * iterations) + 1e-9))
    return Loss("evolving", partial(_evolving, k=k, normalize=normalize), winners=k, of_losses=True)


def _evolving(
    outputs: Value,
    y: Tensor,
    sample_weights: Tensor | None,
    ties: Tensor | None,
    base_loss: BaseLoss,
    k: int | None,
    normalize: str,
) -> LossValue:
    losses = base_loss(outputs, y)
    fixed = losses.detach()
    best = assign(fixed, k or len(fixed), sample_weights, ties)
    assignment = best / best.sum(0).clamp_min(1) * ones_or(sample_weights, fixed)
    return LossValue((normalize_assignment(assignment, normalize) * losses).sum(), assignment, fixed)
