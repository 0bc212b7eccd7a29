"""What every loss takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LossValue:
    """A loss on B examples.

    `total` is the sum over examples, to be divided by the batch size by whoever knows it, so that cutting a batch
    changes nothing but rounding. `assignment` [M, B] says how much each member learns from each example; `losses`
    [M, B] are the members' own cross-entropies.
    """

    total: Tensor
    assignment: Tensor
    losses: Tensor

    @property
    def mean(self) -> Tensor:
        return self.total / self.losses.shape[1]


@dataclass(frozen=True)
class Loss:
    """A loss function with what an engine must know of it.

    `separable`: the loss of a member does not depend on the outputs of the others, so each member's forward and
    backward can run back to back. `winners`: how many members learn from an example, None for all; the others (their
    assignment is 0) cost no backward for it. `averaged`: the members' outputs are averaged before the loss, which
    divides their gradients by M and gives priors on examples no meaning. `options`: those that it was made with.
    """

    name: str
    function: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], LossValue]
    separable: bool = False
    winners: int | None = None
    averaged: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self, outputs: Tensor, y: Tensor, prior: Tensor | None = None, ties: Tensor | None = None
    ) -> LossValue:
        """The loss of outputs [M, B, C] on labels [B], given priors [M, B] and tie-breaking keys [M, B]."""
        return self.function(outputs, y, prior, ties)


def cross_entropies(outputs: Tensor, y: Tensor) -> Tensor:
    """-log p_y of every member on every example: [M, B, C], [B] -> [M, B]."""
    m, b, c = outputs.shape
    flat = F.cross_entropy(outputs.reshape(m * b, c), y.repeat(m), reduction="none")
    return flat.view(m, b)


def ones_or(prior: Tensor | None, losses: Tensor) -> Tensor:
    return torch.ones_like(losses) if prior is None else prior.to(losses.dtype)
