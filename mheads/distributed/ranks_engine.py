"""The engine of several processes: the tasks of the threads engine, each on a rank that holds its stage.

Ranks form a mesh of replicas x members. A stage lives on every rank that holds one of its members, and these
divide its micro-batches. What goes from rank to rank goes by torch's collectives, in an order that is the same on all
ranks, while the workers compute. Sums have the same order as in one process, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.data.batches import Batch, Reader
from mheads.distributed.collectives import Gathering, Group, OrderedCollectives
from mheads.distributed.planning.placement import Division, Placement
from mheads.distributed.process_group import NEVER, World
from mheads.distributed.rank_evaluation import EvaluationWindow
from mheads.distributed.rank_training_step import RankStep
from mheads.engine.engine_options import EngineOptions
from mheads.engine.forward_pass import ForwardPass
from mheads.engine.micro_batches import count_pieces
from mheads.engine.step_results import StepReport
from mheads.engine.threads import ThreadsEngine
from mheads.engine.training_step import TrainingStep
from mheads.losses import Loss
from mheads.trees.treenet import TreeNet

T = TypeVar("T")


class EngineOnRank(ThreadsEngine):
    """The engine of one of several processes: what it does with the others, it does in collectives."""

    def __init__(self, net: TreeNet, options: EngineOptions, world: World) -> None:
        super().__init__(net, options)
        self.world, self.is_main, self.wire = world, world.is_main, world.wire_device(options.device)
        self.rank = world.rank
        self.collectives, self.gathering = OrderedCollectives(self.workers, self._report_lost), Gathering(self.wire)
        world.watch.tell(
            fail=self.workers.fail,
            progress=lambda: self.workers.finished + self.collectives.finished,
            busy=lambda: self.workers.busy,
        )

    def _report_lost(self, error: BaseException) -> None:
        """A collective that breaks off is a rank that is lost, here or in a layer that explains it."""
        lost = error.__cause__ if isinstance(error, UserError) else error
        if isinstance(lost, RuntimeError):
            self.world.watch.suspect(lost)
        else:
            self.workers.fail(error)

    def agree(self, decide: Callable[[], tuple[Any, T]]) -> tuple[Any, T | None]:
        kept: list[T] = []

        def plain() -> Any:
            decision, own = decide()
            kept.append(own)
            return decision

        with self.pausing():  # reading a large checkpoint is no hanging, nor is waiting for it
            return self.world.share("decision", plain), kept[0] if kept else None

    def broadcast(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        shared = [{name: t.clone() for name, t in tensors.items() if not name.startswith("progress/")}]
        self.collectives.together(lambda: dist.broadcast_object_list(shared, src=0))
        return tensors if self.is_main else shared[0]

    def close(self) -> None:
        self.world.watch.tell()
        self.collectives.close()
        super().close()


class RanksEngine(EngineOnRank):
    """Runs the stages that are here; `net` holds these alone."""

    def __init__(
        self,
        net: TreeNet,
        options: EngineOptions,
        world: World,
        placement: Placement,
        sums: str = "ordered",
    ) -> None:
        self.groups = make_groups(placement, world.rank)  # the watch allows it time
        super().__init__(net, options, world)
        self.placement, self.sums, self.notes = placement, sums, world
        self.replica = world.rank // placement.slots
        # The stages here that other ranks of this replica hold, too.
        self.shared = {name for name in self.stages.facts if len(placement.stages[name]) > 1}
        self._divisions: dict[int, Division] = {}

    def to_device(self, value: Value) -> Value:
        """Moves a value to the device of this rank."""
        return nested_values.map_leaves(lambda t: t.to(self.options.device), value)

    # Training.

    def divide(self, num_examples: int) -> Division:
        """Who runs which micro-batches of so many examples; found once."""
        if num_examples not in self._divisions:
            parts, tree = self.parts(num_examples), self.net.tree
            pieces = count_pieces(tree, self.options.pieces, num_examples, parts)
            self._divisions[num_examples] = Division(self.placement, parts, self.stages.statistics, pieces)
        return self._divisions[num_examples]

    def step(self, step: int, batch: Batch, loss: Loss) -> StepReport:
        self.net.train()
        task = RankStep(self, step, batch, loss, self.divide(len(batch)))
        task.start()
        self.workers.wait()
        task.results.bring_to_host()
        return self._report(task)

    def _report(self, task: TrainingStep) -> StepReport:
        """Every rank hears of all losses and signals, and so all take the same decisions."""
        own, stop = (torch.tensor(self.asked_to_stop), *self._losses(task)), 0
        reports = self.collectives.together(lambda: self.gathering.gather("report", dist.group.WORLD, own))
        for asked, totals, members, (start, end), *blocks in reports.values():
            stop = stop or int(asked)
            task.results.totals |= {(int(m), int(i)): total for m, i, total in totals.tolist()}
            for whole, block in zip((task.results.losses, task.results.assignment), blocks, strict=True):
                whole[members.cpu(), start:end] = block.cpu()
        return task.results.report(stop)

    def _losses(self, task: TrainingStep) -> tuple[Tensor, ...]:
        """What this rank tells of the losses: totals as (member, micro-batch, total); members, rows, and for these the
        losses and the assignment. Of losses that need all members, the first rank of a replica tells."""
        slot, share = self.world.rank % self.placement.slots, task.mine
        members = list(range(task.tree.num_members)) if slot == 0 else []
        if task.loss.separable:
            members = [m for m, leaf in enumerate(task.tree.leaves) if self.placement.stages[leaf.name][0] == slot]
        start, end = (task.slices[share[0]].start, task.slices[share[-1]].stop) if share else (0, 0)
        totals = [(m, i, float(total)) for (m, i), total in task.results.totals.items() if m in members]
        tables = torch.tensor(totals, dtype=torch.float64).view(-1, 3), torch.tensor(members, dtype=torch.int64)
        blocks = task.results.losses[members, start:end], task.results.assignment[members, start:end]
        return *tables, torch.tensor([start, end]), *blocks

    # Evaluation.

    def outputs(self, readers: Sequence[Callable[[], Batch]]) -> Iterator[tuple[Value, Value]]:
        self.net.eval()
        size = 2 * self.workers.count * self.placement.ranks  # enough to keep all busy, few enough to fit in memory
        for first in range(0, len(readers), size):
            some = readers[first : first + size]
            window = EvaluationWindow(self, some)
            window.start()
            self.workers.wait()
            parts = self._gather_on_main(window.outputs)
            for i, read in enumerate(some if self.is_main else ()):
                whole = ForwardPass(self.stages, read, i, self.workers.spawn, self.options.device, self.options.views)
                for part in parts:
                    for name, output in part.get(i, {}).items():
                        whole.hand_over(self.stages.nodes[name], self.to_device(output))
                targets = read.targets if isinstance(read, Reader) else read().targets
                yield whole.outputs, self.to_device(targets)

    # Bringing tensors together.

    def _gather_on_main(self, own: Value) -> list[Value]:
        """The values of all ranks on the main rank; elsewhere this rank's alone."""
        parts = [None] * self.world.size if self.is_main else None
        own = nested_values.map_leaves(lambda t: t.cpu().clone(), own)  # a view would be sent with all that it is of
        self.collectives.together(lambda: dist.gather_object(own, parts, dst=0))
        return parts or [own]

    @property
    def writers(self) -> dict[str, int]:
        return {stage: self.placement.all_holders(stage)[0] for stage in self.placement.stages}

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        gathered: dict[str, Tensor] = {}
        for part in self._gather_on_main(tensors):
            gathered |= part
        return gathered if self.is_main else {}


def make_groups(placement: Placement, rank: int) -> dict[tuple[int, ...], Group]:
    """The groups that a rank belongs to, by their ranks: its replica, and those who share its stages."""
    groups: dict[tuple[int, ...], Group] = {tuple(range(dist.get_world_size())): dist.group.WORLD}
    replica = rank // placement.slots
    for name in placement.stages_on(rank):  # an order in which the ranks of any two groups make both
        for ranks in (placement.ranks_of(replica), placement.holders(name, replica), placement.all_holders(name)):
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks), timeout=NEVER, use_local_synchronization=True)
    return groups
