"""A network as a chain: named layers, one after the other, of which stages are made.

Children that are called in a row are the layers as they are. Any other network is followed into a graph
(`cut_traced_graph.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, Self

from torch import fx, nn

from mheads.common.errors import UserError
from mheads.common.modules import call, children, has_fixed_statistics
from mheads.common.nested_values import Value
from mheads.networks.dropout import is_dropout, replace_dropout
from mheads.networks.member_scaling import OwnCopy


@dataclass(frozen=True)
class ChainLayer:
    """What a tree needs to know of a layer in order to split after it.

    `also` are other names of the same place, `refused` names of places inside it where nothing can be split, and why.
    `differs` says that it needs no parameters to differ between members, as dropout does.
    `ends` says that a block with parameters ends with it, though it may be the dropout of that block alone.
    """

    name: str
    has_parameters: bool
    differs: bool
    also: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    ends: bool = False

    @property
    def splittable(self) -> bool:
        return self.has_parameters or self.ends


def differs(module: nn.Module) -> bool:
    """Whether a module without parameters gives members different values: it drops some, or takes one's own."""
    return is_dropout(module) or any(isinstance(m, OwnCopy) for m in module.modules())


class Freezable(nn.Module):
    """A stage in which frozen layers stay in eval mode: their statistics do not change."""

    holds_fixed = False  # whether there are such

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.holds_fixed:  # asked first: this is called at every step, of a thousand members as well
            for module in self.modules():
                if has_fixed_statistics(module):
                    module.training = False
        return self


class Chain(Protocol):
    """Where a network can be cut, and the stages that this gives."""

    layers: list[ChainLayer]
    why: str | None  # no graph could be made of it, where one was looked for
    drops: frozenset[str]  # layers that draw masks of dropout without a module for it

    def stage(self, layers: Sequence[str], *sources: nn.Module) -> Freezable:
        """These consecutive layers, with the weights of a network or of the stages that hold them."""


class SequentialStage(Freezable, nn.Sequential):
    """Consecutive named layers with weights of their own.

    A layer whose attribute `takes` names side inputs of the batch (regions of interest, say) is called with them too.
    """

    def forward(self, x: Value, side: dict[str, Value] | None = None) -> Value:
        for layer in self:
            x = call(layer, x, side)
        return x


class SequentialChain:
    """A network whose children are called one after the other."""

    drops: frozenset[str] = frozenset()

    def __init__(self, network: nn.Module, why: str | None = None) -> None:
        self.layers = [
            ChainLayer(name, any(True for _ in child.parameters()), differs(child)) for name, child in children(network)
        ]
        self.why = why
        if not self.layers:
            where = f"; torch.fx cannot follow its forward: {why}" if why else ""
            raise UserError(
                f"{type(network).__name__} has no children to make a tree of; return an nn.Sequential, say{where}"
            )

    def stage(self, layers: Sequence[str], *sources: nn.Module) -> SequentialStage:
        by_name = {name: child for source in sources for name, child in children(source)}
        stage = SequentialStage(OrderedDict((name, replace_dropout(by_name[name])) for name in layers))
        stage.holds_fixed = any(map(has_fixed_statistics, stage.modules()))
        return stage


def cut_names(names: list[str], splits: Collection[str]) -> list[list[str]]:
    """The names of layers, cut after each split."""
    stops = [i + 1 for i, name in enumerate(names[:-1]) if name in splits]
    return [names[start:stop] for start, stop in pairwise([0, *stops, len(names)])]


def is_sequential(network: nn.Module) -> bool:
    """Whether calling the network is calling its children one after the other: nothing else can happen."""
    runs = (type(network).forward, type(network).__call__)
    return runs == (nn.Sequential.forward, nn.Module.__call__) and "forward" not in network.__dict__


def calls_its_children(graph: fx.Graph, network: nn.Module) -> bool:
    """Whether all that a graph does is to call the children in their order, each with what the one before gave."""
    value: fx.Node | None = None
    called: list[str] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node
        elif node.op == "output":
            return called == [name for name, _ in children(network)] and node.args == (value,)
        elif node.op == "call_module" and node.args == (value,) and not node.kwargs:
            called.append(str(node.target))
            value = node
        elif node.op == "call_method" and node.target == "contiguous" and node.args == (value,):
            value = node  # strides are the engine's affair
        elif node.op != "get_attr" or node.users:
            return False
    return False
