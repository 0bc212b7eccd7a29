"""Freezing: which stages and layers of a tree do not learn."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from mheads.common.errors import UserError
from mheads.common.modules import takes_statistics

if TYPE_CHECKING:
    from mheads.trees.treenet import TreeNet

UP_TO = ".."  # before the last of the layers to freeze
STAGE, LAYER = "stage:", "layer:"  # before a name that a stage and a layer have


def freeze(net: TreeNet, names: Collection[str] = ()) -> None:
    """Has these stages, layers or modules inside layers learn nothing; what was frozen before learns again.

    `trunk` is a stage, `conv1` that layer wherever it is, `..conv3` all layers up to it, and itself. Where a stage and
    a layer are both called 0, they are `stage:0` and `layer:0`. Frozen BatchNorm normalises by the statistics that it
    has; dropout drops.
    """
    if isinstance(names, str):
        raise UserError(f"freeze={names!r}: give a list of names, freeze=[{names!r}]")
    net.frozen = tuple(dict.fromkeys(part for name in names for part in _resolve(net, name)))
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


def frozen_stages(net: TreeNet) -> set[str]:
    """The stages that are frozen whole."""
    return {stage for name in net.frozen if (stage := name.removeprefix(STAGE)) in net.tree.nodes}


def frozen_layers(net: TreeNet) -> list[str]:
    """The layers, and modules inside layers, that are frozen wherever they are."""
    stages = frozen_stages(net)
    return [name.removeprefix(LAYER) for name in net.frozen if name.removeprefix(STAGE) not in stages]


def _resolve(net: TreeNet, name: str) -> list[str]:
    """The stage or the layers that are meant, each by its name, with its prefix where both have that name.

    Raises an error for a name of neither, for `..` before no layer, and for a name that may mean both.
    """
    layers, stages = [layer.name for layer in net.layers], list(net.tree.nodes)
    modules = {*layers, *dict(net.make_member().named_modules())}
    both = modules & set(stages)
    plain = name.removeprefix(UP_TO).removeprefix(STAGE).removeprefix(LAYER)
    if plain not in modules and plain not in stages:
        shown = ", ".join(stages[:8]) + (", ..." if len(stages) > 8 else "")
        raise UserError(
            f"freeze: there is no stage and no layer {plain!r}; the stages are {shown}, the layers of "
            f"{net.network_name} {', '.join(layers)}"
        )
    if name.startswith(UP_TO):
        if plain not in layers:
            raise UserError(
                f"freeze = [{name}]: {UP_TO} stands before a layer of {net.network_name}: {', '.join(layers)}"
            )
        return [f"{LAYER}{layer}" if layer in both else layer for layer in layers[: layers.index(plain) + 1]]
    for prefix, what, known in ((STAGE, "stage", stages), (LAYER, "layer", modules)):
        if name.startswith(prefix):
            if plain not in known:
                raise UserError(f"freeze = [{name}]: there is no {what} {plain!r}; give {plain}")
            return [name if plain in both else plain]
    if plain in both:
        raise UserError(
            f"freeze = [{name}]: {name} is a stage and also a layer of {net.network_name}; give {STAGE}{name} for the "
            f"stage, or {LAYER}{name} for this layer in every stage"
        )
    return [plain]
