"""An ensemble as one module: a stage for each node of its tree."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mheads import networks
from mheads.common import fingerprint, nested_values, seeds
from mheads.common.device import refuse_beyond_memory
from mheads.common.errors import UserError
from mheads.common.memory_layout import canonical
from mheads.common.modules import avoid_overruns, is_hooked, takes_statistics
from mheads.common.nested_values import Value
from mheads.common.safe_yaml import as_plain
from mheads.networks.dropout import replace_dropout
from mheads.trees.checks.compare_with_forward import cannot_follow, compare_with_forward
from mheads.trees.checks.hidden_randomness_and_state import ONE_LAYER, changes_its_input, check_layers
from mheads.trees.checks.mixed_examples import check_examples
from mheads.trees.layer_properties import LayerFacts
from mheads.trees.splitting.cut_sequential import ChainLayer, Freezable
from mheads.trees.splitting.cut_traced_graph import GraphChain, chain_of
from mheads.trees.tree_spec import LAYER, Node, Spec, Tree, parse, split_names, whole_spec

UP_TO = ".."  # before a layer in `freeze`


class TreeNet(nn.Module):
    """An ensemble whose members share their first layers as a tree says.

    `network_factory` makes one network: any module whose forward is a row of its children or can be followed
    (`splitting/`). A module that is built already is taken as the start of every member: its weights are copied.
    `split` is the name of the last shared layer or a tree, `tree` a tree; neither means independent members.
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
        self.spec = spec = whole_spec(members, tree if tree is not None else split)
        self.init = init
        self.trained = 0  # iterations that have changed its weights
        self.failed = False  # whether training ended by an error, somewhere on the way
        self.origin = ""  # what there is to say of where its weights come from
        self.frozen: tuple[str, ...] = ()  # stages and layers that do not learn
        self._froze: set[str] = set()  # the parameters that would learn otherwise

        self.seed = seed
        self._factory = _Factory(network_factory)
        first = self._draw(0)
        self.network_name = getattr(network_factory, "__name__", type(first).__name__)
        self.network_path, self.network_args = networks.name_factory(network_factory) or (
            self._path(network_factory),
            {},
        )
        self.chain = chain_of(first, split_names(spec))
        self.layers = self.chain.layers
        if isinstance(as_plain(split), int) and str(split) in (layer.name for layer in self.layers):
            raise UserError(f"split = {split} may be meant otherwise: {LAYER.format(split)}; leave it out")
        with self._why_children():
            self.tree = parse(spec, self.layers, members, self.network_name)
        self._structure = fingerprint.structure(first)
        # What the whole network is, wherever its stages are: a run is not resumed with another one.
        self.identity = {
            "seed": str(seed),
            "init": init,
            "layers": self._structure,
            "code": fingerprint.code(network_factory, first),
        }
        self._facts = LayerFacts.of(first, self.chain)
        self._unsure = not self._facts.sequential  # whether its layers in a row are all that the network does
        own = [name for name in self.tree.nodes if only is None or name in only]
        refuse_beyond_memory(self.num_bytes(own), f"the weights of {self.num_members:,} members")
        stages: dict[str, nn.Module] = {}
        for member in sorted({self.tree.nodes[name].members[0] for name in own}):
            network = first if member == 0 else self._draw(member)
            if isinstance(self.chain, GraphChain) and network is not first:
                self._refuse_another_graph(network)
            for name in own:
                node = self.tree.nodes[name]
                if node.members[0] == member:
                    stages[name] = self.chain.stage(node.layers, network)
        self.stages = nn.ModuleDict({name: stages[name] for name in own})
        if sum(p.numel() for s in stages.values() for p in s.parameters()) != sum(p.numel() for p in self.parameters()):
            if len(self.tree.roots) == self.num_members:
                raise UserError(
                    f"members of {self.network_name} share a parameter: the factory must build a network at each call, "
                    "not hand out the same one again (TreeNet(network, ...) copies a built one)"
                )
            raise UserError(f"layers of {self.network_name} on both sides of a split share a parameter")
        self._refuse_common_statistics()
        _out_of_place(self)
        for parameter in self.parameters():
            parameter.data = canonical(parameter.data)

    def _path(self, network_factory: Callable[[], nn.Module] | nn.Module) -> str:
        """Where the factory is found. A lambda, a local function or a built network can only be named, not imported
        again: mheads.load asks for it."""
        named = inspect.unwrap(network_factory)
        qualified = getattr(named, "__qualname__", f"<{self.network_name}>")
        module = getattr(named, "__module__", "__main__") if "<" not in qualified else "__main__"
        return f"{module}:{qualified}"

    def _refuse_common_statistics(self) -> None:
        """Running statistics of one network in two stages would be updated by one branch and not by the others."""
        seen: dict[int, str] = {}
        for stage, module in self.stages.items():
            taking = [m for m in module.modules() if takes_statistics(m)]
            for buffer in {id(b): b for m in taking for b in m.buffers(recurse=False)}.values():
                if seen.setdefault(id(buffer), stage) != stage:
                    raise UserError(
                        f"layers of {self.network_name} on both sides of a split share running statistics (a "
                        "normalisation that is used twice?): give each place its own, or split elsewhere"
                    )

    def _draw(self, member: int) -> nn.Module:
        """The network that a member's own stages come from; only the seed and the member decide its weights."""
        with seeds.seed_generators(self.seed, "weights", 0 if self.init == "same" else member):
            self._refuse_arguments()
            network = self._factory()
        if not isinstance(network, nn.Module):
            raise UserError(f"the factory gives a {type(network).__name__}, not an nn.Module: return the network")
        if isinstance(network, torch.jit.ScriptModule):
            raise UserError("the factory gives a scripted network, whose layers are hidden: return the module itself")
        if found := [name for name, p in network.named_parameters() if p.is_complex()]:
            raise UserError(
                f"{found[0]} is complex, and weights are real numbers here: keep its real and imaginary parts in one "
                "real parameter [..., 2], and use torch.view_as_complex(parameter) in the forward"
            )
        lazy = [name for name, p in network.named_parameters() if is_lazy(p)]
        if lazy:
            raise UserError(f"{lazy[0]} has no size yet: give the layer its number of inputs instead of a lazy one")
        return avoid_overruns(network)

    def _refuse_arguments(self) -> None:
        """Refuses a factory that cannot be called without arguments, such as a class with some."""
        function = self._factory.function
        if isinstance(function, nn.Module):
            return
        if not callable(function):
            raise UserError(
                f"a tree is made of a network or of a function that builds one, not of a {type(function).__name__}: "
                "mheads.evaluate([a, b], test) measures networks that are trained already"
            )
        try:
            inspect.signature(function, follow_wrapped=False).bind()
        except ValueError:
            pass  # written in C: it has no signature to look at
        except TypeError as error:
            name = getattr(function, "__name__", repr(function))
            raise UserError(
                f"the factory {name} cannot be called without arguments ({error}): give lambda: {name}(...)"
            ) from error

    def _refuse_another_graph(self, network: nn.Module) -> None:
        """A graph holds the numbers of the network that it was made of, so all must be built alike."""
        there = fingerprint.structure(network)
        for name, said in self._structure.items():
            if there.get(name) != said:
                raise UserError(
                    f"the factory of {self.network_name} builds networks that differ: {name} is {said} in one and "
                    f"{there.get(name, 'not there')} in another; build all alike, their weights aside"
                )

    def network(self) -> nn.Module:
        """One network as the factory draws it for the first member."""
        network = self._draw(0)
        uniform = len({p.dtype for p in network.parameters()}) < 2  # else each layer has its own on purpose
        return _out_of_place(network.to(self.dtype) if uniform else network)

    @property
    def num_members(self) -> int:
        return self.tree.num_members

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters()), self._facts.dtype)

    def stage(self, name: str) -> Freezable:
        return self.stages[name]  # type: ignore[return-value]

    def forward(self, x: Value, side: dict[str, Value] | None = None) -> Value:
        """Outputs of all members, [M, B, C]; every stage runs once."""
        if self._unsure and not side:
            self._compare_once(x)
        given: dict[str | None, Value] = {None: nested_values.map_leaves(_channels_last, x)}
        for node in self.tree.nodes.values():
            taken = given[node.parent]
            before = _versions(taken)
            given[node.name] = self.stage(node.name)(taken, side)
            if _versions(taken) != before:
                raise changes_its_input(f"layer {node.layers[0]!r} (or one after it) of {self.network_name}")
        return nested_values.map_leaves(lambda *parts: torch.stack(parts), *(given[n.name] for n in self.tree.leaves))

    def member(self, m: int) -> nn.Module:
        """Member m as an ordinary network; it shares its weights with this tree (deepcopy it to separate them)."""
        if not 0 <= m < self.num_members:
            raise UserError(f"member {m} of {self.num_members}: they are counted from 0 to {self.num_members - 1}")
        stages = (self.stage(node.name) for node in self.tree.path(m))
        return self.chain.stage([layer.name for layer in self.layers], *stages)

    def keep(self, members: Collection[int]) -> TreeNet:
        """A tree of these members alone, in this order, with copies of their weights.

        Members that share layers stand side by side.
        """
        from mheads.trees import surgery

        return surgery.keep(self, members)

    def without(self, members: Collection[int]) -> TreeNet:
        """A tree of all members but these."""
        from mheads.trees import surgery

        return surgery.without(self, members)

    def with_members(self, n: int, at: str | None = None, like: int | None = None, seed: int | None = None) -> TreeNet:
        """A tree with n more members, which part from the others at the split `at`.

        None: they have nothing in common with them. Their own weights are drawn by the seed, by default the next one,
        or those of the member `like`.
        """
        from mheads.trees import surgery

        return surgery.with_members(self, n, at, like, seed)

    def fork(self, members: int, split: Spec | str | None = None) -> TreeNet:
        """A tree whose members all start as copies of this one network."""
        from mheads.trees import surgery

        return surgery.fork(self, members, split)

    @property
    def factory(self) -> Callable[[], nn.Module] | nn.Module:
        """What one network is made by."""
        return self._factory.function

    def freeze(self, names: Collection[str] = ()) -> None:
        """Has these stages, layers or modules inside layers learn nothing; what was frozen before learns again.

        `trunk` is a stage, `conv1` that layer wherever it is, `..conv3` all layers up to it, and itself. Frozen
        BatchNorm normalises by the statistics that it has; dropout drops.
        """
        if isinstance(names, str):
            raise UserError(f"freeze={names!r}: give a list of names, freeze=[{names!r}]")
        for name in names:
            self._check_frozen(name.removeprefix(UP_TO))
        self.frozen = tuple(dict.fromkeys(one for name in names for one in self._frozen_by(name)))
        for name, parameter in self.named_parameters(remove_duplicate=False):  # layers may share a weight
            if name in self._froze:
                parameter.requires_grad_(True)
        self._froze = set()
        for name in self.stages:
            stage = self.stage(name)
            for key, parameter in stage.named_parameters(remove_duplicate=False):
                if parameter.requires_grad and self._is_frozen(name, key):
                    self._froze.add(f"stages.{name}.{key}")
                    parameter.requires_grad_(False)
            stage.holds_fixed = False
            for key, module in stage.named_modules():
                module.__dict__.pop("fixed_statistics", None)
                if self._is_frozen(name, key) and takes_statistics(module):
                    module.fixed_statistics = stage.holds_fixed = True
        self.train(self.training)
        if self.frozen and not any(map(self.learns, self.tree.nodes)):
            frozen = ", ".join(self.frozen)
            self.freeze()
            raise UserError(f"freeze = [{frozen}] leaves nothing to learn: leave some stage or layer out")

    def _check_frozen(self, name: str) -> None:
        layers = [layer.name for layer in self.layers]
        if name in self.tree.nodes or name in layers or name in dict(self._one().named_modules()):
            return
        stages = list(self.tree.nodes)
        shown = ", ".join(stages[:8]) + (", ..." if len(stages) > 8 else "")
        raise UserError(
            f"freeze: there is no stage and no layer {name!r}; the stages are {shown}, the layers of "
            f"{self.network_name} {', '.join(layers)}"
        )

    def _frozen_by(self, name: str) -> list[str]:
        if not name.startswith(UP_TO):
            return [name]
        layers = [layer.name for layer in self.layers]
        if name.removeprefix(UP_TO) not in layers:
            raise UserError(
                f"freeze = [{name}]: {UP_TO} stands before a layer of {self.network_name}: {', '.join(layers)}"
            )
        return layers[: layers.index(name.removeprefix(UP_TO)) + 1]

    def _is_frozen(self, stage: str, key: str) -> bool:
        """Whether a parameter or module of a stage, by its name in the network, is."""
        return stage in self.frozen or any(key == name or key.startswith(f"{name}.") for name in self.frozen)

    def learns(self, stage: str) -> bool:
        """Whether anything in a stage learns, wherever it is."""
        if stage in self.stages:
            return any(p.requires_grad for p in self.stage(stage).parameters())
        own = (name for name in self.names_in(stage) if name in self._facts.trainable)
        return any(not self._is_frozen(stage, name) for name in own)

    def num_parameters(self) -> int:
        """Parameters of the whole tree, wherever its stages are."""
        return sum(self._facts.size(node) for node in self.tree.nodes.values())

    def layer_sizes(self) -> dict[str, int]:
        """The number of parameters of each layer."""
        return {name: sum(sizes.values()) for name, sizes in self._facts.parameters.items()}

    def num_bytes(self, stages: Collection[str] | None = None) -> int:
        """Bytes of the weights of these stages, by default of those that are here."""
        here = self.stages if stages is None else stages
        size = torch.empty(0, dtype=self._facts.dtype).element_size()
        return size * sum(self._facts.size(self.tree.nodes[name]) for name in here)

    def num_independent_parameters(self) -> int:
        """Parameters of the same members with nothing shared."""
        return sum(self._facts.size(node) * len(node.members) for node in self.tree.nodes.values())

    def copy_weights(self, source: TreeNet) -> None:
        """Takes over the weights of another tree of the same layers, member by member; one member serves all."""
        self.take_weights(source.tree, source.state_dict() | unsaved_buffers(source))

    @torch.no_grad()
    def take_weights(
        self, tree: Tree, weights: Mapping[str, Tensor], members: Sequence[int | None] | None = None
    ) -> None:
        """Those of a tree of the same layers, by the names of its state; see `copy_weights`.

        What members share here they must share there: layers trained apart from those below them do not go together.
        `members` are those there that the members here start from, None for one that keeps what is its own.
        """
        owner = {(m, layer): n.name for n in tree.nodes.values() for m in n.members for layer in n.layers}
        if members is None and 1 < tree.num_members < self.num_members:
            raise UserError(
                f"cannot start from those weights: they are of {tree.num_members} members, and there are "
                f"{self.num_members} here; one network's weights serve all, and init_members says in a config which "
                "member starts from which"
            )
        if members is None:
            members = [0] * self.num_members if tree.num_members == 1 else range(self.num_members)
        for node in self.tree.nodes.values():
            for layer in node.layers:
                sources = {m for m in (members[m] for m in node.members) if m is not None}
                if len({owner.get((m, layer)) for m in sources}) > 1:
                    raise UserError(
                        f"cannot start from those weights: members {', '.join(map(str, node.members))} share {layer} "
                        "here, but each has its own there, trained together with its own later layers. What fits is "
                        "the same tree, one that splits earlier, or the weights of one member, which serve all"
                    )
        for name in self.stages:
            member = next((members[m] for m in self.tree.nodes[name].members if members[m] is not None), None)
            if member is None:
                continue
            for key, tensor in self.stage(name).state_dict().items():
                donor = weights.get(f"stages.{owner.get((member, self._facts.layer_of[key]))}.{key}")
                if donor is None and self.is_fresh(key):
                    continue
                if donor is None or donor.shape != tensor.shape:
                    got = "nothing" if donor is None else tuple(donor.shape)
                    here = tuple(tensor.shape)
                    raise UserError(f"cannot start from those weights: {key} is {here} here, {got} there")
                tensor.copy_(donor)
            for key, tensor in unsaved_buffers(self.stage(name)).items():
                donors = (weights.get(f"stages.{there.name}.{key}") for there in tree.path(member))
                donor = next((found for found in donors if found is not None), tensor)
                if donor.shape != tensor.shape or not torch.equal(donor.to(tensor), tensor):
                    # A copy would be lost with the next file.
                    raise UserError(
                        f"cannot start from those weights: the buffer {key} is another one in each network that is "
                        "drawn, and no file of weights holds it; register it with persistent=True"
                    )

    def identical_members(self) -> Iterator[tuple[int, int]]:
        """Pairs of members that are the same network: equal weights, buffers and layers, shared by as many members.

        Where stages are in other processes, two members are drawn to see whether their weights follow the seed.
        """
        here = len(self.stages) == len(self.tree.nodes)
        alike: dict[Any, list[int]] = defaultdict(list)
        for m in range(self.num_members):
            alike[tuple((node.layers, len(node.members)) for node in self.tree.path(m))].append(m)
        stages: dict[str, tuple[Any, list[Tensor]]] = {}
        for members in alike.values():
            first: dict[Any, int] = {}
            for m in members if here else members[:2]:
                path = self.tree.path(m)
                for node in path:
                    if node.name not in stages:
                        stages[node.name] = _contents(self.stage(node.name) if here else self._drawn_stage(node))
                other = first.setdefault(tuple(stages[node.name][0] for node in path), m)
                pairs = zip(self.tree.path(other), path, strict=True)
                tensors = [(t, u) for a, b in pairs for t, u in zip(stages[a.name][1], stages[b.name][1], strict=True)]
                if other != m and all(torch.equal(t, u) for t, u in tensors):
                    yield other, m

    def parted_by_dropout(self, a: int, b: int) -> bool:
        """Whether two members draw masks of their own: dropout in a stage that they do not share."""
        own = [node for node in self.tree.path(a) if b not in node.members]
        return any(name in self._facts.dropout for node in own for name in node.layers)

    def parted_by_freezing(self, a: int, b: int) -> bool:
        """Whether one of two members learns where the other is frozen, in a stage that they do not share."""

        def frozen(m: int, other: int) -> list[bool]:
            return [node.name in self.frozen for node in self.tree.path(m) if other not in node.members]

        return frozen(a, b) != frozen(b, a)

    def is_parameter(self, name: str) -> bool:
        """Whether `layer.name` is a weight, not a buffer."""
        return name in self._facts.names

    def layer_of(self, name: str) -> str:
        """The layer that a parameter or buffer, by its name in the network, belongs to."""
        return self._facts.layer_of[name]

    def is_fresh(self, name: str) -> bool:
        """Whether `layer.name` starts anew where weights from elsewhere have none: it belongs to a score, say."""
        return name in self._facts.fresh

    def batch_statistics_layers(self) -> list[str]:
        """Layers anywhere in the tree that need the whole batch."""
        found = self._facts.statistics
        return [
            f"{node.name}.{name}"
            for node in self.tree.nodes.values()
            for name in node.layers
            if not all(self._is_frozen(node.name, module) for module in found[name])
        ]

    @property
    def side_inputs(self) -> frozenset[str]:
        """The names of those that some layer takes."""
        return self._facts.side_inputs

    def probe(self, x: Value, side: dict[str, Value] | None = None) -> Value:
        """Runs a member on some examples and refuses networks that a tree would silently get wrong.

        Returns its output, so that the caller can look at the shape.
        """
        if self._facts.hooked:
            raise UserError(
                f"{self.network_name} has hooks on the network itself, which a tree would never call, since it runs "
                f"the layers inside; put them on a layer, {ONE_LAYER}"
            )
        member, splits, known = self._one(), self._splits, self._is_built_in()
        layers = [(layer.name, self.chain.stage([layer.name], member)) for layer in self.layers]
        with self._why_children():
            output = check_layers(self.network_name, layers, x, side, splits, known)
        if not self._facts.sequential and not side:
            self._compare(x)
        if not known and not side:
            with self._why_children():
                check_examples(self.network_name, self.chain, member, x, splits)
        return output

    def _is_built_in(self) -> bool:
        """Whether the network is a built-in one as it was built: tests hold that its layers mix and keep nothing."""
        ours = self.network_path in networks.NETWORKS and networks.is_ours(self.network_path, self.network_args)
        modules = [m for stage in self.stages.values() for m in stage.modules()]
        return ours and not any(
            is_hooked(m) or not type(m).__module__.startswith(("torch.nn.", "mheads.")) for m in modules
        )

    def _compare_once(self, x: Value) -> None:
        """Compares the layers with the network's own forward on the first batch that allows it, in a loop of one's own.

        Not inside transforms, where gradients cannot be compared, nor on one example where statistics need two.
        """
        if self._is_built_in():
            self._unsure = False
            return
        alone = nested_values.num_rows(x) < 2 and any(self._facts.statistics.values())
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

    def names_in(self, stage: str) -> list[str]:
        """The parameters and buffers of a stage, wherever it is, by their names in the network."""
        if stage in self.stages:
            return list(self.stage(stage).state_dict())
        layers = self.tree.nodes[stage].layers
        return [name for name, layer in self._facts.layer_of.items() if layer in layers]

    def _one(self) -> nn.Module:
        """Member 0, or a network like it where some of its stages are in other processes."""
        here = all(node.name in self.stages for node in self.tree.path(0))
        return self.member(0) if here else self.network()

    @contextmanager
    def _why_children(self) -> Iterator[None]:
        """An error inside also says why children are taken for the layers, if that is for want of a graph."""
        try:
            yield
        except UserError as error:
            if self.chain.why is not None:
                error.hint = f"only its children are layers, since {cannot_follow(self.chain.why)}"
            raise

    def _drawn_stage(self, node: Node) -> nn.Module:
        return self.chain.stage(node.layers, self._draw(node.members[0]))


def _out_of_place(module: nn.Module) -> nn.Module:
    """The module, its layers writing into no input: siblings are given the same tensor."""
    for layer in module.modules():
        if getattr(layer, "inplace", False) is True:
            layer.inplace = False  # type: ignore[assignment]
    return module


class _Factory:
    """The user's factory, or copies of a built network; left out of a pickled tree if it cannot be pickled."""

    def __init__(self, function: Callable[[], nn.Module] | nn.Module) -> None:
        self.function = function

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.function) if isinstance(self.function, nn.Module) else self.function()

    @property
    def is_lost(self) -> bool:
        return self.function is _lost

    def __deepcopy__(self, memo: dict[int, Any]) -> _Factory:
        return self

    def __reduce__(self) -> tuple[type[_Factory], tuple[Any]]:
        try:
            pickle.dumps(self.function)
        except (pickle.PicklingError, AttributeError, TypeError):
            return _Factory, (_lost,)
        return _Factory, (self.function,)


def _lost() -> nn.Module:
    raise UserError("this tree was pickled without its factory, which only its first process knows: build it anew")


def unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that are not in the state of a module: registered with persistent=False."""
    saved = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name not in saved}


def _contents(stage: nn.Module) -> tuple[Any, list[Tensor]]:
    """A key and tensors: stages that are the same have equal ones."""
    tensors = [t.detach() for t in (*stage.parameters(), *stage.buffers())]
    return (repr(stage), tuple((t.shape, t.sum().item()) for t in tensors)), tensors


def describe(network: nn.Module, spec: Spec = 1) -> list[ChainLayer]:
    """The layers that a network can be split after, for a tree that names some."""
    return chain_of(network, split_names(spec)).layers


def _versions(value: Value) -> list[int | None]:
    """How often each tensor has been written into; None where torch does not count."""
    return [None if t.is_inference() else t._version for t in nested_values.leaves(value)]


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
