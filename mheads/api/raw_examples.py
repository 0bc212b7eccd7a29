"""Raw examples as users give them, checked against those of training, and networks that take them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.data.arrays import as_side, stack_arrays
from mheads.data.value_range import measure_range
from mheads.data.views import View, average_views, stack_views
from mheads.runs.data_facts import DataFacts


class PreprocessingNetwork(nn.Module):
    """A network after the preprocessing of its run. It takes raw examples: images [B, C, H, W], vectors [B, F], or
    tokens [B, T], and gives numbers in the units of the targets. In eval mode its outputs are means over the views of
    the run."""

    def __init__(self, network: nn.Module, data: DataFacts, views: Sequence[View] = ()) -> None:
        super().__init__()
        self.network = network
        self.data = data
        self.views = views

    def forward(self, x: Any, side: dict[str, Any] | None = None) -> Value:
        raw = as_raw_examples(x, self.data)
        if side is not None:
            arrays = read_side_inputs(side, len(raw), self.data)
            side = {name: torch.from_numpy(array).to(raw.device) for name, array in arrays.items()}
        return self.run(raw, side)

    def run(self, raw: Tensor, side: dict[str, Any] | None = None) -> Value:
        """The outputs of raw examples as `as_raw_examples` gives them."""
        parameter = next(self.network.parameters(), torch.empty(0))
        x = self.data.inputs(raw.to(parameter.device), parameter.dtype)
        views = () if self.training else self.views
        x = stack_views(x, views)
        outputs: Value = self.network(x) if side is None else self.network(x, side)
        averaged = nested_values.map_leaves(lambda t: average_views(t, views, dim=0), outputs)
        return self.data.problem.in_original_units(averaged)


def as_raw_examples(x: Any, data: DataFacts, what: str = "the examples") -> Tensor:
    """Examples as `Split.read` gives them: uint8 images NHWC, float images NCHW, vectors [B, F], tokens int64 [B, T].

    Raises unless they have the shape and the range of those that the run was trained on.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about read-only arrays: nobody writes to them
            raw = x if isinstance(x, Tensor) else torch.as_tensor(stack_arrays(x, what))
            raw = raw.to_dense() if raw.layout != torch.strided else raw
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{what} are not an array ({error}); give an array of shape {_batch_shape(data)}") from error
    if not raw.numel() and raw.shape[:1] in ((), (0,)):
        raise UserError(f"{what} are empty: give at least one, as an array of shape {_batch_shape(data)}")
    if raw.dim() == 3 and data.shape[0] == 1 and len(data.shape) == 3:
        raw = raw[:, None]
    if tuple(raw.shape[1:]) != data.shape:
        hint = f"; one example is x[None], of shape {[1, *data.shape]}" if tuple(raw.shape) == data.shape else ""
        raise UserError(f"{what} have shape {list(raw.shape[1:])}, but the run was trained on {list(data.shape)}{hint}")
    if data.seen is not None and data.seen.kind == "tokens" and raw.dtype in (torch.int32, torch.int64):
        raw = raw.long()
    elif raw.dtype == torch.uint8:
        raw = raw.permute(0, 2, 3, 1) if raw.dim() == 4 else raw
    elif not raw.is_floating_point():
        kind = str(raw.dtype).removeprefix("torch.")
        raise UserError(f"{what} have dtype {kind}; convert them to uint8 or float32, as in training")
    check_raw_examples(raw, data, what)
    return raw


def _batch_shape(data: DataFacts) -> str:
    """The shape of a batch as messages give it: [N, 3, 32, 32]."""
    return f"[N, {', '.join(map(str, data.shape))}]"


def read_side_inputs(side: Any, count: int, data: DataFacts, what: str = "the examples") -> dict[str, np.ndarray]:
    """Side inputs of so many examples; raises if their shapes are not those of training."""
    arrays = as_side(side, count, what)
    check_side_inputs({name: array.shape[1:] for name, array in arrays.items()}, data, what)
    return arrays


def check_side_inputs(shapes: Mapping[str, tuple[int, ...]], data: DataFacts, what: str = "the examples") -> None:
    """Raises if the shapes of side inputs for one example are not those of training."""
    for name, shape in (data.side or {}).items():
        if shape and shapes.get(name, shape) != shape:
            raise UserError(
                f"{what}: side input {name!r} has shape {list(shapes[name])} for one example, but training had "
                f"{list(shape)}"
            )


def check_raw_examples(raw: Tensor, data: DataFacts, what: str = "the examples") -> None:
    """Raises for NaN and infinity, and for what cannot be brought to the range that training saw."""
    plain = raw.detach().float() if raw.dtype == torch.bfloat16 else raw.detach()  # numpy does not know it
    data.check(measure_range(plain.cpu().numpy(), what), what)
