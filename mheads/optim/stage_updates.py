"""Updates the weights of stages: one torch optimizer per stage, all at the learning rate that the schedule gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import product
from typing import Protocol

import torch
from torch import Tensor, nn

from mheads.optim.optim_section import OptimSection
from mheads.optim.parameter_groups import assign_groups, make_groups
from mheads.trees.treenet import TreeNet

HUGE = 1e37  # that float32 still holds


class Stack(Protocol):
    """Stages that are updated as one: their weights are views of stacked parameters [S, ...]."""

    names: tuple[str, ...]
    stages: list[nn.Module]
    parameters: dict[str, nn.Parameter]


class Optimizer:
    """Updates stages, each by itself: an engine may do so in any order and place.

    Those of a stack are updated as one, under the name of the first; in a checkpoint each has its own state.
    """

    def __init__(self, net: TreeNet, options: OptimSection, stacks: Mapping[str, Stack] | None = None) -> None:
        self.options = options
        self.rate = 0.0
        self.scale = 1.0  # of the next gradients: below 1 where they are clipped
        self.tree = net.tree
        stacks = stacks or {}
        inside = {name for stack in stacks.values() for name in stack.names}
        named = {name: dict(net.stage(name).named_parameters()) for name in net.stages if name not in inside}
        named |= {name: dict(stack.parameters) for name, stack in stacks.items()}
        self.parameters = {name: [p for p in own.values() if p.requires_grad] for name, own in named.items()}
        own_options = assign_groups(net.facts.trainable, options.parameter_groups)
        # A stage whose layers are all frozen has nothing to update.
        self.stages = {
            name: options.entry.make(
                make_groups(net.stage(name), named[name], options, own_options), options.lr, **options.options
            )
            for name, own in self.parameters.items()
            if own
        }
        # The names of a parameter: one, or those of all stages of a stack.
        self.names = {
            id(parameter): [f"stages.{stage}.{key}" for stage in (stacks[name].names if name in stacks else (name,))]
            for name, own in named.items()
            for key, parameter in own.items()
        }

    def set_rate(self, rate: float, rate_until: Callable[[float], float] | None = None) -> None:
        """Sets the learning rate of the next update; each group's own multiplier applies on top.

        `rate_until` gives that of groups whose schedule runs over a part of the iterations.
        """
        for optimizer in self.stages.values():
            for group in optimizer.param_groups:
                now = rate if rate_until is None or group["until"] == 1 else rate_until(group["until"])
                group["lr"] = now * group["lr_mult"]
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
        if not self.parameters[stage]:
            return
        scale = self.scale * self.share(stage)
        for parameter, gradient in zip(self.parameters[stage], gradients, strict=True):
            parameter.grad = gradient if scale == 1.0 else gradient * scale
        if self.options.regularization == "l1":
            self._decay_by_sign(self.stages[stage])
        self.stages[stage].step()
        for parameter in self.parameters[stage]:
            parameter.grad = None

    def share(self, stage: str) -> float:
        """What the gradients of a stage, sums over its members, are multiplied by."""
        return 1 / len(self.tree.nodes[stage].members) if self.options.shared_gradients == "mean" else 1.0

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
        tensors: dict[str, Tensor] = {}
        for optimizer in self.stages.values():
            for parameter, state in optimizer.state.items():
                names = self.names[id(parameter)]
                for what, tensor in state.items():
                    if isinstance(tensor, Tensor):
                        stacked = len(names) > 1 and tensor.shape == parameter.shape
                        parts = tensor.unbind() if stacked else [tensor] * len(names)
                        tensors |= {f"{name}:{what}": part for name, part in zip(names, parts, strict=True)}
        return tensors

    def refuse_misfits(self, tensors: dict[str, Tensor]) -> None:
        """Raises ValueError if these are no state of the parameters here: each has the same, as all are updated."""
        for optimizer in self.stages.values():
            shapes = {
                name: p.shape[1:] if len(self.names[id(p)]) > 1 else p.shape
                for group in optimizer.param_groups
                for p in group["params"]
                for name in self.names[id(p)]
            }
            kinds = {key.rpartition(":")[2] for key in tensors if key.rpartition(":")[0] in shapes}
            for what, (name, shape) in product(sorted(kinds), shapes.items()):
                tensor = tensors.get(f"{name}:{what}")
                wanted = torch.Size([]) if what == "step" else shape
                if tensor is None or tensor.shape != wanted or not tensor.is_floating_point():
                    problem = "is missing" if tensor is None else f"is {tensor.dtype} {list(tensor.shape)}"
                    raise ValueError(f"optim/{name}:{what} {problem}, where floats {list(wanted)} should be")

    def load_state(self, tensors: dict[str, Tensor], rate: float) -> None:
        states: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in tensors.items():
            name, _, what = key.rpartition(":")
            states[name][what] = tensor
        for optimizer in self.stages.values():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                names = self.names[id(parameter)]
                for what, first in states[names[0]].items():
                    count = what == "step"  # which needs all its digits, and is the same for all of a stack
                    tensor = first if count or len(names) == 1 else torch.stack([states[name][what] for name in names])
                    # Copied into the parameter's own strides: strides decide bits.
                    optimizer.state[parameter][what] = (
                        torch.empty_like(parameter).copy_(tensor)
                        if not count and tensor.shape == parameter.shape
                        else tensor.to(parameter.device, copy=True)
                    )
        self.rate = rate
