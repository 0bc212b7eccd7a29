"""Muon (Jordan et al. 2024): steps of filters are orthogonalised momentum; all other parameters learn by SGD."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

Groups = list[dict[str, Any]]

Momentum = Annotated[float, Field(ge=0, lt=1, description="momentum of filters")]
SgdMomentum = Annotated[float, Field(ge=0, lt=1, description="momentum of all parameters but filters")]
Nesterov = Annotated[bool, Field(description="Nesterov's form")]
Steps = Annotated[int, Field(ge=1, le=20, description="Newton-Schulz steps that orthogonalise an update of filters")]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's, chosen for the steepest slope at 0
EPSILON = 1e-7


def muon(
    groups: Groups,
    lr: float,
    momentum: Momentum = 0.9,
    nesterov: Nesterov = False,
    sgd_momentum: SgdMomentum = 0.9,
    newton_schulz: Steps = 5,
) -> torch.optim.Optimizer:
    return Muon(groups, lr, momentum, sgd_momentum, nesterov, newton_schulz)


class Muon(torch.optim.Optimizer):
    """m <- mu m + g, u = g + mu m (Nesterov) or m, W <- W - lr u; the gradient g of other parameters includes
    weight_decay * W.

    Filters W [n, ...] are first rescaled to the norm sqrt(n), and u is orthogonalised as a matrix with a row for each
    filter. The rescaling takes the place of weight decay.
    """

    def __init__(
        self, groups: Groups, lr: float, momentum: float, sgd_momentum: float, nesterov: bool, newton_schulz: int
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.momentum, self.sgd_momentum = momentum, sgd_momentum
        self.nesterov, self.newton_schulz = nesterov, newton_schulz

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            filters, momentum = group["filters"], self.momentum if group["filters"] else self.sgd_momentum
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad
                if group["weight_decay"] and not filters:
                    gradient = gradient + group["weight_decay"] * parameter
                state = self.state[parameter]
                mean = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                mean.mul_(momentum).add_(gradient)
                update = gradient.add(mean, alpha=momentum) if self.nesterov else mean
                if filters:
                    update = self._turn_filters(parameter, update, group["stacked"])
                parameter.sub_(update, alpha=group["lr"])

    def _turn_filters(self, filters: Tensor, update: Tensor, stacked: int) -> Tensor:
        """Rescales filters [n, ...], or [S, n, ...] of S stages that are stacked, and orthogonalises their update."""
        norm = torch.linalg.vector_norm(filters, dim=tuple(range(stacked, filters.dim())), keepdim=True)
        filters.mul_(filters.shape[stacked] ** 0.5 / norm.clamp_min(EPSILON))
        return orthogonalise(update.flatten(1 + stacked), self.newton_schulz).reshape(update.shape)


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """Near U V^T of the matrix U S V^T, [..., n, k]: its singular values are brought to about 1, between 0.7 and 1.2.

    X <- a X + b (X X^T) X + c (X X^T)^2 X, from the matrix divided by its norm.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x: Tensor = matrix.mT if tall else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + EPSILON)
    for _ in range(steps):
        products = x @ x.mT
        x = a * x + (b * products + c * products @ products) @ x
    return x.mT if tall else x
