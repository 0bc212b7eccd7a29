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
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mheads.common.errors import UserError
from mheads.common.safe_yaml import as_plain
from mheads.trees.splitting.cut_sequential import ChainLayer

Spec = Any  # int | dict[str, Spec] | list[Spec]
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

    @property
    def num_members(self) -> int:
        return len(self.leaves)

    def path(self, member: int) -> list[Node]:
        """The stages of a member, root first."""
        node: Node | None = self.leaves[member]
        found: list[Node] = []
        while node is not None:
            found.append(node)
            node = None if node.parent is None else self.nodes[node.parent]
        return found[::-1]


def parse(spec: Spec, layers: Sequence[ChainLayer], members: int | None = None, network: str = "the network") -> Tree:
    """The tree of a specification over these layers; `members`, where given, must be its number of leaves."""
    names = [layer.name for layer in layers]
    splittable = [layer.name for layer in layers if layer.has_parameters or layer.ends]
    places = {name: layer.name for layer in layers for name in (layer.name, *layer.also)}
    refused = {name: (i, reason) for i, layer in enumerate(layers) for name, reason in layer.refused}
    nodes: dict[str, Node] = {}
    num_leaves = 0

    def last_shared(name: Any, start: int) -> int:
        """The index after the last layer of a stage that ends at layer `name`."""
        place = places.get(name)
        if place is None and name in refused:
            i, reason = refused[name]
            before = [f"{n!r} before it" for n in names[:i] if n in splittable][-1:]
            after = [f"{n!r} after it" for n in names[i:-1] if n in splittable][:1]
            nearest = " and ".join(before + after)
            instead = f"the nearest cuts are {nearest}" if nearest else "it cannot be split anywhere"
            raise UserError(f"{network} cannot be split at {name!r}: {reason}; {instead}")
        if place is None:
            hint = " (in YAML a colon needs a space after it)" if ":" in str(name) else ""
            raise UserError(
                f"split {name!r} is not a layer of {network}; layers with parameters: {', '.join(splittable)}{hint}"
            )
        if place not in splittable:
            raise UserError(
                f"split {name!r} has no parameters, so sharing up to it means nothing of its own; "
                f"{network} can be split at {', '.join(splittable[:-1]) or 'no layer'}"
            )
        stop = names.index(place) + 1
        if stop <= start:
            above = next(n for n in reversed(names[:start]) if n in splittable)
            raise UserError(f"split {name!r} lies before its parent's split {above!r}; splits go downwards")
        # Layers without parameters give every child the same values: computed once, with the stage.
        # Not dropout: each branch draws masks of its own.
        while stop < len(layers) and not layers[stop].has_parameters and not layers[stop].is_dropout:
            stop += 1
        if not any(layer.has_parameters for layer in layers[stop:]):
            usable = ", ".join(splittable[:-1])
            raise UserError(f"split {name!r} leaves no layer with parameters to the members; use one of {usable}")
        return stop

    def children_of(spec: Spec) -> list[Spec]:
        """The parts side by side in a specification: None for a leaf, (layer, spec) for a stage that splits again."""
        if isinstance(spec, bool) or not isinstance(spec, int | dict | list | tuple):
            raise UserError(f"a tree is made of numbers, {{layer: tree}} and lists, not {spec!r}")
        if isinstance(spec, int):
            if spec < 1:
                raise UserError(f"a tree needs at least one member at each split, not {spec}")
            return [None] * spec
        if not spec:
            raise UserError("an empty list or mapping in a tree: give the number of members there")
        if isinstance(spec, dict):
            return list(spec.items())
        return [part for item in spec for part in children_of(item)]

    def grow(part: Any, name: str, start: int, parent: str | None) -> tuple[int, ...]:
        """Adds the stage `part` that begins at layer `start`, and all below it; returns its members."""
        nonlocal num_leaves
        if part is None:
            num_leaves += 1
            nodes[name] = Node(name, tuple(names[start:]), (num_leaves - 1,), parent, ())
            return (num_leaves - 1,)
        layer, below = part
        stop = last_shared(layer, start)
        parts = children_of(below)
        while len(parts) == 1:  # a stage with one child is one longer stage
            if parts[0] is None:
                return grow(None, name, start, parent)
            layer, below = parts[0]
            stop = last_shared(layer, stop)
            parts = children_of(below)
        called = str(layer).replace(".", "-")  # names of modules hold no dots
        prefix = called if name == "trunk" else f"{name}/{called}"
        child_names = tuple(f"{prefix}/{i}" for i in range(len(parts)))
        nodes[name] = Node(name, tuple(names[start:stop]), (), parent, child_names)
        below_members = [grow(p, c, stop, name) for p, c in zip(parts, child_names, strict=True)]
        members = tuple(m for ms in below_members for m in ms)
        nodes[name] = Node(name, tuple(names[start:stop]), members, parent, child_names)
        return members

    if not splittable:
        raise UserError(f"{network} has no layer with parameters")
    roots = children_of(spec)
    for i, root in enumerate(roots):
        grow(root, "trunk" if len(roots) == 1 else str(i), 0, None)
    if members is not None and num_leaves != members:
        hint = f"; {LAYER.format(spec)}" if isinstance(spec, int) and str(spec) in names else ""
        raise UserError(
            f"the tree {spec!r} has {num_leaves} leaves, but members is {members}: they must be equal{hint}"
        )
    return Tree(nodes)


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
