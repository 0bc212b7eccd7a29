"""Finds layers that mix examples: the output for one example depends on the others, or on its place in the batch.

A tree cuts batches and mixes them, so a layer must treat each example by itself, or declare batch statistics. The
layers run on a batch, and on variations of it that hold some of the same examples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.modules import has_batch_statistics
from mheads.common.nested_values import Value
from mheads.trees.checks import trial_run
from mheads.trees.checks.trial_run import Layers
from mheads.trees.splitting.cut_sequential import Chain, SequentialChain, cut_names


@dataclass(frozen=True)
class Variation:
    """A batch whose rows `there` hold the examples that the original has in its rows `here`."""

    batch: Value
    here: list[int]
    there: list[int]


@torch.no_grad()
def check_examples(network: str, chain: Chain, module: nn.Module, x: Value, splits: Collection[str]) -> None:
    """Raises an error if a layer mixes examples in training, or places matter in evaluation, where no mask is drawn.

    For places the layers of a graph run as they are cut by the splits: cut more often, they would lose sizes.
    """
    rows = nested_values.num_rows(x)
    if rows < 2 or any(hasattr(m, "takes") for m in module.modules()):  # only the batch knows what belongs together
        return
    names = [layer.name for layer in chain.layers]
    layers = [(name, chain.stage([name], module)) for name in names]
    parts = layers
    if not isinstance(chain, SequentialChain):
        cut = cut_names(names, splits)
        parts = [(f"{p[0]} to {p[-1]}" if len(p) > 1 else p[0], chain.stage(p, module)) for p in cut]
    last = rows - 1  # both ends are kept: an output may depend on the rows before it or on those after it
    others = [Variation(trial_run.replace_others(x, row), [row], [row]) for row in (0, last)]
    places = [
        Variation(_map_rows(lambda t: t.flip(0), x), [*range(rows)], [*reversed(range(rows))]),
        Variation(_map_rows(lambda t: t[:1], x), [0], [0]),
    ]
    if (mixing := _find_dependent(layers, x, others, training=True)) is not None:
        raise UserError(
            f"layer {mixing!r} of {network} mixes examples: its output for one example depends on the others in the "
            "batch, so cutting the batch would silently change results. Set batch_statistics = True on that module, "
            "so that it gets whole batches, or let it treat each example by itself (is the batch its first dimension?)"
        )
    if (placing := _find_dependent(parts, x, places, training=False)) is not None:
        raise UserError(
            f"layer {placing!r} of {network} gives another output for the same example at another place in the batch, "
            "or in a batch of another size, but batches are cut and shuffled: let it treat each example by itself (is "
            "the batch its first dimension, and not the positions of a sequence?)"
        )


def _find_dependent(layers: Layers, x: Value, variations: Sequence[Variation], training: bool) -> str | None:
    """The first layer whose output for the same example differs between the batch and a variation."""
    rows, stages = nested_values.num_rows(x), nn.ModuleList(layer for _, layer in layers)
    with trial_run.as_it_was(stages), trial_run.isolated():
        stages.train(training)
        for weights in (trial_run.shake(stages), nullcontext()):
            try:
                with weights:
                    outputs = [x]
                    for _, layer in layers:
                        outputs.append(trial_run.call(layer, outputs[-1], None))
                    names = (_find_difference(layers, outputs[1:], rows, variation) for variation in variations)
                    return next((name for name in names if name is not None), None)
            except Exception:  # not every layer can run on other weights: they must be positive, say
                continue
    return None


def _find_difference(layers: Layers, outputs: Sequence[Value], rows: int, variation: Variation) -> str | None:
    other, suspect = variation.batch, None
    for (name, layer), plain in zip(layers, outputs, strict=True):
        try:
            other = trial_run.call(layer, other, None)
        except Exception:  # not every layer runs on other examples, or on one
            return None
        if has_batch_statistics(layer):  # it declares that it may mix: the same examples continue on both sides
            other = nested_values.map_leaves(partial(_restore, rows, variation), plain, other)
        leaves = zip(nested_values.leaves(plain), nested_values.leaves(other), strict=True)
        pairs = [(a[variation.here], b[variation.there]) for a, b in leaves if trial_run.is_rowwise(a, rows)]
        same = trial_run.close([b for _, b in pairs], [a for a, _ in pairs])
        suspect = None if same else suspect or name  # rows may stand elsewhere on the way: sequence first
    return suspect


def _restore(rows: int, variation: Variation, plain: Tensor, other: Tensor) -> Tensor:
    """The tensor of the variation with the examples of the original."""
    if not trial_run.is_rowwise(plain, rows):
        return plain
    other = other.clone()
    other[variation.there] = plain[variation.here]
    return other


def _map_rows(change: Callable[[Tensor], Tensor], x: Value) -> Value:
    rows = nested_values.num_rows(x)
    return nested_values.map_leaves(lambda t: change(t) if trial_run.is_rowwise(t, rows) else t, x)
