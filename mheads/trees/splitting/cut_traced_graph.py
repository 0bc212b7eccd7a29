"""Cutting the graph of a network into a chain of pieces, wherever exactly one value goes from one to the next.

Between two layers with parameters there is at most one cut: after the functions that follow the first, so that members
share what they would all compute alike. Dropout begins a piece of its own, since members draw masks of their own.
"""

from __future__ import annotations

import importlib
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from types import ModuleType
from typing import Any

from torch import Tensor, fx, nn

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.modules import children, has_fixed_statistics
from mheads.common.nested_values import Value
from mheads.networks.dropout import FUNCTIONS, is_dropout, replace_dropout
from mheads.trees.splitting.cut_sequential import (
    Chain,
    ChainLayer,
    Freezable,
    SequentialChain,
    calls_its_children,
    is_sequential,
)
from mheads.trees.splitting.graph_nodes import (
    At,
    is_row_count,
    is_size,
    rebuild,
    refer,
    resolve,
    rewrite,
    sink,
    tabulate,
)
from mheads.trees.splitting.trace import TRAINING, CannotFollowError, Traced, trace


def chain_of(network: nn.Module, splits: Collection[str] = ()) -> Chain:
    """How a network is a chain; `splits` are names of layers that it is to be cut after, as far as they are known."""
    if callable(getattr(type(network), "stages", None)):
        return GraphChain.said_by(network)
    in_a_row = is_sequential(network) or "forward" in network.__dict__
    known = set(splits) <= {name for name, _ in children(network)}
    if (in_a_row and known) or any(hasattr(module, "takes") for module in network.modules()):
        return SequentialChain(network)
    try:
        if known and calls_its_children(trace(network, inside=False).graph, network):
            return SequentialChain(network)
        return GraphChain.of(network, trace(network))
    except CannotFollowError as error:
        return SequentialChain(network, str(error))


def finest_chain(network: nn.Module) -> Chain:
    """The chain with the most cuts: a tree that names only children does not look inside them.

    Children that hand on several values at once can be split after, and a graph cannot be cut there.
    """
    chain = chain_of(network)
    if (
        not isinstance(chain, SequentialChain)
        or chain.why is not None
        or any(hasattr(m, "takes") for m in network.modules())
    ):
        return chain
    try:
        graph = GraphChain.of(network, trace(network))
    except CannotFollowError:
        return chain
    found = {name for layer in graph.layers for name in (layer.name, *layer.also)}
    lost = any(layer.has_parameters and layer.name not in found for layer in chain.layers)
    tied = len(list(network.parameters())) < sum(len(list(child.parameters())) for _, child in children(network))
    return chain if lost and not tied else graph


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
        return _restored, (self.source, modules, others)


def _restored(source: str, modules: dict[str, str], others: dict[str, Any]) -> StageCode:
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
        return _rebuilt, (rows, pieces, [at[node] for node in self.row_counts], others)

    @staticmethod
    def of(network: nn.Module, traced: Traced) -> GraphChain:
        return _Cutting(network, traced).chain()

    @staticmethod
    def said_by(network: nn.Module) -> GraphChain:
        """The chain that a network's own method `stages` says."""
        graph = fx.Graph()
        value = given = graph.placeholder("x")
        paths = {id(module): path for path, module in network.named_modules(remove_duplicate=False)}
        layers, pieces = [], []
        for name, module in _said(network):
            called = [_path(network, paths, name, inner) for inner in _unrolled(paths, module)]
            nodes = []
            for path in called:
                value = graph.create_node("call_module", path, (value,))
                nodes.append(value)
            found = [network.get_submodule(path) for path in called]
            weighted = any(True for m in found for _ in m.parameters())
            layers.append(ChainLayer(name, weighted, any(map(is_dropout, found))))
            pieces.append(Piece(nodes, given, value))
            given = value
        uses = _Uses(network, [node for piece in pieces for node in piece.nodes])
        starts = [sum(len(piece.nodes) for piece in pieces[:i]) for i in range(1, len(pieces))]
        for start in starts:
            if start - 1 in uses.tied:
                raise UserError(
                    f"stages() of {type(network).__name__} uses {uses.tied[start - 1]} in more than one stage: what "
                    "shares weights must be in one"
                )
        statistics = getattr(network, "batch_statistics", False)
        return GraphChain(layers, pieces, unused=uses.unused, batch_statistics=statistics)

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
            module = next(m for source in sources if (m := _submodule(source, path)) is not None)
            _place(stage, path, sources)._modules[path.rpartition(".")[2]] = replace_dropout(module)
        for path in dict.fromkeys(path for node in nodes for path in _attributes(node)):
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
        there = next(m for source in sources if (m := _submodule(source, owner)) is not None and hasattr(m, name))
        place, tensor = _place(stage, path, sources), getattr(there, name)
        if isinstance(tensor, nn.Parameter):
            place.register_parameter(name, tensor)
        else:
            kept = name in there._buffers and name not in there._non_persistent_buffers_set
            place.register_buffer(name, tensor, persistent=kept)

    def _code(self, first: int, last: int) -> StageCode:
        graph = fx.Graph()
        found: dict[fx.Node, fx.Node] = {self.pieces[first].given: (x := graph.placeholder("x"))}

        def place(node: fx.Node) -> fx.Node:
            if node not in found:
                if node.op == "get_attr":
                    found[node] = graph.create_node("get_attr", node.target)
                else:
                    assert node in self.row_counts, f"{node} comes from a piece before"
                    found[node] = graph.call_function(nested_values.num_rows, (x,))
            return found[node]

        for piece in self.pieces[first : last + 1]:
            for node in piece.nodes:
                found[node] = graph.node_copy(node, place)
        graph.output(fx.map_arg(self.pieces[last].gives, place))
        code = graph.python_code("self")
        return StageCode(code.src, code.globals)


def _rebuilt(
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


class _Uses:
    """Which nodes use which weights: where one is used twice, nothing between can be cut.

    Buffers that functions read, such as a mask, may be in several pieces: a layer that changes one is found by running.
    """

    def __init__(self, network: nn.Module, nodes: Sequence[fx.Node]) -> None:
        found: dict[int, list[int]] = defaultdict(list)
        names = {id(t): name for name, t in (*network.named_parameters(), *network.named_buffers())}
        owned: set[int] = set()
        for i, node in enumerate(nodes):
            tensors: list[Any] = [_tensor(network, path) for path in _attributes(node)]
            owned |= {id(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter)}
            if node.op == "call_module":
                module = network.get_submodule(str(node.target))
                inside = [*module.parameters(), *module.buffers()]
                owned |= {id(tensor) for tensor in inside}
                tensors += inside
            for tensor in tensors:
                found[id(tensor)].append(i)
        self.tied: dict[int, str] = {}  # the name of a weight that is used both up to a node and after it
        for key, name in names.items():
            if key in owned:
                self.tied = dict.fromkeys(range(min(found[key]), max(found[key])), name) | self.tied
        self.unused = tuple(name for key, name in names.items() if key not in found)


class _Cutting:
    """Finds the pieces of a traced graph."""

    def __init__(self, network: nn.Module, traced: Traced) -> None:
        self.network, self.traced, graph = network, traced, traced.graph
        rewrite(graph)
        self.row_counts = frozenset(node for node in graph.nodes if is_row_count(node))
        sink(graph, self.row_counts)
        placeholder, *_, output = graph.nodes
        self.given, self.gives = placeholder, output.args[0]
        # The number of rows of the input is known everywhere: asking for it is no use of the input.
        of_input = {node for node in self.row_counts if node.all_input_nodes == [placeholder]}
        of_input |= {n for n in self.row_counts - of_input if n.all_input_nodes[0].all_input_nodes == [placeholder]}
        sizes = {node for node in placeholder.users if is_size(node) and of_input.issuperset(node.users)}
        known, kinds = of_input | sizes, ("placeholder", "get_attr", "output")
        self.nodes = [node for node in graph.nodes if node.op not in kinds and node not in known]
        self.uses = _Uses(network, self.nodes)
        self.at = {node: i for i, node in enumerate(self.nodes)}  # where a node is, or the last one before it
        last = -1
        for node in graph.nodes:
            last = self.at.setdefault(node, last)
        self.at[output] = len(self.nodes)
        self.users = {node: [user for user in node.users if user not in known] for node in graph.nodes}
        self.last_use = {node: max(map(self.at.__getitem__, users), default=-1) for node, users in self.users.items()}

    def chain(self) -> GraphChain:
        weighted = [self._has_parameters(node) for node in self.nodes]
        dropping = [self._drops(node) for node in self.nodes]
        anchors = [i for i, _ in enumerate(self.nodes) if weighted[i] or dropping[i]]
        if not any(weighted):
            raise UserError(f"{type(self.network).__name__} has no layer with parameters")
        cuts: list[int] = []
        for anchor, following in pairwise(anchors):
            legal = (p for p in range(following - 1, anchor - 1, -1) if self._crossing(p) is not None)
            cuts += [*islice(legal, 1)]  # what follows a layer and has no parameters is computed with it
        starts, stops = [0, *(cut + 1 for cut in cuts)], [*(cut + 1 for cut in cuts), len(self.nodes)]
        pieces: list[Piece] = []
        for start, stop in zip(starts, stops, strict=True):
            given = pieces[-1].gives if pieces else self.given
            gives = self._crossing(stop - 1) if stop < len(self.nodes) else self.gives
            pieces.append(Piece(self.nodes[start:stop], given, gives))
        layers = []
        taken: set[str] = set()
        gaps = [next((a for a in anchors if a > cut), len(self.nodes)) for cut in cuts] + [len(self.nodes)]
        ends = {path: self.at[node] for path, node in self.traced.ends}
        ends |= {path: i for i, node in enumerate(self.nodes) for path in _attributes(node) if self._is_parameter(path)}
        for start, stop, gap in zip(starts, stops, gaps, strict=True):
            inside = [a for a in anchors if start <= a < stop]
            last_anchor = max([a for a in inside if weighted[a]] or inside)
            here = {path: at for path, at in ends.items() if start <= at < gap and path not in taken}
            taken |= here.keys()
            by_path = sorted(here, key=lambda path: (path.count("."), -here[path]))
            called = [path for path in by_path if here[path] >= last_anchor and self._weighs(path)]
            name = called[0] if called else self._name_of(self.nodes[last_anchor])
            refused = [(path, self._why_not(path, here[path])) for path in by_path if path not in (name, *called)]
            has, drops = any(weighted[start:stop]), any(dropping[start:stop])
            layers.append(ChainLayer(name, has, drops, tuple(called[1:]), tuple(refused), bool(called)))
        statistics = getattr(self.network, "batch_statistics", False)
        by_function = frozenset(
            layer.name
            for layer, piece in zip(layers, pieces, strict=True)
            if any(node.target in FUNCTIONS.values() and node.kwargs.get("p", 0.5) != 0 for node in piece.nodes)
        )
        constants, unused = self.traced.constants, self.uses.unused
        return GraphChain(layers, pieces, self.row_counts, constants, unused, statistics, by_function)

    def _crossing(self, position: int) -> fx.Node | None:
        """The one value that goes on after the node at this position; None if there are more, or weights are tied."""
        found = self._alive(position)
        return found[0] if len(found) == 1 and position not in self.uses.tied else None

    def _alive(self, position: int) -> list[fx.Node]:
        nodes = [self.given, *self.nodes[: position + 1]]
        return [n for n in nodes if self.last_use[n] > position and n not in self.row_counts]

    def _is_parameter(self, path: str) -> bool:
        return isinstance(_tensor(self.network, path), nn.Parameter)

    def _has_parameters(self, node: fx.Node) -> bool:
        called = node.op == "call_module" and self._weighs(str(node.target))
        return called or any(map(self._is_parameter, _attributes(node)))

    def _weighs(self, path: str) -> bool:
        module = _submodule(self.network, path)
        return self._is_parameter(path) if module is None else any(True for _ in module.parameters())

    def _drops(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return is_dropout(self.network.get_submodule(str(node.target)))
        return node.target in FUNCTIONS.values()

    def _name_of(self, node: fx.Node) -> str:
        """Of a piece that no layer with parameters ends: the dropout that it is."""
        if node.op == "call_module":
            return str(node.target)
        inside = node.meta["inside"]
        return f"{inside}.{node.name}" if inside else node.name

    def _why_not(self, path: str, position: int) -> str:
        if not self._weighs(path):
            return "it has no parameters, so sharing up to it means nothing of its own"
        if position in self.uses.tied:
            return f"{self.uses.tied[position]} is used both up to there and after it"
        past = [n for n in self._alive(position) if n is not self.nodes[position]]
        said = []
        for node in past[:3]:
            user = max(self.users[node], key=self.at.__getitem__)
            said.append(f"from {self._label(node)} to {self._label(user)}")
        more = f" (and {len(past) - 3} more)" if len(past) > 3 else ""
        return f"the connection {' and that '.join(said)} passes it by{more}"

    def _label(self, node: fx.Node) -> str:
        if node.op in ("placeholder", "output"):
            return f"the {'input' if node.op == 'placeholder' else 'output'}"
        if node.op == "call_module":
            return repr(str(node.target))
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and is_size(node.args[0]):
            return f"size {node.args[1]} of {self._label(node.args[0].args[0])}"  # type: ignore[arg-type]
        name = getattr(node.target, "__name__", str(node.target))
        if node.meta["inside"]:
            return f"{name} in {node.meta['inside']!r}"
        before = [path for path, end in self.traced.ends if self.at[end] <= self.at[node]]
        return f"{name} after {before[-1]!r}" if before else name


def _attributes(node: fx.Node) -> list[str]:
    """Paths of the tensors that a node is given directly."""
    return [str(n.target) for n in node.all_input_nodes if n.op == "get_attr" and n.target != TRAINING]


def _tensor(network: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    module = _submodule(network, owner)
    return None if module is None else getattr(module, name, None)


def _submodule(source: nn.Module, path: str) -> nn.Module | None:
    module: nn.Module | None = source
    for name in path.split(".") if path else []:
        module = None if module is None else module._modules.get(name)
    return module


def _place(stage: nn.Module, path: str, sources: Sequence[nn.Module]) -> nn.Module:
    """What holds this path in a stage, made where it is not there."""
    atoms = path.split(".")[:-1]
    here = stage
    for name in atoms:
        if name not in here._modules:
            here._modules[name] = nn.Module()
        found = here._modules[name]
        assert found is not None
        here = found
    for source in sources:  # rates of the parameters that it holds itself
        there = _submodule(source, ".".join(atoms))
        if there is not None and hasattr(there, "multipliers"):
            here.multipliers = there.multipliers
    return here


def _said(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """What `stages` returns, checked."""
    kind = type(network).__name__
    found = network.stages()  # type: ignore[operator]
    pairs = list(found.items()) if isinstance(found, Mapping) else list(found)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], nn.Module)):
            raise UserError(f"stages() of {kind} gives {pair!r}: return a dict, or pairs, of names and modules")
    names = [str(name) for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if not pairs or twice is not None:
        raise UserError(f"stages() of {kind} gives {'nothing' if not pairs else f'{twice!r} twice'}")
    return [(str(name), module) for name, module in pairs]


def _unrolled(paths: Mapping[int, str], module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a stage runs: itself, or what a Sequential made for the purpose holds."""
    if id(module) in paths or type(module) is not nn.Sequential:
        yield module
    else:
        for child in module:
            yield from _unrolled(paths, child)


def _path(network: nn.Module, paths: dict[int, str], stage: str, module: nn.Module) -> str:
    """The path of a module in the network."""
    path = paths.get(id(module))
    if not path:
        raise UserError(
            f"stages() of {type(network).__name__} gives in {stage!r} a {type(module).__name__} that is no module "
            "inside the network: make it one in __init__, so that it and its weights have a name"
        )
    return path
