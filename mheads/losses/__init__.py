"""Losses: plain functions of outputs [M, B, C] and labels [B], or of what else the problem has for these.

    loss = mheads.losses.mcl(k=1)
    value = loss(outputs, y)
    value.total, value.assignment, value.losses

A loss knows nothing of trees, threads or ranks. `LOSSES` turns the name in a config into the function that makes it;
its arguments that are annotated with a `Field` can be set in a config. `BASE_LOSSES` has the losses of one member on
one example by name, `base_loss="mae"`. Read `ensemble_loss.py` first, then `mcl.py`.
"""

from collections.abc import Callable

# `name as name` exports it to type checkers, which cannot read `*LOSSES` in `__all__`.
from mheads.losses.annealed import annealed as annealed
from mheads.losses.averaged import prob_averaged as prob_averaged
from mheads.losses.averaged import score_averaged as score_averaged
from mheads.losses.confident import confident as confident
from mheads.losses.ensemble_loss import Loss, LossValue
from mheads.losses.evolving import evolving as evolving
from mheads.losses.independent import independent as independent
from mheads.losses.mcl import mcl as mcl
from mheads.losses.mixture_density import mixture_density as mixture_density
from mheads.losses.relaxed import relaxed as relaxed
from mheads.losses.scored import scored as scored
from mheads.losses.winners import assign
from mheads.problems import BASE_LOSSES, BaseLoss, cross_entropies, squared_errors

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
    "mixture_density": mixture_density,
}

WITH_SCORES = tuple(name for name, make in LOSSES.items() if make().teaches_scores)

__all__ = [
    "LOSSES",
    "WITH_SCORES",
    "BASE_LOSSES",
    "Loss",
    "LossValue",
    "BaseLoss",
    "assign",
    "cross_entropies",
    "squared_errors",
    *LOSSES,
]
