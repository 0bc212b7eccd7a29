"""Copies weights from one tree into another tree of the same layers, member by member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mheads.common.errors import UserError
from mheads.trees.tree_spec import Tree

if TYPE_CHECKING:
    from mheads.trees.treenet import TreeNet

Members = Sequence[int | None]  # the member of the source for each member, None for one that keeps its weights


def copy_weights(net: TreeNet, source: TreeNet) -> None:
    """Takes over the weights of another tree of the same layers, member by member; one member serves all.

    What members share here they must share there.
    """
    take_weights(net, source.tree, source.state_dict() | non_persistent_buffers(source))


@torch.no_grad()
def take_weights(net: TreeNet, tree: Tree, weights: Mapping[str, Tensor], members: Members | None = None) -> None:
    """Gives a net the weights of a tree, by the names of its state; by default member by member, or one for all."""
    if members is None and 1 < tree.num_members < net.num_members:
        raise UserError(
            f"cannot start from those weights: they are of {tree.num_members} members, and there are "
            f"{net.num_members} here; one network's weights serve all, and init_members says in a config which "
            "member starts from which"
        )
    if members is None:
        members = [0] * net.num_members if tree.num_members == 1 else range(net.num_members)
    owner = tree.owners()
    check_sharing(net, owner, members)
    for name in net.stages:
        member = next((members[m] for m in net.tree.nodes[name].members if members[m] is not None), None)
        if member is None:
            continue
        stage = net.stage(name)
        for key, tensor in stage.state_dict().items():
            source = weights.get(f"stages.{owner.get((member, net.facts.layer_of[key]))}.{key}")
            if source is None and key in net.facts.fresh:
                continue
            if source is None or source.shape != tensor.shape:
                shape = "nothing" if source is None else tuple(source.shape)
                raise UserError(f"cannot start from those weights: {key} is {tuple(tensor.shape)} here, {shape} there")
            tensor.copy_(source)
        for key, tensor in non_persistent_buffers(stage).items():
            sources = (weights.get(f"stages.{node.name}.{key}") for node in tree.path(member))
            source = next((buffer for buffer in sources if buffer is not None), tensor)
            if source.shape != tensor.shape or not torch.equal(source.to(tensor), tensor):
                # A copy would be lost with the next file.
                raise UserError(
                    f"cannot start from those weights: the buffer {key} differs in each new network, and no file of "
                    "weights holds it; register it with persistent=True"
                )


def check_sharing(net: TreeNet, owner: Mapping[tuple[int, str], str], members: Members) -> None:
    """Raises an error if members share a layer that each has of its own in the source.

    Layers that were trained apart from those below them do not go together.
    """
    for node in net.tree.nodes.values():
        sources = {m for m in (members[m] for m in node.members) if m is not None}
        for layer in node.layers:
            if len({owner.get((m, layer)) for m in sources}) > 1:
                raise UserError(
                    f"cannot start from those weights: members {', '.join(map(str, node.members))} share {layer} "
                    "here, but each has its own there, trained together with its own later layers. Give weights of "
                    "the same tree, of one that splits earlier, or of one member for all"
                )


def non_persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that are not in the state of a module: registered with persistent=False."""
    saved = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name not in saved}
