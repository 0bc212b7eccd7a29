"""The engine of several processes: the tasks of the threads engine, each where its stage is.

Every rank holds some stages, runs their tasks on its own worker threads, and sends what a stage elsewhere needs as soon
as it is there, while it goes on computing. Sums have the same order as in one process, so the bits are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.data.batches import Batch, Reader
from mheads.distributed.placement import Placement
from mheads.distributed.process_group import World
from mheads.distributed.rank_training_step import RankPass, RankStep, move_to_device
from mheads.engine.engine_options import EngineOptions
from mheads.engine.gradient_sums import divides_evenly
from mheads.engine.threads import ThreadsEngine
from mheads.engine.training_step import StepReport
from mheads.losses import Loss
from mheads.trees.tree_spec import Tree
from mheads.trees.treenet import TreeNet

T = TypeVar("T")


class RanksEngine(ThreadsEngine):
    """Runs the stages that are here; `net` holds these alone."""

    def __init__(
        self,
        net: TreeNet,
        options: EngineOptions,
        world: World,
        placement: Placement,
        lead_reads: bool = False,
    ) -> None:
        super().__init__(net, options)
        self.world, self.placement, self.lead_reads = world, placement, lead_reads
        self.is_main = world.is_main
        self.replica = placement.replica(world.rank)
        self.working = world.rank < placement.ranks
        self.courier = world.open_courier(peers(net.tree, placement, world.rank, world.size))
        self._calls: dict[str, int] = defaultdict(int)
        world.watch.tell(
            fail=self.workers.fail,
            progress=lambda: self.workers.finished + self.courier.received,
            busy=lambda: self.workers.busy,
        )

    def close(self) -> None:
        self.world.watch.tell()
        super().close()

    # Training.

    def step(self, step: int, batch: Batch, loss: Loss) -> StepReport:
        self.net.train()
        parts = self.parts(len(batch))
        task = RankStep(self, step, batch, loss, parts, self.share(parts))
        task.start()
        self.workers.wait()
        self.courier.forget(task.channel)
        return self._report(task, step)

    def share(self, parts: int) -> range:
        """The micro-batches of this replica."""
        replicas = self.placement.replicas
        if not divides_evenly(parts, replicas):
            raise UserError(
                f"{replicas} replicas cannot share {parts} micro-batches in equal shares of 1, 2, 4, ...: give "
                f"engine.micro_batches={replicas} or {2 * replicas}, or another number of ranks"
            )
        size = parts // replicas
        return range(self.replica * size, (self.replica + 1) * size) if self.working else range(0)

    def _report(self, task: RankStep, step: int) -> StepReport:
        """The main rank hears of every rank and decides for all: the loss, and whether to stop.

        Reports go up a binary tree of the ranks and the decision down, so that a thousand ranks do not queue at one.
        """
        stop = self.asked_to_stop
        task.bring_to_host()
        above, below = relatives(self.world.rank, self.world.size)
        places = sorted(task.totals)
        totals: list[list[Any]] = [[*place, task.totals[place]] for place in places]
        blocks = [torch.stack([t[task.block(*place)] for t in (task.losses, task.assignment)]) for place in places]
        for (their_stop, their_totals), their_blocks in self.hear(f"report {step}", len(below)):
            stop = stop or their_stop
            totals += their_totals
            blocks += their_blocks
        if above is None:
            for (member, i, total), block in zip(totals, blocks, strict=True):
                task.totals[member, i] = total
                task.losses[task.block(member, i)], task.assignment[task.block(member, i)] = block
            report = task.report(stop)
        else:
            self.courier.send(above, [f"report {step}", stop, totals], blocks)
            (((loss, stop), _),) = self.hear(f"decision {step}", 1)
            report = StepReport(loss, task.losses[:0], task.assignment[:0], stop)
        for rank in below:
            self.courier.send(rank, [f"decision {step}", report.loss, report.stop])
        return report

    def hear(self, channel: str, count: int) -> list[tuple[list[Any], Value]]:
        """Waits for the next `count` frames of a channel."""
        heard: list[tuple[list[Any], Value]] = []

        def handle(key: list[Any], value: Value) -> None:
            heard.append((key, value))
            self.workers.release()

        self.workers.hold(count)
        self.courier.listen(channel, handle)
        self.workers.wait()
        self.courier.forget(channel)
        return heard

    def _call(self, what: str) -> str:
        """Names a new channel for each use; all ranks use the same names in the same order."""
        self._calls[what] += 1
        return f"{what} {self._calls[what]}"

    # Evaluation: the main rank says when a batch begins, so that no rank is drowned, and gets the outputs.

    def outputs(self, readers: Sequence[Callable[[], Batch]]) -> Iterator[tuple[Tensor, Value]]:
        self.net.eval()
        channel = self._call("evaluation")
        passes = [RankPass(self, channel, read, i) for i, read in enumerate(readers)]

        def handle(key: list[Any], value: Value) -> None:
            if key[0] == "end":
                self.workers.release()
            else:
                passes[key[1]].receive(key[0], key[2:], value)

        self.workers.hold()
        self.courier.listen(channel, handle)
        if not self.is_main:
            self.workers.wait()
            self.courier.forget(channel)
            return
        ahead = 2 * self.workers.count * self.placement.ranks
        for one in passes[:ahead]:
            one.begin()
        for i, one in enumerate(passes):
            self.workers.wait(one.done)
            if i + ahead < len(passes):
                passes[i + ahead].begin()
            read = readers[i]
            targets = read.targets if isinstance(read, Reader) else read().targets
            yield one.outputs, move_to_device(targets, self.options.device)
            one.outputs = None
        for rank in range(1, self.world.size):
            self.courier.send(rank, [channel, "end"])
        self.workers.release()
        self.workers.wait()
        self.courier.forget(channel)

    # Agreement, and bringing tensors together.

    def agree(self, decide: Callable[[], tuple[Any, T]]) -> tuple[Any, T | None]:
        self.workers.waiting = True  # reading a large checkpoint is no hanging, nor is waiting for it
        try:
            return self.world.decide(decide)
        finally:
            self.workers.waiting = False

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        channel = self._call("gather")
        first = range(1, self.placement.slots)  # the ranks of the first replica, beside the main rank
        if self.world.rank in first:
            # A copy: the next step changes the weights, perhaps before they are gone.
            self.courier.send(0, [channel], {name: t.detach().clone() for name, t in tensors.items()})
        if not self.is_main:
            return {}
        gathered = dict(tensors)
        for _, part in self.hear(channel, len(first)):
            gathered |= part
        return gathered

    def scatter(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        channel = self._call("scatter")
        if not self.is_main:
            own: dict[str, Tensor]
            ((_, own),) = self.hear(channel, 1)
            return own

        def of(stages: Sequence[str]) -> dict[str, Tensor]:
            prefixes = tuple(f"{kind}/stages.{name}." for kind in ("model", "optim") for name in stages)
            return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}

        for rank in range(1, self.world.size):
            self.courier.send(rank, [channel], of(self.placement.stages_on(rank)))
        rest = {name: tensor for name, tensor in tensors.items() if name.startswith("progress/")}
        return of(self.placement.stages_on(0)) | rest


def relatives(rank: int, size: int) -> tuple[int | None, list[int]]:
    """The rank above and those below in the binary tree of all ranks."""
    below = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
    return (rank - 1) // 2 if rank else None, below


def peers(tree: Tree, placement: Placement, rank: int, size: int) -> set[int]:
    """The ranks that a rank may hear from: the main rank, relatives, neighbours in the tree, the loss, its replicas."""
    if rank == 0:
        return set(range(1, size))
    above, below = relatives(rank, size)
    ranks = {0, above or 0, *below}
    if rank >= placement.ranks:
        return ranks
    replica = placement.replica(rank)
    own = set(placement.stages_on(rank))
    loss = placement.loss_rank(tree, replica)
    for name, node in tree.nodes.items():
        links = [*node.children, *([node.parent] if node.parent else [])]
        if name in own:
            ranks |= {placement.rank(link, replica) for link in links}
            ranks |= {placement.rank(name, r) for r in range(placement.replicas)}
            if not node.children:
                ranks.add(loss)
        elif not node.children and rank == loss:
            ranks.add(placement.rank(name, replica))
    return ranks - {rank}
