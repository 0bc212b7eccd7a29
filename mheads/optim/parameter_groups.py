"""Groups of parameters that learn alike: each has a learning rate, a weight decay and an end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from mheads.common.errors import UserError
from mheads.optim.optim_section import GroupOptions, OptimSection


@dataclass(frozen=True)
class Group:
    """`filters`: weights [n, ...] of convolutions. `stacked`: 1 if the parameters are those of several stages, stacked
    along a first dimension, else 0."""

    lr_mult: float
    weight_decay: float
    until: float
    filters: bool
    stacked: int


def make_groups(
    stage: nn.Module,
    parameters_by_name: Mapping[str, nn.Parameter],
    options: OptimSection,
    own_options: Mapping[str, GroupOptions],
) -> list[dict[str, Any]]:
    """The groups of a stage, or of the stacked parameters of several that have its layers, as torch takes them.

    A layer's attribute `multipliers` maps its parameters to (lr_mult, decay_mult); `own_options` stand above these.
    """
    groups: dict[Group, list[nn.Parameter]] = defaultdict(list)
    seen: set[int] = set()  # a weight that two layers share is one weight
    for path, module in stage.named_modules():
        multipliers = getattr(module, "multipliers", {})
        known = [name for name, _ in module.named_parameters(recurse=False)]
        if unknown := [name for name in multipliers if name not in known and getattr(module, name, ...) is ...]:
            raise UserError(
                f"multipliers of a {type(module).__name__} name {unknown[0]!r}; its parameters are {', '.join(known)}"
            )
        for key, own in module.named_parameters(recurse=False):
            if not own.requires_grad or id(own) in seen:
                continue
            seen.add(id(own))
            name = f"{path}.{key}" if path else key
            parameter = parameters_by_name[name]
            lr, decay = multipliers.get(key, (1.0, 1.0))
            decay *= options.weight_decay
            asked = own_options.get(name, GroupOptions())
            lr = lr if asked.lr is None else asked.lr / options.lr
            decay = decay if asked.weight_decay is None else asked.weight_decay
            groups[Group(lr, decay, asked.until, own.dim() > 2, parameter.dim() - own.dim())].append(parameter)
    decay_of = "l1" if options.regularization == "l1" else "weight_decay"
    made = []
    for group, own in groups.items():
        facts = asdict(group)
        made.append({"params": own, decay_of: facts.pop("weight_decay"), **facts})
    return made


def assign_groups(names: Collection[str], groups: Mapping[str, GroupOptions]) -> dict[str, GroupOptions]:
    """The options of each parameter that `optim.parameter_groups` names; each may be in one group."""
    assigned: dict[str, str] = {}
    for pattern in groups:
        matching = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not matching:
            raise UserError(
                f"optim.parameter_groups: no parameter that learns is called {pattern!r}; there are "
                f"{', '.join(sorted(names))}",
                key="optim.parameter_groups",
            )
        for name in matching:
            if name in assigned:
                raise UserError(
                    f"optim.parameter_groups: {name} is in two groups, {assigned[name]!r} and {pattern!r}; make one "
                    "of them narrower",
                    key="optim.parameter_groups",
                )
            assigned[name] = pattern
    return {name: groups[pattern] for name, pattern in assigned.items()}
