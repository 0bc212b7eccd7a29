"""Guided backprop (Springenberg et al., 2015): what of its input a network responds to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from mheads.api.raw_examples import PreprocessingNetwork, as_raw_examples
from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.engine.measure import in_eval_mode


def guided_backprop(
    network: nn.Module, x: Any, target: Any = None, layer: str | None = None, side: dict[str, Any] | None = None
) -> Tensor:
    """The guided gradient, of x's shape, of each example's score of class `target`: one class for all, or [B].

    With `layer` in place of `target`, that of the layer's strongest unit (channel and place) for each example. At every
    ReLU, be it a module or a function, in place or not, only positive gradients pass; all else is as it is, so that a
    network without ReLU gives plain gradients. A member with its preprocessing, `run.member(m)`, takes raw examples;
    the gradient is with respect to what the network itself takes. `side` holds the side inputs of layers.
    """
    if isinstance(network, PreprocessingNetwork):
        data, network = network.data, network.network
        raw = as_raw_examples(x, data)
        x = data.inputs(raw, _parameter(network).dtype)
    return backprop(network, torch.as_tensor(x), target, layer, side)[0]


def backprop(
    network: nn.Module, x: Tensor, target: Any, layer: str | None = None, side: dict[str, Any] | None = None
) -> tuple[Tensor, bool]:
    """The gradient of inputs as the network takes them, and whether a ReLU guided it."""
    if (target is None) == (layer is None):
        raise UserError("give either a target, the class whose score is explained, or a layer")
    if x.dtype in (torch.int32, torch.int64):
        raise UserError("tokens have no gradient: saliency is for images and other numbers")
    like = _parameter(network)
    with torch.inference_mode(False), torch.enable_grad(), in_eval_mode([network]), _keep(network, layer) as kept:
        start = x.detach().to(like.device, like.dtype, copy=True).requires_grad_()
        inputs = start.clone()  # which a network may write into
        output = network(inputs) if side is None else network(inputs, side)
        scores = _scores(output, target) if layer is None else _strongest(kept, network, layer, len(x))
        if scores.grad_fn is None:
            raise UserError(f"{type(network).__name__} gives no gradient: is there a no_grad or a detach in it?")
        # In the graph every kind of call has become the same node, and the network itself is left alone.
        relus = [node for node in _nodes(scores.grad_fn) if node.name() == "ReluBackward0"]
        for relu in relus:
            relu.register_prehook(lambda gradients: (gradients[0].clamp_min(0),))
        # Examples do not see each other in eval mode, so the gradient of the sum is each one's own.
        (gradient,) = torch.autograd.grad(scores.sum(), start, materialize_grads=True)
    return gradient, bool(relus)


def _parameter(network: nn.Module) -> Tensor:
    """One that tells the network's device and precision."""
    return next(network.parameters(), torch.empty(0))


def _scores(output: Any, target: Any) -> Tensor:
    """The score [B] of each example's class."""
    scores = nested_values.leaves(output)[0]
    if scores.dim() != 2:
        raise UserError(f"the network gives outputs of shape {tuple(scores.shape)}, not a score for each class")
    count, classes = scores.shape
    wanted = torch.as_tensor(target, device=scores.device)
    whole = not wanted.is_floating_point() and tuple(wanted.shape) in ((), (count,))
    if not whole or not bool(((wanted >= 0) & (wanted < classes)).all()):
        raise UserError(
            f"target={target}: give a class from 0 to {classes - 1}, or one for each of the {count} examples"
        )
    return scores.gather(1, wanted.long().expand(count)[:, None])[:, 0]


def _strongest(kept: list[Any], network: nn.Module, layer: str, count: int) -> Tensor:
    """The largest activation [B] of what a layer gave when it was last called."""
    if not kept:  # in a network that was cut as a graph, blocks are no modules any more
        inside = [f"{layer}.{name}" for name, _ in network.get_submodule(layer).named_modules() if name]
        hint = f"give a layer in it, such as {inside[-1]}" if inside else "give another"
        raise UserError(f"layer {layer!r} is not called by itself in this network: {hint}")
    activations = nested_values.leaves(kept[-1])[0]
    if not activations.is_floating_point() or activations.shape[:1] != (count,):
        raise UserError(f"layer {layer!r} gives {tuple(activations.shape)} for {count} examples: give another layer")
    units = activations.reshape(count, -1)
    # The first of several that are equal; `amax` would share the gradient out among them.
    return units.gather(1, units.argmax(1, keepdim=True))[:, 0]


def find_layer(network: nn.Module, layer: str) -> nn.Module:
    """The module of this name in a network."""
    modules: dict[str, nn.Module] = dict(network.named_modules())
    if not layer or layer not in modules:
        inner = next((f", and what is in them, such as {name}" for name in modules if "." in name), "")
        names = ", ".join(name for name, _ in network.named_children())
        raise UserError(f"there is no layer {layer!r}: the layers are {names}{inner}")
    return modules[layer]


@contextmanager
def _keep(network: nn.Module, layer: str | None) -> Iterator[list[Any]]:
    """The outputs of a layer while the network runs in this thread."""
    outputs: list[Any] = []
    if layer is None:
        yield outputs
        return
    module = find_layer(network, layer)
    thread = threading.get_ident()

    def keep(_: nn.Module, args: Any, output: Any) -> Any:
        if threading.get_ident() != thread:
            return None
        outputs.append(output)
        return nested_values.map_leaves(torch.clone, output)  # what follows may write into it

    handle = module.register_forward_hook(keep)
    try:
        yield outputs
    finally:
        handle.remove()


def _nodes(end: Node) -> set[Node]:
    """All nodes of the graph that ends here."""
    nodes: set[Node] = set()
    ahead = [end]
    while ahead:
        node = ahead.pop()
        if node not in nodes:
            nodes.add(node)
            ahead += [before for before, _ in node.next_functions if before is not None]
    return nodes
