"""The engine of a net that says itself which rank runs which layer, and is no tree: each process runs the layers of
its rank as they are written, and hands values on through Broadcast and Gather.

Every rank knows the whole net. The main rank computes the loss, gets all gradients and so keeps all weights up to
date: it evaluates and writes checkpoints alone. On the others only the weights of their own layers mean anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mheads.common.nested_values import Value
from mheads.common.number_ranges import cuts
from mheads.data.batches import Batch
from mheads.distributed.layers.communication_layers import Broadcast, Gather
from mheads.distributed.process_group import World
from mheads.distributed.ranks_engine import EngineOnRank
from mheads.engine.engine_options import EngineOptions
from mheads.engine.step_results import StepReport
from mheads.losses import Loss
from mheads.networks.dropout import Dropout, keyed_masks, skip_mask
from mheads.trees.treenet import TreeNet


@dataclass(frozen=True)
class RunModule:
    """A module on a rank: it takes values by number and gives some."""

    name: str
    rank: int
    bottoms: tuple[int, ...]
    tops: tuple[int, ...]


@dataclass(frozen=True)
class BroadcastValue:
    """A value of the root, given to ranks: `tops` by rank."""

    root: int
    bottom: int
    tops: dict[int, int]


@dataclass(frozen=True)
class GatherValues:
    """Values of ranks, in their order, given to the root."""

    root: int
    bottoms: dict[int, int]
    tops: tuple[int, ...]


@dataclass(frozen=True)
class RenameValue:
    """A value under another number."""

    rank: int
    bottom: int
    top: int


@dataclass(frozen=True)
class RankGraph:
    """The steps of a net over numbered values, on `ranks` ranks; value 0 is the examples, on each rank the same."""

    ranks: int
    steps: tuple[RunModule | BroadcastValue | GatherValues | RenameValue, ...]
    outputs: tuple[tuple[int, int], ...]  # number and rank


class GraphEngine(EngineOnRank):
    """Runs the layers of this rank; `net` holds the whole net as one stage."""

    def __init__(self, net: TreeNet, options: EngineOptions, world: World, rank_graph: RankGraph) -> None:
        super().__init__(net, options, world)
        self.rank_graph = rank_graph
        (self.name,) = net.tree.nodes
        self.modules_: dict[str, Any] = dict(net.stage(self.name)._modules)
        self.links: dict[int, nn.Module] = {}
        for i, step in enumerate(rank_graph.steps):
            if isinstance(step, BroadcastValue):
                self.links[i] = Broadcast(step.root, step.tops)
            elif isinstance(step, GatherValues):
                self.links[i] = Gather(step.root, step.bottoms)
        self.ends = {i: Gather(0, [rank]) for i, (_, rank) in enumerate(rank_graph.outputs) if rank != 0}
        self.owned = self._tensors_by_rank()

    def _tensors_by_rank(self) -> dict[int, list[Tensor]]:
        """By rank, the parameters that learn there and the buffers that change there."""
        by_rank: dict[int, dict[int, Tensor]] = {rank: {} for rank in range(self.world.size)}
        for step in self.rank_graph.steps:
            if isinstance(step, RunModule):
                module = self.modules_[step.name]
                for tensor in (*(p for p in module.parameters() if p.requires_grad), *module.buffers()):
                    by_rank[step.rank].setdefault(id(tensor), tensor)
        return {rank: list(tensors.values()) for rank, tensors in by_rank.items()}

    def step(self, step: int, batch: Batch, loss: Loss) -> StepReport:
        self.net.train()
        # As one collective: the layers in it have an order, and a rank that waits in one for another is innocent.
        return self.collectives.together(lambda: self._step(step, batch, loss))

    def _step(self, step: int, batch: Batch, loss: Loss) -> StepReport:
        members, rows = 1, batch.num_rows
        losses = torch.zeros(members, rows, dtype=self.net.dtype)
        assignment, total = torch.zeros_like(losses), 0.0
        for parameter in self.net.parameters():
            parameter.grad = None
        for i, part in enumerate(cuts(len(batch), self.parts(len(batch)))):
            key = (self.options.seed, "dropout", step, i, self.name)
            loss_value = self._pass(batch.cut(*part), loss, key, rows)
            if loss_value is not None:
                total += loss_value.total.item()
                own = batch.rows(*part)
                losses[:, own], assignment[:, own] = loss_value.losses, loss_value.assignment
        self._collect_gradients()
        reports: list[Any] = [None] * self.world.size
        dist.all_gather_object(reports, (total, self.asked_to_stop))
        stop = next((asked for _, asked in reports if asked), 0)
        return StepReport(reports[0][0] / max(1, rows), losses, assignment, stop)

    def _pass(self, batch: Batch, loss: Loss, key: tuple[int | str, ...], rows: int) -> Any:
        """Forward and backward of a micro-batch; the main rank gets what the loss is."""
        x = batch.network_inputs(self.net.dtype)
        with torch.enable_grad(), keyed_masks(key, len(x)):
            outputs, ends = self._forward(x)
        roots = [(end, torch.zeros_like(end)) for end in ends if end.requires_grad]
        value = None
        if self.is_main:
            with torch.enable_grad():
                leaves = [output.detach().unsqueeze(0).requires_grad_() for output in outputs]
                given = leaves[0] if len(leaves) == 1 else tuple(leaves)
                value = loss(given, batch.targets, batch.sample_weights, batch.ties)
                scale = torch.full_like(value.total, 1 / max(1, rows))
                d_outputs = torch.autograd.grad(value.total, leaves, scale, allow_unused=True)
            pairs = zip(outputs, leaves, d_outputs, strict=True)
            roots += [(o, torch.zeros_like(o) if g is None else g[0]) for o, _, g in pairs if o.requires_grad]
        if roots:
            tensors, gradients = zip(*roots, strict=True)
            torch.autograd.backward(tensors, gradients)
        return value

    def _forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs, on the main rank, and what a backward must begin at besides, for the sake of other ranks."""
        me, values, ends = self.world.rank, {0: x}, []
        for i, step in enumerate(self.rank_graph.steps):
            if isinstance(step, RunModule):
                module = self.modules_[step.name]
                if step.rank != me:
                    if isinstance(module, Dropout) and module.p > 0:
                        skip_mask()  # masks are numbered as in one process
                    continue
                results = module(*(values[b] for b in step.bottoms))
                values |= zip(step.tops, results if isinstance(results, tuple) else (results,), strict=False)
            elif isinstance(step, RenameValue):
                if step.rank == me:
                    values[step.top] = values[step.bottom]
            elif isinstance(step, BroadcastValue):
                if me in step.tops:
                    values[step.tops[me]] = self.links[i](*([values[step.bottom]] if me == step.root else []))
                    ends.append(values[step.tops[me]])
            elif me in step.bottoms:
                results = self.links[i](values[step.bottoms[me]])
                if me == step.root:
                    values |= zip(step.tops, results, strict=True)
                ends += results if me == step.root else [results]
        outputs = []
        for i, (number, rank) in enumerate(self.rank_graph.outputs):
            if rank == 0:
                outputs += [values[number]] if me == 0 else []
            elif me == 0:
                outputs += self.ends[i]()
            elif me == rank:
                ends.append(self.ends[i](values[number]))
        return outputs, ends

    def _collect_gradients(self) -> None:
        """Puts the gradients of this rank into place; on the main rank also gradients and statistics of the others."""
        own = () if self.is_main else tuple(_content(t).clone() for t in self.owned[self.world.rank])
        parts: list[Any] | None = [()] * self.world.size if self.is_main else None
        dist.gather_object(own, parts, dst=0)
        for rank, tensors in enumerate(parts or ()):
            for tensor, part in zip(self.owned[rank] if rank else (), tensors, strict=True):
                if tensor.requires_grad:
                    tensor.grad = torch.empty_like(tensor).copy_(part)
                else:
                    tensor.copy_(part)
        for kept, parameter in zip(self.gradients[self.name], self.stages[self.name].parameters, strict=True):
            kept.zero_() if parameter.grad is None else kept.copy_(parameter.grad)

    def outputs(self, readers: Sequence[Callable[[], Batch]]) -> Iterator[tuple[Value, Value]]:
        """The main rank has all weights, and evaluates by itself."""
        if self.is_main:
            yield from super().outputs(readers)

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors if self.is_main else {}


def _content(tensor: Tensor) -> Tensor:
    """The gradient of a parameter, or a buffer itself."""
    if not tensor.requires_grad:
        return tensor
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
