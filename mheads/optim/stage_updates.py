"""Updates the weights of stages: one torch optimizer per stage, all at the learning rate that the schedule gives."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mheads.common.errors import UserError
from mheads.common.modules import trainable
from mheads.optim.optim_section import OptimSection
from mheads.trees.treenet import TreeNet

HUGE = 1e37  # that float32 still holds


class Optimizer:
    """Updates stages, each by itself: an engine may do so in any order and place."""

    def __init__(self, net: TreeNet, options: OptimSection) -> None:
        self.options = options
        self.rate = 0.0
        self.scale = 1.0  # of the next gradients: below 1 where they are clipped
        self.parameters = {name: trainable(stage) for name, stage in net.stages.items()}
        # A stage whose layers are all frozen has nothing to update.
        self.stages = {name: _optimizer(net.stage(name), options) for name, found in self.parameters.items() if found}
        self.names = {id(p): name for name, p in net.named_parameters()}

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of the next update; each layer's own multiplier applies on top."""
        for optimizer in self.stages.values():
            for group in optimizer.param_groups:
                group["lr"] = rate * group["lr_mult"]
            if self.options.options.get("caffe_momentum") and rate > 0 and self.rate not in (0.0, rate):
                # Caffe's momentum holds steps, learning rate included; torch's holds gradients. They differ only here.
                for state in optimizer.state.values():
                    if state.get("momentum_buffer") is not None:
                        ratio = min(self.rate / rate, HUGE)
                        state["momentum_buffer"].mul_(ratio)
                        if ratio > 1.05:  # a learning rate that falls faster than momentum fades would end at infinity
                            state["momentum_buffer"].clamp_(-HUGE, HUGE)
        self.rate = rate

    def update(self, stage: str, gradients: list[Tensor]) -> None:
        """Takes one step of a stage. A member that learned nothing still has weight decay and momentum."""
        if stage not in self.stages:
            return
        for parameter, gradient in zip(self.parameters[stage], gradients, strict=True):
            parameter.grad = gradient if self.scale == 1.0 else gradient * self.scale
        if self.options.regularization == "l1":
            self._decay_by_sign(self.stages[stage])
        self.stages[stage].step()
        for parameter in self.parameters[stage]:
            parameter.grad = None

    @torch.no_grad()
    def _decay_by_sign(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if group["l1"]:
                    parameter.grad = parameter.grad + group["l1"] * parameter.sign()

    def forget(self) -> None:
        """Sets momentum to zero, as at the start."""
        for optimizer in self.stages.values():
            optimizer.state.clear()

    def state(self) -> dict[str, Tensor]:
        """`parameter name:what` -> tensor, the same names for any tree of processes."""
        return {
            f"{self.names[id(parameter)]}:{what}": tensor
            for optimizer in self.stages.values()
            for parameter, state in optimizer.state.items()
            for what, tensor in state.items()
            if isinstance(tensor, Tensor)
        }

    def refuse_misfits(self, tensors: dict[str, Tensor]) -> None:
        """Raises ValueError if these are no state of the parameters here: each has the same, as all are updated."""
        for optimizer in self.stages.values():
            shapes = {self.names[id(p)]: p.shape for group in optimizer.param_groups for p in group["params"]}
            kinds = {key.rpartition(":")[2] for key in tensors if key.rpartition(":")[0] in shapes}
            for what, (name, shape) in product(sorted(kinds), shapes.items()):
                tensor = tensors.get(f"{name}:{what}")
                wanted = torch.Size([]) if what == "step" else shape
                if tensor is None or tensor.shape != wanted or not tensor.is_floating_point():
                    problem = "is missing" if tensor is None else f"is {tensor.dtype} {list(tensor.shape)}"
                    raise ValueError(f"optim/{name}:{what} {problem}, where floats {list(wanted)} should be")

    def load_state(self, tensors: dict[str, Tensor], rate: float) -> None:
        found: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in tensors.items():
            name, _, what = key.rpartition(":")
            found[name][what] = tensor
        for optimizer in self.stages.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    for what, tensor in found[self.names[id(parameter)]].items():
                        fits = what != "step" and tensor.shape == parameter.shape  # a count needs all its digits
                        # Copied into the parameter's own strides: strides decide bits.
                        optimizer.state[parameter][what] = (
                            torch.empty_like(parameter).copy_(tensor)
                            if fits
                            else tensor.to(parameter.device, copy=True)
                        )
        self.rate = rate


def _optimizer(stage: nn.Module, options: OptimSection) -> torch.optim.Optimizer:
    groups: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
    seen: set[int] = set()  # a weight that two layers share is one weight
    for module in stage.modules():
        multipliers = getattr(module, "multipliers", {})
        known = [name for name, _ in module.named_parameters(recurse=False)]
        if unknown := [name for name in multipliers if name not in known and getattr(module, name, ...) is ...]:
            raise UserError(
                f"multipliers of a {type(module).__name__} name {unknown[0]!r}; its parameters are {', '.join(known)}"
            )
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                groups[multipliers.get(name, (1.0, 1.0))].append(parameter)
    decay_of = "l1" if options.regularization == "l1" else "weight_decay"
    parameters: list[dict[str, Any]] = [
        {"params": params, "lr_mult": lr, decay_of: options.weight_decay * decay}
        for (lr, decay), params in groups.items()
    ]
    return options.entry.make(parameters, options.lr, **options.options)
