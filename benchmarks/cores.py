"""How much of a larger machine a step would use: the step's own tasks, timed one by one, on pretended cores.

Every task runs here, on one core, and is given a place on the first pretended core that is free, in the order in which
an engine would take it. Operations on several threads are taken to follow Amdahl's law, with the serial part that one
and two threads show here. What the pretended cores do not have: the interpreter's lock, shared caches and shared memory
bandwidth, so a real machine does worse.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.ours import BATCH, MEMBERS, network, optimizer, pixels
from mheads import losses
from mheads.engine.engine_options import EngineOptions
from mheads.engine.micro_batches import auto_micro_batches
from mheads.engine.stages import Stages
from mheads.engine.training_step import TrainingStep
from mheads.networks import NETWORKS
from mheads.trees.tree_spec import Node
from mheads.trees.treenet import TreeNet

Progress = Callable[[int, int], None]
CORES = (4, 16, 64)
# Factory, tree, rows of a batch.
CASES: dict[str, tuple[Callable[[], torch.nn.Module], Any, int]] = {
    "quick_m4": (network, MEMBERS, BATCH),
    "quick_trunk_to_conv3": (network, {"conv3": MEMBERS}, BATCH),
    "resnet20_m4": (NETWORKS["resnet20"], MEMBERS, 128),
    "resnet20_m1": (NETWORKS["resnet20"], 1, 128),
}


class PretendedCores:
    """Places tasks on cores that are not there. `lanes` tasks run side by side; a wide one has all lanes to itself.

    `shorten` says how much of its time on one core a task takes.
    """

    def __init__(self, lanes: int, shorten: Callable[[Node | None], float]) -> None:
        self.free = [0.0] * lanes  # when each lane is
        self.shorten = shorten
        self.work = 0.0  # seconds of all tasks on one core
        self._now = 0.0
        self._numbers = itertools.count()
        self._queue: list[tuple[float, tuple[int, ...], int, Callable[..., None], tuple[Any, ...], bool]] = []

    def spawn(
        self, priority: tuple[int, ...], function: Callable[..., None], *args: object, wide: bool = False
    ) -> None:
        self._queue.append((self._now, priority, next(self._numbers), function, args, wide))

    def run(self) -> float:
        """Runs what was spawned, and what that spawns; returns when the last task ends."""
        end = max(self.free)
        while self._queue:
            lane = min(range(len(self.free)), key=self.free.__getitem__)
            began = max(self.free[lane], min(task[0] for task in self._queue))
            task = min((task for task in self._queue if task[0] <= began), key=lambda task: task[1:3])
            self._queue.remove(task)
            _, _, _, function, args, wide = task
            began = max(self.free) if wide else began
            clock = time.perf_counter()
            node = next((arg for arg in args if isinstance(arg, Node)), None)
            with SpawnedLater(self) as later:
                function(*args)
            seconds = time.perf_counter() - clock
            self.work += seconds
            ended = began + seconds * self.shorten(node)
            self.free = [ended] * len(self.free) if wide else [*self.free[:lane], ended, *self.free[lane + 1 :]]
            self._queue += [(ended, *rest) for _, *rest in later]
            end = max(end, ended)
        self.free = [end] * len(self.free)
        self._now = end
        return end


class SpawnedLater:
    """Collects what a task spawns: it is ready when the task ends."""

    def __init__(self, cores: PretendedCores) -> None:
        self.cores = cores

    def __enter__(self) -> list[Any]:
        self.before, self.cores._queue = self.cores._queue, []
        return self.cores._queue

    def __exit__(self, *error: object) -> None:
        self.cores._queue = self.before


def simulate(case: str, made_for: int, cores: int, serial: dict[str, float]) -> float:
    """The part of so many cores that a step uses, if the run is made for `made_for` of them."""
    factory, tree, rows = CASES[case]
    net = TreeNet(factory, tree=tree)
    options = EngineOptions(cores, auto_micro_batches(rows, net, made_for), cores=made_for)
    stages = Stages(net, options)
    threads = {name: facts.threads for name, facts in stages.facts.items()}
    stages.facts = {name: replace(facts, threads=1) for name, facts in stages.facts.items()}
    lanes = max(1, min(cores, cores // min(threads.values())))

    def shorten(node: Node | None) -> float:
        count = min(cores, threads[node.name]) if node is not None and node.name in threads else 1
        part = serial.get(node.name, 0.0) if node is not None else 0.0
        return part + (1 - part) / count

    machine = PretendedCores(lanes, shorten)
    batch, gradients, update = pixels(rows, net.num_members), stages.gradients(), optimizer(net)
    net.train()
    for count in range(3):  # the first steps make primitives and buffers
        machine.work, began = 0.0, machine.free[0]
        spawn = _widen(machine, threads, min(threads.values()))
        task = TrainingStep(
            stages, losses.independent(), batch, options.micro_batches, count, spawn, gradients, options
        )
        task.start()
        machine.run()
        for i, (name, own) in enumerate(gradients.items()):
            machine.spawn((i,), update.update, name, own)
        ended = machine.run()
    return machine.work / (cores * (ended - began))


def _widen(machine: PretendedCores, threads: dict[str, int], least: int) -> Any:
    def spawn(priority: tuple[int, ...], function: Callable[..., None], *args: object, wide: bool = False) -> None:
        nodes = [arg.name for arg in args if isinstance(arg, Node)]
        machine.spawn(priority, function, *args, wide=any(threads.get(name, 1) > least for name in nodes))

    return spawn


def serial_parts(case: str) -> dict[str, float]:
    """The part of each stage's time that a second thread does not shorten, by Amdahl's law.

    Two threads share the clock and the memory of this machine, so they are compared with one thread whose neighbour
    works as hard: alone on the machine, one thread is faster, and a longer memory pass would count as serial work.
    """
    net = _network(case)
    if not net.batch_statistics_layers():
        return {}
    step = _pass_of_first_stage(case)
    seconds: dict[int, float] = {}
    before = torch.get_num_threads()
    with neighbour(case) as signal_to:
        for turn in range(20):
            for count in (1, 2):
                torch.set_num_threads(count)
                if count == 1:
                    signal_to(signal.SIGCONT)
                clock = time.perf_counter()
                step()
                took = time.perf_counter() - clock
                signal_to(signal.SIGSTOP)
                if turn:
                    seconds[count] = min(seconds.get(count, 1e9), took)
    torch.set_num_threads(before)
    part = max(0.0, 2 * seconds[2] / seconds[1] - 1)
    return dict.fromkeys(net.tree.nodes, part)


@contextlib.contextmanager
def neighbour(case: str) -> Iterator[Callable[[signal.Signals], None]]:
    """A process that keeps one core busy with the same work between SIGCONT and SIGSTOP; it begins stopped."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_repeat, args=(case, ready), daemon=True)
    process.start()
    ready.wait()
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield lambda number: os.kill(pid, number)
    finally:
        process.kill()
        process.join()


def _repeat(case: str, ready: Any) -> None:
    torch.set_num_threads(1)
    step = _pass_of_first_stage(case)
    step()
    ready.set()
    while True:
        step()


def _network(case: str) -> TreeNet:
    factory, tree, _ = CASES[case]
    return TreeNet(factory, tree=tree)


def _pass_of_first_stage(case: str) -> Callable[[], object]:
    """Forward and backward of the first stage."""
    net = _network(case)
    stage, x = net.stage(next(iter(net.stages))), pixels(CASES[case][2], 1).network_inputs(torch.float32)
    return lambda: torch.autograd.grad(stage(x).sum(), list(stage.parameters()))


def cores(progress: Progress, rounds: int) -> dict[str, Any]:
    """The part of 4, 16 and 64 cores that a step would use: made for two cores, and made for as many."""
    result: dict[str, Any] = {}
    torch.set_num_threads(1)
    for i, case in enumerate(CASES):
        serial = serial_parts(case)
        result[f"{case}_serial_part"] = round(max(serial.values(), default=0.0), 3)
        for count in CORES:
            for name, made_for in (("two", 2), ("all", count)):
                used = max(simulate(case, made_for, count, serial) for _ in range(2))
                result[f"{case}_{name}_of_{count}"] = round(used, 2)
        progress(i + 1, len(CASES))
    return result
