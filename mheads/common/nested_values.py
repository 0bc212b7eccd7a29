"""Values: what stages take and give. A tensor, or a tuple, list or dict of values.

Classification moves single tensors; a detector's member gives scores and box deltas, and the engine need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Value = Any  # Tensor | tuple[Value, ...] | list[Value] | dict[str, Value]


def leaves(value: Value) -> list[Tensor]:
    """The tensors of a value, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key])]
    return [leaf for part in value for leaf in leaves(part)]


def map_leaves(function: Callable[..., Tensor], *values: Value) -> Value:
    """A value of the same form whose tensors are `function` of those at the same place in each of the values."""
    first = values[0]
    if isinstance(first, Tensor):
        return function(*values)
    if isinstance(first, dict):
        return {key: map_leaves(function, *(v[key] for v in values)) for key in first}
    parts = [map_leaves(function, *part) for part in zip(*values, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)


def rebuild(value: Value, tensors: Sequence[Tensor | None]) -> Value:
    """A value of the form of `value` with these tensors for its leaves."""
    queue = iter(tensors)
    return map_leaves(lambda _: next(queue), value)  # type: ignore[return-value,arg-type]


def num_rows(value: Value) -> int:
    return leaves(value)[0].shape[0]
