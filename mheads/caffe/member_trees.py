"""The tree that the ranks of a net make of it.

Ranks that share what MPIBroadcast hands them, go on with layers of the same names, and come together after MPIGather
(or each at a loss of its own) are the members of a tree. The examples are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mheads.caffe.build_modules import aliases
from mheads.caffe.layer_graph import LEARNING, TRAIN, Blob, Graph, NetState, graph_of
from mheads.caffe.layers import kind_of
from mheads.caffe.layers.concat_eltwise_reshape import SUM
from mheads.caffe.net_plan import (
    LossTerm,
    NetPlan,
    Walk,
    check_labels,
    find_terms,
    one_input,
    order_outputs,
    plan_whole_net,
)
from mheads.caffe.prototxt import CaffeLayer, Net
from mheads.trees.tree_spec import Spec

ROUNDING = 1e-5  # relative: coefficients are written with a few digits, 0.333333


def plan_of(net: Net, stages: Sequence[str] = (), level: int = 0) -> NetPlan:
    """How a net is trained, as a tree if its ranks make one, else as one network of all that its ranks hold."""
    graph = graph_of(net, NetState(TRAIN, frozenset((*net.state.stage, *stages)), level or net.state.level))
    for step in graph.steps:
        kind_of(step.layer)  # also of layers that no loss needs
    walk = Walk(graph)
    terms = find_terms(graph, walk)
    plan = _find_tree(graph, walk, terms) if len(graph.ranks) > 1 and terms else None
    plan = plan or plan_whole_net(graph, walk, terms)
    check_labels(walk, plan.inputs, terms)
    return plan


def _find_tree(graph: Graph, walk: Walk, terms: list[LossTerm]) -> NetPlan | None:
    """The plan of a net whose ranks are members of a tree; None if they are not."""
    members = _find_members(walk, terms)
    if members is None:
        return None
    leaves, combine, of = members  # the outputs of each member, in the order of a term's inputs
    if len(leaves) < 2:
        return None
    paths = []
    for outputs in leaves:
        steps, inputs = walk.steps_needed(outputs)
        paths.append([step for step in steps if not aliases(step)])
    first = [step.layer for step in paths[0]]
    if any([id(s.layer) for s in path] != [id(layer) for layer in first] for path in paths):
        return None  # members of different layers
    learning = [i for i, layer in enumerate(first) if layer.type in LEARNING]
    owners = [[path[i].rank for i in learning] for path in paths]
    names = [first[i].name for i in learning]
    if not all(_refines([o[i] for o in owners], [o[i + 1] for o in owners]) for i in range(len(learning) - 1)):
        return None  # what was apart comes together again
    if len({tuple(o) for o in owners}) < len(paths):
        return None  # two members that are one
    if _shares_across([first[i] for i in learning], owners):
        return None
    order, split = _grow(owners, names)
    steps, inputs = walk.steps_needed(leaves[order[0]])
    outputs = leaves[order[0]]
    terms = [replace(t, inputs=tuple(b if b is None else outputs[_position(of, b)] for b in t.inputs)) for t in of]
    if isinstance(combine, tuple):
        combine = tuple(combine[m] for m in order)
    chosen = order_outputs(terms)
    return NetPlan(
        graph, tuple(steps), one_input(graph, inputs), tuple(chosen), tuple(terms), len(paths), split, combine
    )


def _shares_across(learning: Sequence[CaffeLayer], owners: Sequence[Sequence[int]]) -> bool:
    """Whether a rank shares a weight between layers that do not belong to the same members."""
    names = [{spec.name for spec in layer.message.param if spec.name} for layer in learning]
    columns = list(zip(*owners, strict=True))
    return any(
        names[i] & names[j] and columns[i] != columns[j] and any(a == b for a, b in zip(*pair, strict=True))
        for i in range(len(names))
        for j in range(i)
        if (pair := (columns[i], columns[j]))
    )


def _position(of: Sequence[LossTerm], blob: Blob) -> int:
    blobs = list(dict.fromkeys(b for term in of for b in term.inputs if b is not None))
    return blobs.index(blob)


Members = tuple[list[list[Blob]], Any, list[LossTerm]]


def _find_members(walk: Walk, terms: list[LossTerm]) -> Members | None:
    """What each member gives to the losses, how that comes together, and the losses of one of them."""
    by_rank: dict[int, list[LossTerm]] = {}
    for term in terms:
        by_rank.setdefault(term.step.rank, []).append(term)
    if len(by_rank) > 1:
        kinds = [[id(term.step.layer) for term in own] for own in by_rank.values()]
        if any(kind != kinds[0] for kind in kinds):
            return None
        leaves = [list(dict.fromkeys(b for t in own for b in t.inputs if b is not None)) for own in by_rank.values()]
        return leaves, None, next(iter(by_rank.values()))
    (own,) = by_rank.values()
    if len(own) == 1 and own[0].inputs[0] is not None and own[0].inputs[1:] == (None,):
        return _find_averaged(walk, own[0])
    simple = [t for t in own if t.inputs[0] is not None and t.inputs[1:] == (None,)]
    alike = {(t.step.layer.type, t.weight, str(t.step.layer.message.loss_param)) for t in own}
    if len(simple) == len(own) and len(alike) == 1:
        leaves = [[b for b in t.inputs if b is not None] for t in own]
        if len({b.rank for (b,) in leaves}) == len(leaves):  # each from a rank of its own, through a gather
            return leaves, None, own[:1]
    return None


def _find_averaged(walk: Walk, term: LossTerm) -> Members | None:
    """The members whose sum a loss looks at."""
    (blob, _), layer = term.inputs, term.step.layer
    assert blob is not None
    step = walk.made_by[blob]
    if step.layer.type != "Eltwise" or step.layer.message.eltwise_param.operation != SUM:
        return None
    leaves = [walk.resolve(b) for b in step.bottoms]
    if len({leaf.rank for leaf in leaves}) < len(leaves):
        return None
    given = list(step.layer.message.eltwise_param.coeff) or [1.0] * len(leaves)
    if len(given) != len(leaves):
        return None  # refused where it is made
    equal = all(abs(c * len(leaves) - 1) < ROUNDING for c in given)
    if layer.type == "MultinomialLogisticLoss":
        made = [walk.made_by[leaf] for leaf in leaves]
        if not equal or term.weight != 1 or any(s.layer.type != "Softmax" for s in made):
            return None
        leaves = [walk.resolve(s.bottoms[0]) for s in made]
        return [[leaf] for leaf in leaves], "probabilities", [replace(term, inputs=(leaves[0], None))]
    combine = "mean" if equal else tuple(given)
    return [[leaf] for leaf in leaves], combine, [replace(term, inputs=(leaves[0], None))]


def _refines(coarse: Sequence[int], fine: Sequence[int]) -> bool:
    """Whether members that share a later layer share the one before it."""
    return all(coarse[a] == coarse[b] for a in range(len(fine)) for b in range(a) if fine[a] == fine[b])


def _grow(owners: Sequence[Sequence[int]], names: Sequence[str]) -> tuple[list[int], Spec]:
    """The members in the order of the tree, and its specification."""

    def groups(members: list[int], layer: int) -> list[list[int]]:
        by_owner: dict[int, list[int]] = {}
        for m in members:
            by_owner.setdefault(owners[m][layer], []).append(m)
        return list(by_owner.values())

    def grow(members: list[int], start: int) -> tuple[list[int], Spec]:
        if len(members) == 1:
            return members, 1
        stop = start
        while stop < len(names) and len(groups(members, stop)) == 1:
            stop += 1
        parts = [grow(part, stop) for part in groups(members, stop)]
        below: Spec = [spec for _, spec in parts]
        if all(spec == 1 for spec in below):
            below = len(below)
        order = [m for part, _ in parts for m in part]
        return order, below if stop == start else {names[stop - 1]: below}

    order, spec = grow(list(range(len(owners))), 0)
    return order, None if isinstance(spec, int) else spec
