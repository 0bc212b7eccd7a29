"""The engine of several processes: the tasks of the threads engine, each on a rank that holds its stage.

Ranks form a DeviceMesh of replicas x members. A stage lives on every rank that holds one of its members, and these
divide its micro-batches. What goes from rank to rank goes by torch's collectives, in an order that is the same on all
ranks, while the workers compute. Sums have the same order as in one process, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.data.batches import Batch, Reader
from mheads.data.views import average_views
from mheads.distributed.collectives import Gathering, Group, OrderedCollectives
from mheads.distributed.planning.placement import Division, Placement
from mheads.distributed.process_group import World
from mheads.distributed.rank_training_step import RankStep
from mheads.distributed.shared_outputs import EvaluationWindow
from mheads.engine.engine_options import EngineOptions
from mheads.engine.threads import ThreadsEngine
from mheads.engine.training_step import StepReport, TrainingStep, join_members
from mheads.losses import Loss
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
        sums: str = "ordered",
    ) -> None:
        super().__init__(net, options)
        self.world, self.placement, self.lead_reads, self.sums = world, placement, lead_reads, sums
        self.is_main = world.is_main
        self.wire = world.wire_device(options.device)
        self.collectives, self.gathering = OrderedCollectives(self._report_lost), Gathering(self.wire)
        self.depth: dict[str, int] = {}
        for name, node in net.tree.nodes.items():
            self.depth[name] = 0 if node.parent is None else self.depth[node.parent] + 1
        self._divisions: dict[int, Division] = {}
        self._groups = make_groups(placement, world, self.wire)
        world.watch.tell(
            fail=self.workers.fail,
            progress=lambda: self.workers.finished + self.collectives.finished,
            busy=lambda: self.workers.busy,
        )

    def close(self) -> None:
        self.world.watch.tell()
        self.collectives.close()
        super().close()

    # Groups of ranks.

    @property
    def replica(self) -> int:
        return self.world.rank // self.placement.slots

    def is_shared(self, stage: str) -> bool:
        return len(self.placement.stages[stage]) > 1

    def replica_group(self, stage: str) -> Group:
        """The ranks of this replica that hold a stage."""
        return self._groups[tuple(self.placement.holders(stage, self.replica))]

    def sum_group(self, stage: str) -> Group:
        """All ranks that hold a stage."""
        return self._groups[tuple(self.placement.all_holders(stage))]

    @property
    def loss_group(self) -> Group:
        """The ranks of this replica."""
        first = self.replica * self.placement.slots
        return self._groups[tuple(range(first, first + self.placement.slots))]

    def to_device(self, value: Value) -> Value:
        """Moves a received value to the device of this rank."""
        if self.wire == self.options.device:
            return value
        return nested_values.map_leaves(lambda t: t.to(self.options.device), value)

    def _report_lost(self, error: BaseException) -> None:
        if isinstance(error, RuntimeError):
            self.world.watch.suspect(error)
        else:
            self.workers.fail(error)

    def together(self, run: Callable[[], T]) -> T:
        """Runs a collective of all ranks, and waits for it; the loss of a rank ends the wait."""
        results: list[T] = []

        def collect() -> None:
            results.append(run())
            self.workers.release()

        self.workers.hold()
        self.collectives.submit(collect)
        self.workers.wait()
        return results[0]

    # Training.

    def divide(self, parts: int) -> Division:
        """Who runs which of so many micro-batches; found once."""
        if parts not in self._divisions:
            self._divisions[parts] = Division(self.placement, parts, whole=self.stages.statistics)
        return self._divisions[parts]

    def step(self, step: int, batch: Batch, loss: Loss) -> StepReport:
        self.net.train()
        division = self.divide(self.parts(len(batch)))
        task: TrainingStep | None = None
        if self.world.rank < self.placement.ranks:
            task = RankStep(self, step, batch, loss, division)
            task.start()
            self.workers.wait()
        else:  # nothing is run here, but all ranks hear of the step
            task = TrainingStep(
                self.stages, loss, batch, division.parts, step, self.workers.spawn, {}, self.options, range(0)
            )
        task.bring_to_host()
        return self._report(task)

    def _report(self, task: TrainingStep) -> StepReport:
        """Every rank hears of all losses and signals, and so all take the same decisions."""
        own = (torch.tensor(self.asked_to_stop), *self._losses(task))
        stop = 0
        for asked, places, totals, members, rows, *blocks in self.together(
            lambda: self.gathering.gather("report", self.world.group, own)
        ):
            stop = stop or int(asked)
            task.totals |= zip(map(tuple, places.tolist()), totals.tolist(), strict=True)
            for whole, block in zip((task.losses, task.assignment), blocks, strict=True):
                whole[members[:, None], rows] = block
        return task.report(stop)

    def _losses(self, task: TrainingStep) -> tuple[Tensor, ...]:
        """What this rank tells of the losses: places (member, micro-batch) and totals; members, rows, and for these the
        losses and the assignment. Of losses that need all members, the first rank of a replica tells."""
        slot, share = self.world.rank % self.placement.slots, task.mine
        own = [m for m, leaf in enumerate(task.tree.leaves) if self.placement.stages[leaf.name][0] == slot]
        members = own if task.loss.separable else list(range(task.tree.num_members)) if slot == 0 else []
        rows = range(task.slices[share[0]].start, task.slices[share[-1]].stop) if share and members else range(0)
        places = [place for place in sorted(task.totals) if members and place[0] in members]
        totals = torch.tensor([float(task.totals[place]) for place in places], dtype=torch.float64)
        told = [t[members, rows.start : rows.stop] for t in (task.losses, task.assignment)]
        place = torch.tensor(places, dtype=torch.int64).view(-1, 2)
        return place, totals, torch.tensor(members, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64), *told

    # Evaluation.

    def outputs(self, readers: Sequence[Callable[[], Batch]]) -> Iterator[tuple[Value, Value]]:
        self.net.eval()
        size = 2 * self.workers.count * self.placement.ranks  # enough to keep all busy, few enough to fit in memory
        for first in range(0, len(readers), size):
            some = readers[first : first + size]
            window = EvaluationWindow(self, self._hand_out(some) if self.lead_reads else some)
            window.start()
            self.workers.wait()
            parts = self.together(lambda: self.gathering.gather_on_main(self.world.group, window.outputs))  # noqa: B023
            for i, read in enumerate(some if self.is_main else ()):
                outputs: dict[str, Value] = {}
                for part in parts:
                    outputs |= part.get(i, {})
                members = sorted(
                    ((self.stages.nodes[name], y) for name, y in outputs.items()), key=lambda p: p[0].members
                )
                joined = self.to_device(join_members(members))
                targets = read.targets if isinstance(read, Reader) else read().targets
                yield (
                    nested_values.map_leaves(self._average_views, joined),
                    nested_values.map_leaves(lambda t: t.to(self.options.device), targets),
                )

    def _average_views(self, outputs: Tensor) -> Tensor:
        return average_views(outputs.to(self.net.dtype), self.options.views, dim=1)

    def _hand_out(self, readers: Sequence[Callable[[], Batch]]) -> list[Callable[[], Batch]]:
        """The batches that the main rank reads, on all ranks: inputs where a rank begins with them."""
        division = Division(self.placement, len(readers))
        roots = [root.name for root in self.net.tree.roots]

        def parts() -> list[list[Any]]:
            batches = [read() for read in readers]
            return [
                [
                    (
                        batch.inputs if any(i in division.runs(root, rank) for root in roots) else None,
                        batch.side,
                        batch.counts,
                    )
                    for i, batch in enumerate(batches)
                ]
                for rank in range(self.world.size)
            ]

        def batch(part: Any, read: Any) -> Callable[[], Batch]:
            inputs, side, counts = part
            return lambda: Batch(inputs, torch.empty(0), read.preprocess, side=side, counts=counts)

        own: list[Any] = self.scatter_objects(parts)
        return [batch(part, read) for part, read in zip(own, readers, strict=True)]

    # Agreement, and bringing tensors together.

    def scatter_objects(self, parts: Callable[[], list[T]]) -> T:
        """What the main rank has for each rank; `parts` is called there alone."""
        given = parts() if self.is_main else None
        taken: list[Any] = [None]
        self.together(lambda: dist.scatter_object_list(taken, given, src=0))
        own: T = taken[0]
        return own

    def agree(self, decide: Callable[[], tuple[Any, T]]) -> tuple[Any, T | None]:
        decision: list[Any] = [None, None]
        kept = None
        if self.is_main:
            self.workers.waiting = True  # reading a large checkpoint is no hanging, nor is waiting for it
            try:
                decision[0], kept = decide()
            except UserError as error:
                decision[1] = str(error)
            finally:
                self.workers.waiting = False
        self.together(lambda: dist.broadcast_object_list(decision, src=0))
        if decision[1] is not None:
            raise UserError(decision[1])
        return decision[0], kept

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        gathered: dict[str, Tensor] = {}
        for part in self.together(lambda: self.gathering.gather_on_main(self.world.group, tensors)):
            gathered |= part
        return gathered | tensors if self.is_main else {}

    def scatter(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        def of(rank: int) -> dict[str, Tensor]:
            prefixes = tuple(
                f"{kind}/stages.{s}." for kind in ("model", "optim") for s in self.placement.stages_on(rank)
            )
            return {name: tensor.clone() for name, tensor in tensors.items() if name.startswith(prefixes)}

        own = self.scatter_objects(lambda: [{}, *(of(rank) for rank in range(1, self.world.size))])
        rest = {name: tensor for name, tensor in tensors.items() if name.startswith("progress/")}
        return of(0) | rest if self.is_main else own


def make_groups(placement: Placement, world: World, wire: torch.device) -> dict[tuple[int, ...], Group]:
    """The groups of ranks that share a stage, in a replica and in all; those of the mesh are its dimensions."""
    shape = (placement.replicas, placement.slots)
    mesh = DeviceMesh(wire.type, torch.arange(placement.ranks).view(shape), mesh_dim_names=("replica", "member"))
    handles: dict[tuple[int, ...], Any] = {world.group.ranks: world.group.handle}
    wanted = [tuple(placement.holders(name, r)) for name in placement.stages for r in range(placement.replicas)]
    wanted += [tuple(placement.all_holders(name)) for name in placement.stages]
    wanted += [tuple(mesh.mesh[r].tolist()) for r in range(placement.replicas)]
    if world.rank < placement.ranks:
        replica, member = divmod(world.rank, placement.slots)
        handles |= {tuple(mesh.mesh[:, member].tolist()): mesh.get_group("replica")}
        handles |= {tuple(mesh.mesh[replica].tolist()): mesh.get_group("member")}
    lines = {tuple(line) for line in (*mesh.mesh.tolist(), *mesh.mesh.T.tolist())}
    for ranks in dict.fromkeys(wanted):
        if ranks not in handles and len(ranks) > 1 and ranks not in lines:
            handles[ranks] = dist.new_group(list(ranks))  # by all ranks, whether they are in it or not
        elif world.rank in ranks:
            handles.setdefault(ranks, None)
    return {ranks: Group(ranks, handle) for ranks, handle in handles.items() if world.rank in ranks}
