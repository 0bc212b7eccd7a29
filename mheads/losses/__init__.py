"""Losses: plain functions of outputs [M, B, C] and labels [B], or of what else the problem has for these.

    loss = mheads.losses.mcl(k=1)
    value = loss(outputs, y)
    value.total, value.assignment, value.losses

A loss knows nothing of trees, threads or ranks. `LOSSES` turns the name in a config into the function that makes it;
what of its arguments a config may give, `options.py` says. `MEMBER_LOSSES` has the losses of one member on one example
by name, `of="mae"`.
"""

from collections.abc import Callable

from mheads.losses.annealed import annealed
from mheads.losses.averaged import prob_averaged, score_averaged
from mheads.losses.confident import confident
from mheads.losses.evolving import evolving
from mheads.losses.independent import independent
from mheads.losses.loss import Loss, LossValue
from mheads.losses.mcl import assign, mcl
from mheads.losses.relaxed import relaxed
from mheads.losses.scored import scored
from mheads.problems import MEMBER_LOSSES, MemberLoss, cross_entropies, squared_errors

LOSSES: dict[str, Callable[..., Loss]] = {
    "independent": independent,
    "score_averaged": score_averaged,
    "prob_averaged": prob_averaged,
    "mcl": mcl,
    "relaxed": relaxed,
    "evolving": evolving,
    "annealed": annealed,
    "confident": confident,
    "scored": scored,
}

__all__ = [
    "LOSSES",
    "MEMBER_LOSSES",
    "Loss",
    "LossValue",
    "MemberLoss",
    "assign",
    "cross_entropies",
    "squared_errors",
    *LOSSES,
]
