"""Who learns from an example: the members with the lowest losses, and what their scores learn of that."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.trees import member_scores


def check_members(k: int, members: int) -> None:
    """Raises UserError if there are fewer than k members."""
    if k > members:
        raise UserError(f"loss.k is {k}, but there are only {members} members: k goes from 1 to {members}")


def assign(losses: Tensor, k: int, sample_weights: Tensor | None = None, ties: Tensor | None = None) -> Tensor:
    """1 for the k lowest of the M losses of each example, else 0: [M, B] -> [M, B].

    Equal losses are ordered by the keys `ties`: by sorting on (loss, key), since noise added to the losses would
    also reorder close ones. Members whose sample weight is 0 are never chosen.
    """
    check_members(k, len(losses))
    if sample_weights is not None:
        losses = losses.masked_fill(sample_weights == 0, torch.inf)
    if ties is None:
        ties = torch.rand(losses.shape, device=losses.device)
    by_key = ties.argsort(dim=0, stable=True)
    by_loss = losses.gather(0, by_key).argsort(dim=0, stable=True)
    chosen = torch.zeros_like(losses).scatter_(0, by_key.gather(0, by_loss)[:k], 1.0)
    return chosen if sample_weights is None else chosen * (sample_weights > 0)


def score_losses(loss: str, outputs: Value, won: Tensor) -> Tensor:
    """-log sigmoid(s) where a member won an example and -log sigmoid(-s) elsewhere, s its score: [M, B] -> [M, B]."""
    score = member_scores.score_of(outputs)
    if score is None:
        raise UserError(
            f"loss {loss} needs a network that gives a score beside its answer: in Python, "
            f"mheads.TreeNet(mheads.with_scores(factory), ...), which adds one to the last layer, or to layer='head'; "
            f"or {member_scores.OWN}"
        )
    return F.binary_cross_entropy_with_logits(score, won, reduction="none")
