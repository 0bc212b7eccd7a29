"""What a tree knows of the layers of its network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mheads.common.modules import is_hooked, takes_statistics
from mheads.networks.dropout import CHANNELWISE, Dropout
from mheads.trees.splitting.cut_sequential import Chain, SequentialChain, is_sequential
from mheads.trees.tree_spec import Node


@dataclass(frozen=True)
class LayerFacts:
    """Facts about the layers of every member, found by looking at one."""

    names: frozenset[str]  # of the parameters
    trainable: frozenset[str]  # of those that learn
    fresh: frozenset[str]  # of those that start anew where weights from elsewhere have none: scores, say
    layer_of: dict[str, str]  # of parameters and buffers
    parameters: dict[str, dict[int, int]]  # of each layer: identity -> size, since layers may share a weight
    statistics: dict[str, list[str]]  # of each layer: the modules in it that need the whole batch
    dropout: frozenset[str]
    side_inputs: frozenset[str]  # names of those that some layer takes
    dtype: torch.dtype
    sequential: bool  # calling the network is calling its children one after the other: nothing else can happen
    hooked: bool  # the network itself, which a tree never calls

    @staticmethod
    def of(network: nn.Module, chain: Chain) -> LayerFacts:
        layers = {layer.name: chain.stage([layer.name], network) for layer in chain.layers}
        return LayerFacts(
            frozenset(key for layer in layers.values() for key, _ in layer.named_parameters()),
            frozenset(key for layer in layers.values() for key, p in layer.named_parameters() if p.requires_grad),
            frozenset(
                f"{path}.{key}"
                for layer in layers.values()
                for path, module in layer.named_modules()
                if getattr(module, "fresh", False)
                for key in module.state_dict()
            ),
            {key: name for name, layer in layers.items() for key in layer.state_dict()},
            {name: {id(p): p.numel() for p in layer.parameters()} for name, layer in layers.items()},
            {n: [key for key, m in layer.named_modules() if takes_statistics(m)] for n, layer in layers.items()},
            chain.drops | {n for n, layer in layers.items() if any(_drops(m) for m in layer.modules())},
            frozenset(name for module in network.modules() for name in _taken(module)),
            next(network.parameters()).dtype,
            is_sequential(network) and isinstance(chain, SequentialChain),
            is_hooked(network) and "forward" not in network.__dict__,
        )

    def size(self, node: Node) -> int:
        return sum({k: v for name in node.layers for k, v in self.parameters[name].items()}.values())


def _taken(module: nn.Module) -> tuple[str, ...]:
    found = getattr(module, "takes", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _drops(module: nn.Module) -> bool:
    """Whether this is a dropout that is keyed, or will be, with something to drop."""
    plain = type(module) in (nn.Dropout, *CHANNELWISE) and not is_hooked(module)
    return (plain or isinstance(module, Dropout)) and bool(0 < module.p < 1)  # type: ignore[operator]
