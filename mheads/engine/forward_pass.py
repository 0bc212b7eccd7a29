"""Evaluation: the outputs of all members on a batch, without a graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.memory_layout import canonical
from mheads.common.nested_values import Value
from mheads.data.batches import Batch
from mheads.data.views import View, average_views, stack_views
from mheads.engine.stacked_stages import repeat_for
from mheads.engine.stages import Stages
from mheads.engine.training_step import FORWARD, PREPARE, Spawn, join_members
from mheads.trees.tree_spec import Node


class ForwardPass:
    """Outputs of all members on one batch without graph, for evaluation; `outputs` [M, b, C] when all is done."""

    def __init__(
        self,
        stages: Stages,
        read: Callable[[], Batch],
        index: int,
        spawn: Spawn,
        device: torch.device,
        views: Sequence[View] = (),
    ) -> None:
        self.stages = stages
        self.read = read
        self.index = index
        self.spawn = spawn
        self.device, self.views = device, views
        self.roots = stages.roots
        self.targets: Value = None
        self._side: dict[str, Value] | None = None
        self._lock = threading.Lock()
        self._outputs: list[tuple[Node, Value]] = []
        self.outputs: Value = None

    def start(self) -> None:
        self.spawn((self.index, PREPARE), self.prepare)

    def done(self) -> bool:
        return self.outputs is not None

    @torch.inference_mode()
    def prepare(self) -> None:
        batch = self.read().to(self.device)
        self.targets, self._side = batch.targets, batch.side_inputs()
        x = batch.network_inputs(self.stages.net.dtype)
        if self.views:
            x = stack_views(x, self.views)
        for root in self.roots:
            self.spawn((self.index, FORWARD), self.forward, root, x)

    @torch.inference_mode()
    def forward(self, node: Node, x: Value) -> None:
        x, stack = nested_values.map_leaves(canonical, x), self.stages.stacks.get(node.name)
        facts = self.stages.for_evaluation(node.name)
        y = facts.outputs(x if stack is None else repeat_for(stack, x), self.side_inputs() if facts.sided else {})
        if node.children:
            self.hand_down(node, y)
        else:
            self.hand_over(node, y if stack is not None else nested_values.map_leaves(lambda t: t.unsqueeze(0), y))

    def side_inputs(self) -> dict[str, Value]:
        """Those of the batch; another process may have prepared it."""
        if self._side is None:
            self._side = self.read().to(self.device).side_inputs()
        return self._side

    def hand_down(self, node: Node, output: Value) -> None:
        for child in self.stages.here(node.children):
            self.spawn((self.index, FORWARD), self.forward, child, output)

    def hand_over(self, leaf: Node, output: Value) -> None:
        with self._lock:
            self._outputs.append((leaf, output))
            complete = sum(len(part.members) for part, _ in self._outputs) == self.stages.tree.num_members
        if complete:
            parts, self._outputs = sorted(self._outputs, key=lambda part: part[0].members), []
            self.outputs = nested_values.map_leaves(self._finish, join_members(parts))

    def _finish(self, outputs: Tensor) -> Tensor:
        return average_views(outputs.to(self.stages.net.dtype), self.views, dim=1)
