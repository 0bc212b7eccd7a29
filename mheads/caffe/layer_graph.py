"""Which layers a phase and a rank have, and what feeds what: a net as steps over values that are written once.

Ranks are those of MPI-Caffe: a layer is on the ranks that its rules name, or on all. The steps of all ranks together
are one graph, in which MPIBroadcast and MPIGather hand values from rank to rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mheads.caffe.prototxt import CaffeLayer, Net
from mheads.common.errors import UserError

TRAIN, TEST = 0, 1
MAX_RANKS = 1024
BROADCAST, GATHER = "MPIBroadcast", "MPIGather"
LEARNING = ("Convolution", "Deconvolution", "InnerProduct", "PReLU", "BatchNorm", "Scale", "Bias")  # they have weights


@dataclass(frozen=True)
class NetState:
    """What rules are met by."""

    phase: int = TRAIN
    stages: frozenset[str] = frozenset()
    level: int = 0


@dataclass(frozen=True)
class Blob:
    """A value: the blob of this name on a rank, after it was written so many times."""

    name: str
    rank: int
    version: int = 0


@dataclass(frozen=True)
class GraphStep:
    """A layer on a rank. Of MPIBroadcast and MPIGather there is one for the whole group, on the rank of their root."""

    layer: CaffeLayer
    rank: int
    bottoms: tuple[Blob, ...]
    tops: tuple[Blob, ...]
    group: tuple[int, ...] = ()  # the ranks of a broadcast or gather, in the order they are listed


@dataclass
class Graph:
    """The steps of a phase on all ranks, each after what it needs."""

    net: Net
    state: NetState
    ranks: list[int]
    steps: list[GraphStep] = field(default_factory=list)

    @property
    def last(self) -> dict[Blob, GraphStep]:
        """The step that makes a value."""
        return {top: step for step in self.steps for top in step.tops}


def is_data(layer: CaffeLayer) -> bool:
    """Whether a layer brings examples from outside: those without a bottom."""
    return layer.type in DATA or (layer.type == "Python" and not layer.message.bottom)


DATA = (
    "Data", "ImageData", "HDF5Data", "DummyData", "Input", "MemoryData", "WindowData", "AnnotatedData",
)  # fmt: skip


def world_of(net: Net) -> list[int]:
    """The ranks that a net speaks of; a net that says nothing of ranks has one."""
    size = 1
    for layer in net.layers:
        for rule in (*layer.message.include, *layer.message.exclude):
            for rank in rule.mpi_rank:
                if not 0 <= rank < MAX_RANKS:
                    raise layer.refuse(f"mpi_rank: {rank}: ranks are counted from 0 to {MAX_RANKS - 1}")
                size = max(size, rank + 1)
        if layer.type == GATHER and not any(rule.mpi_rank for rule in (*layer.message.include, *layer.message.exclude)):
            size = max(size, len(layer.tops))  # on all ranks, with a top for each
    return list(range(size))


def matches_rule(rule: Any, state: NetState, rank: int) -> bool:
    if rule.HasField("phase") and rule.phase != state.phase:
        return False
    if rule.HasField("min_level") and state.level < rule.min_level:
        return False
    if rule.HasField("max_level") and state.level > rule.max_level:
        return False
    if not set(rule.stage) <= state.stages or set(rule.not_stage) & state.stages:
        return False
    return not rule.mpi_rank or rank in rule.mpi_rank


def ranks_of(layer: CaffeLayer, state: NetState, world: Sequence[int]) -> list[int]:
    """The ranks that have a layer in a state, in the order in which its rules list them."""
    include, exclude = layer.message.include, layer.message.exclude
    if include and exclude:
        raise layer.refuse("it has both include and exclude: say with one of them where it belongs")
    if not include:
        return [rank for rank in world if not any(matches_rule(rule, state, rank) for rule in exclude)]
    ranks: dict[int, None] = {}
    for rule in include:
        listed = list(rule.mpi_rank) or list(world)
        ranks |= dict.fromkeys(rank for rank in listed if matches_rule(rule, state, rank))
    return list(ranks)


def graph_of(net: Net, state: NetState | None = None) -> Graph:
    """The graph of a state; refuses what Caffe and MPI-Caffe refuse, with the layer, its line and the remedy."""
    state = state or NetState()
    graph = Graph(net, state, world_of(net))
    known: dict[int, dict[str, Blob]] = {rank: {} for rank in graph.ranks}
    names: dict[tuple[str, int], CaffeLayer] = {}
    for layer in net.layers:
        if not layer.type:
            raise layer.refuse('it has no type: give one, such as type: "Convolution"')
        ranks = ranks_of(layer, state, graph.ranks)
        for rank in ranks:
            other = names.setdefault((layer.name, rank), layer)
            # Caffe takes any names; only weights, which are kept by name, need one of their own.
            if other is not layer and layer.name and (layer.type in LEARNING or other.type in LEARNING):
                raise layer.refuse(
                    f"line {other.line} has a layer of this name too: weights are kept by name, so rename one"
                )
        if layer.type in (BROADCAST, GATHER):
            if ranks:
                graph.steps.append(_between_ranks(layer, ranks, known, net))
            continue
        for rank in ranks:
            bottoms = [_bottom(layer, name, rank, known, net) for name in layer.bottoms]
            tops = [_top(layer, i, rank, known, net) for i in range(len(layer.tops))]
            graph.steps.append(GraphStep(layer, rank, tuple(bottoms), tuple(tops)))
    if not graph.steps:
        raise UserError(f"{net.file} has no layer in phase {'TEST' if state.phase else 'TRAIN'}: look at its rules")
    return graph


def _between_ranks(layer: CaffeLayer, group: list[int], known: dict[int, dict[str, Blob]], net: Net) -> GraphStep:
    """A broadcast or a gather: one step of its group."""
    root, who = layer.message.mpi_param.root, _ranks(group)
    if root not in group:
        raise layer.refuse(
            f"its root is rank {root}, which does not hold it: {who} do; list rank {root} in its rule, or give "
            f"mpi_param {{ root: {group[0]} }}"
        )
    if len(layer.bottoms) != 1:
        raise layer.refuse(f"it has {len(layer.bottoms)} bottoms: give the one blob that goes from rank to rank")
    if layer.type == BROADCAST:
        if len(layer.tops) != 1:
            raise layer.refuse(f"it has {len(layer.tops)} tops: give one, which each of its ranks gets")
        bottom = _bottom(layer, layer.bottoms[0], root, known, net)
        return GraphStep(layer, root, (bottom,), tuple(_top(layer, 0, r, known, net) for r in group), tuple(group))
    if len(layer.tops) != len(group):
        raise layer.refuse(
            f"it has {len(layer.tops)} tops for {who}: give one for each rank of its group, in the order in which they "
            "are listed, or change its rule"
        )
    missing = [rank for rank in group if layer.bottoms[0] not in known[rank]]
    if missing:
        raise layer.refuse(
            f"its bottom {layer.bottoms[0]!r} is not there on {_ranks(missing)}, which hold it as {_ranks(group)} do: "
            "put the layer that makes it on these ranks, or leave them out of this rule"
        )
    bottoms = tuple(_bottom(layer, layer.bottoms[0], rank, known, net) for rank in group)
    tops = tuple(_top(layer, i, root, known, net) for i in range(len(layer.tops)))
    return GraphStep(layer, root, bottoms, tops, tuple(group))


def _bottom(layer: CaffeLayer, name: str, rank: int, known: dict[int, dict[str, Blob]], net: Net) -> Blob:
    if name not in known[rank]:
        elsewhere = [other for other, blobs in known.items() if name in blobs]
        on = f" on rank {rank}" if len(known) > 1 else ""
        later = [other.line for other in net.layers if name in other.message.top]
        if elsewhere:
            remedy = f"it is on {_ranks(elsewhere)}: bring it there with MPIBroadcast, or put this layer where it is"
        elif later:
            remedy = f"the layer of line {later[0]} makes it later, or in another phase: layers follow what they use"
        else:
            remedy = f"there are {', '.join(known[rank]) or 'none'}"
        raise layer.refuse(f"its bottom {name!r} is not there{on}: {remedy}")
    return known[rank][name]


def _top(layer: CaffeLayer, i: int, rank: int, known: dict[int, dict[str, Blob]], net: Net) -> Blob:
    """The value that a top is; a name that is there already may only be written by a layer that works in place."""
    name, before = layer.tops[i], known[rank].get(layer.tops[i])
    if name in layer.tops[:i]:
        raise layer.refuse(f"its top {name!r} is there twice: give each a name of its own")
    if before is not None and name not in layer.bottoms:
        other = next(o.line for o in net.layers if name in o.message.top)
        raise layer.refuse(
            f"its top {name!r} is made by the layer of line {other} too: give it another name, or the same as its "
            "bottom to work in place"
        )
    known[rank][name] = blob = Blob(name, rank, 0 if before is None else before.version + 1)
    return blob


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
