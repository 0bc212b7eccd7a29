"""Optimizers that scale each weight's step by what its gradients were: Adam, AdaGrad, RMSProp and AdaDelta.

As Caffe computes them, which is not as torch does: decay goes through the gradient, and `delta` is added to roots that
are not corrected for their start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mheads.optim.options import OptimOptions


class AdaptiveRule(torch.optim.Optimizer):
    """W <- W - rate * step(g), where g is the gradient and weight_decay * W."""

    def __init__(self, groups: list[dict[str, Any]], options: OptimOptions) -> None:
        super().__init__(groups, {"lr": options.lr, "weight_decay": 0.0})
        self.options = options
        self.rule: Callable[[Tensor, dict[str, Any]], Tensor] = getattr(self, f"_{options.name}")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad
                if group["weight_decay"]:
                    gradient = gradient + group["weight_decay"] * parameter
                parameter.sub_(self.rule(gradient, self.state[parameter]), alpha=group["lr"])

    def _adam(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        """m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + delta)."""
        b1, b2 = self.options.momentum, self.options.momentum2
        m, v = _mean(state, "mean", g, b1), _mean(state, "squares", g.square(), b2)
        t = state["step"] = state.get("step", torch.zeros((), dtype=torch.float64)) + 1
        correction = math.sqrt(1 - b2 ** t.item()) / (1 - b1 ** t.item())
        update: Tensor = m / v.sqrt().add_(self.options.delta) * correction
        return update

    def _adagrad(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        """h <- h + g^2, g / (sqrt(h) + delta)."""
        state["squares"] = state.get("squares", torch.zeros_like(g)) + g.square()
        squares: Tensor = state["squares"]
        return g / squares.sqrt().add_(self.options.delta)

    def _rmsprop(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        """h <- d h + (1 - d) g^2, g / (sqrt(h) + delta)."""
        return g / _mean(state, "squares", g.square(), self.options.rms_decay).sqrt().add_(self.options.delta)

    def _adadelta(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        """h <- mu h + (1 - mu) g^2, s = g sqrt((u + delta) / (h + delta)), u <- mu u + (1 - mu) s^2."""
        mu, delta = self.options.momentum, self.options.delta
        h = _mean(state, "squares", g.square(), mu)
        before: Tensor = state.get("updates", torch.zeros_like(g))
        update = g * ((before + delta) / (h + delta)).sqrt_()
        _mean(state, "updates", update.square(), mu)
        return update


def _mean(state: dict[str, Any], name: str, value: Tensor, keep: float) -> Tensor:
    """A mean that forgets, with this value in it; it begins at 0."""
    before: Tensor = state.get(name, torch.zeros_like(value))
    state[name] = mean = before * keep + value * (1 - keep)
    return mean
