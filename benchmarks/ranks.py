"""Two ranks in processes of their own, which step only when told to, so that they can take turns with others."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from mheads import losses
from mheads.data.batches import Batch
from mheads.data.preprocessing import Preprocess
from mheads.distributed import collectives, rank_training_step
from mheads.distributed.collectives import Gathering, exchange
from mheads.distributed.launcher import Launch
from mheads.distributed.planning.placement import Placement
from mheads.distributed.planning.stage_loads import StageLoad, measure_loads
from mheads.distributed.planning.workload import Workload
from mheads.engine.engine_options import EngineOptions
from mheads.networks import INPUT_SHAPES, NETWORKS
from mheads.trees.splitting.cut_network import make_chain
from mheads.trees.tree_spec import Tree, parse
from mheads.trees.treenet import TreeNet

RANKS = 2


@dataclass(frozen=True)
class Case:
    """A training step: M networks that share the layers up to a split, on a batch in micro-batches."""

    model: str
    split: str
    members: int
    rows: int
    micro_batches: int

    @cached_property
    def tree(self) -> Tree:
        with torch.device("meta"):  # without weights
            layers = make_chain(NETWORKS[self.model]()).layers
        return parse({self.split: self.members}, layers, self.members, self.model)

    @property
    def workload(self) -> Workload:
        return Workload(self.tree, self.rows, self.micro_batches, separable=True)

    def batch(self) -> Batch:
        generator = torch.Generator().manual_seed(0)
        channels, height, width = shape = INPUT_SHAPES[self.model]
        images = torch.randint(256, (self.rows, height, width, channels), generator=generator, dtype=torch.uint8)
        targets = torch.randint(10, (self.rows,), generator=generator)
        return Batch(images, targets, Preprocess(mean=torch.full(shape, 127.5)))

    def loads(self) -> dict[str, StageLoad]:
        """What the stages take on this machine, as `mheads plan` measures them."""
        net = TreeNet(NETWORKS[self.model], tree={self.split: self.members}, only=())
        return measure_loads(self.workload, net, torch.zeros(1, *INPUT_SHAPES[self.model]))


class RemoteRanks:
    """The ranks, reached by pipes. `bandwidth` is what they measured between them, in bytes per second."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            pipe, other = context.Pipe()
            launch = Launch("env", rank, RANKS, rank, one_host=True, port=port)
            self._processes.append(context.Process(target=_serve, args=(other, launch), daemon=True))
            self._processes[-1].start()
            other.close()
            self._pipes.append(pipe)
        self.bandwidth: float = self._answers()[0]

    def build(self, case: Case, placement: Placement, update: bool = False) -> None:
        """Sets what the ranks step from now on; with `update`, a step includes the optimizer's."""
        self._call("build", case, placement, update)

    def step(self, payload: bool = True) -> float:
        """Seconds of a step, from when the first rank begins to when the last one is done."""
        spans: list[tuple[float, float]] = self._call("step", payload)
        return max(end for _, end in spans) - min(began for began, _ in spans)

    def latency(self, turns: int = 20) -> float:
        """Seconds of an almost empty all-gather."""
        return min(max(map(float, self._call("transfer", 1, 1))) for _ in range(turns))

    def transfer(self, outputs: int, gradients: int, micro_batches: int) -> float:
        """Seconds to move what a step moves for a shared stage, round by round, while nothing is computed."""
        rounds = -(-micro_batches // RANKS)
        seconds = self._call("transfer", outputs // micro_batches, gradients // micro_batches, rounds)
        return max(map(float, seconds))

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # a rank that failed has gone
                pipe.send(None)
        for process in self._processes:
            process.join(30)
            process.kill()

    def _call(self, name: str, *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((name, *args))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


def _serve(pipe: Connection, launch: Launch) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    torch.set_num_threads(1)
    from mheads.distributed.planning.measure_bandwidth import measure_bandwidth
    from mheads.distributed.process_group import World

    world = World(launch)
    world.watch.timeout = 3600.0  # others are timed between two steps: a long wait is not a fault
    served = _Rank(world)
    pipe.send(measure_bandwidth(world))
    with suppress(EOFError, BrokenPipeError):  # the process that measured has gone
        while (command := pipe.recv()) is not None:
            name, *args = command
            try:
                answer = getattr(served, name)(*args)
            except Exception as error:
                world.abort(error)  # or the other rank would wait for this one, and nobody would hear why
                answer = RuntimeError(f"rank {launch.rank}: {type(error).__name__}: {error}")
            pipe.send(answer)
    served.close()
    world.close()


class _Rank:
    """One rank, in its process."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.engine: Any = None
        self.count = 0

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def build(self, case: Case, placement: Placement, update: bool) -> None:
        from benchmarks.ours import optimizer
        from mheads.distributed.ranks_engine import RanksEngine

        self.close()
        owned = placement.stages_on(self.world.rank)
        net = TreeNet(NETWORKS[case.model], tree={case.split: case.members}, only=owned)
        self.engine = RanksEngine(net, EngineOptions(1, case.micro_batches), self.world, placement)
        self.batch, self.loss = case.batch(), losses.independent()
        self.optimizer = optimizer(net) if update else None
        self.kept: list[Any] = []
        gathering = self.engine.gathering
        gathering.gather = self._replayable(gathering.gather, 1)
        for name in ("exchange", "add_ordered"):
            setattr(rank_training_step, name, self._replayable(getattr(collectives, name), 0))
        self.step(payload=True)

    def _replayable(self, collective: Callable[..., Any], group: int) -> Callable[..., Any]:
        """Without payload, a collective is one of a byte each, and gives what it gave in the last step that had one."""

        def run(*args: Any) -> Any:
            if self.payload:
                self.kept.append(collective(*args))
                return self.kept[-1]
            byte = torch.zeros(1)
            dist.all_gather([byte.clone() for _ in range(dist.get_world_size(args[group]))], byte, group=args[group])
            self.replayed += 1
            return self.kept[self.replayed - 1]

        return run

    def step(self, payload: bool) -> tuple[float, float]:
        self.payload, self.kept = payload, [] if payload else self.kept
        self.replayed = 0
        began = time.monotonic()  # one clock for all processes of a machine
        self.engine.step(self.count, self.batch, self.loss)
        if self.optimizer is not None:
            self.engine.update(self.optimizer.update)
        ended = time.monotonic()
        self.count += 1
        return began, ended

    def transfer(self, outputs: int, gradients: int, rounds: int = 1) -> float:
        """All-gathers of so many floats from each rank, and exchanges with the other one."""
        group, gathering, other = dist.group.WORLD, Gathering(torch.device("cpu")), 1 - self.world.rank
        output, gradient = torch.ones(outputs), torch.ones(gradients)
        for _ in range(2):  # the first has to find out how long blocks are
            began = time.monotonic()
            for _ in range(rounds):
                gathering.gather("transfer", group, output)
                exchange(group, {other: gradient}, {other: gradient}, gradient.device)
        return time.monotonic() - began
