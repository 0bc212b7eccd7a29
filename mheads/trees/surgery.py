"""Trees made of trained trees: some members of one, more members on one, many members from one network.

Each gives a new tree with weights of its own; the one that it was made of stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mheads.common.errors import UserError
from mheads.common.safe_yaml import as_plain
from mheads.trees.copy_weights import non_persistent_buffers, take_weights
from mheads.trees.freezing import LAYER, STAGE, frozen_layers, frozen_stages
from mheads.trees.training_history import TrainingHistory
from mheads.trees.tree_spec import MAX_MEMBERS, Node, Spec

if TYPE_CHECKING:
    from mheads.trees.treenet import TreeNet

Sources = list[int | None]  # the member that each member of the new tree comes from, None for one that is new


def keep(net: TreeNet, members: Collection[int]) -> TreeNet:
    """These members alone, in this order. Stages that only one goes through become one stage."""
    members = _read_members(net, members)
    if not members:
        raise UserError(f"a tree needs at least one member: keep some of the {net.num_members}")
    if twice := [m for i, m in enumerate(members) if m in members[:i]]:
        raise UserError(f"keep: member {twice[0]} is there twice; net.with_members(1, like={twice[0]}) copies one")
    spec, sources = _make_spec(net, members)
    if sources != members:
        raise UserError(f"keep({members}): members that share layers stand side by side, as in {sources}")
    return _rebuild(net, sources, tree=spec, seed=net.seed, init=net.init)


def without(net: TreeNet, members: Collection[int]) -> TreeNet:
    """All members but these."""
    gone = _read_members(net, members)
    return keep(net, [m for m in range(net.num_members) if m not in gone])


def with_members(
    net: TreeNet, n: int, at: str | None = None, like: int | None = None, seed: int | None = None
) -> TreeNet:
    """The tree with n more members, which share all up to the split `at` and are new from there on.

    `at` is the layer where members part, or the stage that ends there, which comes first if both have the name (in a
    Sequential both are numbers); None for members with nothing in common. A single network may be split anywhere. New
    members come after those that are there below the same split, and later ones move up. Their weights are drawn, by a
    seed of their own, or those of the member `like`.
    """
    n = as_plain(n)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_MEMBERS:
        raise UserError(f"with_members({n!r}): give how many, at least 1 and at most {MAX_MEMBERS:,}")
    everyone = range(net.num_members)
    if at is None:
        spec, sources = _make_spec(net, everyone, {None: n})
    elif net.num_members == 1:
        spec, sources = {at: n + 1}, [0, *[None] * n]
    else:
        spec, sources = _make_spec(net, everyone, {_split_at(net, at): n})
    if like is not None:
        like = read_member(net, like)
        sources = [like if source is None else source for source in sources]
    # The next seed, because a new member must not start where one of those that are there did.
    return _rebuild(net, sources, tree=spec, seed=net.seed + 1 if seed is None else seed, init="random")


def fork(net: TreeNet, members: int, split: Spec | str | None = None) -> TreeNet:
    """One trained network as the start of many members; what parts them is the loss, the sampling or dropout."""
    if net.num_members != 1:
        raise UserError(f"fork copies one network, and this tree has {net.num_members}: net.keep([0]).fork({members})")
    return _rebuild(net, None, members=members, split=split, seed=net.seed, init="same")


def split_names(net: TreeNet, node: Node) -> list[str]:
    """The names of the layer after which the children of a stage part: its own, and others for the same place."""
    last = next(layer for layer in reversed(net.layers) if layer.splittable and layer.name in node.layers)
    return [last.name, *last.also]


def _read_members(net: TreeNet, members: Any) -> list[int]:
    if not isinstance(members, Iterable):
        raise UserError(f"members {members!r}: give a list of their numbers, such as [{members!r}]")
    return [read_member(net, m) for m in members]


def read_member(net: TreeNet, member: Any) -> int:
    """The number of a member; raises for others."""
    member = as_plain(member)
    if isinstance(member, bool) or not isinstance(member, int) or not 0 <= member < net.num_members:
        raise UserError(f"member {member!r} of {net.num_members}: they are counted from 0 to {net.num_members - 1}")
    return member


def _split_at(net: TreeNet, at: str) -> str:
    inner = {node.name: split_names(net, node) for node in net.tree.nodes.values() if node.children}
    if at in inner:
        return at
    stages = [name for name, names in inner.items() if at in names]
    if not stages:
        splits = ", ".join(dict.fromkeys(names[0] for names in inner.values())) or "nowhere"
        raise UserError(f"at={at!r}: members of this tree part at {splits}; None adds members with nothing in common")
    if len(stages) > 1:
        raise UserError(f"at={at!r} is where {len(stages)} stages end: name one of them, {', '.join(stages)}")
    return stages[0]


def _make_spec(net: TreeNet, members: Sequence[int], more: dict[str | None, int] | None = None) -> tuple[Spec, Sources]:
    """The specification of a tree with these of its members and `more` below some stages, and where each comes from.

    Members come in the given order, as far as those that share a stage stand side by side.
    """
    sources: Sources = []
    places = {member: place for place, member in enumerate(members)}

    def first(node: Node) -> int:
        return min((places[m] for m in node.members if m in places), default=-1)

    def join(nodes: Sequence[Node], parent: str | None) -> Spec:
        parts = [below(node) for node in sorted(nodes, key=first) if first(node) >= 0]
        new = (more or {}).get(parent, 0)
        sources.extend([None] * new)
        parts += [1] * new
        return parts[0] if len(parts) == 1 else len(parts) if all(part == 1 for part in parts) else parts

    def below(node: Node) -> Spec:
        if node.children:
            return {split_names(net, node)[0]: join([net.tree.nodes[child] for child in node.children], node.name)}
        sources.append(node.members[0])
        return 1

    return join(net.tree.roots, None), sources


def _rebuild(net: TreeNet, sources: Sources | None, **options: Any) -> TreeNet:
    """A tree of the same networks, each member with the weights of its source; None for member 0 as the only one."""
    from mheads.trees.treenet import TreeNet

    made = TreeNet(net.factory, **options)
    sources = [0] * made.num_members if sources is None else sources
    first = next(net.parameters())
    made.to(device=first.device, dtype=first.dtype)
    take_weights(made, net.tree, net.state_dict() | non_persistent_buffers(net), sources)
    made.history = TrainingHistory(net.history.iterations, data=net.history.data)
    _freeze_alike(made, net, sources)
    return made.train(net.training)


def _freeze_alike(made: TreeNet, net: TreeNet, sources: Sources) -> None:
    """What did not learn does not learn in the new tree either; what is new learns."""
    owner = net.tree.owners()
    stages = frozen_stages(net)
    names = [f"{LAYER}{layer}" for layer in frozen_layers(net)]
    frozen: dict[tuple[str, str], bool] = {}  # (stage, layer)
    for node in made.tree.nodes.values():
        source = next((sources[m] for m in node.members if sources[m] is not None), None)
        if source is None:
            frozen |= {(node.name, layer): False for layer in node.layers}
            continue
        for layer in node.layers:
            frozen[node.name, layer] = owner[source, layer] in stages
        for key, parameter in made.stage(node.name).named_parameters():
            source_stage = owner[source, made.facts.layer_of[key]]
            free = f"stages.{source_stage}.{key}" in net.frozen_parameters  # which `freeze` took, and gives back
            parameter.requires_grad_(free or net.stage(source_stage).get_parameter(key).requires_grad)
        if all(frozen[node.name, layer] for layer in node.layers):
            names.append(f"{STAGE}{node.name}")  # else its layers by their names, below
    whole = {stage for stage, _ in frozen if f"{STAGE}{stage}" in names}
    for layer in dict.fromkeys(layer for (stage, layer), cold in frozen.items() if cold and stage not in whole):
        if not all(cold for (_, other), cold in frozen.items() if other == layer):
            raise UserError(
                f"{', '.join(sorted(stages))} are frozen, and {layer} would be in a part of a stage of the new tree: "
                "net.freeze([]) before, and freeze what the new tree has"
            )
        names.append(f"{LAYER}{layer}")
    made.freeze(names)
