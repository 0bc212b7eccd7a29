"""A graph of a network as a chain of pieces, and the stages that are made of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor, fx, nn

from mheads.common import nested_values
from mheads.common.modules import has_fixed_statistics
from mheads.common.nested_values import Value
from mheads.networks.dropout import replace_dropout
from mheads.trees.splitting.cut_sequential import ChainLayer, Freezable
from mheads.trees.splitting.graph_nodes import At, rebuild, refer, resolve, tabulate
from mheads.trees.splitting.trace import TRAINING


class GraphStage(Freezable):
    """Consecutive pieces of a graph with weights of their own, under the names that these have in the network."""

    def __init__(self, code: StageCode) -> None:
        super().__init__()
        self._code = code

    def forward(self, x: Value, side: dict[str, Value] | None = None) -> Value:
        return self._code.run(self, x)


class StageCode:
    """A graph as a function of a stage and its input; it can be pickled, and copies of a stage share it."""

    def __init__(self, source: str, names: Mapping[str, Any]) -> None:
        self.source, self.names = source, dict(names)
        scope = dict(names)
        exec(compile(source, "<graph of a stage>", "exec"), scope)
        self.run: Callable[[nn.Module, Value], Value] = scope["forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> StageCode:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        modules = {name: thing.__name__ for name, thing in self.names.items() if isinstance(thing, ModuleType)}
        others = {name: thing for name, thing in self.names.items() if name not in modules and name != "__builtins__"}
        return _restore_code, (self.source, modules, others)


def _restore_code(source: str, modules: dict[str, str], others: dict[str, Any]) -> StageCode:
    return StageCode(source, {name: importlib.import_module(module) for name, module in modules.items()} | others)


@dataclass
class Piece:
    """Nodes that run one after the other, from the one value that they are given to what they give."""

    nodes: list[fx.Node]
    given: fx.Node
    gives: Any  # a node, or at the end whatever the network returns


@dataclass
class GraphChain:
    """The graph of a network, cut into pieces; `layers` are what these are called."""

    layers: list[ChainLayer]
    pieces: list[Piece]
    row_counts: frozenset[fx.Node] = frozenset()  # nodes that give the number of rows, which any piece can ask for
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # parameters and buffers that no node uses: the last piece keeps them
    batch_statistics: bool = False
    drops: frozenset[str] = frozenset()  # layers that call a function for dropout
    why: str | None = None

    def __post_init__(self) -> None:
        self._codes: dict[tuple[int, int], StageCode] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphChain:
        return self  # it never changes, and stages take copies of its constants

    def __reduce__(self) -> tuple[Any, ...]:
        rows, at = tabulate(self.pieces[0].given.graph)
        pieces = [([at[node] for node in p.nodes], at[p.given], refer(p.gives, at)) for p in self.pieces]
        others = {**vars(self), "row_counts": None, "pieces": None}
        return _rebuild_chain, (rows, pieces, [at[node] for node in self.row_counts], others)

    def stage(self, layers: Sequence[str], *sources: nn.Module) -> GraphStage:
        names = [layer.name for layer in self.layers]
        first, last = names.index(layers[0]), names.index(layers[-1])
        if (first, last) not in self._codes:
            self._codes[first, last] = self._code(first, last)
        stage = GraphStage(self._codes[first, last])
        if self.batch_statistics:
            stage.batch_statistics = True  # type: ignore[assignment]  # not a tensor
        nodes = [node for piece in self.pieces[first : last + 1] for node in piece.nodes]
        for path in dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module"):
            module = next(m for source in sources if (m := find_submodule(source, path)) is not None)
            _place(stage, path, sources)._modules[path.rpartition(".")[2]] = replace_dropout(module)
        for path in dict.fromkeys(path for node in nodes for path in attributes_of(node)):
            self._add_tensor(stage, path, sources)
        if last == len(names) - 1:
            for path in self.unused:
                self._add_tensor(stage, path, sources)
        stage.holds_fixed = any(map(has_fixed_statistics, stage.modules()))
        return stage

    def borrows_rows(self, start: int) -> bool:
        """Whether pieces from this one on ask for the size 0 of a value before it, taken for the number of rows."""
        before = {node for piece in self.pieces[:start] for node in piece.nodes} & self.row_counts
        return any(before.intersection(n.all_input_nodes) for piece in self.pieces[start:] for n in piece.nodes)

    def _add_tensor(self, stage: nn.Module, path: str, sources: Sequence[nn.Module]) -> None:
        owner, _, name = path.rpartition(".")
        if path in self.constants:
            stage.register_buffer(path, self.constants[path].clone(), persistent=False)
            return
        source = next(m for s in sources if (m := find_submodule(s, owner)) is not None and hasattr(m, name))
        place, tensor = _place(stage, path, sources), getattr(source, name)
        if isinstance(tensor, nn.Parameter):
            place.register_parameter(name, tensor)
        else:
            kept = name in source._buffers and name not in source._non_persistent_buffers_set
            place.register_buffer(name, tensor, persistent=kept)

    def _code(self, first: int, last: int) -> StageCode:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {self.pieces[first].given: (x := graph.placeholder("x"))}

        def place(node: fx.Node) -> fx.Node:
            if node not in copies:
                if node.op == "get_attr":
                    copies[node] = graph.create_node("get_attr", node.target)
                else:
                    assert node in self.row_counts, f"{node} comes from a piece before"
                    copies[node] = graph.call_function(nested_values.num_rows, (x,))
            return copies[node]

        for piece in self.pieces[first : last + 1]:
            for node in piece.nodes:
                copies[node] = graph.node_copy(node, place)
        graph.output(fx.map_arg(self.pieces[last].gives, place))
        code = graph.python_code("self")
        return StageCode(code.src, code.globals)


def _rebuild_chain(
    rows: list[tuple[Any, ...]], pieces: list[tuple[list[At], At, Any]], row_counts: list[At], others: dict[str, Any]
) -> GraphChain:
    nodes = rebuild(rows)
    chain = GraphChain.__new__(GraphChain)
    vars(chain).update(others)
    chain.pieces = [
        Piece([nodes[at.row] for at in inside], nodes[given.row], resolve(gives, nodes))
        for inside, given, gives in pieces
    ]
    chain.row_counts = frozenset(nodes[at.row] for at in row_counts)
    return chain


def attributes_of(node: fx.Node) -> list[str]:
    """Paths of the tensors that a node is given directly."""
    return [str(n.target) for n in node.all_input_nodes if n.op == "get_attr" and n.target != TRAINING]


def find_tensor(network: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    module = find_submodule(network, owner)
    return None if module is None else getattr(module, name, None)


def find_submodule(source: nn.Module, path: str) -> nn.Module | None:
    module: nn.Module | None = source
    for name in path.split(".") if path else []:
        module = None if module is None else module._modules.get(name)
    return module


def _place(stage: nn.Module, path: str, sources: Sequence[nn.Module]) -> nn.Module:
    """The module of a stage that holds this path, made if it is missing."""
    owner = path.rpartition(".")[0]
    holder = stage
    for name in owner.split(".") if owner else []:
        if holder._modules.get(name) is None:
            holder._modules[name] = nn.Module()
        holder = holder.get_submodule(name)
    for source in sources:  # learning rates of the parameters that it holds itself
        original = find_submodule(source, owner)
        if original is not None and hasattr(original, "multipliers"):
            holder.multipliers = original.multipliers
    return holder
