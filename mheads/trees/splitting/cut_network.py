"""Makes a chain of layers of a network: its children in a row, the stages it declares, or the pieces of its graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import fx, nn

from mheads.common.errors import UserError
from mheads.common.modules import children
from mheads.trees.splitting.cut_sequential import (
    Chain,
    ChainLayer,
    SequentialChain,
    calls_its_children,
    differs,
    is_sequential,
)
from mheads.trees.splitting.cut_traced_graph import WeightUses, cut_graph
from mheads.trees.splitting.graph_chain import GraphChain, Piece
from mheads.trees.splitting.trace import CannotFollowError, trace


def make_chain(network: nn.Module, splits: Collection[str] = ()) -> Chain:
    """The chain of a network; `splits` are the names of layers that it is to be cut after, as far as they are known."""
    if callable(getattr(type(network), "stages", None)):
        return chain_declared_stages(network)
    in_a_row = is_sequential(network) or "forward" in network.__dict__
    known = set(splits) <= {name for name, _ in children(network)}
    if (in_a_row and known) or any(hasattr(module, "takes") for module in network.modules()):
        return SequentialChain(network)
    try:
        if known and calls_its_children(trace(network, inside=False).graph, network):
            return SequentialChain(network)
        return cut_graph(network, trace(network))
    except CannotFollowError as error:
        return SequentialChain(network, str(error))


def make_finest_chain(network: nn.Module) -> Chain:
    """The chain with the most cuts: a tree that names only children does not look inside them.

    Children that hand on several values at once can be split after, and a graph cannot be cut there.
    """
    chain = make_chain(network)
    if (
        not isinstance(chain, SequentialChain)
        or chain.why is not None
        or any(hasattr(m, "takes") for m in network.modules())
    ):
        return chain
    try:
        graph = cut_graph(network, trace(network))
    except CannotFollowError:
        return chain
    names = {name for layer in graph.layers for name in (layer.name, *layer.also)}
    lost = any(layer.has_parameters and layer.name not in names for layer in chain.layers)
    tied = len(list(network.parameters())) < sum(len(list(child.parameters())) for _, child in children(network))
    return chain if lost and not tied else graph


def chain_declared_stages(network: nn.Module) -> GraphChain:
    """The chain that a network declares by a method `stages()`: its modules in order, by name."""
    graph = fx.Graph()
    value = inputs = graph.placeholder("x")
    paths = {id(module): path for path, module in network.named_modules(remove_duplicate=False)}
    layers, pieces = [], []
    for name, module in read_stages(network):
        modules = list(_unroll(paths, module))
        nodes = []
        for inner in modules:
            value = graph.create_node("call_module", _find_path(network, paths, name, inner), (value,))
            nodes.append(value)
        has_parameters = any(True for m in modules for _ in m.parameters())
        layers.append(ChainLayer(name, has_parameters, any(map(differs, modules))))
        pieces.append(Piece(nodes, inputs, value))
        inputs = value
    uses = WeightUses(network, [node for piece in pieces for node in piece.nodes])
    last = -1
    for piece in pieces[:-1]:
        last += len(piece.nodes)
        if last in uses.tied:
            raise UserError(
                f"stages() of {type(network).__name__} uses {uses.tied[last]} in more than one stage: what shares "
                "weights must be in one"
            )
    statistics = getattr(network, "batch_statistics", False)
    return GraphChain(layers, pieces, unused=uses.unused, batch_statistics=statistics)


def read_stages(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """The names and modules that the method `stages()` of a network returns."""
    kind = type(network).__name__
    stages = network.stages()  # type: ignore[operator]
    pairs = list(stages.items()) if isinstance(stages, Mapping) else list(stages)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], nn.Module)):
            raise UserError(f"stages() of {kind} gives {pair!r}: return a dict, or pairs, of names and modules")
    names = [str(name) for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if not pairs or twice is not None:
        raise UserError(f"stages() of {kind} gives {'nothing' if not pairs else f'{twice!r} twice'}")
    return [(str(name), module) for name, module in pairs]


def _unroll(paths: Mapping[int, str], module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a stage runs: itself, or what a Sequential made for the purpose holds."""
    if id(module) in paths or type(module) is not nn.Sequential:
        yield module
    else:
        for child in module:
            yield from _unroll(paths, child)


def _find_path(network: nn.Module, paths: Mapping[int, str], stage: str, module: nn.Module) -> str:
    """The path of a module in the network."""
    path = paths.get(id(module))
    if not path:
        raise UserError(
            f"stages() of {type(network).__name__} gives in {stage!r} a {type(module).__name__} that is no module "
            "inside the network: make it one in __init__, so that it and its weights have a name"
        )
    return path
