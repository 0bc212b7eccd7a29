"""Finds layers with hidden randomness or state: each layer of a network runs on a few examples, and is watched.

A tree runs layers in threads, on parts of a batch. So a layer must leave its input alone, draw from no global
generator, keep nothing from call to call, and change no weight or buffer, unless it declares batch statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from mheads.common import nested_values, seeds
from mheads.common.errors import UserError
from mheads.common.modules import has_batch_statistics
from mheads.common.nested_values import Value
from mheads.trees.checks import trial_run
from mheads.trees.checks.trial_run import Layers, Side

ONE_LAYER = "or give the whole network as one layer, nn.Sequential(net), which works without a split"
_GLOBAL_HOOKS = [f"_global_{kind}_hooks" for kind in ("forward", "forward_pre", "backward", "backward_pre")]


class LayerError(UserError):
    """A layer raises `__cause__` on inputs of these `shapes`."""

    def __init__(self, layer: str, network: str, shapes: list[tuple[int, ...]], error: Exception) -> None:
        shown = shapes[0] if len(shapes) == 1 else shapes
        super().__init__(f"layer {layer!r} of {network} fails on an input of shape {shown}: {error}", key=layer)
        self.shapes = shapes


@torch.no_grad()
def check_layers(network: str, layers: Layers, x: Value, side: Side, splits: Collection[str], known: bool) -> Value:
    """Runs the layers of a network, each as a stage of its own, in both modes; returns the output in training.

    `splits` names the layers after which members part. Layers that are `known` to remember nothing run once.
    """
    check_hooks(network, layers)
    chain = nn.ModuleList(layer for _, layer in layers)
    with trial_run.as_it_was(chain), trial_run.isolated():
        chain.train(False)
        outputs = _run_and_check(network, layers, x, side, splits)
        remembering = None if known else _find_remembering(layers, x, side, outputs)
        chain.train(True)
        output = _run_and_check(network, layers, x, side, splits)[-1]
    if remembering is not None:
        raise UserError(
            f"layer {remembering!r} of {network} gives other outputs if another batch runs in between: it reads state "
            "that it or another layer stored in an earlier call, and threads would mix up such state; pass it on as "
            "an output of layers (a tuple or dict)"
        )
    return output


def check_hooks(network: str, layers: Layers) -> None:
    """Raises an error for hooks and options that the engine would leave out, or that threads must not run at once."""
    if any(getattr(nn.modules.module, name, None) for name in _GLOBAL_HOOKS):
        raise UserError(
            "a hook on all modules is registered (torch.nn.modules.module.register_module_..._hook), but known layers "
            f"run without their modules and would not call it: remove it, and put hooks on layers of {network}"
        )
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
        if getattr(module, "scale_grad_by_freq", False):
            raise UserError(
                f"layer {name!r} of {network} divides gradients by how often a token is in the batch "
                "(scale_grad_by_freq), which cutting the batch would change without a word: leave that out"
            )


def _run_and_check(network: str, layers: Layers, x: Value, side: Side, splits: Collection[str]) -> list[Value]:
    """The outputs of all layers; raises an error for one that does more than to compute its output."""
    outputs, sided = [x], False
    for name, layer in layers:
        before = _Snapshot(layer, outputs[-1])
        try:
            y = trial_run.call(layer, outputs[-1], side)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise LayerError(name, network, [tuple(t.shape) for t in before.inputs], error) from error
        where = f"layer {name!r} of {network}"
        _check_type(y, where)
        before.check(layer, outputs[-1], [other for _, other in layers], where)
        rows = nested_values.num_rows(x)
        sided = sided or any(hasattr(module, "takes") for module in layer.modules())  # then rows may differ from those
        if name in splits and not sided and not all(trial_run.is_rowwise(t, rows) for t in nested_values.leaves(y)):
            raise UserError(
                f"{network} is split after layer {name!r}, but its output for {rows} examples has the shape "
                f"{[tuple(t.shape) for t in nested_values.leaves(y)]}: at a split the batch must be the first "
                "dimension, since a member may learn from some examples only; split elsewhere, or let the layer give "
                "the batch first"
            )
        outputs.append(y)
    return outputs[1:]


class _Snapshot:
    """The state that a layer can reach, before it runs."""

    def __init__(self, layer: nn.Module, x: Value) -> None:
        self.generators, self.buffers = seeds.global_states(), trial_run.buffers(layer)
        self.weights = [p._version for p in layer.parameters()]
        self.inputs = [t.clone() for t in nested_values.leaves(x)]
        self.versions = [t._version for t in nested_values.leaves(x)]

    def check(self, layer: nn.Module, x: Value, layers: Sequence[nn.Module], where: str) -> None:
        """Raises an error if running the layer on x has changed something."""
        inputs = nested_values.leaves(x)
        if [t._version for t in inputs] != self.versions or not all(map(trial_run.equal, inputs, self.inputs)):
            raise changes_its_input(where)
        if seeds.global_states() != self.generators:
            advice = _dropout_advice(layer) or "use mheads.Dropout, or mheads.dropout.draw_mask for your own noise"
            raise UserError(
                f"{where} draws random numbers from the global generator of torch, numpy or random, so results would "
                f"depend on the order of threads; {advice}"
            )
        now = trial_run.buffers(layer)
        changed = [key for key in now if key not in self.buffers or not trial_run.equal(now[key], self.buffers[key])]
        if changed and not has_batch_statistics(layer):
            raise UserError(
                f"{where} changes its buffer {changed[0]!r} as it runs, so micro-batches must not overlap; set "
                "batch_statistics = True on that module to have them run one by one"
            )
        if shared := [key for key in changed if sum(key in other.state_dict() for other in layers) > 1]:
            raise UserError(
                f"{where} changes its buffer {shared[0]!r} as it runs, which other layers use too: each stage would "
                f"have one of its own; use it in one layer, {ONE_LAYER}"
            )
        if [p._version for p in layer.parameters()] != self.weights:
            raise UserError(
                f"{where} changes its own weights as it runs (nn.Embedding with max_norm?), which threads must not do "
                "at once; use torch.nn.utils.parametrizations"
            )


def changes_its_input(where: str) -> UserError:
    return UserError(f"{where} changes its input in place, which other members may still need: let it work on a copy")


def _check_type(value: Value, where: str) -> None:
    """Raises an error for outputs that an engine could not hand on."""
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            _check_type(part, where)
    elif not isinstance(value, Tensor):
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise UserError(
            f"{where} gives {kind}: layers give tensors, or tuples, lists and dicts of tensors; let it give the "
            "tensors alone"
        )


def _dropout_advice(layer: nn.Module) -> str:
    """What to do about layers of torch that drop inside, where no keyed mask reaches."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0:
            kind = type(module).__name__
            return f"{name} is an nn.{kind} that drops by itself: set its attribute dropout to 0.0 in the factory"
    return ""


def _find_remembering(layers: Layers, x: Value, side: Side, outputs: Sequence[Value]) -> str | None:
    """The first layer that gives another output than before, since another batch ran in between."""
    h, other = x, trial_run.replace_others(x, row=0)
    for (name, layer), expected in zip(layers, outputs, strict=True):
        h = trial_run.call(layer, h, side)
        if not trial_run.close(nested_values.leaves(h), nested_values.leaves(expected)):
            return name
        try:
            other = trial_run.call(layer, other, side)
        except Exception:  # it does not run on every example
            return None
    return None
