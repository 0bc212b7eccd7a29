"""What of a net is learned and how: the losses as terms, the members, and the tree that its ranks make of them.

Ranks that share what MPIBroadcast hands them, go on with layers of the same names, and come together after MPIGather
(or each at a loss of its own) are the members of a tree. The examples are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mheads.caffe import layers
from mheads.caffe.blobs import free_name
from mheads.caffe.graph import BROADCAST, TRAIN, Blob, Graph, State, Step, graph_of, is_data
from mheads.caffe.layers import losses as loss_layers
from mheads.caffe.layers.made import Shape
from mheads.caffe.layers.mixing import SUM
from mheads.caffe.network import EXAMPLES, Built, aliases, assembled, build, loss_weights
from mheads.caffe.text import Net
from mheads.distributed.written import Call, Collect, Rename, Spread, Written
from mheads.errors import UserError
from mheads.tree import Spec

LABELLED = ("SoftmaxWithLoss", "MultinomialLogisticLoss", "HingeLoss")  # their second bottom holds labels
KEEPING = ("Flatten", "Reshape")  # labels stay labels
LEARNING = ("Convolution", "Deconvolution", "InnerProduct", "PReLU", "BatchNorm", "Scale", "Bias")
LABEL = "label"


@dataclass(frozen=True)
class Term:
    """A loss: its step, its weight, and its inputs: blobs of the network, or None for the labels."""

    step: Step
    weight: float
    inputs: tuple[Blob | None, ...]


@dataclass(frozen=True)
class Plan:
    """How a net is trained: the steps of one member's network, and what is done with what the members give.

    `combine`: how the members' outputs come together before the loss: None (each has its own), "mean",
    "probabilities", or coefficients. `split` is the tree, None for members with nothing in common.
    """

    graph: Graph
    steps: tuple[Step, ...]
    inputs: tuple[Blob, ...]
    outputs: tuple[Blob, ...]
    terms: tuple[Term, ...]
    members: int = 1
    split: Spec | None = None
    combine: str | tuple[float, ...] | None = None

    def build(self, shape: Shape) -> tuple[Built, list[Blob]]:
        """One member's network on examples of this shape, and its outputs: a score per class is a vector here."""
        several = len({step.rank for step in self.steps}) > 1 and self.members == 1
        built = build(self.steps, dict.fromkeys(self.inputs, (EXAMPLES, *shape)), several)
        outputs = []
        for blob in map(built.resolve, self.outputs):
            found = built.shapes[blob]
            if len(found) > 2 and set(found[2:]) == {1} and len(self.outputs) == 1:
                name, flat = free_name("flatten", built.modules), Blob("flat", -2, len(outputs))
                built.modules[name] = nn.Flatten()
                built.plan.append((name, (blob,), (flat,)))
                built.shapes[flat] = found[:2]
                blob = flat
            outputs.append(blob)
        return built, outputs

    def network(self, shape: Shape) -> nn.Module:
        built, outputs = self.build(shape)
        network = assembled(built, self.inputs, outputs)
        if len(self.graph.ranks) > 1 and self.members == 1:
            network.written = self._written(built, outputs)  # type: ignore[assignment]  # not a tensor
        return network

    def _written(self, built: Built, outputs: Sequence[Blob]) -> Written:
        """The steps with their ranks, for as many processes; labels go to the lead, and are not sent."""
        numbers: dict[Blob, int] = dict.fromkeys(self.inputs, 0)

        def number(blob: Blob) -> int:
            return numbers.setdefault(blob, len(numbers))

        steps: list[Any] = []
        for step in self.steps:
            layer, tops = step.layer, tuple(map(number, step.tops))
            if step.group:
                if not all(built.resolve(bottom) in built.shapes for bottom in step.bottoms):
                    continue
                if layer.type == BROADCAST:
                    by_rank = {top.rank: number(top) for top in step.tops}
                    steps.append(Spread(step.rank, number(step.bottoms[0]), by_rank))
                else:
                    by_rank = {rank: number(b) for rank, b in zip(step.group, step.bottoms, strict=True)}
                    steps.append(Collect(step.rank, by_rank, tops))
            elif found := aliases(step):
                steps += [Rename(step.rank, number(b), number(t)) for t, b in found.items() if built.resolve(b) in built.shapes]
            else:
                value = tuple(map(number, step.bottoms))
                labels = built.labels.get(id(step), [])
                for i, label in enumerate(labels):
                    gives = tops if i == len(labels) - 1 else (number(Blob(label, -3)),)
                    steps.append(Call(label, step.rank, value, gives))
                    value = gives
        final = []
        for blob, given in zip(outputs, self.outputs, strict=True):
            if blob.rank == -2:  # made flat at the end
                name = next(name for name, _, gives in built.plan if gives == (blob,))
                steps.append(Call(name, given.rank, (number(given),), (number(blob),)))
            final.append((number(blob if blob.rank == -2 else given), given.rank))
        return Written(len(self.graph.ranks), tuple(steps), tuple(final))

    def described(self, shapes: Sequence[Shape]) -> list[dict[str, Any]]:
        """The terms as plain data, given the shapes of the outputs."""
        found = []
        for term in self.terms:
            at = [None if b is None else self.outputs.index(b) for b in term.inputs]
            said = loss_layers.described(term.step.layer, [shapes[i] for i in at if i is not None])
            found.append({**said, "weight": term.weight, "inputs": [LABEL if i is None else i for i in at]})
        return found


class _Walk:
    """Questions about a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made_by = graph.last
        self.alias = {top: bottom for step in graph.steps for top, bottom in aliases(step).items()}

    def resolve(self, blob: Blob) -> Blob:
        while blob in self.alias:
            blob = self.alias[blob]
        return blob

    def origin(self, blob: Blob) -> Blob | None:
        """The top of a data layer that a blob is, under another name or in another shape."""
        blob = self.resolve(blob)
        step = self.made_by[blob]
        if is_data(step.layer):
            return blob
        return self.origin(step.bottoms[0]) if step.layer.type in KEEPING else None

    def needed(self, blobs: Sequence[Blob]) -> tuple[list[Step], list[Blob]]:
        """The steps that make these blobs, in order, and what they read from outside."""
        wanted, todo, inputs = set(), [self.resolve(blob) for blob in blobs], {}
        while todo:
            step = self.made_by[blob := todo.pop()]
            if is_data(step.layer):
                inputs[blob] = None
            elif id(step) not in wanted:
                wanted.add(id(step))
                todo += map(self.resolve, step.bottoms)
        kept = [step for step in self.graph.steps if id(step) in wanted or aliases(step)]
        return kept, [blob for step in self.graph.steps for blob in step.tops if blob in inputs]


def plan_of(net: Net, stages: Sequence[str] = ()) -> Plan:
    """How a net is trained, as a tree if its ranks make one, else as one network of all that its ranks hold."""
    graph = graph_of(net, State(TRAIN, frozenset(stages)))
    walk = _Walk(graph)
    terms = _terms(graph, walk)
    if len(graph.ranks) > 1 and terms:
        found = _tree(graph, walk, terms)
        if found is not None:
            return found
    return _whole(graph, walk, terms)


def _terms(graph: Graph, walk: _Walk) -> list[Term]:
    found = []
    for blob, weight in loss_weights(graph).items():
        step = walk.made_by[blob]
        if step.layer.type not in layers.LOSSES:
            raise step.layer.refuse(
                f"loss_weight is for losses here, {', '.join(layers.LOSSES)}: leave it out, or use one of these"
            )
        if len(step.bottoms) != 2:
            raise step.layer.refuse(f"it has {len(step.bottoms)} bottoms: a loss takes what is predicted and the labels")
        origins = [walk.origin(b) for b in step.bottoms]
        inputs: list[Blob | None] = [walk.resolve(b) for b in step.bottoms]
        if step.layer.type in LABELLED:
            if origins[1] is None:
                made = walk.made_by[walk.resolve(step.bottoms[1])].layer
                raise step.layer.refuse(
                    f"its labels {step.layer.bottoms[1]!r} are made by {made} of line {made.line}: here labels come "
                    "from a data layer, reshaped at most"
                )
            inputs[1] = None
        else:
            for i in (1, 0):
                if origins[i] is not None and _is_label(origins[i], walk):
                    inputs[i] = None
                    break
        if all(b is None or walk.origin(b) is not None for b in inputs):
            raise step.layer.refuse("it compares data with data: nothing before it has weights")
        found.append(Term(step, weight, tuple(inputs)))
    return found


def _is_label(blob: Blob | None, walk: _Walk) -> bool:
    """Whether a top of a data layer holds labels: its second one, or one of a name that says so."""
    assert blob is not None
    step = walk.made_by[blob]
    return step.tops.index(blob) > 0 or "label" in blob.name.lower() or "target" in blob.name.lower()


def _whole(graph: Graph, walk: _Walk, terms: list[Term]) -> Plan:
    """One network of all that the ranks hold."""
    if terms:
        outputs = _in_order(terms)
    else:
        taken = {b for step in graph.steps for b in step.bottoms}
        ends = [t for s in graph.steps if not is_data(s.layer) for t in s.tops if t not in taken]
        ends = [b for b in ends if walk.made_by[b].layer.type not in ("Accuracy", *layers.NOTHING)]
        # Probabilities are for reading: members, losses and measures here take the scores before them.
        before = [walk.made_by[walk.resolve(b)] for b in ends]
        outputs = [
            walk.resolve(s.bottoms[0] if s.layer.type == "Softmax" and s.bottoms else b)
            for b, s in zip(ends, before, strict=True)
        ]
        outputs = list(dict.fromkeys(b for b in outputs if not is_data(walk.made_by[b].layer)))
        if not outputs:
            raise UserError(f"{graph.net.file}: no layer gives anything that another does not use up")
    steps, inputs = walk.needed(outputs)
    return Plan(graph, tuple(steps), _one_input(graph, inputs), tuple(outputs), tuple(terms))


def _in_order(terms: Sequence[Term]) -> list[Blob]:
    """What the losses look at, the answer first: the blob of the loss that weighs most, of equals the last."""
    main = max(enumerate(terms), key=lambda pair: (abs(pair[1].weight), pair[0]))[1]
    blobs = [b for term in (main, *terms) for b in term.inputs if b is not None]
    return list(dict.fromkeys(blobs))


def _one_input(graph: Graph, inputs: Sequence[Blob]) -> tuple[Blob, ...]:
    names = list(dict.fromkeys(blob.name for blob in inputs))
    if len(names) != 1:
        said = ", ".join(names) if names else "nothing"
        raise UserError(
            f"{graph.net.file}: the layers up to the losses read {said} from data layers; here a network reads one "
            "blob of examples, and labels go to losses alone"
        )
    return tuple(inputs)


# Trees.


def _tree(graph: Graph, walk: _Walk, terms: list[Term]) -> Plan | None:
    """The plan of a net whose ranks are members of a tree; None if they are not."""
    found = _members(walk, terms)
    if found is None:
        return None
    leaves, combine, of = found  # the outputs of each member, in the order of a term's inputs
    if len(leaves) < 2:
        return None
    paths = []
    for outputs in leaves:
        steps, inputs = walk.needed(outputs)
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
    order, split = _grow(owners, names)
    steps, inputs = walk.needed(leaves[order[0]])
    outputs = [b for b in leaves[order[0]]]
    terms = [Term(t.step, t.weight, tuple(b if b is None else outputs[_position(of, b)] for b in t.inputs)) for t in of]
    if isinstance(combine, tuple):
        combine = tuple(combine[m] for m in order)
    chosen = _in_order(terms)
    return Plan(graph, tuple(steps), _one_input(graph, inputs), tuple(chosen), tuple(terms), len(paths), split, combine)


def _position(of: Sequence[Term], blob: Blob) -> int:
    blobs = list(dict.fromkeys(b for term in of for b in term.inputs if b is not None))
    return blobs.index(blob)


Members = tuple[list[list[Blob]], Any, list[Term]]


def _members(walk: _Walk, terms: list[Term]) -> Members | None:
    """What each member gives to the losses, how that comes together, and the losses of one of them."""
    by_rank: dict[int, list[Term]] = {}
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
        return _averaged(walk, own[0])
    simple = [t for t in own if t.inputs[0] is not None and t.inputs[1:] == (None,)]
    alike = {(t.step.layer.type, t.weight, str(t.step.layer.message.loss_param)) for t in own}
    if len(simple) == len(own) and len(alike) == 1:
        leaves = [[b for b in t.inputs if b is not None] for t in own]
        if len({b.rank for (b,) in leaves}) == len(leaves):  # each from a rank of its own, through a gather
            return leaves, None, own[:1]
    return None


def _averaged(walk: _Walk, term: Term) -> Members | None:
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
    equal = all(abs(c * len(leaves) - 1) < 1e-6 for c in given)
    if layer.type == "MultinomialLogisticLoss":
        made = [walk.made_by[leaf] for leaf in leaves]
        if not equal or term.weight != 1 or any(s.layer.type != "Softmax" for s in made):
            return None
        leaves = [walk.resolve(s.bottoms[0]) for s in made]
        return [[leaf] for leaf in leaves], "probabilities", [Term(term.step, term.weight, (leaves[0], None))]
    combine = "mean" if equal else tuple(given)
    return [[leaf] for leaf in leaves], combine, [Term(term.step, term.weight, (leaves[0], None))]


def _refines(coarse: Sequence[int], fine: Sequence[int]) -> bool:
    """Whether members that share a later layer share the one before it."""
    return all(coarse[a] == coarse[b] for a in range(len(fine)) for b in range(a) if fine[a] == fine[b])


def _grow(owners: Sequence[Sequence[int]], names: Sequence[str]) -> tuple[list[int], Spec]:
    """The members in the order of the tree, and its specification."""

    def groups(members: list[int], layer: int) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for m in members:
            found.setdefault(owners[m][layer], []).append(m)
        return list(found.values())

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
