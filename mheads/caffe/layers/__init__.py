"""Caffe's layers as modules, by type: what each is made of, and how many bottoms and tops it takes.

A maker is given the layer and the shapes of its bottoms, and gives a module, or several that run one after the other.
Modules are made on the meta device, where weights have shapes and no values; `LayerModules.fillers` fill them later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial

from torch import nn

from mheads.caffe.layer_graph import BROADCAST, DATA, GATHER, is_data
from mheads.caffe.layers import activations, losses, pooling
from mheads.caffe.layers import concat_eltwise_reshape as shaping
from mheads.caffe.layers import convolution as weighted
from mheads.caffe.layers.layer_modules import Detach, LayerModules, Shape, bottoms_without_gradient
from mheads.caffe.prototxt import CaffeLayer

MANY = 1_000_000


@dataclass(frozen=True)
class Kind:
    """A type of layer: its maker, and the least and most bottoms and tops."""

    make: Callable[[CaffeLayer, list[Shape]], LayerModules]
    bottoms: tuple[int, int] = (1, 1)
    tops: tuple[int, int] = (1, 1)


KINDS: dict[str, Kind] = {
    "Convolution": Kind(weighted.convolution),
    "Deconvolution": Kind(weighted.deconvolution),
    "InnerProduct": Kind(weighted.inner_product),
    "PReLU": Kind(weighted.prelu),
    "BatchNorm": Kind(weighted.batch_norm),
    "Scale": Kind(weighted.scale, (1, 2)),
    "Bias": Kind(weighted.bias, (1, 2)),
    "Pooling": Kind(pooling.pooling),
    "LRN": Kind(pooling.lrn),
    "ReLU": Kind(activations.relu),
    "ELU": Kind(activations.elu),
    "Sigmoid": Kind(activations.without_options(nn.Sigmoid)),
    "TanH": Kind(activations.without_options(nn.Tanh)),
    "AbsVal": Kind(activations.without_options(activations.Abs)),
    "BNLL": Kind(activations.without_options(partial(nn.Softplus, threshold=50))),
    "Power": Kind(activations.power),
    "Exp": Kind(activations.exponential),
    "Log": Kind(activations.logarithm),
    "Dropout": Kind(activations.dropout),
    "Softmax": Kind(activations.softmax),
    "Flatten": Kind(shaping.flatten),
    "Reshape": Kind(shaping.reshape),
    "ArgMax": Kind(shaping.argmax),
    "Eltwise": Kind(shaping.eltwise, (2, MANY)),
    "Concat": Kind(shaping.concat, (1, MANY)),
    "Slice": Kind(shaping.slices, tops=(1, MANY)),
    "Crop": Kind(shaping.crop, (2, 2)),
    "SoftmaxWithLoss": Kind(losses.loss, (2, 2), (0, 2)),
    "MultinomialLogisticLoss": Kind(losses.loss, (2, 2), (0, 1)),
    "EuclideanLoss": Kind(losses.loss, (2, 2), (0, 1)),
    "SigmoidCrossEntropyLoss": Kind(losses.loss, (2, 2), (0, 1)),
    "HingeLoss": Kind(losses.loss, (2, 2), (0, 1)),
    "Accuracy": Kind(losses.accuracy, (2, 2), (1, 2)),
}
ALIASES = ("Split",)  # each top is the bottom
BETWEEN_RANKS = (BROADCAST, GATHER)
NOTHING = ("Silence",)
LOSSES = ("SoftmaxWithLoss", "MultinomialLogisticLoss", "EuclideanLoss", "SigmoidCrossEntropyLoss", "HingeLoss")


def kind_of(layer: CaffeLayer) -> Kind | None:
    """What a layer is, if it computes anything; refuses one that is not known here."""
    if layer.type in (*ALIASES, *NOTHING, *BETWEEN_RANKS) or is_data(layer):
        return None
    kind = KINDS.get(layer.type)
    if kind is None:
        known = [*KINDS, *ALIASES, *NOTHING, *BETWEEN_RANKS, *DATA]
        same = [name for name in known if name.lower() == layer.type.lower().replace("_", "")]
        near = same or get_close_matches(layer.type, known, 1, 0.8)
        raise layer.refuse(
            f"there is no layer of type {layer.type!r} here"
            + (f"; did you mean {near[0]!r}?" if near else f": there are {', '.join(KINDS)}")
        )
    return kind


def make(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    """The modules of a layer whose bottoms have these shapes."""
    kind = kind_of(layer)
    assert kind is not None, f"{layer} computes nothing"
    for what, count, (low, high) in (("bottoms", len(shapes), kind.bottoms), ("tops", len(layer.tops), kind.tops)):
        if not low <= count <= high:
            wanted = str(low) if low == high else f"at least {low}" if high == MANY else f"{low} to {high}"
            raise layer.refuse(f"it has {count} {what}: a {layer.type} takes {wanted}")
    made, fixed = kind.make(layer, shapes), bottoms_without_gradient(layer)
    return replace(made, modules=[Detach(fixed), *made.modules]) if any(fixed) else made
