"""An ensemble as one module: a stage for each node of its tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mheads import networks
from mheads.common import fingerprint, nested_values
from mheads.common.device import refuse_beyond_memory
from mheads.common.errors import UserError
from mheads.common.memory_layout import canonical
from mheads.common.modules import is_hooked, takes_statistics
from mheads.common.nested_values import Value
from mheads.common.safe_yaml import as_plain
from mheads.networks.dropout import replace_dropout
from mheads.networks.member_scaling import OwnCopy
from mheads.trees import freezing, surgery
from mheads.trees.checks.compare_with_forward import cannot_follow, compare_with_forward
from mheads.trees.checks.hidden_randomness_and_state import ONE_LAYER, changes_its_input, check_layers
from mheads.trees.checks.mixed_examples import check_examples
from mheads.trees.copy_weights import copy_weights
from mheads.trees.layer_properties import LayerFacts
from mheads.trees.network_factory import NetworkFactory
from mheads.trees.splitting.cut_network import make_chain
from mheads.trees.splitting.cut_sequential import Freezable
from mheads.trees.splitting.graph_chain import GraphChain
from mheads.trees.training_history import TrainingHistory
from mheads.trees.tree_spec import LAYER, Node, Spec, parse, split_names, whole_spec


class TreeNet(nn.Module):
    """An ensemble whose members share their first layers as a tree says.

    `network_factory` makes one network: any module whose forward is a row of its children or can be followed
    (`splitting/`). A module that is built already is taken as the start of every member: its weights are copied.
    `members` is 1 if it is not given. `split` is the name of the last shared layer or a tree, `tree` a tree; neither
    means independent members.
    Weights follow from `seed`: a stage takes those of the network drawn for its first member, and `init="same"`
    draws one network for all. `only` names the stages to build, if others are in other processes.
    """

    def __init__(
        self,
        network_factory: Callable[[], nn.Module] | nn.Module,
        members: int | None = None,
        split: Spec | str | None = None,
        tree: Spec | None = None,
        seed: int = 0,
        init: str = "random",
        only: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        if split is not None and tree is not None:
            raise UserError("give either split or tree, not both")
        if init not in ("random", "same"):
            raise UserError(f"init is 'random' or 'same', not {init!r}")
        self.spec = whole_spec(members, tree if tree is not None else split)
        self.seed, self.init = seed, init
        self.history = TrainingHistory()
        self.frozen: tuple[str, ...] = ()  # stages and layers that do not learn
        self.frozen_parameters: set[str] = set()  # those that would learn otherwise
        self._factory = NetworkFactory(network_factory, seed, init)
        first = self._factory.draw(0)
        self.network_name, self.network_path, self.network_args = self._factory.describe(first)
        self.chain = make_chain(first, split_names(self.spec))
        self.layers = self.chain.layers
        if isinstance(as_plain(split), int) and str(split) in (layer.name for layer in self.layers):
            raise UserError(f"split = {split} may be meant otherwise: {LAYER.format(split)}; leave it out")
        with self._explain_layers():
            self.tree = parse(self.spec, self.layers, members, self.network_name)
        # What the whole network is, wherever its stages are: a run is not resumed with another one.
        self.identity: dict[str, Any] = {
            "seed": str(seed),
            "init": init,
            "layers": fingerprint.structure(first),
            "code": fingerprint.code(network_factory, first),
        }
        self.facts = LayerFacts.of(first, self.chain)  # after the identity, since stages exchange dropout
        self._unsure = not self.facts.sequential  # whether its layers in a row are all that the network does
        self.stages = self._build_stages(first, [name for name in self.tree.nodes if only is None or name in only])
        self._check_sharing()
        _out_of_place(self)
        for parameter in self.parameters():
            parameter.data = canonical(parameter.data)

    def _build_stages(self, first: nn.Module, names: list[str]) -> nn.ModuleDict:
        refuse_beyond_memory(self.num_bytes(names), f"the weights of {self.num_members:,} members")
        stages: dict[str, nn.Module] = {}
        for member in sorted({self.tree.nodes[name].members[0] for name in names}):
            network = first if member == 0 else self._factory.draw(member)
            if isinstance(self.chain, GraphChain) and network is not first:
                self._check_graph(network)
            for name in names:
                node = self.tree.nodes[name]
                if node.members[0] == member:
                    stages[name] = self.chain.stage(node.layers, network)
        return nn.ModuleDict({name: stages[name] for name in names})

    def _check_graph(self, network: nn.Module) -> None:
        """Raises an error for a network unlike the first: a graph holds the numbers of the network it was made of."""
        structure = fingerprint.structure(network)
        for name, kind in self.identity["layers"].items():
            if structure.get(name) != kind:
                raise UserError(
                    f"the factory of {self.network_name} builds networks that differ: {name} is {kind} in one and "
                    f"{structure.get(name, 'not there')} in another; build all alike, their weights aside"
                )

    def _check_sharing(self) -> None:
        """Raises an error if two stages share a weight, or running statistics, which only one branch would update, or
        if all members share what takes the copy of one."""
        owners: dict[int, str] = {}
        for stage, module in self.stages.items():
            shared_by_all = len(self.tree.nodes[stage].members) == self.num_members > 1
            if shared_by_all and any(isinstance(m, OwnCopy) for m in module.modules()):
                raise UserError(
                    f"{self.network_name} is split after its OwnCopy, so that all members take the copy of member 0: "
                    "split above that layer, so that each has its own"
                )
            statistics = [b for m in module.modules() if takes_statistics(m) for b in m.buffers(recurse=False)]
            for tensor in (*module.parameters(), *statistics):
                if (owner := owners.setdefault(id(tensor), stage)) == stage:
                    continue
                if not isinstance(tensor, nn.Parameter):
                    raise UserError(
                        f"layers of {self.network_name} on both sides of a split share running statistics (a "
                        "normalisation that is used twice?): give each place its own, or split elsewhere"
                    )
                if self.tree.nodes[owner].layers == self.tree.nodes[stage].layers:
                    raise UserError(
                        f"members of {self.network_name} share a parameter: the factory must build a network at each "
                        "call, not hand out the same one again (TreeNet(network, ...) copies a built one)"
                    )
                raise UserError(f"layers of {self.network_name} on both sides of a split share a parameter")

    @property
    def factory(self) -> Callable[[], nn.Module] | nn.Module:
        """What one network is made by."""
        return self._factory.function

    @property
    def num_members(self) -> int:
        return self.tree.num_members

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters()), self.facts.dtype)

    def network(self) -> nn.Module:
        """One network as the factory draws it for the first member."""
        network = self._factory.draw(0)
        uniform = len({p.dtype for p in network.parameters()}) < 2  # else each layer has its own on purpose
        return _out_of_place(network.to(self.dtype) if uniform else network)

    def stage(self, name: str) -> Freezable:
        return self.stages[name]  # type: ignore[return-value]

    def draw_stage(self, node: Node) -> nn.Module:
        """A stage with the weights that it has before training, also where it is in another process."""
        return self.chain.stage(node.layers, self._factory.draw(node.members[0]))

    def member(self, m: int) -> nn.Module:
        """Member m as an ordinary network; it shares its weights with this tree (deepcopy it to separate them)."""
        stages = (self.stage(node.name) for node in self.tree.path(surgery.read_member(self, m)))
        return self.chain.stage([layer.name for layer in self.layers], *stages)

    def make_member(self) -> nn.Module:
        """Member 0, or a network like it where some of its stages are in other processes."""
        whole = all(node.name in self.stages for node in self.tree.path(0))
        return self.member(0) if whole else self.network()

    def forward(self, x: Value, side: dict[str, Value] | None = None) -> Value:
        """Outputs of all members, [M, B, C]; every stage runs once."""
        if self._unsure and not side:
            self._compare_once(x)
        outputs: dict[str | None, Value] = {None: nested_values.map_leaves(_channels_last, x)}
        for node in self.tree.nodes.values():
            inputs = outputs[node.parent]
            before = _versions(inputs)
            outputs[node.name] = self.stage(node.name)(inputs, side)
            if _versions(inputs) != before:
                raise changes_its_input(f"layer {node.layers[0]!r} (or one after it) of {self.network_name}")
        leaves = (outputs[leaf.name] for leaf in self.tree.leaves)
        return nested_values.map_leaves(lambda *parts: torch.stack(parts), *leaves)

    keep, without, with_members, fork = surgery.keep, surgery.without, surgery.with_members, surgery.fork
    copy_weights, freeze = copy_weights, freezing.freeze

    def is_frozen(self, stage: str, key: str) -> bool:
        """Whether a parameter or module of a stage, by its name in the network, is frozen."""
        layers = freezing.frozen_layers(self)
        return stage in freezing.frozen_stages(self) or any(key == n or key.startswith(f"{n}.") for n in layers)

    def learns(self, stage: str) -> bool:
        """Whether anything in a stage learns, wherever it is."""
        if stage in self.stages:
            return any(p.requires_grad for p in self.stage(stage).parameters())
        return any(key in self.facts.trainable and not self.is_frozen(stage, key) for key in self.names_in(stage))

    def names_in(self, stage: str) -> list[str]:
        """The parameters and buffers of a stage, wherever it is, by their names in the network."""
        if stage in self.stages:
            return list(self.stage(stage).state_dict())
        layers = self.tree.nodes[stage].layers
        return [name for name, layer in self.facts.layer_of.items() if layer in layers]

    def num_parameters(self) -> int:
        """Parameters of the whole tree, wherever its stages are."""
        return sum(self.facts.stage_size(node) for node in self.tree.nodes.values())

    def num_independent_parameters(self) -> int:
        """Parameters of the same members with nothing shared."""
        return sum(self.facts.stage_size(node) * len(node.members) for node in self.tree.nodes.values())

    def num_bytes(self, stages: Collection[str] | None = None) -> int:
        """Bytes of the weights of these stages, by default of those in this process."""
        names = self.stages if stages is None else stages
        return self.facts.dtype.itemsize * sum(self.facts.stage_size(self.tree.nodes[name]) for name in names)

    def batch_statistics_layers(self, nodes: Iterable[Node] | None = None) -> list[str]:
        """Layers of these stages, by default anywhere in the tree, that need the whole batch."""
        return [
            f"{node.name}.{name}"
            for node in (self.tree.nodes.values() if nodes is None else nodes)
            for name in node.layers
            if not all(self.is_frozen(node.name, module) for module in self.facts.statistics[name])
        ]

    def probe(self, x: Value, side: dict[str, Value] | None = None) -> Value:
        """Runs a member on some examples; raises an error for networks that a tree would silently get wrong.

        Returns its output, so that the caller can look at the shape.
        """
        if self.facts.hooked:
            raise UserError(
                f"{self.network_name} has hooks on the network itself, which a tree would never call, since it runs "
                f"the layers inside; put them on a layer, {ONE_LAYER}"
            )
        member, splits, known = self.make_member(), self._splits, self._is_built_in()
        layers = [(layer.name, self.chain.stage([layer.name], member)) for layer in self.layers]
        with self._explain_layers():
            output = check_layers(self.network_name, layers, x, side, splits, known)
        if known or side:
            return output
        if not self.facts.sequential:
            self._compare(x)
        with self._explain_layers():
            check_examples(self.network_name, self.chain, member, x, splits)
        return output

    def _is_built_in(self) -> bool:
        """Whether the network is a built-in one as it was built: our tests check what no start needs to check then."""
        if self.network_path not in networks.NETWORKS or not networks.is_ours(self.network_path, self.network_args):
            return False
        modules = [m for stage in self.stages.values() for m in stage.modules()]
        return all(type(m).__module__.startswith(("torch.nn.", "mheads.")) and not is_hooked(m) for m in modules)

    def _compare_once(self, x: Value) -> None:
        """Compares the layers with the network's own forward on the first batch that allows it, in a loop of one's own.

        Not inside transforms, where gradients cannot be compared, nor on one example where statistics need two.
        """
        if self._is_built_in():
            self._unsure = False
            return
        alone = nested_values.num_rows(x) < 2 and any(self.facts.statistics.values())
        transformed = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
        if alone or transformed or torch.is_inference_mode_enabled() or self._factory.is_lost:
            return
        with torch.autocast("cpu", enabled=False):
            self._compare(nested_values.map_leaves(lambda t: t[[0, -1]].detach(), x))

    def _compare(self, x: Value) -> None:
        network = replace_dropout(self.network())
        device = next(network.parameters()).device
        x = nested_values.map_leaves(lambda t: t.to(device), x)
        compare_with_forward(self.network_name, network, self.chain, x, self._splits)
        self._unsure = False

    @property
    def _splits(self) -> set[str]:
        """The layers after which members part."""
        return {node.layers[-1] for node in self.tree.nodes.values() if node.children}

    @contextmanager
    def _explain_layers(self) -> Iterator[None]:
        """An error inside also says why children are taken for the layers, if that is for want of a graph."""
        try:
            yield
        except UserError as error:
            if self.chain.why is not None:
                error.hint = f"only its children are layers, since {cannot_follow(self.chain.why)}"
            raise


def _out_of_place(module: nn.Module) -> nn.Module:
    """The module, its layers writing into no input: siblings are given the same tensor."""
    for layer in module.modules():
        if getattr(layer, "inplace", False) is True:
            layer.inplace = False  # type: ignore[assignment]
    return module


def _versions(value: Value) -> list[int | None]:
    """How often each tensor has been written into; None where torch does not count."""
    return [None if t.is_inference() else t._version for t in nested_values.leaves(value)]


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
