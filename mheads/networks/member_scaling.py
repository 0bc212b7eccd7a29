"""Members that share weights and differ in how they scale the input, after TabM-mini (Gorishniy et al., 2024).

One batch holds a copy of each example for each member, and all copies pass through the same layers. So a shared trunk
computes another function for each member, at the price of one vector of weights for each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScaledCopies(nn.Module):
    """[B, F] -> [B, K, F]: copy k is x * weight[k], elementwise. The weights [K, F] start as random signs."""

    def __init__(self, features: int, copies: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(0, 2, (copies, features)) * 2.0 - 1)

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1) * self.weight

    def extra_repr(self) -> str:
        return "copies={}, features={}".format(*self.weight.shape)


class OwnCopy(nn.Module):
    """[B, K, H] -> [B, H]: the copy of one member. It belongs to the branches of a tree.

    `index` is a buffer: a member that is moved, copied or saved keeps its copy.
    """

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies = copies
        self.register_buffer("index", torch.zeros(1, dtype=torch.long))
        self.index: Tensor

    def assign(self, member: int) -> None:
        """Takes the copy of this member; members beyond the number of copies start again with the first."""
        self.index.fill_(member % self.copies)

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(1, self.index).squeeze(1)

    def extra_repr(self) -> str:
        return f"copies={self.copies}"
