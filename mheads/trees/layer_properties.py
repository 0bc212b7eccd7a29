"""What a tree knows of the layers of its network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mheads.common.modules import is_hooked, takes_statistics
from mheads.networks.dropout import CHANNELWISE, Dropout
from mheads.networks.member_scaling import OwnCopy, ScaledCopies
from mheads.networks.mlp import MeanAndLogVariance
from mheads.trees.member_scores import OnAnswer, Score, ScoredLinear
from mheads.trees.splitting.cut_sequential import Chain, SequentialChain, SequentialStage, is_sequential
from mheads.trees.tree_spec import Node


@dataclass(frozen=True)
class LayerFacts:
    """Facts about the layers of every member, read from one network; parameters have their names in the network."""

    parameters: frozenset[str]  # names of all parameters, without buffers
    trainable: frozenset[str]  # names of the parameters that learn
    fresh: frozenset[str]  # names of what starts anew where weights from elsewhere have none: scores, say
    layer_of: dict[str, str]  # the layer of each parameter and buffer
    sizes: dict[str, dict[int, int]]  # of each layer: identity -> size of its parameters, since layers may share one
    statistics: dict[str, list[str]]  # of each layer: the modules in it that need the whole batch
    dropout: frozenset[str]  # layers that draw masks
    side_inputs: frozenset[str]  # names of the side inputs that some layer takes
    dtype: torch.dtype
    sequential: bool  # calling the network is calling its children one after the other: nothing else can happen
    hooked: bool  # hooks on the network itself, which a tree never calls
    products: dict[str, int | None]  # multiply-adds per example of a layer that batches over members; None for others

    @staticmethod
    def of(network: nn.Module, chain: Chain) -> LayerFacts:
        layers = {layer.name: chain.stage([layer.name], network) for layer in chain.layers}
        modules = [pair for layer in layers.values() for pair in layer.named_modules()]
        parameters = {key: p for layer in layers.values() for key, p in layer.named_parameters()}
        takes = [getattr(module, "takes", ()) for module in network.modules()]
        return LayerFacts(
            parameters=frozenset(parameters),
            trainable=frozenset(key for key, p in parameters.items() if p.requires_grad),
            fresh=frozenset(f"{path}.{key}" for path, m in modules if _is_fresh(m) for key in m.state_dict()),
            layer_of={key: name for name, layer in layers.items() for key in layer.state_dict()},
            sizes={name: {id(p): p.numel() for p in layer.parameters()} for name, layer in layers.items()},
            statistics={
                name: [key for key, m in layer.named_modules() if takes_statistics(m)] for name, layer in layers.items()
            },
            dropout=chain.drops | {name for name, layer in layers.items() if any(map(_drops, layer.modules()))},
            side_inputs=frozenset(n for names in takes for n in ((names,) if isinstance(names, str) else names)),
            dtype=next(network.parameters()).dtype,
            sequential=is_sequential(network) and isinstance(chain, SequentialChain),
            hooked=is_hooked(network) and "forward" not in network.__dict__,
            products={name: _count_products(layer) for name, layer in layers.items()},
        )

    def layer_sizes(self) -> dict[str, int]:
        """The number of parameters of each layer."""
        return {name: sum(sizes.values()) for name, sizes in self.sizes.items()}

    def stage_size(self, node: Node) -> int:
        """The number of parameters of a stage."""
        return sum({key: size for name in node.layers for key, size in self.sizes[name].items()}.values())

    def stage_products(self, node: Node) -> int | None:
        """Multiply-adds of a stage on one example if its layers batch over members; None if some do not."""
        counts = [self.products[name] for name in node.layers]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None


# Layers that run stacked over members at little cost.
BATCHING = (
    nn.Linear, nn.Embedding, nn.Identity, nn.Flatten, nn.LayerNorm, nn.BatchNorm1d, nn.ReLU, nn.LeakyReLU, nn.ELU,
    nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus, Dropout, nn.Sequential, SequentialStage,
    ScoredLinear, Score, OnAnswer, MeanAndLogVariance, ScaledCopies, OwnCopy,
)  # fmt: skip


def _count_products(layer: nn.Module) -> int | None:
    modules = list(layer.modules())
    if any(type(m) not in BATCHING or is_hooked(m) for m in modules):
        return None
    return sum(m.weight.numel() for m in modules if isinstance(m, nn.Linear))


def _is_fresh(module: nn.Module) -> bool:
    return bool(getattr(module, "fresh", False))


def _drops(module: nn.Module) -> bool:
    """Whether this is a dropout that is keyed, or will be, with something to drop."""
    plain = type(module) in (nn.Dropout, *CHANNELWISE) and not is_hooked(module)
    return (plain or isinstance(module, Dropout)) and bool(0 < module.p < 1)  # type: ignore[operator]
