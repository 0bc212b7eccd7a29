"""The option `normalize` of losses in which members win examples: what the sum of a member's losses is divided by."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from mheads.common.errors import UserError

Normalize = Annotated[
    Literal["batch", "wins"],
    Field(
        description="what the sum of a member's losses is divided by: the size of the batch, or the number of "
        "examples that it wins"
    ),
]


def check_normalize(normalize: str) -> bool:
    """Whether it needs the whole batch."""
    if normalize not in ("batch", "wins"):
        raise UserError(f"loss.normalize is batch or wins, not {normalize!r}")
    return normalize == "wins"


def normalize_assignment(assignment: Tensor, normalize: str) -> Tensor:
    """The weights [M, B] of the losses in a total that is divided by B: with `wins` those of a member add to B.

    Then its loss is the mean over what it won, weighted by the sample weights. One that won nothing has none.
    """
    if normalize == "batch":
        return assignment
    wins = assignment.sum(1, keepdim=True)
    return assignment / wins.where(wins > 0, 1.0) * assignment.shape[1]  # in this order: B by next to nothing is inf
