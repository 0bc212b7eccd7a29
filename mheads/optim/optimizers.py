"""Optimizers by name: factories whose annotated arguments are options of a config.

Each takes groups of parameters, with `lr_mult`, their weight decay and whether they are `filters`, and the first
learning rate, and makes a torch optimizer. To add one, write its factory and its line in `OPTIMIZERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field

from mheads.optim.caffe_optimizers import Beta1, Beta2, Epsilon, adadelta, adagrad, adam, rmsprop
from mheads.optim.muon import muon

Groups = list[dict[str, Any]]

Momentum = Annotated[float, Field(ge=0, lt=1, description="momentum")]
Nesterov = Annotated[bool, Field(description="Nesterov's form")]
CaffeMomentum = Annotated[bool, Field(description="the learning rate inside the momentum, as in Caffe")]


def sgd(
    groups: Groups,
    lr: float,
    momentum: Momentum = 0.9,
    nesterov: Nesterov = False,
    caffe_momentum: CaffeMomentum = False,  # stage_updates.py sees to it where the learning rate changes
) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=_can_fuse(groups))


def adamw(
    groups: Groups, lr: float, momentum: Beta1 = 0.9, momentum2: Beta2 = 0.999, delta: Epsilon = 1e-8
) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, betas=(momentum, momentum2), eps=delta, fused=_can_fuse(groups))


def _can_fuse(groups: Groups) -> bool:
    """On the CPU torch's fused SGD leaves most weights of 16 bits as they are."""
    return all(p.dtype in (torch.float32, torch.float64) for group in groups for p in group["params"])


@dataclass(frozen=True)
class OptimizerEntry:
    """`make` is the factory. `linear`: a step is proportional to the gradient, so that averaging over M members divides
    it by M. `decoupled`: weight decay is apart from the gradients, so that there is no l1 form of it."""

    make: Callable[..., torch.optim.Optimizer]
    linear: bool = False
    decoupled: bool = False


OPTIMIZERS: dict[str, OptimizerEntry] = {
    "sgd": OptimizerEntry(sgd, linear=True),
    "adamw": OptimizerEntry(adamw, decoupled=True),
    "muon": OptimizerEntry(muon, decoupled=True),  # of filters, which are rescaled instead
    "adam": OptimizerEntry(adam),
    "adagrad": OptimizerEntry(adagrad),
    "rmsprop": OptimizerEntry(rmsprop),
    "adadelta": OptimizerEntry(adadelta),
}
FACTORIES = {name: entry.make for name, entry in OPTIMIZERS.items()}
