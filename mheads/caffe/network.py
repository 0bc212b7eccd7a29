"""Networks made of steps: modules in a row where the layers are one, else a module that runs the graph.

`Blobs` runs a whole net as it is written, losses and accuracies included; `network` is the factory that configs name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mheads.caffe import layers
from mheads.caffe.build_modules import Built, build
from mheads.caffe.layer_graph import TEST, TRAIN, Blob, Graph, NetState, graph_of, is_data
from mheads.caffe.layers.layer_modules import Shape
from mheads.caffe.prototxt import Net, parse_net
from mheads.common.errors import UserError


class GraphNetwork(nn.Module):
    """Runs modules in the order of a plan, each on the values that it names: one input, one or several outputs."""

    def __init__(self, built: Built, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        super().__init__()
        for name, module in built.fill().items():
            self.add_module(name, module)
        numbers: dict[Blob, int] = dict.fromkeys(inputs, 0)  # each rank reads the same examples
        for _, _, tops in built.plan:
            for top in tops:
                numbers.setdefault(top, len(numbers))
        self._plan = [
            (name, [numbers[b] for b in bottoms], [numbers[t] for t in tops]) for name, bottoms, tops in built.plan
        ]
        self._outputs = [numbers[built.resolve(blob)] for blob in outputs]

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        values: dict[int, Any] = {0: x}
        for name, bottoms, tops in self._plan:
            results = self._modules[name](*(values[b] for b in bottoms))  # type: ignore[misc]
            values |= {tops[0]: results} if len(tops) == 1 else {top: results[i] for i, top in enumerate(tops)}
        outputs = tuple(values[number] for number in self._outputs)
        return outputs if len(outputs) > 1 else outputs[0]


def assemble(built: Built, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> nn.Module:
    """The network of what was built: its modules in a row where each takes what the one before gave."""
    value: tuple[Blob, ...] = (inputs[0],)
    row = len(inputs) == 1 and len(outputs) == 1 and not built.ties
    for _, bottoms, tops in built.plan:
        row = row and bottoms == value and len(tops) == 1
        value = tops
    if row and value == (built.resolve(outputs[0]),):
        return nn.Sequential(built.fill())
    return GraphNetwork(built, inputs, outputs)


class Blobs(nn.Module):
    """A net of a phase as it is written: all layers, losses and accuracies too, on all its ranks in this process.

    `net(data=x, label=y)` gives the blobs that no layer uses, by name; `blobs` holds all of the last call, and `loss`
    is the sum of the losses by their weights. On several ranks the names of blobs are followed by `@rank`.
    """

    def __init__(
        self, net: Net | str, shapes: Mapping[str, Sequence[int]], phase: str = "TRAIN", stages: Iterable[str] = ()
    ) -> None:
        super().__init__()
        net = parse_net(net) if isinstance(net, str) else net
        self.graph = graph_of(net, NetState({"TRAIN": TRAIN, "TEST": TEST}[phase], frozenset(stages)))
        self.given = [top for step in self.graph.steps if is_data(step.layer) for top in step.tops]
        for blob in self.given:
            if blob.name not in shapes:
                raise UserError(f"{net.file}: give the shape of {blob.name!r}, which comes from outside")
        inputs = {blob: tuple(shapes[blob.name]) for blob in self.given}
        self.several = len(self.graph.ranks) > 1
        own = ("loss", "blobs", "graph", "given", "several", "weights_of_losses")
        built = build(self.graph.steps, inputs, self.several, own)
        for name, module in built.fill().items():
            self.add_module(name, module)
        self._built = built
        self.weights_of_losses = loss_weights(self.graph)
        self.blobs: dict[str, Tensor] = {}
        self.loss: Tensor = torch.zeros(())
        self.train(phase == "TRAIN")

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        values: dict[Blob, Tensor] = {blob: inputs[blob.name] for blob in self.given}
        for name, bottoms, gives in self._built.plan:
            results = self._modules[name](*(values[b] for b in bottoms))  # type: ignore[misc]
            values |= zip(gives, results if isinstance(results, tuple) else (results,), strict=False)
        everything = values | {blob: values[self._built.resolve(blob)] for blob in self._built.alias}
        tops = [top for step in self.graph.steps if not is_data(step.layer) for top in step.tops]
        taken = {b for step in self.graph.steps for b in step.bottoms}
        self.blobs = {self._name(blob): value for blob, value in everything.items() if blob.rank >= 0}
        self.loss = sum(
            (weight * everything[blob].sum() for blob, weight in self.weights_of_losses.items()), torch.zeros(())
        )
        return {self._name(top): everything[top] for top in tops if top not in taken and top in everything}

    def _name(self, blob: Blob) -> str:
        return f"{blob.name}@{blob.rank}" if self.several else blob.name


def loss_weights(graph: Graph) -> dict[Blob, float]:
    """The tops that count as losses, and how much: those with a loss_weight, and the first of a loss layer."""
    weights: dict[Blob, float] = {}
    for step in graph.steps:
        given = list(step.layer.message.loss_weight)
        if given and len(given) > len(step.tops):
            raise step.layer.refuse(f"it has {len(given)} loss_weight for {len(step.tops)} tops")
        if not given and step.layer.type in layers.LOSSES:
            given = [1.0]
        for top, weight in zip(step.tops, given, strict=False):
            if weight != weight or abs(weight) == float("inf"):
                raise step.layer.refuse(f"loss_weight: {weight}: give a number")
            if weight:
                weights[top] = weight
    return weights


def check_shape(shape: Any, where: str = "model_args.shape") -> Shape:
    """The shape of an example, as it was given."""
    sizes = list(shape) if isinstance(shape, list | tuple) else []
    if not sizes or any(isinstance(s, bool) or not isinstance(s, int) or not 0 < s < 2**31 for s in sizes):
        written = "; a recipe without it was converted without data: convert the net again with data=..., which adds it"
        raise UserError(
            f"{where} = {shape!r}: give the shape of an example, such as [3, 32, 32]{written if shape is None else ''}"
        )
    return tuple(sizes)


def network(net: str, shape: Sequence[int] | None = None, stages: Sequence[str] = (), level: int = 0) -> nn.Module:
    """The network of one member of a net, given as text, on examples of this shape: a factory for configs."""
    from mheads.caffe.member_trees import plan_of

    if not isinstance(net, str):
        raise UserError(f"model_args.net is the text of a specification, not {type(net).__name__}")
    return plan_of(parse_net(net), stages, level).network(check_shape(shape))
