"""Losses and accuracy. Each is a function of single examples, so that a batch may be cut, and a module on a batch.

`of_examples(terms)` in `mheads.caffe.objective` uses the functions; a net that is run layer by layer uses the modules.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mheads.caffe.layers.layer_modules import LayerModules, Shape, axis_of
from mheads.caffe.prototxt import CaffeLayer

FULL, VALID, BATCH_SIZE, NONE = range(4)
TINY = 1e-20  # below which MultinomialLogisticLoss takes no logarithm
IGNORED = -100  # what mheads' own data calls a pixel that does not count


def softmax_losses(x: Tensor, y: Tensor, axis: int = 1, ignore: int | None = None) -> tuple[Tensor, Tensor]:
    """-log softmax(x)_y of each place, and which count: [B, ...] both, without the axis of the classes."""
    x = x.movedim(axis, 1)
    y = _labels(y, x)
    counts = y != IGNORED
    if ignore is not None:
        counts = counts & (y != ignore)
    losses = F.cross_entropy(x, y.where(counts, torch.full_like(y, IGNORED)), reduction="none", ignore_index=IGNORED)
    return losses, counts


def _labels(y: Tensor, x: Tensor) -> Tensor:
    """Class numbers of the shape of scores [B, C, ...] without their classes."""
    return y.long().reshape(x.shape[0], *x.shape[2:])


def multinomial_losses(p: Tensor, y: Tensor) -> Tensor:
    """-log max(p_y, 1e-20) of probabilities [B, C]; the gradient goes through the bound, as in Caffe."""
    p_y = p.flatten(1).gather(1, y.long().reshape(-1, 1)).squeeze(1)
    bounded = p_y.detach().clamp_min(TINY)
    return -bounded.log() - (p_y - p_y.detach()) / bounded


def euclidean_losses(a: Tensor, b: Tensor) -> Tensor:
    """Half the squared distance of each example."""
    return (a - b.reshape(a.shape).to(a.dtype)).square().flatten(1).sum(1) / 2


def sigmoid_losses(x: Tensor, y: Tensor, ignore: int | None = None) -> tuple[Tensor, Tensor]:
    """The cross-entropy of sigmoid(x) and targets in 0..1 at each place, and which count."""
    y = y.reshape(x.shape).to(x.dtype)
    counts = torch.ones_like(y, dtype=torch.bool) if ignore is None else y != ignore
    losses = F.binary_cross_entropy_with_logits(x, y.where(counts, torch.zeros_like(y)), reduction="none")
    return losses * counts, counts


def hinge_losses(x: Tensor, y: Tensor, squared: bool = False) -> Tensor:
    """sum_c max(0, 1 - t_c x_c), t being 1 for the class y and -1 for others; the sum of squares, if squared."""
    x = x.flatten(1)
    sign = torch.full_like(x, -1).scatter(1, y.long().reshape(-1, 1), 1)
    margins = (1 - sign * x).clamp_min(0)
    return (margins.square() if squared else margins).sum(1)


def divisor(mode: int, batch: int, outer: int, places: int, valid: Tensor) -> Tensor | float:
    """What a sum over a batch is divided by; never less than 1 where it is counted.

    `outer` is how many places of an example stand before the axis of the classes: Caffe's size of a batch counts them.
    """
    if mode == VALID:
        return valid.clamp_min(1)
    return {FULL: float(batch * places), BATCH_SIZE: float(batch * outer), NONE: 1.0}[mode]


def normalization(layer: CaffeLayer, default: int) -> int:
    """The way in which a loss is normalised: as it is said now, or as it was once."""
    p = layer.message.loss_param
    if p.HasField("normalization"):
        mode: int = p.normalization
        return mode
    if p.HasField("normalize"):
        return VALID if p.normalize else BATCH_SIZE
    return default


def ignore_label(layer: CaffeLayer) -> int | None:
    p = layer.message.loss_param
    return p.ignore_label if p.HasField("ignore_label") else None


def describe_loss(layer: CaffeLayer, shapes: list[Shape]) -> dict[str, Any]:
    """A loss as plain data: its type and what decides it."""
    if layer.type == "SoftmaxWithLoss":
        axis = axis_of(layer, layer.message.softmax_param.axis, len(shapes[0]))
        _check_classes(layer, shapes[0], axis)
        outer = math.prod(shapes[0][1:axis])
        return {
            "type": layer.type,
            "axis": axis,
            "ignore": ignore_label(layer),
            "normalization": normalization(layer, VALID),
            **({"outer": outer} if outer > 1 else {}),
        }
    if layer.type == "SigmoidCrossEntropyLoss":
        return {"type": layer.type, "ignore": ignore_label(layer), "normalization": normalization(layer, BATCH_SIZE)}
    if layer.type == "HingeLoss":
        return {"type": layer.type, "squared": layer.message.hinge_loss_param.norm == 2}
    return {"type": layer.type}


def _check_classes(layer: CaffeLayer, shape: Shape, axis: int) -> None:
    if axis == 0 or len(shape) < 2:
        raise layer.refuse(
            f"its bottom has the shape {list(shape)}: it takes examples x classes, classes along axis {axis}"
        )


def places_and_sums(term: dict[str, Any], inputs: list[Tensor]) -> tuple[Tensor, Tensor, int]:
    """Sums over the places of each example, how many of these count, and how many there are."""
    kind, (x, y) = term["type"], inputs
    if kind in ("SoftmaxWithLoss", "SigmoidCrossEntropyLoss"):
        if kind == "SoftmaxWithLoss":
            losses, counts = softmax_losses(x, y, term["axis"], term["ignore"])
        else:
            losses, counts = sigmoid_losses(x, y, term["ignore"])
        losses, counts = losses.reshape(len(x), -1), counts.reshape(len(x), -1)
        return losses.sum(1), counts.sum(1), losses.shape[1]
    if kind == "HingeLoss":
        losses = hinge_losses(x, y, term["squared"])
    else:
        losses = euclidean_losses(x, y) if kind == "EuclideanLoss" else multinomial_losses(x, y)
    return losses, torch.ones_like(losses), 1


class LossLayer(nn.Module):
    """A loss of a batch: the sum over its examples, divided as the normalisation says."""

    def __init__(self, term: dict[str, Any], also: bool) -> None:
        super().__init__()
        self.term, self.also = term, also

    def forward(self, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        sums, counts, places = places_and_sums(self.term, [x, y])
        mode, outer = self.term.get("normalization", BATCH_SIZE), self.term.get("outer", 1)
        loss = sums.sum() / divisor(mode, len(x), outer, places, counts.sum())
        return (loss, F.softmax(x, self.term["axis"])) if self.also else loss

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.term.items())


def loss(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    term = describe_loss(layer, shapes)
    scores = shapes[0]
    targets, needs = {
        "SoftmaxWithLoss": (_without(scores, term.get("axis", 1)), "a label for each place"),
        "EuclideanLoss": (scores, "as many values in both"),
        "SigmoidCrossEntropyLoss": (scores, "a target for each value"),
    }.get(layer.type, (scores[:1], "a label for each example"))
    _check_targets(layer, shapes, targets, needs)
    return LayerModules([LossLayer(term, len(layer.tops) > 1)])


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _check_targets(layer: CaffeLayer, shapes: list[Shape], targets: Shape, needs: str) -> None:
    if math.prod(shapes[1]) != math.prod(targets):
        raise layer.refuse(f"its bottoms have the shapes {list(shapes[0])} and {list(shapes[1])}: it takes {needs}")


class Accuracy(nn.Module):
    """The part of the places whose label is among the k highest scores; of equals, those before it count as higher."""

    def __init__(self, k: int, axis: int, ignore: int | None, each: bool) -> None:
        super().__init__()
        self.k, self.axis, self.ignore, self.each = k, axis, ignore, each

    @torch.no_grad()
    def forward(self, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = x.movedim(self.axis, 1)
        y = _labels(y, x)
        counts = torch.ones_like(y, dtype=torch.bool) if self.ignore is None else y != self.ignore
        own = x.gather(1, y.where(counts, torch.zeros_like(y)).unsqueeze(1))
        right = ((x >= own).sum(1) - 1 < self.k) & counts
        accuracy = right.sum() / counts.sum().clamp_min(1)
        if not self.each:
            return accuracy.to(x.dtype)
        by_class = [(right & (y == c)).sum() / ((y == c) & counts).sum().clamp_min(1) for c in range(x.shape[1])]
        return accuracy.to(x.dtype), torch.stack(by_class).to(x.dtype)

    def extra_repr(self) -> str:
        return f"k={self.k}, axis={self.axis}, ignore={self.ignore}"


def accuracy(layer: CaffeLayer, shapes: list[Shape]) -> LayerModules:
    p = layer.message.accuracy_param
    axis = axis_of(layer, p.axis, len(shapes[0]))
    if axis == 0:
        raise layer.refuse("axis: 0 goes over the examples of a batch: give 1 or more")
    if not 1 <= p.top_k <= shapes[0][axis]:
        raise layer.refuse(f"top_k: {p.top_k} of {shapes[0][axis]} classes")
    _check_targets(layer, shapes, _without(shapes[0], axis), "a label for each place")
    ignore = p.ignore_label if p.HasField("ignore_label") else None
    return LayerModules([Accuracy(p.top_k, axis, ignore, len(layer.tops) > 1)])
