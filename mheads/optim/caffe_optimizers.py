"""Optimizers that scale each weight's step by what its gradients were: Adam, AdaGrad, RMSProp and AdaDelta.

As Caffe computes them, which is not as torch does: decay goes through the gradient, and `delta` is added to roots that
are not corrected for their start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

Groups = list[dict[str, Any]]
State = dict[str, Any]
Rule = Callable[[Tensor, State], Tensor]

Beta1 = Annotated[float, Field(ge=0, lt=1, description="beta1, the decay rate of the first moment")]
Beta2 = Annotated[float, Field(ge=0, lt=1, description="beta2, the decay rate of the second moment")]
SquaresDecay = Annotated[float, Field(ge=0, lt=1, description="the decay rate of the mean of squares")]
Epsilon = Annotated[float, Field(gt=0, description="epsilon, added to the denominator")]


class CaffeOptimizer(torch.optim.Optimizer):
    """W <- W - lr * rule(g), where g is the gradient and weight_decay * W."""

    def __init__(self, groups: Groups, lr: float, rule: Rule) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.rule = rule

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


def adam(
    groups: Groups, lr: float, momentum: Beta1 = 0.9, momentum2: Beta2 = 0.999, delta: Epsilon = 1e-8
) -> torch.optim.Optimizer:
    """m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + delta)."""
    b1, b2 = momentum, momentum2

    def rule(g: Tensor, state: State) -> Tensor:
        m, v = _mean(state, "mean", g, b1), _mean(state, "squares", g.square(), b2)
        t = state["step"] = state.get("step", torch.zeros((), dtype=torch.float64)).cpu() + 1
        correction = math.sqrt(1 - b2 ** t.item()) / (1 - b1 ** t.item())
        update: Tensor = m / v.sqrt().add_(delta) * correction
        return update

    return CaffeOptimizer(groups, lr, rule)


def adagrad(groups: Groups, lr: float, delta: Epsilon = 1e-8) -> torch.optim.Optimizer:
    """h <- h + g^2, g / (sqrt(h) + delta)."""

    def rule(g: Tensor, state: State) -> Tensor:
        state["squares"] = state.get("squares", torch.zeros_like(g)) + g.square()
        squares: Tensor = state["squares"]
        return g / squares.sqrt().add_(delta)

    return CaffeOptimizer(groups, lr, rule)


def rmsprop(groups: Groups, lr: float, rms_decay: SquaresDecay = 0.99, delta: Epsilon = 1e-8) -> torch.optim.Optimizer:
    """h <- d h + (1 - d) g^2, g / (sqrt(h) + delta)."""

    def rule(g: Tensor, state: State) -> Tensor:
        return g / _mean(state, "squares", g.square(), rms_decay).sqrt().add_(delta)

    return CaffeOptimizer(groups, lr, rule)


def adadelta(groups: Groups, lr: float, momentum: Beta1 = 0.9, delta: Epsilon = 1e-8) -> torch.optim.Optimizer:
    """h <- mu h + (1 - mu) g^2, s = g sqrt((u + delta) / (h + delta)), u <- mu u + (1 - mu) s^2."""

    def rule(g: Tensor, state: State) -> Tensor:
        h = _mean(state, "squares", g.square(), momentum)
        before: Tensor = state.get("updates", torch.zeros_like(g))
        update = g * ((before + delta) / (h + delta)).sqrt_()
        _mean(state, "updates", update.square(), momentum)
        return update

    return CaffeOptimizer(groups, lr, rule)


def _mean(state: State, name: str, value: Tensor, decay: float) -> Tensor:
    """A mean that forgets, with this value in it; it begins at 0."""
    before: Tensor = state.get(name, torch.zeros_like(value))
    state[name] = mean = before * decay + value * (1 - decay)
    return mean
