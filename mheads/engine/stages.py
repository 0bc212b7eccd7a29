"""What an engine knows of its stages, found once: at a thousand members, looking again at every step would cost more
than the arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from mheads.common.errors import UserError
from mheads.common.modules import has_batch_statistics, trainable
from mheads.common.nested_values import Value
from mheads.engine import row_backward
from mheads.engine.engine_options import EngineOptions
from mheads.engine.stacked_stages import StackedStage
from mheads.trees.tree_spec import Node, Tree
from mheads.trees.treenet import TreeNet


@dataclass(frozen=True)
class StageFacts:
    """`known`: `row_backward.py` has all its layers. `mixing`: it needs whole batches. `sided`: it takes side inputs.

    `threads`: how many its operations use in training, by `threads_of`. `autocast`: the device and the precision that
    its operations are cast to; None to leave them as they are. `normed`: the first layer that learns is a GroupNorm,
    whose backward on CPUs ends the process where the gradient of its input, channels last, is not wanted.
    """

    module: Any  # an nn.Module, or a StackedStage
    parameters: Sequence[Tensor]
    known: bool
    mixing: bool
    sided: bool
    threads: int
    autocast: tuple[str, torch.dtype] | None
    normed: bool = False

    @staticmethod
    def of(stage: nn.Module, threads: int = 1, autocast: tuple[str, torch.dtype] | None = None) -> StageFacts:
        sided = any(hasattr(module, "takes") for module in stage.modules())
        known, mixing = row_backward.supports(stage), has_batch_statistics(stage)
        return StageFacts(
            stage, trainable(stage), known, mixing, sided, threads, autocast, _learns_group_norm_first(stage)
        )

    @staticmethod
    def of_stack(stack: StackedStage, threads: int, autocast: tuple[str, torch.dtype] | None) -> StageFacts:
        parameters = [p for p in stack.parameters.values() if p.requires_grad]
        mixing = has_batch_statistics(stack.stages[0])
        normed = _learns_group_norm_first(stack.stages[0])
        return StageFacts(stack, parameters, False, mixing, False, threads, autocast, normed)

    @contextmanager
    def context(self) -> Iterator[None]:
        """What the operations of the stage run in, forward and backward: its number of threads and its precision."""
        before = torch.get_num_threads()
        if before != self.threads:
            torch.set_num_threads(self.threads)
        try:
            if self.autocast is None:
                yield
            else:
                # torch's cache of cast weights belongs to all threads, and whoever leaves autocast first clears it.
                with torch.autocast(*self.autocast, cache_enabled=False):
                    yield
        finally:
            if before != self.threads:
                torch.set_num_threads(before)

    def run_by_row(self, x: Value) -> TypeGuard[Tensor]:
        """Whether `row_backward` can run the stage on this input."""
        return self.known and row_backward.takes(x)

    def outputs(self, x: Value, side: dict[str, Value]) -> Value:
        """The outputs of the stage alone, for which nothing is kept."""
        with self.context():
            return row_backward.outputs(self.module, x) if self.run_by_row(x) else self.module(x, side)


def _learns_group_norm_first(stage: nn.Module) -> bool:
    learning = (m for m in stage.modules() if any(p.requires_grad for p in m.parameters(recurse=False)))
    return isinstance(next(learning, None), nn.GroupNorm)


def threads_of(net: TreeNet, cores: int) -> dict[str, int]:
    """How many threads the operations of each stage use. One where batches are cut, since micro-batches fill the cores;
    batch statistics forbid to cut them, so the stages that can run side by side share the cores.

    Gradients differ in their bits between one thread and two, so this depends on the tree and `engine.cores`, never on
    the machine.
    """
    if not net.batch_statistics_layers():
        return dict.fromkeys(net.tree.nodes, 1)
    beside = Counter(net.tree.depths.values())  # below a split, a stage has siblings
    return {name: max(1, cores // max(beside[depth], min(depth, 1) + 1)) for name, depth in net.tree.depths.items()}


class Stages:
    """The stages of a tree that are here, by name, and what is known of the tree.

    Siblings that are stacked stand here as one: under the name of the first, as a leaf of all their members.
    """

    def __init__(self, net: TreeNet, options: EngineOptions) -> None:
        self.net, self.tree = net, net.tree
        threads = threads_of(net, options.cores)
        lower = options.precision != torch.float32
        autocast = (options.device.type, options.precision) if lower else None
        self.stacks = {
            names[0]: StackedStage(names, [net.stage(name) for name in names]) for names in _stacks_here(net, options)
        }
        stack_of = {name: names for names in options.stacked for name in names}
        first = {name for name in net.tree.nodes if name == stack_of.get(name, (name,))[0]}
        self.nodes = {name: _join_members(net.tree, name, stack_of) for name in net.tree.nodes if name in first}
        self.facts = {
            name: StageFacts.of_stack(self.stacks[name], options.stack_threads, autocast)
            if name in self.stacks
            else StageFacts.of(net.stage(name), threads[name], autocast)
            for name in net.stages
            if name in first
        }
        self._evaluating = {name: replace(facts, threads=1) for name, facts in self.facts.items()}
        # Of what every task uses: that many cores a worker takes.
        self.threads = min(facts.threads for facts in self.facts.values()) if self.facts else 1
        self.roots = self.here(tuple(root.name for root in net.tree.roots))
        self.statistics = bool(net.batch_statistics_layers())
        learns = {name: net.learns(name) for name, node in net.tree.nodes.items() if node.children}
        self.groups: dict[str, int] = {}  # the number of the root above each stage
        numbers = {root.name: i for i, root in enumerate(net.tree.roots)}
        for name, node in net.tree.nodes.items():
            self.groups[name] = numbers[name] if node.parent is None else self.groups[node.parent]
        self.wanted: dict[str, bool] = {}  # whether the gradient of a stage's input is: anything above it learns
        for name, node in net.tree.nodes.items():
            self.wanted[name] = node.parent is not None and (self.wanted[node.parent] or learns[node.parent])

    def __contains__(self, name: str) -> bool:
        return name in self.facts

    def __getitem__(self, name: str) -> StageFacts:
        return self.facts[name]

    def for_evaluation(self, name: str) -> StageFacts:
        """A stage that evaluates: batches run side by side, so its operations use one thread each."""
        return self._evaluating[name]

    def here(self, names: tuple[str, ...]) -> list[Node]:
        """The stages among these that are here; of those that are stacked, the stack."""
        return [self.nodes[name] for name in names if name in self.facts]

    def close(self) -> None:
        """Gives stages that were stacked tensors of their own."""
        for stack in self.stacks.values():
            stack.release()

    def gradients(self) -> dict[str, list[Tensor]]:
        """Tensors to hold the gradients of each stage."""
        return {name: [torch.zeros_like(p) for p in facts.parameters] for name, facts in self.facts.items()}


def _join_members(tree: Tree, name: str, stack_of: dict[str, tuple[str, ...]]) -> Node:
    """The node of a stage; of the first of a stack, with the members of all."""
    stages = [tree.nodes[other] for other in stack_of.get(name, (name,))]
    return replace(tree.nodes[name], members=tuple(member for stage in stages for member in stage.members))


def _stacks_here(net: TreeNet, options: EngineOptions) -> Iterator[tuple[str, ...]]:
    for names in options.stacked:
        here = [name in net.stages for name in names]
        if any(here) and not all(here):
            raise UserError(
                f"the stages {names[0]} to {names[-1]} are stacked, and some of them are on other ranks: place them "
                "together, or use engine.stack=never",
                key="engine.stack",
            )
        if all(here):
            yield names
