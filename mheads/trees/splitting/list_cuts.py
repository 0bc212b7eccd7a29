"""Where a network can be split, and what lies above and below each place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.networks.dropout import replace_dropout
from mheads.trees.checks.compare_with_forward import compare_with_forward
from mheads.trees.multiply_adds import make_example, multiply_adds
from mheads.trees.splitting.cut_network import make_finest_chain
from mheads.trees.splitting.cut_sequential import Chain
from mheads.trees.splitting.graph_chain import GraphChain
from mheads.trees.tree_spec import end_of_stage
from mheads.trees.treenet import TreeNet

MEMBERS = 4  # the number for which the cost of a split is reported


@dataclass(frozen=True)
class Part:
    """Parameters, and multiply-adds of one example in a forward."""

    parameters: int
    multiply_adds: int

    def __add__(self, other: Part) -> Part:
        return Part(self.parameters + other.parameters, self.multiply_adds + other.multiply_adds)


@dataclass(frozen=True)
class Cut:
    """A layer after which a network can be split; `above` is shared, each member has its own `below`.

    `crossing` are the shapes, for one example, of the values that the shared layers give to the members.
    """

    name: str
    also: tuple[str, ...]
    above: Part
    below: Part
    crossing: tuple[tuple[int, ...], ...]

    def share(self, members: int = MEMBERS) -> tuple[float, float]:
        """Parameters and multiply-adds of so many members, as parts of what as many networks have."""
        pairs = (
            (self.above.parameters, self.below.parameters),
            (self.above.multiply_adds, self.below.multiply_adds),
        )
        first, second = ((a + members * b) / (members * max(1, a + b)) for a, b in pairs)
        return first, second


@dataclass(frozen=True)
class Cuts:
    """All cuts of a network; `why` torch.fx could not trace it further, if so."""

    network: str
    whole: Part
    cuts: list[Cut]
    why: str | None


@torch.no_grad()
def list_cuts(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Cuts:
    """The legal splits of the network that a factory makes, for examples of this shape."""
    net = TreeNet(make, members=1, only=())
    network = net.network()
    x = example = _example(net, shape)
    chain = make_finest_chain(network)
    parts, shapes = [], []
    for layer in chain.layers:
        stage = chain.stage([layer.name], network)
        count, x = multiply_adds(stage.eval(), x)
        parts.append(Part(sum(p.numel() for p in stage.parameters()), count))
        shapes.append(tuple(tuple(t.shape[1:]) for t in nested_values.leaves(x)))
    whole = sum(parts, Part(0, 0))
    cuts = []
    for i, layer in enumerate(chain.layers):
        stop = end_of_stage(chain.layers, i)
        below = sum(parts[stop:], Part(0, 0))
        if layer.splittable and below.parameters and _holds(net, chain, stop, example):
            above = sum(parts[:stop], Part(0, 0))
            cuts.append(Cut(layer.name, layer.also, above, below, shapes[stop - 1]))
    return Cuts(net.network_name, whole, cuts, chain.why)


def _holds(net: TreeNet, chain: Chain, stop: int, example: Value) -> bool:
    """Whether a size that goes past the cut before layer `stop` is the number of rows: only running it tells."""
    if not isinstance(chain, GraphChain) or not chain.borrows_rows(stop):
        return True
    network = replace_dropout(net.network())
    try:
        compare_with_forward(net.network_name, network, chain, example, {chain.layers[stop - 1].name})
    except UserError:
        return False
    return True


def _example(net: TreeNet, shape: tuple[int, ...]) -> Value:
    try:
        return make_example(net, shape)
    except UserError as error:
        raise UserError(f"{error} (an example was taken to be of shape {shape}: --shape says another)") from error
