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

from mheads import values
from mheads.data.batch import Batch, BatchStream, Reader
from mheads.distributed.placement import Placement, first_run
from mheads.distributed.world import World
from mheads.engine.sums import Gradients, PairwiseSum, divides_evenly
from mheads.engine.tasks import ForwardPass, StepReport, TrainingStep, add_in_order, cuts
from mheads.engine.threads import ThreadsEngine
from mheads.errors import UserError
from mheads.losses import Loss
from mheads.tree import Node, Tree, TreeNet
from mheads.values import Value

T = TypeVar("T")
SUM = -1  # the phase of sums over replicas: before everything else, since others wait for them


class RanksEngine(ThreadsEngine):
    """Runs the stages that are here; `net` holds these alone."""

    def __init__(
        self,
        net: TreeNet,
        workers: int,
        micro_batches: int,
        seed: int,
        device: torch.device,
        world: World,
        placement: Placement,
        lead_reads: bool = False,
        accumulate: int = 1,
    ) -> None:
        super().__init__(net, workers, micro_batches, seed, device, accumulate)
        self.world, self.placement, self.lead_reads = world, placement, lead_reads
        self.lead = world.lead
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
        """The lead hears of every rank and decides for all: the loss, and whether to stop.

        Reports go up a binary tree of the ranks and the decision down, so that a thousand ranks do not queue at one.
        """
        stop = self.asked_to_stop
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
        """The next `count` frames of a channel."""
        found: list[tuple[list[Any], Value]] = []

        def handle(key: list[Any], value: Value) -> None:
            found.append((key, value))
            self.workers.release()

        self.workers.hold(count)
        self.courier.listen(channel, handle)
        self.workers.wait()
        self.courier.forget(channel)
        return found

    def _call(self, what: str) -> str:
        """A channel of its own for each use; all ranks come to the same ones in the same order."""
        self._calls[what] += 1
        return f"{what} {self._calls[what]}"

    # Evaluation: the lead says when a batch begins, so that no rank is drowned, and gets the outputs.

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
        if not self.lead:
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
            yield one.outputs, moved(read.targets if isinstance(read, Reader) else read().targets, self.device)
            one.outputs = None
        for rank in range(1, self.world.size):
            self.courier.send(rank, [channel, "end"])
        self.workers.release()
        self.workers.wait()
        self.courier.forget(channel)

    # Agreement, and bringing tensors together.

    def agree(self, decide: Callable[[], tuple[Any, T]]) -> tuple[Any, T | None]:
        kept: list[T] = []

        def plain() -> Any:
            found, own = decide()
            kept.append(own)
            return found

        self.workers.waiting = True  # reading a large checkpoint is no hanging, nor is waiting for it
        try:
            return self.world.share("decision", plain), kept[0] if kept else None
        finally:
            self.workers.waiting = False

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        channel = self._call("gather")
        first = range(1, self.placement.slots)  # the ranks of the first replica, beside the lead
        if self.world.rank in first:
            # A copy: the next step changes the weights, perhaps before they are gone.
            self.courier.send(0, [channel], {name: t.detach().clone() for name, t in tensors.items()})
        if not self.lead:
            return {}
        found = dict(tensors)
        for _, part in self.hear(channel, len(first)):
            found |= part
        return found

    def scatter(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        channel = self._call("scatter")
        if not self.lead:
            ((_, found),) = self.hear(channel, 1)
            return found

        def of(stages: Sequence[str]) -> dict[str, Tensor]:
            prefixes = tuple(f"{kind}/stages.{name}." for kind in ("model", "optim") for name in stages)
            return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}

        for rank in range(1, self.world.size):
            self.courier.send(rank, [channel], of(self.placement.owned(rank)))
        rest = {name: tensor for name, tensor in tensors.items() if name.startswith("progress/")}
        return of(self.placement.owned(0)) | rest


class RankStep(TrainingStep):
    """The tasks of a step that belong to this rank."""

    def __init__(self, engine: RanksEngine, step: int, batch: Batch, loss: Loss, parts: int, mine: range) -> None:
        key, spawn = (engine.seed, step), engine.workers.spawn
        super().__init__(engine.stages, loss, batch, parts, key, spawn, engine.gradients, engine.device, mine)
        self.channel = f"step {step}"
        self.placement, self.courier, self.workers = engine.placement, engine.courier, engine.workers
        self.me, self.replica = engine.world.rank, engine.replica
        self.loss_rank = self.placement.loss_rank(self.tree, self.replica)
        self.replicas = self.placement.replicas
        self._prefix: dict[tuple[str, int], dict[str, Value]] = defaultdict(dict)
        self._parts = {name: PairwiseSum(self.replicas) for name in self.stages.facts}
        self._totals_here: dict[str, dict[int, Tensor]] = defaultdict(dict)
        losses = len(mine) if self.me == self.loss_rank and not loss.separable else 0
        self.workers.hold(len(self.stages.facts) + losses)

    def start(self) -> None:
        super().start()
        self.courier.listen(self.channel, self.receive)

    def block(self, member: int, i: int) -> tuple[slice, slice]:
        """Where in [M, B] the losses of a micro-batch go, of one member if they are separable."""
        return slice(member, member + 1) if self.loss.separable else slice(None), self.slices[i]

    def receive(self, key: list[Any], value: Value) -> None:
        """What another rank handed on."""
        value = moved(value, self.device)
        kind, *rest = key
        if kind == "down":
            i, name = rest
            super().hand_down(i, self.tree.nodes[name], value)
        elif kind == "over":
            i, member = rest
            super().hand_over(i, member, value)
        elif kind == "back":
            i, name = rest
            super().hand_back(i, self.tree.nodes[name], value["d"], value.get("learn"))
        elif kind == "up":
            i, name, children = rest
            self.collect(i, self.tree.nodes[name], {c: value if c == children[0] else None for c in children})
        elif kind == "part":
            self.spawn((SUM,), self.add_part, *rest, value)
        else:
            self.spawn((SUM,), self.add_total, *rest, value)

    def _send(self, to: int, key: list[Any], value: Value) -> None:
        self.courier.send(to, [self.channel, *key], value)

    def _rank(self, stage: str) -> int:
        return self.placement.rank(stage, self.replica)

    def hand_down(self, i: int, node: Node, output: Value) -> None:
        for rank in sorted({self._rank(child) for child in node.children} - {self.me}):
            self._send(rank, ["down", i, node.name], output)  # once, however many children are there
        super().hand_down(i, node, output)

    def hand_over(self, i: int, member: int, output: Value) -> None:
        if self.loss_rank == self.me:
            super().hand_over(i, member, output)
        else:
            self._send(self.loss_rank, ["over", i, member], output)

    def apply_loss(self, i: int) -> None:
        super().apply_loss(i)
        self.workers.release()

    def hand_back(self, i: int, leaf: Node, d_output: Value, learn: Tensor | None) -> None:
        rank = self._rank(leaf.name)
        if rank == self.me:
            super().hand_back(i, leaf, d_output, learn)
        else:
            self._send(rank, ["back", i, leaf.name], {"d": d_output} | ({} if learn is None else {"learn": learn}))

    def hand_up(self, i: int, node: Node, d_input: Value) -> None:
        assert node.parent is not None
        parent = self.tree.nodes[node.parent]
        rank = self._rank(parent.name)
        if rank == self.me:
            super().hand_up(i, node, d_input)
            return
        children = parent.children
        prefix = list(children[: first_run([self.placement.stages[child] for child in children])])
        if node.name not in prefix:
            self._send(rank, ["up", i, parent.name, [node.name]], d_input)
            return
        # The sum goes through the children in member order: that of the first ones can be begun where they are.
        with self._lock:
            found = self._prefix[parent.name, i]
            found[node.name] = d_input
            complete = len(found) == len(prefix)
        if complete:
            del self._prefix[parent.name, i]
            total = values.map_leaves(add_in_order, *(found[child] for child in prefix))
            self._send(rank, ["up", i, parent.name, prefix], total)

    # Sums over replicas: each adds one part of the gradients of all, in the order of one process, and tells the others.

    def keep(self, name: str, total: Gradients) -> None:
        if self.replicas == 1:
            super().keep(name, total)
            self.workers.release()
            return
        pairs = zip(self.gradients[name], total, strict=True)
        # -0.0 for a gradient that is not there: adding it changes nothing.
        flat = [torch.full((k.numel(),), -0.0, dtype=k.dtype) if g is None else g.reshape(-1) for k, g in pairs]
        whole = torch.cat(flat) if flat else torch.empty(0)
        own = None
        for replica, (start, stop) in enumerate(cuts(len(whole), self.replicas)):
            if replica == self.replica:
                own = whole[start:stop]
            else:
                self._send(self.placement.rank(name, replica), ["part", name, self.replica], whole[start:stop])
        self.add_part(name, self.replica, own)

    def add_part(self, name: str, replica: int, part: Tensor | None) -> None:
        found = self._parts[name].add(replica, [part])
        if found is None:
            return
        for other in range(self.replicas):
            if other != self.replica:
                self._send(self.placement.rank(name, other), ["total", name, self.replica], found[0])
        assert found[0] is not None
        self.add_total(name, self.replica, found[0])

    def add_total(self, name: str, replica: int, total: Tensor) -> None:
        with self._lock:
            totals = self._totals_here[name]
            totals[replica] = total
            complete = len(totals) == self.replicas
        if not complete:
            return
        kept = self.gradients[name]
        whole = torch.cat([totals[r] for r in range(self.replicas)])
        for tensor, piece in zip(kept, whole.split([k.numel() for k in kept]), strict=True):
            tensor.copy_(piece.view(tensor.shape))
        self.workers.release()


class RankPass(ForwardPass):
    """One batch of an evaluation, on the ranks of one replica."""

    def __init__(self, engine: RanksEngine, channel: str, read: Callable[[], Batch], index: int) -> None:
        super().__init__(engine.stages, read, index, engine.workers.spawn, engine.device)
        self.engine, self.channel = engine, channel
        self.placement, self.me = engine.placement, engine.world.rank
        self.replica = index % self.placement.replicas

    def begin(self) -> None:
        """Said by the lead."""
        roots = {self.placement.rank(root.name, self.replica) for root in self.stages.tree.roots}
        for rank in sorted(roots - {self.me}):
            self._send(rank, ["start", self.index], self._batch() if self.engine.lead_reads else None)
        if self.me in roots:
            self.start()

    def _batch(self) -> dict[str, Value]:
        batch = self.read()
        return {"inputs": batch.inputs, "side": batch.side_inputs()}

    def receive(self, kind: str, rest: list[Any], value: Value) -> None:
        value = moved(value, self.device)
        if kind == "start":
            if value is not None:
                preprocess = self.read.preprocess  # type: ignore[attr-defined]
                batch = Batch(value["inputs"], torch.empty(0), preprocess, side=value["side"])
                self.read = lambda: batch
            self.start()
        elif kind == "down":
            super().hand_down(self.stages.tree.nodes[rest[0]], value["x"], value["side"])
        else:
            self.spawn((self.index, 0), super().hand_over, rest[0], value)

    def _send(self, to: int, key: list[Any], value: Value) -> None:
        self.engine.courier.send(to, [self.channel, *key], value)

    def hand_down(self, node: Node, output: Value, side: dict[str, Value]) -> None:
        ranks = {self.placement.rank(child, self.replica) for child in node.children}
        for rank in sorted(ranks - {self.me}):
            self._send(rank, ["down", self.index, node.name], {"x": output, "side": side})
        super().hand_down(node, output, side)

    def hand_over(self, member: int, output: Value) -> None:
        if self.engine.lead:
            super().hand_over(member, output)
        else:
            self._send(0, ["over", self.index, member], output)


SENT = ("targets", "prior", "ties", "side", "counts")  # of a batch to every rank, beside the inputs of some examples


class SendingStream(BatchStream):
    """The lead reads every batch and sends each rank what it needs of it, as soon as it is read."""

    def __init__(self, engine: RanksEngine, stream: BatchStream, needs: dict[int, range]) -> None:
        members, prior = stream.members, None if stream.prior is None else stream.prior.numpy()
        super().__init__(stream.data, stream.seed, stream.batch_size, members, prior)
        self.engine, self.needs = engine, needs

    def read(self, step: int) -> Batch:
        batch = super().read(step)
        for rank, rows in self.needs.items():
            inputs = values.map_leaves(lambda t, rows=rows: t[rows.start : rows.stop], batch.inputs) if rows else None
            parts = {"inputs": inputs, **{name: getattr(batch, name) for name in SENT}}
            there = {name: part for name, part in parts.items() if part is not None}
            self.engine.courier.send(rank, [f"batch {step}", rows.start], there)
        return batch


class ReceivedStream:
    """Batches that the lead has read."""

    def __init__(self, engine: RanksEngine, preprocess: Callable[[Value, torch.dtype], Value]) -> None:
        self.engine, self.preprocess = engine, preprocess

    def batch(self, step: int) -> Batch:
        (((first,), value),) = self.engine.hear(f"batch {step}", 1)
        return Batch(**{"inputs": None, **value}, preprocess=self.preprocess, first_input=first)

    def close(self) -> None:
        pass


def inputs_needed(tree: Tree, placement: Placement, rank: int, batch_size: int, parts: int) -> range:
    """The examples of a batch whose inputs a rank needs: those of its micro-batches, if it has a root."""
    roots = {root.name for root in tree.roots}
    if not roots & set(placement.owned(rank)):
        return range(0)
    size = parts // placement.replicas
    slices = cuts(batch_size, parts)[placement.replica(rank) * size :][:size]
    return range(slices[0][0], slices[-1][1])


def moved(value: Value, device: torch.device) -> Value:
    """What came over the wire, which brings it to the CPU, on the device of this rank."""
    return value if value is None or device.type == "cpu" else values.map_leaves(lambda t: t.to(device), value)


def relatives(rank: int, size: int) -> tuple[int | None, list[int]]:
    """The rank above and those below in the binary tree of all ranks."""
    below = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
    return (rank - 1) // 2 if rank else None, below


def peers(tree: Tree, placement: Placement, rank: int, size: int) -> set[int]:
    """The ranks that a rank may hear from: the lead, relatives, neighbours in the tree, the loss, and its replicas."""
    if rank == 0:
        return set(range(1, size))
    above, below = relatives(rank, size)
    found = {0, above or 0, *below}
    if rank >= placement.ranks:
        return found
    replica = placement.replica(rank)
    own = set(placement.owned(rank))
    loss = placement.loss_rank(tree, replica)
    for name, node in tree.nodes.items():
        links = [*node.children, *([node.parent] if node.parent else [])]
        if name in own:
            found |= {placement.rank(link, replica) for link in links}
            found |= {placement.rank(name, r) for r in range(placement.replicas)}
            if not node.children:
                found.add(loss)
        elif not node.children and rank == loss:
            found.add(placement.rank(name, replica))
    return found - {rank}
