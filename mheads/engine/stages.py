"""What an engine knows of its stages, found once: at a thousand members, looking again at every step would cost more
than the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import Tensor, nn

from mheads.common.modules import has_batch_statistics, trainable
from mheads.common.nested_values import Value
from mheads.engine import row_backward
from mheads.engine.engine_options import EngineOptions
from mheads.trees.tree_spec import Node
from mheads.trees.treenet import TreeNet


@dataclass(frozen=True)
class StageFacts:
    """`known`: `row_backward.py` has all its layers. `mixing`: it needs whole batches. `sided`: it takes side inputs.

    `threads`: how many its operations use in training, by `threads_of`. `autocast`: the device and the precision that
    its operations are cast to; None to leave them as they are.
    """

    module: nn.Module
    parameters: Sequence[Tensor]
    known: bool
    mixing: bool
    sided: bool
    threads: int
    autocast: tuple[str, torch.dtype] | None

    @staticmethod
    def of(stage: nn.Module, threads: int = 1, autocast: tuple[str, torch.dtype] | None = None) -> StageFacts:
        sided = any(hasattr(module, "takes") for module in stage.modules())
        known, mixing = row_backward.supports(stage), has_batch_statistics(stage)
        return StageFacts(stage, trainable(stage), known, mixing, sided, threads, autocast)

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


def threads_of(net: TreeNet) -> dict[str, int]:
    """Two threads for a stage that has the machine to itself, since batch statistics forbid to cut the batch and no
    stage is beside it; one for all others.

    Gradients differ in their bits between one thread and two, so this is a rule on the tree, never on the machine.
    """
    if not net.batch_statistics_layers():
        return dict.fromkeys(net.tree.nodes, 1)
    roots = net.tree.roots
    return {name: 2 if len(roots) == 1 and node is roots[0] else 1 for name, node in net.tree.nodes.items()}


class Stages:
    """The stages of a tree that are here, by name, and what is known of the tree."""

    def __init__(self, net: TreeNet, options: EngineOptions) -> None:
        self.net, self.tree = net, net.tree
        threads = threads_of(net)
        lower = options.precision != torch.float32
        autocast = (options.device.type, options.precision) if lower else None
        self.facts = {name: StageFacts.of(net.stage(name), threads[name], autocast) for name in net.stages}
        self._evaluating = {name: replace(facts, threads=1) for name, facts in self.facts.items()}
        self.roots = [root for root in net.tree.roots if root.name in self.facts]
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
        """The stages among these that are here."""
        return [self.tree.nodes[name] for name in names if name in self.facts]

    def gradients(self) -> dict[str, list[Tensor]]:
        """Tensors to hold the gradients of each stage."""
        return {name: [torch.zeros_like(p) for p in facts.parameters] for name, facts in self.facts.items()}
