"""The modules of a net's layers: made with their shapes, named, sharing weights, and filled with first values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mheads.caffe import layers, message_schema
from mheads.caffe.fillers import check_filler, fill
from mheads.caffe.layer_graph import BROADCAST, GATHER, Blob, GraphStep, is_data
from mheads.caffe.layers.layer_modules import Detach, LayerModules, Shape, bottoms_without_gradient
from mheads.caffe.prototxt import CaffeLayer
from mheads.caffe.weights import free_name
from mheads.common.device import refuse_beyond_memory
from mheads.common.errors import UserError

MULTIPLIERS = ("lr_mult", "decay_mult")
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
class SharedWeight:
    """A weight that has a name: the module and parameter that hold it, its layer, and the multipliers given."""

    label: str
    name: str
    layer: CaffeLayer
    given: dict[str, float]
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
    shared: dict[tuple[int, str], SharedWeight] = field(default_factory=dict)
    ties: list[tuple[str, str, str, str]] = field(default_factory=list)
    reserved: tuple[str, ...] = ()  # names that no module may have
    labels: dict[int, list[str]] = field(default_factory=dict)  # of the modules of each step, by the step's identity

    def resolve(self, blob: Blob) -> Blob:
        while blob in self.alias:
            blob = self.alias[blob]
        return blob

    def add(self, step: GraphStep, name: str) -> None:
        layer = step.layer
        if renamed := aliases(step):
            if any(bottoms_without_gradient(layer)):
                raise layer.refuse("propagate_down: false is for layers that compute: say it in those that use its top")
            for top, bottom in renamed.items():
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
            tops = _top_shapes(made, shapes)
        except UserError:
            raise
        except Exception as error:  # whatever torch says to sizes that do not fit
            reason = str(error).strip().split("\n")[0]
            raise layer.refuse(
                f"it cannot work on bottoms of shape {', '.join(str(list(s)) for s in shapes)}: {reason}"
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
                self._enter_weights(made, module, label, name, layer, rank)
        return labels

    def _enter_weights(
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
            for key in MULTIPLIERS:
                if not 0 <= getattr(spec, key) < float("inf"):
                    raise layer.refuse(f"{key}: {getattr(spec, key):g}: give 0 or more")
            multipliers[name] = (spec.lr_mult, spec.decay_mult)
            owner = self.shared.get((rank, spec.name)) if spec.name else None
            if owner is not None:
                self._tie(module, name, label, owner, spec, layer, multipliers)
                continue
            if spec.name:
                given = {key: getattr(spec, key) for key in MULTIPLIERS if spec.HasField(key)}
                self.shared[rank, spec.name] = SharedWeight(label, name, layer, given, [multipliers], [name])
            check_filler(made.fillers[name], getattr(module, name).shape, layer)
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
        owner: SharedWeight,
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
        for key in MULTIPLIERS:  # said by any of those that share it, and by all alike
            if spec.HasField(key) and owner.given.setdefault(key, getattr(spec, key)) != getattr(spec, key):
                here, there = getattr(spec, key), owner.given[key]
                raise layer.refuse(f"{shares} {key} is {here:g} here and {there:g} there: say it once, or alike")
        owner.users.append(multipliers)
        owner.names.append(name)
        for user, own in zip(owner.users, owner.names, strict=True):
            user[own] = (owner.given.get("lr_mult", 1.0), owner.given.get("decay_mult", 1.0))
        getattr(holder, owner.name).requires_grad_(owner.given.get("lr_mult", 1.0) != 0)
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


def _top_shapes(made: LayerModules, shapes: list[Shape]) -> list[Shape]:
    """The shapes of the tops, found by running the modules on the meta device."""
    values: Any = [torch.empty(shape, device="meta") for shape in shapes]
    with torch.no_grad():
        for module in made.modules:
            outputs = module.eval()(*values)
            module.train()
            values = outputs if isinstance(outputs, tuple) else (outputs,)
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
