"""The engine of one process: threads that take tasks from one queue, one intra-op thread each."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from mheads.common.nested_values import Value
from mheads.data.batches import Batch
from mheads.engine.engine_options import EngineOptions
from mheads.engine.forward_pass import ForwardPass
from mheads.engine.interface import Notes
from mheads.engine.memory import keep_freed_memory
from mheads.engine.micro_batches import check_micro_batches
from mheads.engine.stacked_stages import StackedStage
from mheads.engine.stages import Stages
from mheads.engine.step_results import StepReport
from mheads.engine.training_step import TrainingStep
from mheads.losses import Loss
from mheads.trees.treenet import TreeNet

T = TypeVar("T")
Queued = tuple[tuple[int, ...], int, Callable[..., None], tuple[object, ...]]


class Workers:
    """Runs tasks, the lowest priority tuple first, on `count` threads: that of whoever waits, and others.

    Whoever waits takes tasks too, so that a chain of small ones needs no other thread. Tasks that compute on several
    threads are left to it: OpenMP keeps helpers for each thread that ever used some, and once a process has more of
    them than cores, they sleep between any two operations.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._changed = threading.Condition()  # something is queued, finished or released, or the workers are closed
        self._queue: list[Queued] = []
        self._wide: list[Queued] = []  # for the thread that waits
        self._numbers = itertools.count()
        self._unfinished = 0
        self._held = 0
        self.waiting = False
        self.finished = 0  # tasks so far
        self._error: BaseException | None = None
        self._closed = False
        self._watched = False  # whether `wait` wants to be woken after each task
        self._threads = [
            threading.Thread(target=self._run, name=f"mheads-worker-{i}", daemon=True) for i in range(1, count)
        ]
        intra_op = torch.get_num_threads()
        self._started = threading.Barrier(count)
        for thread in self._threads:
            thread.start()
        self._started.wait()
        # What a worker sets for itself torch also gives to later threads, which is for our caller to decide.
        torch.set_num_threads(intra_op)

    def spawn(
        self, priority: tuple[int, ...], function: Callable[..., None], *args: object, wide: bool = False
    ) -> None:
        with self._changed:
            self._unfinished += 1
            heapq.heappush(self._wide if wide else self._queue, (priority, next(self._numbers), function, args))
            self._changed.notify(len(self._threads) + 1 if wide else 1)

    def hold(self, count: int = 1) -> None:
        """Makes `wait` also wait for things that are not tasks, until `release` was called for each."""
        with self._changed:
            self._held += count

    def release(self) -> None:
        with self._changed:
            self._held -= 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Makes `wait` raise this error, now or later; what is held will never come."""
        with self._changed:
            self._error = self._error or error
            self._drop_queue()
            self._held = 0
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool] | None = None) -> None:
        """Runs tasks until none is queued or running and nothing is held, or until `until`; raises what a task
        raised."""
        intra_op = torch.get_num_threads()
        torch.set_num_threads(1)  # as every worker, but for the operations of a wide stage
        with self._changed:
            self._watched = until is not None
            self.waiting = True
            while (self._unfinished or (self._held and not self._error)) and not (until is not None and until()):
                if self._wide or self._queue:
                    self._take(self._wide or self._queue)
                else:
                    self._changed.wait()
            self.waiting = False
            if self._queue:
                self._changed.notify()  # the call for the first of these may have come here
            error, self._error = self._error, None
        torch.set_num_threads(intra_op)
        if error is not None:
            self._held = 0
            self.wait()  # for tasks that were still running
            raise error

    @property
    def busy(self) -> bool:
        """Whether anything is queued or running; also true if nobody waits, since then work goes on elsewhere."""
        return self._unfinished > 0 or not self.waiting

    def _drop_queue(self) -> None:
        self._unfinished -= len(self._queue) + len(self._wide)
        self._queue.clear()
        self._wide.clear()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        # One intra-op thread each: gradients differ in their bits between one and two. It acts on this thread alone,
        # but only after torch has looked at the thread for the first time, which `get` makes it do now.
        torch.get_num_threads()
        torch.set_num_threads(1)
        self._started.wait()
        with self._changed:
            while True:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                self._take(self._queue)

    def _take(self, queue: list[Queued]) -> None:
        """Runs the first task of a queue; the lock is held before and after."""
        _, _, function, args = heapq.heappop(queue)
        self._changed.release()
        error: BaseException | None = None
        try:
            function(*args)
        except BaseException as caught:
            error = caught
        finally:
            del function, args  # they hold activations
            self._changed.acquire()
        if error is not None:
            self._error = self._error or error
            self._drop_queue()  # queued tasks may depend on the one that failed
        self._unfinished -= 1
        self.finished += 1
        if error is not None or not self._unfinished or self._watched:
            self._changed.notify_all()


class ThreadsEngine:
    """Runs a tree's training steps and evaluations on the cores of this machine."""

    is_main = True
    rank = 0
    notes: Notes | None = None

    def __init__(self, net: TreeNet, options: EngineOptions) -> None:
        check_micro_batches(net, options.micro_batches, options.pieces)
        keep_freed_memory()
        self.options = options
        self.net = net.to(options.device)
        self.stages = Stages(net, options)
        self.workers = Workers(max(1, options.workers // self.stages.threads))
        self.asked_to_stop = 0  # the signal that did

    def step(self, step: int, batch: Batch, loss: Loss) -> StepReport:
        if not self.net.training:  # looking at every layer takes longer than a step of many small members
            self.net.train()
        parts, gradients = self.parts(len(batch)), self.gradients
        task = TrainingStep(self.stages, loss, batch, parts, step, self.workers.spawn, gradients, self.options)
        task.start()
        self.workers.wait()
        return task.results.report(self.asked_to_stop)

    def ask_to_stop(self, signum: int) -> None:
        self.asked_to_stop = signum

    @cached_property
    def gradients(self) -> dict[str, list[Tensor]]:
        """Tensors to hold the gradients of each stage, made when training begins: an evaluation needs none."""
        return self.stages.gradients()

    def parts(self, num_examples: int) -> int:
        """How many micro-batches a step of this many examples has."""
        return min(self.options.micro_batches * self.options.accumulate, num_examples)

    def update(self, update_stage: Callable[[str, list[Tensor]], None]) -> None:
        # One task per stage, since stages have no parameter in common.
        for i, (name, gradients) in enumerate(self.gradients.items()):
            self.workers.spawn((i,), update_stage, name, gradients)
        self.workers.wait()

    def outputs(self, readers: Sequence[Callable[[], Batch]]) -> Iterator[tuple[Value, Value]]:
        self.net.eval()
        spawn, device, views = self.workers.spawn, self.options.device, self.options.views
        passes = [ForwardPass(self.stages, read, i, spawn, device, views) for i, read in enumerate(readers)]
        ahead = 2 * self.workers.count  # enough to keep the workers busy, few enough to fit in memory
        for one in passes[:ahead]:
            one.start()
        try:
            for i, one in enumerate(passes):
                self.workers.wait(one.done)
                if i + ahead < len(passes):
                    passes[i + ahead].start()
                yield one.outputs, one.targets
                one.outputs = None
        finally:
            self.workers.wait()  # the caller may have stopped asking before the end

    # What several processes must agree on or bring together; a single process has it already.

    def agree(self, decide: Callable[[], tuple[Any, T]]) -> tuple[Any, T | None]:
        return decide()

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors

    def broadcast(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors

    @property
    def writers(self) -> dict[str, int]:
        return dict.fromkeys(self.net.tree.nodes, 0)

    @contextmanager
    def pausing(self) -> Iterator[None]:
        self.workers.waiting = True
        try:
            yield
        finally:
            self.workers.waiting = False

    @property
    def stacks(self) -> dict[str, StackedStage]:
        """By the name of the first: stages that run as one, and are updated as one."""
        return self.stages.stacks

    def close(self) -> None:
        self.workers.close()
        self.stages.close()


def own_cores() -> list[int]:
    """The cores that this process may use: a launcher may have bound it to some."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def share_of_cores(own: list[int], all_here: list[list[int]]) -> int:
    """How many cores a process has for itself, where those of this machine may use these, alone or with others."""
    return max(1, int(sum(1 / sum(cpu in cpus for cpus in all_here) for cpu in own) + 1e-9))


def available_cores() -> int:
    return len(own_cores())
