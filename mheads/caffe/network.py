"""Networks made of steps: modules in a row where the layers are one, else a module that runs the graph.

`Blobs` runs a whole net as it is written, losses and accuracies included; `network` is the factory that configs name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mheads.caffe import layers, message_schema
from mheads.caffe.fillers import check, fill
from mheads.caffe.layer_graph import BROADCAST, GATHER, TEST, TRAIN, Blob, Graph, GraphStep, NetState, graph_of, is_data
from mheads.caffe.layers.layer_modules import Detach, LayerModules, Shape, fixed_bottoms
from mheads.caffe.prototxt import CaffeLayer, Net, parse_net
from mheads.caffe.weights import free_name
from mheads.common.device import refuse_beyond_memory
from mheads.common.errors import UserError

RATES = ("lr_mult", "decay_mult")
EXAMPLES = 2  # in a batch, when shapes are found


def aliases(step: GraphStep) -> dict[Blob, Blob]:
    """The tops of a step that are one of its bottoms: nothing is computed."""
    if step.layer.type in layers.ALIASES:
        if len(step.bottoms) != 1:
            raise step.layer.refuse(f"it has {len(step.bottoms)} bottoms: give one")
        return dict.fromkeys(step.tops, step.bottoms[0])
    if step.layer.type == BROADCAST:
        return dict.fromkeys(step.tops, step.bottoms[0])
    return dict(zip(step.tops, step.bottoms, strict=True)) if step.layer.type == GATHER else {}


def inside(label: str, module: nn.Module, count: int) -> tuple[Blob, ...]:
    """What a module that is not the last of its layer gives to the next."""
    return tuple(Blob(f"{label} inside", -1, i) for i in range(count if isinstance(module, Detach) else 1))


@dataclass
class Shared:
    """A weight that has a name: the module and parameter that hold it, the layer, and what was said of its rates."""

    label: str
    name: str
    layer: CaffeLayer
    said: dict[str, float]
    users: list[dict[str, tuple[float, float]]]  # the multipliers of all modules that have it, under their own names
    names: list[str]


@dataclass
class Built:
    """Modules on the meta device by name, the order in which they run, and how their weights begin."""

    modules: OrderedDict[str, nn.Module] = field(default_factory=OrderedDict)
    plan: list[tuple[str, tuple[Blob, ...], tuple[Blob, ...]]] = field(default_factory=list)
    shapes: dict[Blob, Shape] = field(default_factory=dict)
    alias: dict[Blob, Blob] = field(default_factory=dict)
    fillers: list[tuple[str, str, Any]] = field(default_factory=list)
    # Rank and name of a weight -> module, parameter: each rank has a net of its own, which shares with no other.
    shared: dict[tuple[int, str], Shared] = field(default_factory=dict)
    ties: list[tuple[str, str, str, str]] = field(default_factory=list)
    reserved: tuple[str, ...] = ()  # names that no module may have
    labels: dict[int, list[str]] = field(default_factory=dict)  # of the modules of each step, by the step's identity

    def resolve(self, blob: Blob) -> Blob:
        while blob in self.alias:
            blob = self.alias[blob]
        return blob

    def add(self, step: GraphStep, name: str) -> None:
        layer = step.layer
        if found := aliases(step):
            if any(fixed_bottoms(layer)):
                raise layer.refuse("propagate_down: false is for layers that compute: say it in those that use its top")
            for top, bottom in found.items():
                if (source := self.resolve(bottom)) in self.shapes:  # else it is of another member, who is not built
                    self.alias[top] = bottom
                    self.shapes[top] = self.shapes[source]
            return
        if layer.type in layers.NOTHING:
            return
        bottoms = tuple(map(self.resolve, step.bottoms))
        shapes = [self.shapes[blob] for blob in bottoms]
        try:
            with torch.device("meta"):
                made = layers.make(layer, shapes)
            tops = _run(made, shapes)
        except UserError:
            raise
        except Exception as error:  # whatever torch says to sizes that do not fit
            said = str(error).strip().split("\n")[0]
            raise layer.refuse(
                f"it cannot work on bottoms of shape {', '.join(str(list(s)) for s in shapes)}: {said}"
            ) from error
        empty = next((top for top in tops if 0 in top), None)
        if empty is not None:
            raise layer.refuse(
                f"nothing is left of its bottom of shape {list(shapes[0])}: its top would be {list(empty)}"
            )
        self.labels[id(step)] = self._enter(made, layer, name, bottoms, step.tops, step.rank)
        for top, shape in zip(step.tops, tops, strict=False):
            self.shapes[top] = shape

    def _enter(
        self,
        made: LayerModules,
        layer: CaffeLayer,
        name: str,
        bottoms: tuple[Blob, ...],
        tops: tuple[Blob, ...],
        rank: int,
    ) -> list[str]:
        """Modules by name: what comes before the one with the weights is called after what it does."""
        value, labels = bottoms, []
        names = [*(f"{name}_{type(module).__name__.lower()}" for module in made.modules[:-1]), name]
        for i, (label, module) in enumerate(zip(names, made.modules, strict=True)):
            label = free_name(label, (*self.modules, *self.reserved))
            last = i == len(names) - 1
            gives = tops if last else inside(label, module, len(value))
            self.modules[label] = module
            self.plan.append((label, value, gives))
            labels.append(label)
            value = gives
            if last:
                self._weights(made, module, label, name, layer, rank)
        return labels

    def _weights(
        self, made: LayerModules, module: nn.Module, label: str, named: str, layer: CaffeLayer, rank: int
    ) -> None:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        specs = list(layer.message.param)
        blobs = names or list(getattr(module, "blobs", ()))
        if len(specs) > len(blobs):
            raise layer.refuse(f"it has {len(specs)} param for {len(blobs)} blobs of weights: leave the others out")
        module.caffe_name = named if layer.name else ""  # type: ignore[assignment]  # not a tensor
        multipliers = {}
        for i, name in enumerate(names):
            spec = specs[i] if i < len(specs) else message_schema.message("ParamSpec")()
            for key in RATES:
                if not 0 <= getattr(spec, key) < float("inf"):
                    raise layer.refuse(f"{key}: {getattr(spec, key):g}: give 0 or more")
            multipliers[name] = (spec.lr_mult, spec.decay_mult)
            owner = self.shared.get((rank, spec.name)) if spec.name else None
            if owner is not None:
                self._tie(module, name, label, owner, spec, layer, multipliers)
                continue
            if spec.name:
                said = {key: getattr(spec, key) for key in RATES if spec.HasField(key)}
                self.shared[rank, spec.name] = Shared(label, name, layer, said, [multipliers], [name])
            check(made.fillers[name], getattr(module, name).shape, layer)
            self.fillers.append((label, name, made.fillers[name]))
            if spec.lr_mult == 0:
                getattr(module, name).requires_grad_(False)
        if multipliers:
            module.multipliers = multipliers  # type: ignore[assignment]

    def _tie(
        self,
        module: nn.Module,
        name: str,
        label: str,
        owner: Shared,
        spec: Any,
        layer: CaffeLayer,
        multipliers: dict[str, tuple[float, float]],
    ) -> None:
        other, holder = owner.layer, self.modules[owner.label]
        mine, theirs = getattr(module, name).shape, getattr(holder, owner.name).shape
        shares = f"it shares the weight {spec.name!r} with layer {other.name!r} of line {other.line}, but"
        if mine != theirs:
            raise layer.refuse(
                f"{shares} the shapes are {list(mine)} and {list(theirs)}: share weights of equal shape (share_mode: "
                "PERMISSIVE is not supported), or give it another name"
            )
        for key in RATES:  # said by any of those that share it, and by all alike
            if spec.HasField(key) and owner.said.setdefault(key, getattr(spec, key)) != getattr(spec, key):
                here, there = getattr(spec, key), owner.said[key]
                raise layer.refuse(f"{shares} {key} is {here:g} here and {there:g} there: say it once, or alike")
        owner.users.append(multipliers)
        owner.names.append(name)
        for user, own in zip(owner.users, owner.names, strict=True):
            user[own] = (owner.said.get("lr_mult", 1.0), owner.said.get("decay_mult", 1.0))
        getattr(holder, owner.name).requires_grad_(owner.said.get("lr_mult", 1.0) != 0)
        self.ties.append((label, name, owner.label, owner.name))

    def fill(self) -> OrderedDict[str, nn.Module]:
        """The modules with memory of their own and their first weights, drawn in the order of the layers."""
        tied = {(label, name) for label, name, _, _ in self.ties}
        count = sum(
            p.numel()
            for label, module in self.modules.items()
            for name, p in module.named_parameters(recurse=False)
            if (label, name) not in tied
        )
        refuse_beyond_memory(4 * count, f"{count:,} weights of the net")
        for module in self.modules.values():
            module.to_empty(device=torch.get_default_device())
            for buffer in module.buffers():
                buffer.zero_()
        for label, name, filler in self.fillers:
            fill(getattr(self.modules[label], name), filler)
        for label, name, there, key in self.ties:
            self.modules[label]._parameters[name] = getattr(self.modules[there], key)
        return self.modules


def _run(made: LayerModules, shapes: list[Shape]) -> list[Shape]:
    """The shapes of the tops, found by running the modules on the meta device."""
    values: Any = [torch.empty(shape, device="meta") for shape in shapes]
    with torch.no_grad():
        for module in made.modules:
            found = module.eval()(*values)
            module.train()
            values = found if isinstance(found, tuple) else (found,)
    return [tuple(value.shape) for value in values]


def build(
    steps: Sequence[GraphStep], inputs: Mapping[Blob, Shape], several: bool = False, reserved: tuple[str, ...] = ()
) -> Built:
    """The modules of these steps, given the shapes of what comes from outside.

    Where `several` ranks have the same layer, its name is followed by the rank.
    """
    built = Built(shapes=dict(inputs), reserved=reserved)
    held: dict[int, int] = {}
    for step in steps:
        held[id(step.layer)] = held.get(id(step.layer), 0) + 1
    for step in steps:
        if is_data(step.layer):
            continue
        name = step.layer.name or step.layer.type.lower()
        built.add(step, f"{name}@{step.rank}" if several and held[id(step.layer)] > 1 else name)
    return built


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
            found = self._modules[name](*(values[b] for b in bottoms))  # type: ignore[misc]
            if len(tops) == 1:
                values[tops[0]] = found
            else:
                values |= {top: found[i] for i, top in enumerate(tops)}
        if len(self._outputs) == 1:
            output: Tensor = values[self._outputs[0]]
            return output
        return tuple(values[number] for number in self._outputs)


def assembled(built: Built, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> nn.Module:
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
            found = self._modules[name](*(values[b] for b in bottoms))  # type: ignore[misc]
            values |= zip(gives, found if isinstance(found, tuple) else (found,), strict=False)
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
    found: dict[Blob, float] = {}
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
                found[top] = weight
    return found


def checked_shape(shape: Any, where: str = "model_args.shape") -> Shape:
    """The shape of an example, as it was given."""
    sizes = list(shape) if isinstance(shape, list | tuple) else []
    if not sizes or any(isinstance(s, bool) or not isinstance(s, int) or not 0 < s < 2**31 for s in sizes):
        raise UserError(f"{where} = {shape!r}: give the shape of an example, such as [3, 32, 32]")
    return tuple(sizes)


def network(net: str, shape: Sequence[int] | None = None, stages: Sequence[str] = (), level: int = 0) -> nn.Module:
    """The network of one member of a net, given as text, on examples of this shape: a factory for configs."""
    from mheads.caffe.member_trees import plan_of

    if not isinstance(net, str):
        raise UserError(f"model_args.net is the text of a specification, not {type(net).__name__}")
    return plan_of(parse_net(net), stages, level).network(checked_shape(shape))
