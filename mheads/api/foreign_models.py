"""Models that were trained elsewhere: a list of them gives outputs [M, B, C] as a tree does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from mheads.api.raw_examples import PreprocessingNetwork
from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.common.safe_yaml import short
from mheads.data.batches import Batch
from mheads.trees.treenet import TreeNet


def outputs_of_all(models: Sequence[Callable[..., Any]], batch: Batch) -> Value:
    """What the models give for a batch, the models first."""
    found = [_outputs(model, f"model {m} ({_name(model)})", batch) for m, model in enumerate(models)]
    shapes = [[tuple(t.shape) for t in nested_values.leaves(one)] for one in found]
    if other := [m for m, shape in enumerate(shapes) if shape != shapes[0]]:
        said = ", ".join(f"model {m} gives {' and '.join(map(str, shapes[m]))}" for m in (0, other[0]))
        raise UserError(f"all models must give outputs of one shape: {said} for {len(batch)} examples")
    return nested_values.map_leaves(lambda *parts: torch.stack([part.to(parts[0]) for part in parts]), *found)


def outputs_of_one(model: Any, batch: Batch) -> Any:
    """What a model gives for a batch, on its device, in its precision, and with side inputs where it takes some."""
    parameter = next(model.parameters() if isinstance(model, nn.Module) else iter(()), torch.empty(0))
    raw, side = batch.inputs.to(parameter.device), batch.side_inputs()
    if isinstance(model, TreeNet):
        return model(batch.preprocess(raw, parameter.dtype), side)
    if isinstance(model, PreprocessingNetwork):  # it brings its preprocessing: raw images, channels first
        x = raw if raw.is_floating_point() or raw.dim() == 2 else raw.permute(0, 3, 1, 2)
        return model(x, side) if side else model(x)
    return model(batch.preprocess(raw, parameter.dtype).clone())  # it may write into its input, which others get too


def _outputs(model: Callable[..., Any], name: str, batch: Batch) -> Value:
    try:
        found = outputs_of_one(model, batch)
    except UserError:
        raise
    except Exception as error:  # the user's model may raise anything
        shape = list(batch.inputs.shape)
        raise UserError(f"{name} fails on examples of shape {shape} with {type(error).__name__}: {error}") from error
    found = torch.from_numpy(found) if isinstance(found, np.ndarray) else found
    try:
        nested_values.leaves(found)
    except TypeError:
        raise UserError(
            f"{name} gives {short(found)}: each model must give logits as a tensor or an array, or several tensors"
        ) from None
    return found


def _name(model: Callable[..., Any]) -> str:
    return getattr(model, "__name__", type(model).__name__)
