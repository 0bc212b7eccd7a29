"""Multiple Choice Learning: each example teaches the k members that do best on it, and the others by ce_weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.losses.base_loss import BaseLossSpec
from mheads.losses.check_function import check_not_negative
from mheads.losses.ensemble_loss import Loss, LossValue, ones_or
from mheads.losses.normalize import Normalize, check_normalize, normalize_assignment
from mheads.losses.winners import assign, check_members
from mheads.problems import BaseLoss

K = Annotated[int, Field(ge=1, description="how many members learn from each example")]


def mcl(
    k: K = 1,
    ce_weight: Annotated[
        float,
        Field(
            ge=0, description="weight of the independent loss of all members (cross-entropy, for classes) that is added"
        ),
    ] = 0.0,
    normalize: Normalize = "batch",
    base_loss: BaseLossSpec = None,
) -> Loss:
    """The oracle set-loss: sum over i and m of (a_mi + ce_weight) * w_mi * l_mi.

    l_mi is the problem's own loss, -log p_y(m, i) for classes, or `base_loss`. a_mi is 1 for the k members with the
    lowest loss on example i and 0 for the others, w the sample weights; there is no division by k, so an example's
    gradient to a winner is the same for every k. `ce_weight` mixes in the independent loss of all members. With
    `normalize="wins"`, a_mi is divided by the mean of a_mi w_mi over the batch: each member's loss is the mean over
    what it won.
    """
    check_not_negative("loss.ce_weight", ce_weight)
    # What is at its default is not said, so that runs from before there was such an option are resumed.
    further: dict[str, Any] = {"normalize": normalize} if normalize != "batch" else {}
    return Loss(
        "mcl",
        partial(_mcl, k=k, ce_weight=ce_weight, **further),
        winners=None if ce_weight else k,
        whole_batch=check_normalize(normalize),
        options={"k": k, "ce_weight": ce_weight, "normalize": normalize},
        base_loss=base_loss,
        check_members=check_k(k),
        masks=True,
        of_losses=True,
        description=_describe(k, ce_weight),
    )


def _describe(k: int, ce_weight: float) -> str:
    best = "member that does" if k == 1 else f"{k} members that do"
    mixed = f", and all members with a weight of {ce_weight:g}" if ce_weight else ""
    return f"by Multiple Choice Learning: each example teaches the {best} best on it{mixed}"


def check_k(k: int) -> Callable[[int], None]:
    """Refuses a k that no number of members has; returns what refuses one that a number of members does not have."""
    if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
        raise UserError(f"loss.k must be a whole number, at least 1, not {k!r}")
    return partial(check_members, k)


def _mcl(
    outputs: Value,
    y: Tensor,
    sample_weights: Tensor | None,
    ties: Tensor | None,
    base_loss: BaseLoss,
    k: int,
    ce_weight: float,
    normalize: str = "batch",
) -> LossValue:
    losses = base_loss(outputs, y)
    fixed, weights = losses.detach(), ones_or(sample_weights, losses.detach())
    best = assign(fixed, k, sample_weights, ties)
    assignment = (best + ce_weight) * weights
    summed = assignment
    if normalize != "batch":
        summed = normalize_assignment(best * weights, normalize) + ce_weight * weights
    return LossValue((summed * losses).sum(), assignment, fixed)
