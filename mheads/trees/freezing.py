"""Freezing: which stages and layers of a tree do not learn."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from mheads.common.errors import UserError
from mheads.common.modules import takes_statistics

if TYPE_CHECKING:
    from mheads.trees.treenet import TreeNet

UP_TO = ".."  # before the last of the layers to freeze


def freeze(net: TreeNet, names: Collection[str] = ()) -> None:
    """Has these stages, layers or modules inside layers learn nothing; what was frozen before learns again.

    `trunk` is a stage, `conv1` that layer wherever it is, `..conv3` all layers up to it, and itself. Frozen BatchNorm
    normalises by the statistics that it has; dropout drops.
    """
    if isinstance(names, str):
        raise UserError(f"freeze={names!r}: give a list of names, freeze=[{names!r}]")
    check_names(net, names)
    net.frozen = tuple(dict.fromkeys(layer for name in names for layer in _expand(net, name)))
    for name, parameter in net.named_parameters(remove_duplicate=False):  # layers may share a weight
        if name in net.frozen_parameters:
            parameter.requires_grad_(True)
    net.frozen_parameters = set()
    for name in net.stages:
        stage = net.stage(name)
        for key, parameter in stage.named_parameters(remove_duplicate=False):
            if parameter.requires_grad and net.is_frozen(name, key):
                net.frozen_parameters.add(f"stages.{name}.{key}")
                parameter.requires_grad_(False)
        stage.holds_fixed = False
        for key, module in stage.named_modules():
            module.__dict__.pop("fixed_statistics", None)
            if net.is_frozen(name, key) and takes_statistics(module):
                module.fixed_statistics = stage.holds_fixed = True
    net.train(net.training)
    if net.frozen and not any(map(net.learns, net.tree.nodes)):
        frozen = ", ".join(net.frozen)
        freeze(net, [])
        raise UserError(f"freeze = [{frozen}] leaves nothing to learn: leave some stage or layer out")


def check_names(net: TreeNet, names: Collection[str]) -> None:
    """Raises an error for a name that is no stage, layer or module of the network, or `..` before no layer."""
    layers, stages = [layer.name for layer in net.layers], list(net.tree.nodes)
    for name in names:
        layer = name.removeprefix(UP_TO)
        if not (layer in stages or layer in layers or layer in dict(net.make_member().named_modules())):
            shown = ", ".join(stages[:8]) + (", ..." if len(stages) > 8 else "")
            raise UserError(
                f"freeze: there is no stage and no layer {layer!r}; the stages are {shown}, the layers of "
                f"{net.network_name} {', '.join(layers)}"
            )
        if name.startswith(UP_TO) and layer not in layers:
            raise UserError(
                f"freeze = [{name}]: {UP_TO} stands before a layer of {net.network_name}: {', '.join(layers)}"
            )


def _expand(net: TreeNet, name: str) -> list[str]:
    layers = [layer.name for layer in net.layers]
    return layers[: layers.index(name.removeprefix(UP_TO)) + 1] if name.startswith(UP_TO) else [name]
