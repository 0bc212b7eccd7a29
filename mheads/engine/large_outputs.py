"""Members whose outputs are large, as for segmentation, give the loss of the ensemble their own losses instead, where
these are all it needs: no copy of all outputs is made, and none goes to other ranks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mheads.common import nested_values
from mheads.common.nested_values import Value
from mheads.losses import Loss

LARGE = 4096  # numbers in a member's output for an example


class MemberLosses(NamedTuple):
    """The losses [m, b] of members, in the place of their outputs."""

    losses: Tensor


def count_given(loss: Loss, numbers: int) -> int:
    """How many numbers a member gives to the loss for an example: its output, of so many, or its own loss."""
    return 1 if loss.of_losses and not loss.score_weight and numbers >= LARGE else numbers


def gives_losses(loss: Loss, outputs: Value) -> bool:
    """Whether members with these outputs [m, b, ...] give their losses."""
    leaves = nested_values.leaves(outputs)
    numbers = sum(t[0].numel() for t in leaves) // max(1, leaves[0].shape[1])
    return count_given(loss, numbers) < numbers
