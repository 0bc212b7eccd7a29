"""What the making of a layer gives, and what makers ask of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mheads.caffe.prototxt import CaffeLayer

Shape = tuple[int, ...]
Fillers = dict[str, Any]  # name of a parameter -> FillerParameter


@dataclass(frozen=True)
class LayerModules:
    """Modules that run one after the other; the last has the weights, which are Caffe's blobs in this order."""

    modules: list[nn.Module]
    fillers: Fillers = field(default_factory=dict)


class Detach(nn.Module):
    """Its inputs, some of which no gradient goes back to."""

    def __init__(self, fixed: tuple[bool, ...]) -> None:
        super().__init__()
        self.fixed = fixed

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = tuple(x.detach() if fixed else x for x, fixed in zip(inputs, self.fixed, strict=True))
        return outputs[0] if len(outputs) == 1 else outputs

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.fixed))


def bottoms_without_gradient(layer: CaffeLayer) -> tuple[bool, ...]:
    """Which bottoms get no gradient: those with `propagate_down: false`."""
    given = list(layer.message.propagate_down)
    if given and len(given) != len(layer.bottoms):
        raise layer.refuse(f"it has {len(given)} propagate_down for {len(layer.bottoms)} bottoms: give one for each")
    return tuple(not down for down in given)


def axis_of(layer: CaffeLayer, axis: int, dims: int, what: str = "axis") -> int:
    """An axis counted from 0, where negative ones count from the end."""
    if not -dims <= axis < dims:
        raise layer.refuse(f"{what}: {axis}: its bottom has {dims} axes, counted from 0 to {dims - 1}")
    return axis % dims


def per_axis(
    layer: CaffeLayer, parameter: Any, key: str, count: int, default: int | None, least: int
) -> tuple[int, ...]:
    """`key` for each spatial axis: given once for all, once for each, or as `key_h` and `key_w`."""
    short = key.removesuffix("_size")
    fields = parameter.DESCRIPTOR.fields_by_name
    both = [f"{short}_h", f"{short}_w"]
    given = [name for name in both if name in fields and parameter.HasField(name)]
    value = getattr(parameter, key)
    listed = [value] if isinstance(value, int) else list(value)
    if isinstance(value, int) and not parameter.HasField(key):
        listed = []
    if given:
        if listed:
            raise layer.refuse(f"it has {key} as well as {given[0]}: give one of them")
        if count != 2:
            raise layer.refuse(f"{given[0]} is for images, and its bottom has {count} spatial axes: give {key}")
        fallback = default if short == "pad" else None
        if len(given) < 2 and fallback is None:
            raise layer.refuse(f"it has {given[0]} without {(set(both) - set(given)).pop()}: give both")
        listed = [getattr(parameter, name) for name in both]
    if not listed:
        if default is None:
            raise layer.refuse(f"it has no {key}: give one")
        listed = [default]
    if len(listed) not in (1, count):
        raise layer.refuse(f"it has {len(listed)} values of {key} for {count} spatial axes: give one, or one for each")
    values = listed * count if len(listed) == 1 else listed
    for number in values:
        if number < least:
            raise layer.refuse(f"{key}: {number}: give {least} or more")
    return tuple(values)
