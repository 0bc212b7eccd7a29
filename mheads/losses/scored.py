"""Scored MCL: each member also learns to say which examples are its own, so that the ensemble can give one answer."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import Field
from torch import Tensor

from mheads.common.nested_values import Value
from mheads.losses.base_loss import BaseLossSpec
from mheads.losses.check_function import check_not_negative
from mheads.losses.ensemble_loss import Loss, LossValue, ones_or
from mheads.losses.mcl import K, check_k
from mheads.losses.normalize import Normalize, check_normalize, normalize_assignment
from mheads.losses.winners import assign, score_losses
from mheads.problems import BaseLoss


def scored(
    k: K = 1,
    score_weight: Annotated[float, Field(ge=0, description="weight of the loss of the scores")] = 1.0,
    normalize: Normalize = "batch",
    base_loss: BaseLossSpec = None,
) -> Loss:
    """MCL and the cross-entropy of the scores: sum over i and m of w_mi (a_mi l_mi + score_weight bce(s_mi, a_mi)).

    l_mi is the problem's own loss or `base_loss`; a_mi is 1 for the k members with the lowest, w the sample weights.
    s_mi is the score that the network gives beside its answer (`trees/member_scores.py`), bce(s, a) = -a log sigmoid(s)
    - (1 - a) log sigmoid(-s). `normalize` as in `mcl`; the scores learn from the whole batch.
    """
    check_not_negative("loss.score_weight", score_weight)
    return Loss(
        "scored",
        partial(_scored, k=k, score_weight=score_weight, normalize=normalize),
        whole_batch=check_normalize(normalize),
        options={"k": k, "score_weight": score_weight, "normalize": normalize},
        base_loss=base_loss,
        check_members=check_k(k),
        masks=True,
        teaches_scores=True,
    )


def _scored(
    outputs: Value,
    y: Tensor,
    sample_weights: Tensor | None,
    ties: Tensor | None,
    base_loss: BaseLoss,
    k: int,
    score_weight: float,
    normalize: str,
) -> LossValue:
    losses = base_loss(outputs, y)
    fixed, weights = losses.detach(), ones_or(sample_weights, losses.detach())
    won = assign(fixed, k, sample_weights, ties)
    learned = score_losses("scored", outputs, won)
    assignment = won * weights
    total = (normalize_assignment(assignment, normalize) * losses + score_weight * weights * learned).sum()
    return LossValue(total, assignment, fixed)
