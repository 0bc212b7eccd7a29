"""Fast R-CNN: any network of layers in a row that tells images apart, made to tell regions of images apart."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from mheads.common.errors import UserError
from mheads.common.modules import children
from mheads.networks.caffe_style_layers import linear
from mheads.networks.roi_pooling import RegionPool

POOLING = (nn.MaxPool2d, nn.AvgPool2d)
SIDE = 6  # of the grid over a region where no layer asks for another


class Detect(nn.Module):
    """Features [R, F] -> scores [R, classes] and, for each class, what turns a region into a box, [R, 4 * classes]."""

    fresh = True  # weights to start from have none

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.scores = linear(features, classes, std=0.01)
        self.boxes = linear(features, 4 * classes, std=0.001)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scores(x), self.boxes(x)


def fast_rcnn(
    base: str = "caffenet",
    classes: int = 20,
    base_args: dict[str, Any] | None = None,
    pool: int | None = None,
    at: str | None = None,
) -> nn.Sequential:
    """Images [B, 3, H, W] of any size and regions in them -> scores [R, 1 + classes], boxes [R, 4 (1 + classes)].

    The layers of `base` keep their names. Pooling over regions takes the place of the last pooling before the
    classifier, or stands before it where that pools to a fixed size, or follows the layer `at`; what comes after runs
    on each region, and two outputs take the place of the classifier. Layers before it are padded until place i of the
    map is that of pixel i times its stride, where regions look for it. `pool` is the side of the grid over a region: by
    default what the first fully connected layer expects, else 6.
    """
    from mheads import networks  # which has this one, too

    layers = children(_row(networks.resolve(base)(**(base_args or {})), base))
    names = [name for name, _ in layers]
    last = max((i for i, (_, layer) in enumerate(layers) if any(True for _ in layer.parameters())), default=0)
    whole, then = _parting(layers[:last], base, at, names)
    for _, layer in layers[:whole]:
        _centre(layer)
    scale, channels = _map_of(nn.Sequential(OrderedDict(layers[:whole])), base)
    grid = pool or _find_grid(layers[then:last], channels)
    detector = [*layers[:whole], ("regions", RegionPool(grid, scale)), *layers[then:last]]
    features, spatial = _features(nn.Sequential(OrderedDict(layers[then:last])), channels, grid, base)
    if spatial:
        detector += [("average", nn.AdaptiveAvgPool2d(1)), ("together", nn.Flatten())]
    return nn.Sequential(OrderedDict([*detector, ("detect", Detect(features, 1 + classes))]))


def _row(network: nn.Module, base: str) -> nn.Module:
    if type(network).forward is not nn.Sequential.forward:
        raise UserError(
            f"fast_rcnn takes a network whose layers are in a row, and {base} is a {type(network).__name__} with a "
            "forward of its own: give an nn.Sequential with named layers"
        )
    return network


def _parting(layers: list[tuple[str, nn.Module]], base: str, at: str | None, names: list[str]) -> tuple[int, int]:
    """How many layers run on whole images, and the number of the first that runs on regions."""
    if at is not None:
        if at not in names[: len(layers)]:
            raise UserError(
                f"model_args.at = {at!r} is not a layer of {base} before its classifier: there are "
                f"{', '.join(names[: len(layers)])}"
            )
        return names.index(at) + 1, names.index(at) + 1
    for i in range(len(layers) - 1, -1, -1):
        if isinstance(layers[i][1], POOLING):
            return i, i + 1
        if isinstance(layers[i][1], (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)):
            return i, i
    raise UserError(
        f"{base} has no pooling whose place that of regions could take: say with model_args.at after which of its "
        f"layers it stands ({', '.join(names[: len(layers)])})"
    )


def _centre(layer: nn.Module) -> None:
    """Pads convolutions and pooling by half of their windows, as the release's CaffeNet is: else what is pooled for a
    region lies right of it and below, by 17 pixels in CaffeNet. Blocks with a forward of their own stay as they are."""
    if isinstance(layer, nn.Sequential):
        for _, child in children(layer):
            _centre(child)
    elif isinstance(layer, (nn.Conv2d, *POOLING)) and layer.padding != "same":
        given = (0, 0) if layer.padding == "valid" else _pair(layer.padding)
        spread = _pair(getattr(layer, "dilation", 1))
        half = [(side - 1) * step // 2 for side, step in zip(_pair(layer.kernel_size), spread, strict=True)]
        wanted = (max(given[0], half[0]), max(given[1], half[1]))
        if wanted != given:
            layer.padding = wanted
            if isinstance(layer, nn.AvgPool2d):
                layer.count_include_pad = False  # the edge is not darker


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _map_of(features: nn.Module, base: str) -> tuple[float, int]:
    """The size of the map by that of the image, and how many channels it has; nothing is computed."""
    small, large = 256, 256 + 512
    shapes = [_shape_of(features, (1, _inputs(features), side, side), base) for side in (small, large)]
    if any(len(shape) != 4 for shape in shapes) or shapes[0][2] >= shapes[1][2]:
        raise UserError(
            f"{base} has no map of the image where regions would be pooled: name an earlier layer as model_args.at"
        )
    return (shapes[1][2] - shapes[0][2]) / (large - small), shapes[0][1]


def _inputs(features: nn.Module) -> int:
    """The channels of its images."""
    convolutions = (m for m in features.modules() if isinstance(m, nn.Conv2d))
    return next((m.in_channels for m in convolutions), 3)


def _find_grid(layers: list[tuple[str, nn.Module]], channels: int) -> int:
    """The side of the grid that the first fully connected layer was made for."""
    modules = [module for _, layer in layers for module in layer.modules()]
    first = next((m for m in modules if isinstance(m, (nn.Linear, nn.Conv2d))), None)
    if isinstance(first, nn.Linear) and first.in_features % channels == 0:
        return max(1, math.isqrt(first.in_features // channels))
    return SIDE


def _features(layers: nn.Module, channels: int, grid: int, base: str) -> tuple[int, bool]:
    """How many numbers the layers on regions give, and whether these are maps."""
    shape = _shape_of(layers, (1, channels, grid, grid), base)
    return shape[1], len(shape) == 4


def _shape_of(layers: nn.Module, shape: tuple[int, ...], base: str) -> tuple[int, ...]:
    try:
        return tuple(copy.deepcopy(layers).to("meta").eval()(torch.empty(shape, device="meta")).shape)
    except RuntimeError as error:
        cause = str(error).split("\n")[0]
        raise UserError(
            f"fast_rcnn of {base}: inputs of shape {list(shape[1:])} do not go through its layers ({cause}); "
            "model_args.pool and model_args.at say how large regions are and where they are pooled"
        ) from error
