"""Trees: which layers are shared by which members.

A specification is one of
    4                                   four members with nothing in common
    {"conv1": 4}                        all share the layers up to and including conv1
    {"conv1": [{"conv2": 2}, 3]}        five share conv1; two of them go on together up to conv2
    {"conv1": {"conv2": 2, "conv3": 2}} four share conv1; two of them go on up to conv2, two up to conv3
so that `1` is a single model, and an int or a list at the top is a forest. `split="conv1"` is short for the second.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mheads import seeds, values
from mheads.device import refuse_beyond_memory
from mheads.errors import UserError
from mheads.models.layers import Dropout, has_batch_statistics, is_dropout, keyed_masks, replace_dropout
from mheads.values import Value

Spec = Any  # int | dict[str, Spec] | list[Spec]


@dataclass(frozen=True)
class Layer:
    """What a tree needs to know of a layer in order to split after it."""

    name: str
    has_parameters: bool
    is_dropout: bool


@dataclass(frozen=True)
class Node:
    """One stage of the tree: a run of layers and the members that share it."""

    name: str
    layers: tuple[str, ...]
    members: tuple[int, ...]
    parent: str | None
    children: tuple[str, ...]


@dataclass(frozen=True)
class Tree:
    """All stages, parents before children, leaves in member order."""

    nodes: dict[str, Node]

    @property
    def roots(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.parent is None]

    @property
    def leaves(self) -> list[Node]:
        """The leaf of member 0, 1, ..."""
        return sorted((n for n in self.nodes.values() if not n.children), key=lambda n: n.members[0])

    @property
    def num_members(self) -> int:
        return len(self.leaves)

    def path(self, member: int) -> list[Node]:
        """The stages of a member, root first."""
        return [node for node in self.nodes.values() if member in node.members]


def parse(spec: Spec, layers: Sequence[Layer], members: int | None = None, network: str = "the network") -> Tree:
    """The tree of a specification over these layers; `members`, where given, must be its number of leaves."""
    names = [layer.name for layer in layers]
    splittable = [layer.name for layer in layers if layer.has_parameters]
    nodes: dict[str, Node] = {}
    num_leaves = 0

    def last_shared(name: Any, start: int) -> int:
        """The index after the last layer of a stage that ends at layer `name`."""
        if name not in names:
            hint = " (in YAML a colon needs a space after it)" if ":" in str(name) else ""
            raise UserError(
                f"split {name!r} is not a layer of {network}; layers with parameters: {', '.join(splittable)}{hint}"
            )
        if name not in splittable:
            raise UserError(
                f"split {name!r} has no parameters, so sharing up to it means nothing of its own; "
                f"{network} can be split at {', '.join(splittable)}"
            )
        stop = names.index(name) + 1
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
        prefix = layer if name == "trunk" else f"{name}/{layer}"
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
        raise UserError(f"the tree {spec!r} has {num_leaves} leaves, but members is {members}: they must be equal")
    return Tree(nodes)


def whole_spec(members: int | None, split: Spec | str | None) -> Spec:
    """The specification that a number of members and a split, or the lack of one, are short for."""
    if members is not None and members < 1:
        raise UserError(f"members must be at least 1, not {members}")
    if split is None:
        return 1 if members is None else members
    if isinstance(split, str):
        if members is None:
            raise UserError(f"split={split!r} needs the number of members")
        return {split: members}
    return split


class Stage(nn.Sequential):
    """A run of named layers with weights of its own.

    A layer whose attribute `takes` names a side input of the batch (regions of interest, say) is called with it as
    second argument.
    """

    def forward(self, x: Value, side: dict[str, Value] | None = None) -> Value:
        for layer in self:
            takes = getattr(layer, "takes", None)
            x = layer(x) if takes is None else layer(x, (side or {})[takes])
        return x


def canonical(x: Tensor) -> Tensor:
    """The tensor with canonical strides: channels-last for images, contiguous otherwise.

    Strides decide the bits of a convolution, and tensors with one channel or one row can hold the same values under
    several strides that all count as contiguous; so strides are compared, not asked about.
    """
    if x.dim() == 4:
        _, c, h, w = x.shape
        strides: tuple[int, ...] = (h * w * c, 1, w * c, c)
    else:
        strides = torch.empty(x.shape, device="meta").stride()
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


class TreeNet(nn.Module):
    """An ensemble whose members share their first layers as a tree says.

    `network_factory` makes one network: any module whose children, run one after the other, are the network.
    `split` is the name of the last shared layer or a tree, `tree` a tree; neither means independent members.
    Weights follow from `seed`: a stage takes those of the network drawn for its first member, and `init="same"`
    draws one network for all. `only` names the stages to build, if others are in other processes.
    """

    def __init__(
        self,
        network_factory: Callable[[], nn.Module],
        members: int | None = None,
        split: Spec | str | None = None,
        tree: Spec | None = None,
        seed: int = 0,
        init: str = "random",
        only: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        if split is not None and tree is not None:
            raise UserError("give either split or tree, not both")
        if init not in ("random", "same"):
            raise UserError(f"init is 'random' or 'same', not {init!r}")
        self.spec = spec = whole_spec(members, tree if tree is not None else split)
        self.init = init

        def draw(member: int) -> nn.Module:
            # The factories of torch draw from the global generator: seed it for this network alone.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seeds.derive(seed, "weights", 0 if init == "same" else member))
                network = network_factory()
            if not isinstance(network, nn.Module):
                raise UserError(f"the factory gives a {type(network).__name__}, not an nn.Module: return the network")
            return network

        first = draw(0)
        self.network_name = getattr(network_factory, "__name__", type(first).__name__)
        # A lambda or a local function can only be named, not imported again: mheads.load then asks for it.
        qualified = getattr(network_factory, "__qualname__", self.network_name)
        module = getattr(network_factory, "__module__", "__main__") if "<" not in qualified else "__main__"
        self.network_path = f"{module}:{qualified}"
        self.tree = parse(spec, describe(first), members, self.network_name)
        self._draw = draw
        # A module that is no plain Sequential may do more in its forward than call its children: see probe().
        self._is_sequential = type(first).forward is nn.Sequential.forward
        self._facts = _LayerFacts.of(first)
        own = [name for name in self.tree.nodes if only is None or name in only]
        refuse_beyond_memory(self.num_bytes(own), f"the weights of {self.num_members:,} members")
        stages: dict[str, Stage] = {}
        for member in sorted({self.tree.nodes[name].members[0] for name in own}):
            network = dict(children(first if member == 0 else draw(member)))
            for name in own:
                node = self.tree.nodes[name]
                if node.members[0] == member:
                    stages[name] = Stage(OrderedDict((n, replace_dropout(network[n])) for n in node.layers))
        self.stages = nn.ModuleDict({name: stages[name] for name in own})
        if sum(p.numel() for s in stages.values() for p in s.parameters()) != sum(p.numel() for p in self.parameters()):
            raise UserError(f"layers of {self.network_name} on both sides of a split share a parameter")
        for module in self.modules():
            if getattr(module, "inplace", False) is True:
                module.inplace = False  # type: ignore[assignment]  # siblings are given the same tensor
        for parameter in self.parameters():
            parameter.data = canonical(parameter.data)

    @property
    def num_members(self) -> int:
        return self.tree.num_members

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters()), self._facts.dtype)

    def stage(self, name: str) -> Stage:
        return self.stages[name]  # type: ignore[return-value]

    def forward(self, x: Value, side: dict[str, Value] | None = None) -> Value:
        """Outputs of all members, [M, B, C]; every stage runs once."""
        given: dict[str | None, Value] = {None: values.map_leaves(_channels_last, x)}
        for node in self.tree.nodes.values():
            given[node.name] = self.stage(node.name)(given[node.parent], side)
        return values.map_leaves(lambda *parts: torch.stack(parts), *(given[n.name] for n in self.tree.leaves))

    def member(self, m: int) -> nn.Sequential:
        """Member m as an ordinary network; it shares its weights with this tree (deepcopy it to part them)."""
        if not 0 <= m < self.num_members:
            raise UserError(f"member {m} of {self.num_members}: they are counted from 0 to {self.num_members - 1}")
        return Stage(OrderedDict(pair for node in self.tree.path(m) for pair in children(self.stage(node.name))))

    def num_parameters(self) -> int:
        """Of the whole tree, wherever its stages are."""
        return sum(self._facts.size(node) for node in self.tree.nodes.values())

    def num_bytes(self, stages: Collection[str] | None = None) -> int:
        """Of the weights of these stages, by default of those that are here."""
        here = self.stages if stages is None else stages
        size = torch.empty(0, dtype=self._facts.dtype).element_size()
        return size * sum(self._facts.size(self.tree.nodes[name]) for name in here)

    def num_independent_parameters(self) -> int:
        """Parameters of the same members with nothing shared."""
        return sum(self._facts.size(node) * len(node.members) for node in self.tree.nodes.values())

    @torch.no_grad()
    def copy_weights(self, source: TreeNet) -> None:
        """Takes over the weights of another tree of the same layers, member by member; one member serves all."""
        for name in self.stages:
            node = self.tree.nodes[name]
            donor = source.member(node.members[0] if source.num_members > 1 else 0).state_dict()
            for key, tensor in self.stage(name).state_dict().items():
                if key not in donor or donor[key].shape != tensor.shape:
                    got = tuple(donor[key].shape) if key in donor else "nothing"
                    here = tuple(tensor.shape)
                    raise UserError(f"cannot start from those weights: {key} is {here} here, {got} there")
                tensor.copy_(donor[key])

    def has_dropout(self) -> bool:
        """Whether members draw masks of their own: dropout in a leaf, with something to drop."""
        return any(name in self._facts.dropout for leaf in self.tree.leaves for name in leaf.layers)

    def is_parameter(self, name: str) -> bool:
        """Whether `layer.name` is a weight, not a buffer."""
        return name in self._facts.names

    def batch_statistics_layers(self) -> list[str]:
        """Layers anywhere in the tree that need the whole batch."""
        found = self._facts.statistics
        return [f"{node.name}.{name}" for node in self.tree.nodes.values() for name in node.layers if name in found]

    @torch.no_grad()
    def probe(self, x: Value, side: dict[str, Value] | None = None) -> Value:
        """Runs member 0 once, layer by layer, and refuses networks that a tree would silently get wrong.

        Returns its output, so that the caller can look at the shape.
        """
        member = self._first_member()
        for name, module in member.named_modules():
            if any(type(hook).__module__.startswith("torch.nn.utils.") for hook in module._forward_pre_hooks.values()):
                raise UserError(
                    f"layer {name!r} of {self.network_name} is rewritten before each call (the old weight_norm, "
                    "spectral_norm or prune), which threads must not do at once; use torch.nn.utils.parametrizations"
                )
        stateful = {n for n, layer in children(member) if has_batch_statistics(layer)}
        statistics = {name: buffer.clone() for name, buffer in member.named_buffers()}
        modes = [module.training for module in member.modules()]
        member.train()
        h = x
        with torch.random.fork_rng(devices=[]):
            for name, layer in children(member):
                before = torch.get_rng_state()
                given, versions = h, [t._version for t in values.leaves(h)]
                takes = getattr(layer, "takes", None)
                with keyed_masks(("probe",), values.num_rows(h)):
                    try:
                        h = layer(h) if takes is None else layer(h, (side or {})[takes])
                    except (RuntimeError, ValueError, TypeError) as error:
                        shapes = [tuple(t.shape) for t in values.leaves(h)]
                        raise UserError(
                            f"layer {name!r} of {self.network_name} fails on an input of shape "
                            f"{shapes[0] if len(shapes) == 1 else shapes}: {error}"
                        ) from error
                if [t._version for t in values.leaves(given)] != versions:
                    raise UserError(
                        f"layer {name!r} of {self.network_name} changes its input in place, which other members may "
                        "still need: let it work on a copy"
                    )
                if not torch.equal(before, torch.get_rng_state()):
                    raise UserError(
                        f"layer {name!r} of {self.network_name} draws random numbers from torch's global generator, "
                        "so results would depend on the order of threads; use mheads.Dropout, or "
                        "mheads.models.layers.draw_mask for noise of your own"
                    )
        for name, buffer in member.named_buffers():
            owner = name.split(".")[0]
            if owner not in stateful and not torch.equal(buffer, statistics[name]):
                raise UserError(
                    f"layer {owner!r} of {self.network_name} changes its buffer {name!r} in training, so micro-batches "
                    "must not overlap; set batch_statistics = True on that module to have them run one by one"
                )
            buffer.copy_(statistics[name])
        for module, mode in zip(member.modules(), modes, strict=True):
            module.training = mode
        if not self._is_sequential:
            self._compare_with_reference(x)
        return h

    def _first_member(self) -> nn.Sequential:
        """Member 0, or a network like it where some of its stages are in other processes."""
        if all(node.name in self.stages for node in self.tree.path(0)):
            return self.member(0)
        network = children(self._draw(0))
        return Stage(OrderedDict((name, replace_dropout(layer)) for name, layer in network)).to(self.dtype)

    def _compare_with_reference(self, x: Value) -> None:
        """The children run in a row must give what the module's own forward gives."""
        with torch.random.fork_rng(devices=[]):
            module = replace_dropout(self._draw(0)).train().to(values.leaves(x)[0].dtype)
            before = torch.get_rng_state()
            with keyed_masks(("probe",), values.num_rows(x)):
                module(x)
            if not torch.equal(before, torch.get_rng_state()):
                raise UserError(
                    f"the forward of {self.network_name} draws random numbers itself (F.dropout?), which running its "
                    "children one after the other would leave out; make it a child, nn.Dropout for example"
                )
        module = self._draw(0).eval().to(values.leaves(x)[0].dtype)
        expected = module(x)
        got = nn.Sequential(OrderedDict(children(module)))
        try:
            same = all(
                a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
                for a, b in zip(values.leaves(expected), values.leaves(got(x)), strict=True)
            )
        except (RuntimeError, ValueError, TypeError):
            same = False
        if not same:
            raise UserError(
                f"the children of {self.network_name} run one after the other do not give what its forward gives "
                "(a reshape, activation or skip connection inside forward?); make each such step a child, "
                "for example nn.Flatten(), or wrap a block with its skip connection in one module"
            )


@dataclass(frozen=True)
class _LayerFacts:
    """What is known of the layers of every member from looking at one."""

    names: frozenset[str]  # of the parameters
    parameters: dict[str, dict[int, int]]  # of each layer: identity -> size, since layers may share a weight
    statistics: frozenset[str]
    dropout: frozenset[str]
    dtype: torch.dtype

    @staticmethod
    def of(network: nn.Module) -> _LayerFacts:
        layers = children(network)
        drops = (Dropout, nn.modules.dropout._DropoutNd)
        return _LayerFacts(
            frozenset(f"{name}.{key}" for name, layer in layers for key, _ in layer.named_parameters()),
            {name: {id(p): p.numel() for p in layer.parameters()} for name, layer in layers},
            frozenset(name for name, layer in layers if has_batch_statistics(layer)),
            frozenset(n for n, layer in layers if any(isinstance(m, drops) and m.p > 0 for m in layer.modules())),
            next(network.parameters()).dtype,
        )

    def size(self, node: Node) -> int:
        return sum({k: v for name in node.layers for k, v in self.parameters[name].items()}.values())


def children(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and children in order; unlike named_children, one that occurs twice (a ReLU, often) is listed twice."""
    return [(name, child) for name, child in network._modules.items() if child is not None]


def describe(network: nn.Module) -> list[Layer]:
    """The layers of a network: its children, in order."""
    layers = [
        Layer(name, any(True for _ in child.parameters()), is_dropout(child)) for name, child in children(network)
    ]
    if not layers:
        raise UserError(f"{type(network).__name__} has no children to make a tree of; return an nn.Sequential, say")
    return layers


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
