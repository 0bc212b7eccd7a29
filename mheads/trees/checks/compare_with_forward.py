"""Compares the layers of a network, run one after the other, with the network's own forward."""

from __future__ import annotations

import copy
import time
from collections.abc import Collection
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from mheads.common import nested_values, seeds
from mheads.common.errors import UserError
from mheads.common.modules import has_batch_statistics
from mheads.common.nested_values import Value
from mheads.networks.dropout import KeyedFunctions
from mheads.trees.checks import trial_run
from mheads.trees.checks.hidden_randomness_and_state import ONE_LAYER
from mheads.trees.splitting.cut_sequential import Chain, SequentialChain, SequentialStage, cut_names

PATIENCE = 10.0  # seconds after which one try in each mode must do


@torch.no_grad()
def compare_with_forward(network: str, module: nn.Module, chain: Chain, x: Value, splits: Collection[str] = ()) -> None:
    """The layers in a row, cut after `splits`, must give what the module's own forward gives, with the same gradients.

    In both modes, with other weights too, since zeros hide whatever follows them, and with another number of rows; of a
    large network, once that takes long, with other weights alone.
    """
    began = time.monotonic()
    layers = _join_layers(chain, module, splits)
    more = nested_values.map_leaves(lambda t: torch.cat([t, t[:1]]), x)
    with trial_run.as_it_was(module), trial_run.isolated():
        for training in (True, False):
            module.train(training)
            layers.train(training)
            tries = [(0, x), (None, x), (1, more)]
            if chain.why is not None:  # it may decide by what it is given: with the same weights, by either sign
                signs = [
                    nested_values.map_leaves(partial(_times, by), x) for by in ((9, 9), (-9, -9), (9, -9), (-9, 9))
                ]
                tries += [(seed, other) for seed in (0, 1) for other in signs]
            for i, (seed, given) in enumerate(tries):
                if i and time.monotonic() - began > PATIENCE:
                    break
                shaken = nullcontext() if seed is None else trial_run.shake(module, seed)
                with shaken:
                    same = _same_results(network, module, layers, given, must_run=seed is None)
                    if not same and training and not isinstance(chain, SequentialChain):
                        same = _same_in_float64(network, module, chain, given, splits)
                    whole = layers if same else _join_layers(chain, module).train(training)
                    only_cut = not same and _same_results(network, module, whole, given, must_run=False)
                if not same:
                    mode = "training" if training else "evaluation"
                    raise UserError(_differs(network, chain, mode, splits if only_cut else ()))


def _join_layers(chain: Chain, module: nn.Module, splits: Collection[str] = ()) -> nn.Module:
    """All layers, in a stage of their own after each split."""
    names = [layer.name for layer in chain.layers]
    if isinstance(chain, SequentialChain):
        return chain.stage(names, module)
    return nn.Sequential(*(chain.stage(part, module) for part in cut_names(names, splits)))


def _same_in_float64(network: str, module: nn.Module, chain: Chain, x: Value, splits: Collection[str]) -> bool:
    """Whether what differed was rounding, which the statistics of few values magnify."""
    if not has_batch_statistics(module):
        return False
    try:
        exact = copy.deepcopy(module).double()
        x = nested_values.map_leaves(lambda t: t.double() if t.is_floating_point() else t, x)
        return _same_results(network, exact, _join_layers(chain, exact, splits), x, must_run=True)
    except Exception:  # whatever a network says to another dtype
        return False


def _times(factors: tuple[float, float], t: Tensor) -> Tensor:
    """Every other row by one factor, those between by the other: rows that cancel in a sum must not hide a sign."""
    if not t.is_floating_point():
        return t
    t = t.clone()
    for row, factor in enumerate(factors):
        t[row::2] *= factor
    return t


def cannot_follow(why: str) -> str:
    return (
        f"torch.fx cannot follow its forward: {why}; decide by nothing that is known only when it runs, make a module "
        "of that part, or give the network a method stages() that returns its modules in order, by name"
    )


def _differs(network: str, chain: Chain, mode: str, splits: Collection[str]) -> str:
    """`splits` where the layers differ only because they are cut there."""
    if splits:
        return (
            f"{network}, split at {', '.join(map(repr, sorted(splits)))}, does not give what its forward gives in "
            f"{mode}: a size 0 (x.shape[0]) that goes past a split is taken for the number of examples, and is not; "
            "take it after the split, or split elsewhere"
        )
    if not isinstance(chain, SequentialChain):
        return (
            f"the layers of {network} run one after the other do not give what its forward gives in {mode}: it does "
            "something that a graph does not show (no_grad, autocast, an autograd.Function or a hook inside forward, a "
            "type or a count of calls that decides); give it a method stages() that returns its modules in order, by "
            f"name, {ONE_LAYER}"
        )
    cause = "" if chain.why is None else f"; it may do more, but {cannot_follow(chain.why)}"
    return (
        f"the children of {network} run one after the other do not give what its forward gives in {mode}{cause}; "
        f"make each such step a child, {ONE_LAYER}"
    )


def _same_results(network: str, module: nn.Module, layers: nn.Module, x: Value, must_run: bool) -> bool:
    states = seeds.global_states()
    # With the strides that layers are given, since others round otherwise, and statistics of two examples may blow that
    # up; or else with those that everybody else gives the network, which its own forward may ask for.
    for strides in (torch.preserve_format, torch.contiguous_format):
        keyed = nullcontext() if isinstance(layers, SequentialStage) else KeyedFunctions()  # as in a graph
        try:
            with keyed:
                expected = _results(module, module, x, strides)
            break
        except Exception as error:
            failed = error
    else:
        if must_run:
            raise UserError(f"the forward of {network} fails with {type(failed).__name__}: {failed}") from failed
        return True  # weights that must be positive, say
    if seeds.global_states() != states:
        raise UserError(
            f"the forward of {network} draws random numbers itself (F.dropout?), which running its children one after "
            f"the other would leave out; make it a child, nn.Dropout for example, {ONE_LAYER}"
        )
    try:
        got = _results(layers, module, x, torch.preserve_format)
    except Exception:  # whatever a layer says to an input that is not its own
        return False
    return all(map(trial_run.close, got, expected))


def _results(run: nn.Module, module: nn.Module, x: Value, strides: torch.memory_format) -> tuple[list[Tensor], ...]:
    """Outputs, gradients of the module's weights for a fixed gradient of these, and its buffers afterwards."""
    weights = [p for p in module.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    with trial_run.as_it_was(module):
        with torch.enable_grad(), trial_run.masks(x):
            outputs = nested_values.leaves(run(nested_values.map_leaves(lambda t: t.clone(memory_format=strides), x)))
            ys = [y for y in outputs if y.requires_grad]
            ds = [trial_run.noise(y, generator) for y in ys]
            computed = (
                torch.autograd.grad(ys, weights, ds, allow_unused=True) if ys and weights else [None] * len(weights)
            )
        gradients = [torch.zeros_like(w) if g is None else g.to_dense() for w, g in zip(weights, computed, strict=True)]
        return [y.detach() for y in outputs], gradients, list(trial_run.buffers(module).values())
