"""Trees: which layers are shared by which members.

A specification is one of
    4                                   four members with nothing in common
    {"conv1": 4}                        all share the layers up to and including conv1
    {"conv1": [{"conv2": 2}, 3]}        five share conv1; two of them go on together up to conv2
    {"conv1": {"conv2": 2, "conv3": 2}} four share conv1; two of them go on up to conv2, two up to conv3
so that `1` is a single model, and an int or a list at the top is a forest. `split="conv1"` is short for the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mheads.common.errors import UserError
from mheads.common.safe_yaml import as_plain
from mheads.trees.splitting.cut_sequential import ChainLayer

Spec = Any  # int | dict[str, Spec] | list[Spec]
Part = tuple[Any, Spec] | None  # a layer with what is below it, or a leaf
MAX_MEMBERS = 10_000  # at a split; the stages of many more would not fit in memory
LAYER = (
    'the layer {0} is split="{0}", in quotes that a shell leaves (\'split="{0}"\'), since a number says how many '
    "members share nothing"
)


@dataclass(frozen=True)
class Node:
    """One stage of the tree: consecutive layers, and the members that share them."""

    name: str
    layers: tuple[str, ...]
    members: tuple[int, ...]
    parent: str | None
    children: tuple[str, ...]


@dataclass(frozen=True)
class Tree:
    """All stages, parents before children, leaves in member order."""

    nodes: dict[str, Node]

    @cached_property
    def roots(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.parent is None]

    @cached_property
    def leaves(self) -> list[Node]:
        """The leaf of member 0, 1, ..."""
        return sorted((n for n in self.nodes.values() if not n.children), key=lambda n: n.members[0])

    @cached_property
    def depths(self) -> dict[str, int]:
        """How many stages are above each."""
        depths: dict[str, int] = {}
        for name, node in self.nodes.items():  # parents come before their children
            depths[name] = 0 if node.parent is None else depths[node.parent] + 1
        return depths

    @cached_property
    def child_index(self) -> dict[str, int]:
        """The place of each stage among its siblings."""
        return {child: i for node in self.nodes.values() for i, child in enumerate(node.children)}

    @property
    def num_members(self) -> int:
        return len(self.leaves)

    def path(self, member: int) -> list[Node]:
        """The stages of a member, root first."""
        path = [self.leaves[member]]
        while (parent := path[0].parent) is not None:
            path.insert(0, self.nodes[parent])
        return path

    def owners(self) -> dict[tuple[int, str], str]:
        """The stage of each (member, layer)."""
        return {(m, layer): node.name for node in self.nodes.values() for m in node.members for layer in node.layers}


def parse(spec: Spec, layers: Sequence[ChainLayer], members: int | None = None, network: str = "the network") -> Tree:
    """The tree of a specification over these layers; `members`, where given, must be its number of leaves."""
    if not any(layer.splittable for layer in layers):
        raise UserError(f"{network} has no layer with parameters")
    tree = _Parser(layers, network).grow_forest(spec)
    if members is not None and tree.num_members != members:
        names = [layer.name for layer in layers]
        hint = f"; {LAYER.format(spec)}" if isinstance(spec, int) and str(spec) in names else ""
        raise UserError(
            f"the tree {spec!r} has {tree.num_members} leaves, but members is {members}: they must be equal{hint}"
        )
    return tree


class _Parser:
    """Grows the stages of a specification over the layers of a network."""

    def __init__(self, layers: Sequence[ChainLayer], network: str) -> None:
        self.layers, self.network = layers, network
        self.names = [layer.name for layer in layers]
        self.places = {name: i for i, layer in enumerate(layers) for name in (layer.name, *layer.also)}
        self.nodes: dict[str, Node] = {}
        self.num_leaves = 0

    def grow_forest(self, spec: Spec) -> Tree:
        roots = list_parts(spec)
        for i, root in enumerate(roots):
            self.grow(root, "trunk" if len(roots) == 1 else str(i), 0, None)
        return Tree(self.nodes)

    def grow(self, part: Part, name: str, start: int, parent: str | None) -> tuple[int, ...]:
        """Adds the stage of a part that begins at layer `start`, and all below it; returns its members."""
        stop, parts = start, [part]
        while len(parts) == 1 and parts[0] is not None:  # a stage with one child is one longer stage
            layer, below = parts[0]
            stop, parts = self.stop_after(layer, stop), list_parts(below)
        if len(parts) == 1:
            self.num_leaves += 1
            self.nodes[name] = Node(name, tuple(self.names[start:]), (self.num_leaves - 1,), parent, ())
            return self.nodes[name].members
        called = str(layer).replace(".", "-")  # names of modules hold no dots
        prefix = called if name == "trunk" else f"{name}/{called}"
        children = tuple(f"{prefix}/{i}" for i in range(len(parts)))
        self.nodes[name] = node = Node(name, tuple(self.names[start:stop]), (), parent, children)
        members = [m for child, below in zip(children, parts, strict=True) for m in self.grow(below, child, stop, name)]
        self.nodes[name] = replace(node, members=tuple(members))
        return self.nodes[name].members

    def stop_after(self, name: Any, start: int) -> int:
        """The index after the last layer of a stage that begins at `start` and ends at layer `name`."""
        self.check_split(name, start)
        stop = end_of_stage(self.layers, self.places[name])
        if not any(layer.has_parameters for layer in self.layers[stop:]):
            usable = ", ".join(self.splittable[:-1])
            raise UserError(f"split {name!r} leaves no layer with parameters to the members; use one of {usable}")
        return stop

    @property
    def splittable(self) -> list[str]:
        return [layer.name for layer in self.layers if layer.splittable]

    def check_split(self, name: Any, start: int) -> None:
        """Raises an error if a stage that begins at `start` cannot end at layer `name`."""
        network, splittable = self.network, self.splittable
        for i, layer in enumerate(self.layers):
            reason = dict(layer.refused).get(name)
            if reason is not None and name not in self.places:
                before = [f"{n!r} before it" for n in self.names[:i] if n in splittable][-1:]
                after = [f"{n!r} after it" for n in self.names[i:-1] if n in splittable][:1]
                nearest = " and ".join(before + after)
                instead = f"the nearest cuts are {nearest}" if nearest else "it cannot be split anywhere"
                raise UserError(f"{network} cannot be split at {name!r}: {reason}; {instead}")
        if name not in self.places:
            hint = " (in YAML a colon needs a space after it)" if ":" in str(name) else ""
            raise UserError(
                f"split {name!r} is not a layer of {network}; layers with parameters: {', '.join(splittable)}{hint}"
            )
        if not self.layers[self.places[name]].splittable:
            raise UserError(
                f"split {name!r} has no parameters to share by itself; {network} can be split at "
                f"{', '.join(splittable[:-1]) or 'no layer'}"
            )
        if self.places[name] < start:
            above = next(n for n in reversed(self.names[:start]) if n in splittable)
            raise UserError(f"split {name!r} lies before its parent's split {above!r}; splits go downwards")


def end_of_stage(layers: Sequence[ChainLayer], last: int) -> int:
    """The index after the last layer that a stage computes if it is split after layer number `last`.

    Layers without parameters give every child the same values, so they are computed once, with the stage. Not those
    that differ between members: each branch draws masks of its own for dropout.
    """
    stop = last + 1
    while stop < len(layers) and not layers[stop].has_parameters and not layers[stop].differs:
        stop += 1
    return stop


def list_parts(spec: Spec) -> list[Part]:
    """The parts side by side in a specification: None for a leaf, (layer, spec) for a stage that splits again."""
    if isinstance(spec, bool) or not isinstance(spec, int | dict | list | tuple):
        raise UserError(f"a tree is made of numbers, {{layer: tree}} and lists, not {spec!r}")
    if isinstance(spec, int):
        if spec < 1:
            raise UserError(f"a tree needs at least one member at each split, not {spec}")
        if spec > MAX_MEMBERS:
            raise UserError(f"a tree has {spec:,} members at a split: give at most {MAX_MEMBERS:,}")
        return [None] * spec
    if not spec:
        raise UserError("an empty list or mapping in a tree: give the number of members there")
    if isinstance(spec, dict):
        return list(spec.items())
    return [part for item in spec for part in list_parts(item)]


def whole_spec(members: int | None, split: Spec | str | None) -> Spec:
    """The full specification of a tree that is given as a number of members and a split, or none."""
    members, split = as_plain(members), as_plain(split)
    if members is not None and (isinstance(members, bool) or not isinstance(members, int) or members < 1):
        raise UserError(f"members must be a whole number, at least 1, not {members!r}")
    if split is None:
        return 1 if members is None else members
    if isinstance(split, str):
        if members is None:
            raise UserError(f"split={split!r} needs the number of members")
        return {split: members}
    return split


def split_names(spec: Spec) -> set[str]:
    """The layers that a specification names."""
    if isinstance(spec, dict):
        return {str(name) for name in spec} | {name for below in spec.values() for name in split_names(below)}
    return {name for part in spec for name in split_names(part)} if isinstance(spec, list | tuple) else set()
