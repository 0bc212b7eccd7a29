"""Sibling stages of one structure, run as one batched stage.

A small network costs more by the number of its operations than by its arithmetic. The branches of a tree, or
independent members, that have the same layers keep their weights in tensors [S, ...], and one operation computes all.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.modules import has_batch_statistics, has_fixed_statistics
from mheads.common.nested_values import Value
from mheads.common.number_ranges import cuts
from mheads.engine import stacked_layers
from mheads.trees.tree_spec import Node
from mheads.trees.treenet import TreeNet

# Multiply-adds of a stage on a micro-batch from which on stacking is no faster than running stages side by side.
SMALL = 16_000_000
MOST = 1024  # stages of a stack
RECURRENT = (nn.RNNBase, nn.LSTMCell)  # `vmap` has no rule for them
PER_THREAD = 4_000_000  # multiply-adds of a stack on a micro-batch that are worth a thread


class StackedStage:
    """S stages of one structure; called with what one of them takes, S first where `each` has its own.

    The parameters and buffers of the stages become views of stacked tensors, so that whoever asks a stage for its
    weights still gets them. `release` gives the stages tensors of their own again.
    """

    @torch.inference_mode(False)  # where a service evaluates: the stages may learn later
    def __init__(self, names: Sequence[str], stages: Sequence[nn.Module]) -> None:
        self.names, self.stages = tuple(names), list(stages)
        self._local = threading.local()
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        for name, first in stages[0].named_parameters():
            parts = [stage.get_parameter(name) for stage in stages]
            whole = torch.stack([part.detach() for part in parts])
            for part, view in zip(parts, whole, strict=True):
                part.data = view
            self.parameters[name] = nn.Parameter(whole, requires_grad=first.requires_grad)
        for name, _ in stages[0].named_buffers():
            whole = torch.stack([stage.get_buffer(name) for stage in stages])
            for stage, view in zip(stages, whole, strict=True):
                _set_buffer(stage, name, view)
            self.buffers[name] = whole
        # BatchNorm that is frozen throughout ran by vmap before it had a form, and keeps those bits.
        frozen = any(map(has_fixed_statistics, stages[0].modules())) and not has_batch_statistics(stages[0])
        self._layers = None if frozen else stacked_layers.find_layers(stages[0])
        # What autocast would cast; vmap hides the operations from it.
        products = (nn.Linear, nn.Embedding, nn.Bilinear, nn.modules.conv._ConvNd, nn.PReLU)
        self._cast = {
            f"{path}.{key}" if path else key
            for path, module in stages[0].named_modules()
            if isinstance(module, products)
            for key, _ in module.named_parameters(recurse=False)
        }

    def __len__(self) -> int:
        return len(self.names)

    def __call__(self, x: Value, side: dict[str, Value] | None = None, rows: Tensor | None = None) -> Value:
        """Outputs [S, b, ...] of inputs [S, b, ...]. `rows` [S, b]: those of batch statistics, None for all."""
        tensors: dict[str, Tensor] = {**self.parameters, **self.buffers}
        if self._layers is not None and isinstance(x, Tensor):
            return stacked_layers.run(self._layers, tensors, x, rows)
        device = next(iter(tensors.values())).device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            tensors = {name: t.to(dtype) if name in self._cast else t for name, t in tensors.items()}
            x = nested_values.map_leaves(lambda t: t.to(dtype) if t.dtype == torch.float32 else t, x)

        layers = self._module_of_this_thread()

        def run_one(tensors: dict[str, Tensor], x: Any) -> Any:
            return functional_call(layers, tensors, (x, side))

        return vmap(run_one)(tensors, x)

    def _module_of_this_thread(self) -> nn.Module:
        """Layers without weights of their own: functional_call puts tensors into a module for the time of the call."""
        if not hasattr(self._local, "module"):
            self._local.module = copy.deepcopy(self.stages[0]).to("meta")
        module: nn.Module = self._local.module
        if module.training != self.stages[0].training:
            module.train(self.stages[0].training)
        return module

    @torch.inference_mode(False)
    def release(self) -> None:
        for stage in self.stages:
            for parameter in stage.parameters():
                parameter.data = parameter.data.clone()
            for name, buffer in list(stage.named_buffers()):
                _set_buffer(stage, name, buffer.clone())


def repeat_for(stack: StackedStage, x: Value) -> Value:
    """The same input for every stage of a stack, [b, ...] -> [S, b, ...], without a copy."""
    return nested_values.map_leaves(lambda t: t.unsqueeze(0).expand(len(stack), *t.shape), x)


def _set_buffer(stage: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, key = name.rpartition(".")
    stage.get_submodule(path)._buffers[key] = tensor


def siblings_to_stack(net: TreeNet, rows: int, mode: str, batch_norm: bool = True) -> list[list[Node]]:
    """The sibling leaves that are stacked, each list in member order: a rule on the tree, its layers and sizes.

    Operations on many stages have other last bits than on few, so a stack is always whole, on one rank. Its members
    follow one another, since their outputs are together in those of all members.

    `mode` is `engine.stack`. With `auto`, leaves of few multiply-adds on so many rows whose layers are known to batch
    well, those with `batch_norm` or not; with `always`, all siblings that are alike, and an error where some are not.
    """
    if mode == "never":
        return []
    families: list[list[Node]] = []
    for leaf in net.tree.leaves:
        if families and families[-1][-1].parent == leaf.parent:
            families[-1].append(leaf)
        else:
            families.append([leaf])
    groups = [leaves for leaves in families if len(leaves) > 1]
    if mode == "auto":
        small = [leaves for leaves in groups if is_small(net, leaves[0], rows, batch_norm)]
        batching = [leaves for leaves in small if find_unstackable(net, leaves[0]) is None]
        groups = [leaves for leaves in batching if find_unlike(net, leaves) is None]
    elif not groups:
        raise UserError("engine.stack = always, and no two members are siblings: use auto or never", key="engine.stack")
    else:
        for leaves in groups:
            check_alike(net, leaves)
    return [leaves[a:b] for leaves in groups for a, b in cuts(len(leaves), -(-len(leaves) // MOST))]


def stack_threads(net: TreeNet, stacked: Sequence[Sequence[str]], rows: int, cores: int) -> int:
    """How many threads the operations of stacks use: small ones would spend more on handing out work than on it."""
    products = {names[0]: net.facts.stage_products(net.tree.nodes[names[0]]) or 0 for names in stacked}
    largest = max((len(names) * products[names[0]] for names in stacked), default=0)
    return max(1, min(cores, largest * rows // PER_THREAD))


def is_small(net: TreeNet, node: Node, rows: int, batch_norm: bool = False) -> bool:
    """Whether a stage has little arithmetic on so many rows, in layers that batch well; BatchNorm if it may."""
    products = net.facts.stage_products(node)
    fits = batch_norm or not any(net.facts.statistics[name] for name in node.layers)
    return products is not None and products * rows < SMALL and fits


def all_small(net: TreeNet, rows: int) -> bool:
    """Whether cutting a batch of so many rows into micro-batches would cost more than it gives."""
    return all(is_small(net, node, rows) for node in net.tree.nodes.values())


def find_unstackable(net: TreeNet, leaf: Node) -> str | None:
    """A layer with batch statistics that keeps a stage out of stacks: `vmap` knows neither which rows they are of nor
    what a module does to its buffers, so every layer beside it must have a form in `stacked_layers.py`."""
    layers = net.batch_statistics_layers([leaf])
    if not layers:
        return None
    stage = net.chain.stage(leaf.layers, net.make_member())
    return layers[0] if stacked_layers.find_layers(stage) is None else None


def check_alike(net: TreeNet, leaves: Sequence[Node]) -> None:
    if layer := find_unstackable(net, leaves[0]):
        raise UserError(
            f"engine.stack = always, but {layer} takes statistics over a batch, and stages with such a layer are "
            "stacked only where it is a BatchNorm in a row of linear layers, embeddings, activations, LayerNorm and "
            "dropout: use auto or never",
            key="engine.stack",
        )
    here = [leaf for leaf in leaves if leaf.name in net.stages]
    for name, module in net.stage(here[0].name).named_modules() if here else ():
        if isinstance(module, RECURRENT):
            raise UserError(
                f"engine.stack = always, but {here[0].name}.{name} is a recurrent layer, and such layers are not "
                "stacked: use auto or never",
                key="engine.stack",
            )
    if leaf := find_unlike(net, leaves):
        raise UserError(
            f"engine.stack = always, but the stages {here[0].name} and {leaf.name} differ (in layers, shapes or "
            "what is frozen), and only stages of one structure can be stacked: use auto or never",
            key="engine.stack",
        )


def find_unlike(net: TreeNet, leaves: Sequence[Node]) -> Node | None:
    """One of these stages that is unlike the first, of those in this process: in layers, shapes or what is frozen."""
    here = [leaf for leaf in leaves if leaf.name in net.stages]
    first = _structure(net.stage(here[0].name)) if here else None
    return next((leaf for leaf in here[1:] if _structure(net.stage(leaf.name)) != first), None)


def _structure(stage: nn.Module) -> list[Any]:
    modules = [(name, type(m), m.extra_repr(), has_fixed_statistics(m)) for name, m in stage.named_modules()]
    tensors = [(name, p.shape, p.dtype, p.requires_grad) for name, p in stage.named_parameters()]
    return [*modules, *tensors, *((name, b.shape, b.dtype) for name, b in stage.named_buffers())]
