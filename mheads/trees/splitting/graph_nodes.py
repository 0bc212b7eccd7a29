"""Nodes of fx graphs: which give sizes, what is rewritten for us, and whole graphs as flat tables."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mheads.networks.dropout import FUNCTIONS


def rewrite(graph: fx.Graph) -> None:
    """Functions that need another form here."""
    for node in graph.nodes:
        if node.op == "call_method" and node.target == "view":
            # Images are channels-last here, which a view of other sizes does not take.
            if not any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values())):
                node.target = "reshape"
        elif node.op == "call_function" and node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
    sizes = [node for node in graph.nodes if is_size(node)]
    for size in sizes:  # parts of a size are taken at once: the size itself then goes no further
        for user in list(size.users):
            if user.target is operator.getitem:
                size.append(user)


def is_size(node: fx.Node) -> bool:
    if node.op == "call_method" and node.target == "size":
        return len(node.args) == 1 and not node.kwargs
    return node.op == "call_function" and node.target is getattr and node.args[1:] == ("shape",)


def is_row_count(node: fx.Node) -> bool:
    """Whether a node gives the number of rows of a value. Examples come first wherever a network can be cut."""
    if node.op == "call_method" and node.target == "size":
        return node.args[1:] == (0,)
    if node.op == "call_function" and node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_size(node.args[0]) and node.args[1:] == (0,)
    return False


def sink(graph: fx.Graph, row_counts: frozenset[fx.Node]) -> None:
    """Moves what is computed from weights alone to where it is used."""
    fixed = set(row_counts)
    moved = []
    for node in graph.nodes:
        if node.op == "get_attr":
            fixed.add(node)
        elif node.users and node.all_input_nodes and fixed.issuperset(node.all_input_nodes) and node not in fixed:
            fixed.add(node)
            moved.append(node)
    for node in reversed(moved):
        next(n for n in graph.nodes if n in node.users).prepend(node)


@dataclass(frozen=True)
class At:
    """A node in a table, by its row."""

    row: int


def tabulate(graph: fx.Graph) -> tuple[list[tuple[Any, ...]], dict[fx.Node, At]]:
    """A graph as a row for each node, and where each node is.

    A node holds its neighbours: to pickle one is to pickle the next inside it, as deep as the network is long.
    """
    at = {node: At(row) for row, node in enumerate(graph.nodes)}
    rows = [(n.op, n.name, n.target, refer(n.args, at), refer(n.kwargs, at), n.meta.get("inside")) for n in at]
    return rows, at


def refer(value: Any, at: dict[fx.Node, At]) -> Any:
    """The value with rows of a table in place of nodes, also inside tuples, lists and dicts."""

    def replace(part: Any) -> Any:
        return at[part] if isinstance(part, fx.Node) else part

    return fx.node.map_aggregate(value, replace)


def resolve(value: Any, nodes: list[fx.Node]) -> Any:
    """The value with nodes in place of rows."""

    def replace(part: Any) -> Any:
        return nodes[part.row] if isinstance(part, At) else part

    return fx.node.map_aggregate(value, replace)


def rebuild(rows: list[tuple[Any, ...]]) -> list[fx.Node]:
    """The nodes of a new graph, one for each row."""
    graph, nodes = fx.Graph(), list[fx.Node]()
    for op, name, target, args, kwargs, inside in rows:
        node = graph.create_node(op, target, resolve(args, nodes), resolve(kwargs, nodes), name)
        node.meta["inside"] = inside
        nodes.append(node)
    return nodes
