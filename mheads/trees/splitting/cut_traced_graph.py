"""Cuts the graph of a network into a chain of pieces, wherever exactly one value goes from one to the next.

Between two layers with parameters there is at most one cut: after the functions that follow the first, so that members
share what they would all compute alike. Dropout begins a piece of its own, since members draw masks of their own.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

from torch import fx, nn

from mheads.common.errors import UserError
from mheads.networks.dropout import FUNCTIONS
from mheads.trees.splitting.cut_sequential import ChainLayer, differs
from mheads.trees.splitting.graph_chain import GraphChain, Piece, attributes_of, find_submodule, find_tensor
from mheads.trees.splitting.graph_nodes import is_row_count, is_size, rewrite, sink
from mheads.trees.splitting.trace import Traced


def cut_graph(network: nn.Module, traced: Traced) -> GraphChain:
    """The chain with a cut wherever one is possible."""
    return _Cutting(network, traced).chain()


class WeightUses:
    """Which nodes use which weights: where one is used twice, nothing between can be cut.

    Buffers that functions read, such as a mask, may be in several pieces: running finds a layer that changes one.
    """

    def __init__(self, network: nn.Module, nodes: Sequence[fx.Node]) -> None:
        users: dict[int, list[int]] = defaultdict(list)
        names = {id(t): name for name, t in (*network.named_parameters(), *network.named_buffers())}
        owned: set[int] = set()
        for i, node in enumerate(nodes):
            tensors: list[Any] = [find_tensor(network, path) for path in attributes_of(node)]
            owned |= {id(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter)}
            if node.op == "call_module":
                module = network.get_submodule(str(node.target))
                inside = [*module.parameters(), *module.buffers()]
                owned |= {id(tensor) for tensor in inside}
                tensors += inside
            for tensor in tensors:
                users[id(tensor)].append(i)
        self.tied: dict[int, str] = {}  # the name of a weight that is used both up to a node and after it
        for key, name in names.items():
            if key in owned:
                self.tied = dict.fromkeys(range(min(users[key]), max(users[key])), name) | self.tied
        self.unused = tuple(name for key, name in names.items() if key not in users)


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
        self.uses = WeightUses(network, self.nodes)
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
        ends |= {
            path: i for i, node in enumerate(self.nodes) for path in attributes_of(node) if self._is_parameter(path)
        }
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
        alive = self._alive(position)
        return alive[0] if len(alive) == 1 and position not in self.uses.tied else None

    def _alive(self, position: int) -> list[fx.Node]:
        nodes = [self.given, *self.nodes[: position + 1]]
        return [n for n in nodes if self.last_use[n] > position and n not in self.row_counts]

    def _is_parameter(self, path: str) -> bool:
        return isinstance(find_tensor(self.network, path), nn.Parameter)

    def _has_parameters(self, node: fx.Node) -> bool:
        called = node.op == "call_module" and self._weighs(str(node.target))
        return called or any(map(self._is_parameter, attributes_of(node)))

    def _weighs(self, path: str) -> bool:
        module = find_submodule(self.network, path)
        return self._is_parameter(path) if module is None else any(True for _ in module.parameters())

    def _drops(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return differs(self.network.get_submodule(str(node.target)))
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
        connections = []
        for node in past[:3]:
            user = max(self.users[node], key=self.at.__getitem__)
            connections.append(f"from {self._label(node)} to {self._label(user)}")
        more = f" (and {len(past) - 3} more)" if len(past) > 3 else ""
        return f"the connection {' and that '.join(connections)} passes it by{more}"

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
