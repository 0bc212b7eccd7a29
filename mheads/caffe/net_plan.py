"""What of a net is learned: its losses as terms, and the network of one member that they look at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from mheads.caffe import layers, message_schema
from mheads.caffe.build_modules import EXAMPLES, Built, aliases, build, inside
from mheads.caffe.layer_graph import BROADCAST, Blob, Graph, GraphStep, is_data
from mheads.caffe.layers import losses as loss_layers
from mheads.caffe.layers.convolution import BatchNorm
from mheads.caffe.layers.layer_modules import Shape, bottoms_without_gradient
from mheads.caffe.network import assemble, loss_weights
from mheads.caffe.weights import free_name
from mheads.common.errors import UserError
from mheads.distributed.layers.graph_engine import BroadcastValue, GatherValues, RankGraph, RenameValue, RunModule
from mheads.trees.tree_spec import Spec

LABELLED = ("SoftmaxWithLoss", "MultinomialLogisticLoss", "HingeLoss")  # their second bottom holds labels
KEEPING = ("Flatten", "Reshape")  # labels stay labels
LABEL = "label"


@dataclass(frozen=True)
class LossTerm:
    """A loss: its step, its weight, and its inputs: blobs of the network, or None for the labels.

    `label` is the top of a data layer that the labels are.
    """

    step: GraphStep
    weight: float
    inputs: tuple[Blob | None, ...]
    label: Blob | None = None


@dataclass(frozen=True)
class NetPlan:
    """How a net is trained: the steps of one member's network, and what is done with what the members give.

    `combine`: how the members' outputs come together before the loss: None (each has its own), "mean",
    "probabilities", or coefficients. `split` is the tree, None for members with nothing in common.
    """

    graph: Graph
    steps: tuple[GraphStep, ...]
    inputs: tuple[Blob, ...]
    outputs: tuple[Blob, ...]
    terms: tuple[LossTerm, ...]
    members: int = 1
    split: Spec | None = None
    combine: str | tuple[float, ...] | None = None

    @property
    def unlabelled(self) -> bool:
        """Whether its losses look at no labels: an autoencoder."""
        return bool(self.terms) and all(term.label is None for term in self.terms)

    def build(self, shape: Shape) -> tuple[Built, list[Blob]]:
        """One member's network on examples of this shape, and its outputs: a score per class is a vector here."""
        several = len({step.rank for step in self.steps}) > 1 and self.members == 1
        built = build(self.steps, dict.fromkeys(self.inputs, (EXAMPLES, *shape)), several)
        for module in built.modules.values():
            if isinstance(module, BatchNorm) and module.fixed is False:
                module.fixed = None  # it was said of training: what is evaluated are the statistics of training
        outputs: list[Blob] = []
        for blob in map(built.resolve, self.outputs):
            size = built.shapes[blob]
            if len(size) > 2 and (set(size[2:]) == {1} or self.unlabelled) and blob not in self.inputs:
                name, flat = free_name("flatten", built.modules), Blob("flat", -2, len(outputs))
                built.modules[name] = nn.Flatten()
                built.plan.append((name, (blob,), (flat,)))
                built.shapes[flat] = (size[0], math.prod(size[1:]))
                blob = flat
            outputs.append(blob)
        return built, outputs

    def network(self, shape: Shape) -> nn.Module:
        built, outputs = self.build(shape)
        network = assemble(built, self.inputs, outputs)
        if len(self.graph.ranks) > 1 and self.members == 1:
            network.rank_graph = self._rank_graph(built, outputs)  # type: ignore[assignment]  # not a tensor
        return network

    def _rank_graph(self, built: Built, outputs: Sequence[Blob]) -> RankGraph:
        """The steps with their ranks, for as many processes; labels go to the main rank, and are not sent."""
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
                    steps.append(BroadcastValue(step.rank, number(step.bottoms[0]), by_rank))
                else:
                    by_rank = {rank: number(b) for rank, b in zip(step.group, step.bottoms, strict=True)}
                    steps.append(GatherValues(step.rank, by_rank, tops))
            elif renamed := aliases(step):
                steps += [
                    RenameValue(step.rank, number(b), number(t))
                    for t, b in renamed.items()
                    if built.resolve(b) in built.shapes
                ]
            else:
                value = tuple(map(number, step.bottoms))
                labels = built.labels.get(id(step), [])
                for i, label in enumerate(labels):
                    last = i == len(labels) - 1
                    between = () if last else inside(label, built.modules[label], len(value))
                    gives = tops if last else tuple(map(number, between))
                    steps.append(RunModule(label, step.rank, value, gives))
                    value = gives
        final = []
        for blob, given in zip(outputs, self.outputs, strict=True):
            if blob.rank == -2:  # made flat at the end
                name = next(name for name, _, gives in built.plan if gives == (blob,))
                steps.append(RunModule(name, given.rank, (number(given),), (number(blob),)))
            final.append((number(blob if blob.rank == -2 else given), given.rank))
        return RankGraph(len(self.graph.ranks), tuple(steps), tuple(final))

    def describe_terms(self, shapes: Sequence[Shape]) -> list[dict[str, Any]]:
        """The terms as plain data, given the shapes of the outputs."""
        terms = []
        for term in self.terms:
            layer, at = term.step.layer, [None if b is None else self.outputs.index(b) for b in term.inputs]
            loss = loss_layers.describe_loss(layer, [shapes[i] for i in at if i is not None])
            fixed = [i for i, still in enumerate(bottoms_without_gradient(layer)) if still and at[i] is not None]
            terms.append({
                **loss,
                "weight": term.weight,
                "inputs": [LABEL if i is None else i for i in at],
                **({"fixed": fixed} if fixed else {}),  # inputs that learn nothing from it
            })  # fmt: skip
        return terms


class Walk:
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

    def steps_needed(self, blobs: Sequence[Blob]) -> tuple[list[GraphStep], list[Blob]]:
        """The steps that make these blobs, in order, and what they read from outside."""
        wanted: set[int] = set()
        inputs: dict[Blob, None] = {}
        todo = [self.resolve(blob) for blob in blobs]
        while todo:
            step = self.made_by[blob := todo.pop()]
            if is_data(step.layer):
                inputs[blob] = None
            elif id(step) not in wanted:
                wanted.add(id(step))
                todo += map(self.resolve, step.bottoms)
        kept = [step for step in self.graph.steps if id(step) in wanted or aliases(step)]
        return kept, [blob for step in self.graph.steps for blob in step.tops if blob in inputs]


def find_terms(graph: Graph, walk: Walk) -> list[LossTerm]:
    terms = []
    for blob, weight in loss_weights(graph).items():
        step = walk.made_by[blob]
        if step.layer.type not in layers.LOSSES:
            raise step.layer.refuse(
                f"loss_weight is for losses here, {', '.join(layers.LOSSES)}: leave it out, or use one of these"
            )
        if len(step.bottoms) != 2:
            raise step.layer.refuse(
                f"it has {len(step.bottoms)} bottoms: a loss takes what is predicted and the labels"
            )
        origins = [walk.origin(b) for b in step.bottoms]
        inputs: list[Blob | None] = [walk.resolve(b) for b in step.bottoms]
        if step.layer.type in LABELLED:
            if origins[1] is None:
                made = walk.made_by[walk.resolve(step.bottoms[1])].layer
                raise step.layer.refuse(
                    f"its labels {step.layer.bottoms[1]!r} are made by {made} of line {made.line}: here labels come "
                    "from a data layer, reshaped at most"
                )
            inputs[1], label = None, origins[1]
        else:
            label = None
            for i in (1, 0):
                if origins[i] is not None and _is_label(origins[i], walk):
                    inputs[i], label = None, origins[i]
                    break
        if all(b is None or walk.origin(b) is not None for b in inputs):
            raise step.layer.refuse("it compares data with data: nothing before it has weights")
        terms.append(LossTerm(step, weight, tuple(inputs), label))
    return terms


def check_labels(walk: Walk, inputs: Sequence[Blob], terms: Sequence[LossTerm]) -> None:
    """Refuses labels that are not the one target that examples have here: several, or made up beside real examples."""
    labelled = [(term.step.layer, term.label) for term in terms if term.label is not None]
    real = [blob for blob in inputs if walk.made_by[blob].layer.type != "DummyData"]
    for layer, label in labelled:
        made = walk.made_by[label].layer
        first, other = labelled[0]
        if label.name != other.name:
            raise layer.refuse(
                f"it learns {label.name!r} of line {made.line}, and {first} of line {first.line} {other.name!r}: here "
                "examples have one target: leave one of the losses out"
            )
        if made.type == "DummyData" and real:
            raise layer.refuse(
                f"its labels {label.name!r} are made up by {made} of line {made.line}, and are not those of the "
                f"examples {real[0].name!r}: take labels from the layer that reads the examples"
            )


def _is_label(blob: Blob | None, walk: Walk) -> bool:
    """Whether a top of a data layer holds labels: its second one, or one of a name that says so."""
    assert blob is not None
    step = walk.made_by[blob]
    return step.tops.index(blob) > 0 or "label" in blob.name.lower() or "target" in blob.name.lower()


def plan_whole_net(graph: Graph, walk: Walk, terms: list[LossTerm]) -> NetPlan:
    """One network of all that the ranks hold."""
    if terms:
        outputs = order_outputs(terms)
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
    steps, inputs = walk.steps_needed(outputs)
    if terms and (shown := _probabilities(terms)) is not None:
        steps, outputs = [*steps, shown], [*shown.tops, *outputs]
    return NetPlan(graph, tuple(steps), one_input(graph, inputs), tuple(outputs), tuple(terms))


def _probabilities(terms: Sequence[LossTerm]) -> GraphStep | None:
    """What an autoencoder answers that learns by SigmoidCrossEntropyLoss: its sigmoid is what is like the examples."""
    main = _heaviest(terms)
    scores = main.inputs[0]
    if main.step.layer.type != "SigmoidCrossEntropyLoss" or scores is None or any(term.label for term in terms):
        return None
    message = message_schema.message("LayerParameter")(
        name="answer", type="Sigmoid", bottom=[scores.name], top=["answer"]
    )
    return GraphStep(
        replace(main.step.layer, message=message), scores.rank, (scores,), (Blob("answer", scores.rank, -1),)
    )


def order_outputs(terms: Sequence[LossTerm]) -> list[Blob]:
    """What the losses look at, the answer first: the blob of the loss that weighs most, of equals the last."""
    blobs = [b for term in (_heaviest(terms), *terms) for b in term.inputs if b is not None]
    return list(dict.fromkeys(blobs))


def _heaviest(terms: Sequence[LossTerm]) -> LossTerm:
    return max(enumerate(terms), key=lambda pair: (abs(pair[1].weight), pair[0]))[1]


def one_input(graph: Graph, inputs: Sequence[Blob]) -> tuple[Blob, ...]:
    names = list(dict.fromkeys(blob.name for blob in inputs))
    if len(names) != 1:
        sources = ", ".join(names) if names else "nothing"
        raise UserError(
            f"{graph.net.file}: the layers up to the losses read {sources} from data layers; here a network reads one "
            "blob of examples, and labels go to losses alone"
        )
    return tuple(inputs)
