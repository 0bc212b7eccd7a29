"""Refuses networks that a tree of their layers would silently get wrong, by running one on a few examples.

A tree runs the children of a network one after the other, in threads, on parts of a batch. So each layer must leave
alone what it is given and what others use, treat examples one by one or say that it does not, and the layers in a row
must be all that the network does.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from mheads.common import nested_values, seeds
from mheads.common.errors import UserError
from mheads.common.modules import has_batch_statistics
from mheads.common.nested_values import Value
from mheads.networks.dropout import KeyedFunctions
from mheads.trees.checks import trial_run
from mheads.trees.checks.trial_run import Side
from mheads.trees.splitting.cut_sequential import Chain, SequentialChain, SequentialStage

Layers = Sequence[tuple[str, nn.Module]]
ONE_LAYER = "or give the whole network as one layer, nn.Sequential(net), which works without a split"
GLOBAL_HOOKS = [f"_global_{kind}_hooks" for kind in ("forward", "forward_pre", "backward", "backward_pre")]
PATIENCE = 10.0  # seconds after which comparing a network with its layers makes do with one try in each mode
KEPT = (0, -1)  # both ends: what a row gives may depend on those before it or on those after it


class LayerError(UserError):
    """A layer raises `__cause__` on inputs of these `shapes`."""

    def __init__(self, layer: str, network: str, shapes: list[tuple[int, ...]], error: Exception) -> None:
        shown = shapes[0] if len(shapes) == 1 else shapes
        super().__init__(f"layer {layer!r} of {network} fails on an input of shape {shown}: {error}", key=layer)
        self.shapes = shapes


@torch.no_grad()
def check_layers(network: str, layers: Layers, x: Value, side: Side = None, splits: Collection[str] = ()) -> Value:
    """Runs the layers of a network one by one, in both modes; returns what comes out in training.

    Each is a stage of its own. `splits` names those that a stage ends with and another goes on from.
    """
    if any(getattr(nn.modules.module, name, None) for name in GLOBAL_HOOKS):
        raise UserError(
            "a hook on all modules is registered (torch.nn.modules.module.register_module_..._hook), but known layers "
            f"run without their modules and would not call it: remove it, and put hooks on layers of {network}"
        )
    chain = nn.ModuleList(layer for _, layer in layers)
    for name, parameter in (pair for _, layer in layers for pair in layer.named_parameters()):
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UserError(
                f"{name} of {network} has a hook for when its gradient is accumulated, which never happens here: "
                "gradients are summed apart and given to the optimizer; use register_hook"
            )
    for name, module in (pair for _, layer in layers for pair in layer.named_modules()):
        if any(type(hook).__module__.startswith("torch.nn.utils.") for hook in module._forward_pre_hooks.values()):
            raise UserError(
                f"layer {name!r} of {network} is rewritten before each call (the old weight_norm, "
                "spectral_norm or prune), which threads must not do at once; use torch.nn.utils.parametrizations"
            )
    for name, module in (pair for _, layer in layers for pair in layer.named_modules()):
        if getattr(module, "scale_grad_by_freq", False):
            raise UserError(
                f"layer {name!r} of {network} divides gradients by how often a token is in the batch "
                "(scale_grad_by_freq), which cutting the batch would change without a word: leave that out"
            )
    with trial_run.as_it_was(chain), trial_run.apart():
        chain.train(False)
        _check_in_a_row(network, layers, x, side, splits)
        remembering = _remembering_layer(layers, x, side)
        chain.train(True)
        output = _check_in_a_row(network, layers, x, side, splits)
        mixing = _mixing_layer(layers, x, side)
    if remembering is not None:
        raise UserError(
            f"layer {remembering!r} of {network} gives something else when another batch runs in between: it keeps "
            "something from call to call, or another layer leaves it there, and threads would mix that up; hand it on "
            "in what layers give (a tuple or dict)"
        )
    if mixing is not None:
        raise UserError(
            f"layer {mixing!r} of {network} mixes examples: what it gives for one depends on the others in the batch, "
            "so cutting the batch would change results without a word. Set batch_statistics = True on that module to "
            "have it see whole batches, or let it treat each example by itself (is the batch its first dimension?)"
        )
    return output


@torch.no_grad()
def check_places(network: str, chain: Chain, module: nn.Module, x: Value, side: Side, splits: Collection[str]) -> None:
    """Refuses layers whose output for an example depends on its place in the batch, or on how many there are.

    Of a graph, the parts between splits are looked at: its layers one by one would be cut more often than they are.
    """
    names = [layer.name for layer in chain.layers]
    parts = [[name] for name in names] if isinstance(chain, SequentialChain) else _parts(names, splits)
    layers = [(f"{part[0]} to {part[-1]}" if len(part) > 1 else part[0], chain.stage(part, module)) for part in parts]
    stages = nn.ModuleList(stage for _, stage in layers)
    with trial_run.as_it_was(stages), trial_run.apart():
        placing = _placing_layer(layers, x, side)
    if placing is not None:
        raise UserError(
            f"layer {placing!r} of {network} gives something else for an example that stands elsewhere in the batch, "
            "or in a batch of another size, and batches are cut and mixed: let it treat each example by itself (is the "
            "batch its first dimension? Positions in a sequence are another one then)"
        )


def _check_in_a_row(network: str, layers: Layers, x: Value, side: Side, splits: Collection[str]) -> Value:
    rows, h = nested_values.num_rows(x), x
    for name, layer in layers:
        states, buffers = seeds.global_states(), trial_run.buffers(layer)
        weights = [p._version for p in layer.parameters()]
        given = h
        copies, versions = [t.clone() for t in nested_values.leaves(h)], [t._version for t in nested_values.leaves(h)]
        try:
            h = trial_run.call(layer, h, side)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            shapes = [tuple(t.shape) for t in copies]
            raise LayerError(name, network, shapes, error) from error
        _refuse_other_values(h, name, network)
        found = nested_values.leaves(given)
        if [t._version for t in found] != versions or not all(map(trial_run.equal, found, copies)):
            raise changes_its_input(repr(name), network)
        if seeds.global_states() != states:
            raise UserError(
                f"layer {name!r} of {network} draws random numbers from the global generator of torch, numpy or "
                "random, so results would depend on the order of threads; "
                f"{_without_own_dropout(layer) or 'use mheads.Dropout, or mheads.dropout.draw_mask for your own noise'}"
            )
        now = trial_run.buffers(layer)
        changed = [key for key in now if key not in buffers or not trial_run.equal(now[key], buffers[key])]
        if changed and not has_batch_statistics(layer):
            raise UserError(
                f"layer {name!r} of {network} changes its buffer {changed[0]!r} as it runs, so micro-batches "
                "must not overlap; set batch_statistics = True on that module to have them run one by one"
            )
        shared = [key for key in changed if sum(key in other.state_dict() for _, other in layers) > 1]
        if shared:
            raise UserError(
                f"layer {name!r} of {network} changes its buffer {shared[0]!r} as it runs, which other layers use too: "
                f"each stage would have one of its own; use it in one layer, {ONE_LAYER}"
            )
        if [p._version for p in layer.parameters()] != weights:
            raise UserError(
                f"layer {name!r} of {network} changes its own weights as it runs (nn.Embedding with max_norm?), which "
                "threads must not do at once; use torch.nn.utils.parametrizations"
            )
        if name in splits and not side and not all(_is_rowwise(t, rows) for t in nested_values.leaves(h)):
            raise UserError(
                f"the members of {network} part after layer {name!r}, but what it gives for {rows} examples is of "
                f"shape {[tuple(t.shape) for t in nested_values.leaves(h)]}: examples must come first there, since "
                "members may learn from some only; split elsewhere, or let it give the batch first"
            )
    return h


def _refuse_other_values(value: Value, name: str, network: str) -> None:
    """Refuses what an engine could not hand on."""
    if isinstance(value, Tensor):
        return
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            _refuse_other_values(part, name, network)
        return
    what = "None" if value is None else f"a {type(value).__name__}"
    raise UserError(
        f"layer {name!r} of {network} gives {what}: layers give tensors, or tuples, lists and dicts of tensors; let it "
        "give the tensors alone"
    )


def _without_own_dropout(layer: nn.Module) -> str:
    """What to do about layers of torch that drop inside, where no keyed mask reaches."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0:
            kind = type(module).__name__
            return f"{name} is an nn.{kind} that drops by itself: set its attribute dropout to 0.0 in the factory"
    return ""


def _remembering_layer(layers: Layers, x: Value, side: Side) -> str | None:
    """The first layer whose output depends on what ran since the layer before it."""
    rows = nested_values.num_rows(x)
    alone, h = [], x
    for _, layer in layers:
        h = trial_run.call(layer, h, side)
        alone.append(nested_values.leaves(h))
    h, other = x, nested_values.map_leaves(lambda t: _with_others(t, rows, 0), x)
    for (name, layer), expected in zip(layers, alone, strict=True):
        h = trial_run.call(layer, h, side)
        if not trial_run.close(nested_values.leaves(h), expected):
            return name
        try:
            other = trial_run.call(layer, other, side)
        except Exception:  # it does not run on every example
            return None
    return None


def _placing_layer(layers: Layers, x: Value, side: Side) -> str | None:
    """The first layer whose output for an example depends on its place in the batch, or on how many there are.

    In evaluation, where no mask of dropout does.
    """
    rows = nested_values.num_rows(x)
    if rows < 2 or _rows_belong_together(layers, side):
        return None
    for _, layer in layers:
        layer.train(False)
    for other in (partial(torch.flip, dims=(0,)), lambda t: t[:1]):
        for weights in (trial_run.shaken, lambda layer: nullcontext()):
            try:
                if (found := _find_placing(layers, x, rows, other, weights)) is not None:
                    return found
                break
            except Exception:  # not every layer can run on other weights, or on one example
                continue
    return None


def _find_placing(
    layers: Layers,
    x: Value,
    rows: int,
    other: Callable[[Tensor], Tensor],
    weights: Callable[[nn.Module], AbstractContextManager[None]],
) -> str | None:
    def moved(t: Tensor) -> Tensor:
        return other(t) if _is_rowwise(t, rows) else t

    suspect: str | None = None
    plain, there = x, nested_values.map_leaves(moved, x)
    for name, layer in layers:
        with weights(layer):
            plain, there = trial_run.call(layer, plain, None), trial_run.call(layer, there, None)
        if has_batch_statistics(layer):  # it said that it looks at all: go on with the same on both sides
            there = nested_values.map_leaves(moved, plain)
        same = trial_run.close([moved(t) for t in nested_values.leaves(plain)], nested_values.leaves(there))
        suspect = None if same else (suspect or name)  # rows may stand elsewhere on the way: sequence first
    return suspect if all(_is_rowwise(t, rows) for t in nested_values.leaves(plain)) else None


def _rows_belong_together(layers: Layers, side: Side) -> bool:
    """Whether only the batch knows which rows are of one example."""
    return bool(side) or any(hasattr(m, "takes") for _, layer in layers for m in layer.modules())


def _mixing_layer(layers: Layers, x: Value, side: Side) -> str | None:
    """The first layer whose output for one example changes with the others, though it did not say that it would."""
    if nested_values.num_rows(x) < 2 or _rows_belong_together(layers, side):
        return None
    try:  # other weights, since zeros hide what a layer does
        return _find_mixing(layers, x, trial_run.shaken)
    except Exception:  # which not every layer can run on: they must be positive, say
        try:
            return _find_mixing(layers, x, lambda layer: nullcontext())
        except Exception:  # nor on other examples
            return None


def _find_mixing(layers: Layers, x: Value, weights: Callable[[nn.Module], AbstractContextManager[None]]) -> str | None:
    rows = nested_values.num_rows(x)
    given = [x, *(nested_values.map_leaves(lambda t, r=r: _with_others(t, rows, r), x) for r in KEPT)]
    suspect: str | None = None
    for name, layer in layers:
        with weights(layer):
            plain, *others = [trial_run.call(layer, h, None) for h in given]
        if has_batch_statistics(layer):  # it may mix: go on with the same example on both sides
            others = [
                nested_values.map_leaves(lambda a, b, r=r: _with_row_of(a, b, rows, r), plain, h)
                for r, h in zip(KEPT, others, strict=True)
            ]
        given = [plain, *others]
        differs = any(
            _is_rowwise(a, rows) and not trial_run.close([a[r]], [b[r]])
            for r, h in zip(KEPT, others, strict=True)
            for a, b in zip(nested_values.leaves(plain), nested_values.leaves(h), strict=True)
        )
        suspect = (suspect or name) if differs else None  # rows may stand elsewhere on the way: sequence first
    return suspect


def _is_rowwise(t: Tensor, rows: int) -> bool:
    return t.dim() > 0 and len(t) == rows


def _with_row_of(a: Tensor, b: Tensor, rows: int, row: int) -> Tensor:
    if not _is_rowwise(a, rows):
        return a
    b = b.clone()
    b[row] = a[row]
    return b


def _with_others(t: Tensor, rows: int, row: int) -> Tensor:
    """The same example in this row with others beside it; whole numbers stay among those that occur."""
    if not _is_rowwise(t, rows):
        return t
    if t.is_floating_point():
        others = t + (1 + t.abs().max()) * trial_run.noise(t, torch.Generator().manual_seed(0))
    else:
        others = t[row].flip(tuple(range(t.dim() - 1))).expand_as(t)
    return _with_row_of(t, others, rows, row)


def changes_its_input(layer: str, network: str) -> UserError:
    return UserError(
        f"layer {layer} of {network} changes its input in place, which other members may still need: let it work on a "
        "copy"
    )


def hooks_on_the_network(network: str) -> UserError:
    return UserError(
        f"{network} has hooks on the network itself, which a tree would never call, since it runs the layers inside; "
        f"put them on a layer, {ONE_LAYER}"
    )


@torch.no_grad()
def compare_with_forward(network: str, module: nn.Module, chain: Chain, x: Value, splits: Collection[str] = ()) -> None:
    """The layers in a row, cut after `splits`, must give what the module's own forward gives, with the same gradients.

    In both modes, with other weights too, since zeros hide whatever follows them, and with another number of rows; of a
    large network, once that takes long, with other weights alone.
    """
    began = time.monotonic()
    layers = _in_a_row(chain, module, splits)
    more = nested_values.map_leaves(lambda t: torch.cat([t, t[:1]]), x)
    with trial_run.as_it_was(module), trial_run.apart():
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
                shaken = nullcontext() if seed is None else trial_run.shaken(module, seed)
                with shaken:
                    same = _same_results(network, module, layers, given, must_run=seed is None)
                    if not same and training and not isinstance(chain, SequentialChain):
                        same = _same_in_float64(network, module, chain, given, splits)
                    whole = layers if same else _in_a_row(chain, module).train(training)
                    only_cut = not same and _same_results(network, module, whole, given, must_run=False)
                if not same:
                    mode = "training" if training else "evaluation"
                    raise UserError(_differs(network, chain, mode, splits if only_cut else ()))


def _in_a_row(chain: Chain, module: nn.Module, splits: Collection[str] = ()) -> nn.Module:
    """All layers, in a stage of their own after each split."""
    names = [layer.name for layer in chain.layers]
    if isinstance(chain, SequentialChain):
        return chain.stage(names, module)
    return nn.Sequential(*(chain.stage(part, module) for part in _parts(names, splits)))


def _parts(names: list[str], splits: Collection[str]) -> list[list[str]]:
    """The names cut after each split."""
    stops = [i + 1 for i, name in enumerate(names[:-1]) if name in splits]
    return [names[start:stop] for start, stop in pairwise([0, *stops, len(names)])]


def _same_in_float64(network: str, module: nn.Module, chain: Chain, x: Value, splits: Collection[str]) -> bool:
    """Whether what differed was rounding, which the statistics of few values magnify."""
    if not has_batch_statistics(module):
        return False
    try:
        exact = copy.deepcopy(module).double()
        x = nested_values.map_leaves(lambda t: t.double() if t.is_floating_point() else t, x)
        return _same_results(network, exact, _in_a_row(chain, exact, splits), x, must_run=True)
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
            found = torch.autograd.grad(ys, weights, ds, allow_unused=True) if ys and weights else [None] * len(weights)
        gradients = [torch.zeros_like(w) if g is None else g.to_dense() for w, g in zip(weights, found, strict=True)]
        return [y.detach() for y in outputs], gradients, list(trial_run.buffers(module).values())
