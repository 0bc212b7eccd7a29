"""The engine of one process: worker threads that take tasks from one queue, one intra-op thread each."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mheads.data.batch import Batch
from mheads.engine.memory import keep_freed_memory
from mheads.engine.tape import trainable
from mheads.engine.tasks import ForwardPass, StepReport, TrainingStep
from mheads.errors import UserError
from mheads.losses import Loss
from mheads.tree import TreeNet
from mheads.values import Value


class Workers:
    """Threads that run tasks, the lowest priority tuple first."""

    def __init__(self, count: int) -> None:
        self.count = count
        lock = threading.Lock()
        self._work = threading.Condition(lock)  # something is queued, or all is over
        self._idle = threading.Condition(lock)  # nothing is queued or running
        self._queue: list[tuple[tuple[int, ...], int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = itertools.count()
        self._unfinished = 0
        self._error: BaseException | None = None
        self._closed = False
        self._watched = False  # whoever waits wants to hear of each task
        self._threads = [
            threading.Thread(target=self._run, name=f"mheads-worker-{i}", daemon=True) for i in range(count)
        ]
        intra_op = torch.get_num_threads()
        self._started = threading.Barrier(count + 1)
        for thread in self._threads:
            thread.start()
        self._started.wait()
        # What a worker sets for itself is also what torch gives to threads that come later: not ours to decide.
        torch.set_num_threads(intra_op)

    def spawn(self, priority: tuple[int, ...], function: Callable[..., None], *args: object) -> None:
        with self._work:
            self._unfinished += 1
            heapq.heappush(self._queue, (priority, next(self._numbers), function, args))
            self._work.notify()

    def wait(self, until: Callable[[], bool] | None = None) -> None:
        """Until no task is queued or running, or until `until`; raises what a task raised."""
        with self._idle:
            self._watched = until is not None
            while self._unfinished and not (until is not None and until()):
                self._idle.wait()
            error, self._error = self._error, None
        if error is not None:
            self.wait()  # for those that were running
            raise error

    def close(self) -> None:
        with self._work:
            self._closed = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        # One intra-op thread each: gradients differ in their bits between one and two. It acts on this thread alone,
        # but only after torch has looked at the thread for the first time, which `get` makes it do now.
        torch.get_num_threads()
        torch.set_num_threads(1)
        self._started.wait()
        while True:
            with self._work:
                while not self._queue and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
                _, _, function, args = heapq.heappop(self._queue)
            error: BaseException | None = None
            try:
                function(*args)
            except BaseException as caught:
                error = caught
            del function, args  # they hold activations
            with self._work:
                if error is not None:
                    self._error = self._error or error
                    self._unfinished -= len(self._queue)  # what is queued depends on what failed
                    self._queue.clear()
                self._unfinished -= 1
                if not self._unfinished or self._watched:
                    self._idle.notify_all()
            del error


class ThreadsEngine:
    """Runs a tree's training steps and evaluations on the cores of this machine."""

    def __init__(self, net: TreeNet, workers: int, micro_batches: int, seed: int) -> None:
        refused = net.batch_statistics_layers()
        if refused and micro_batches > 1:
            raise UserError(
                f"engine.micro_batches is {micro_batches}, but {refused[0]} needs the statistics of the whole batch; "
                "use engine.micro_batches=1 or auto, or a normalisation without batch statistics (GroupNorm)"
            )
        keep_freed_memory()
        self.net = net
        self.micro_batches = micro_batches
        self.seed = seed
        self.workers = Workers(workers)
        self.gradients = {name: [torch.zeros_like(p) for p in trainable(stage)] for name, stage in net.stages.items()}

    def step(self, step: int, batch: Batch, loss: Loss, accumulate: int = 1) -> StepReport:
        """Computes the gradients of one step on all its examples; `update` then uses them."""
        self.net.train()
        parts = min(self.micro_batches * accumulate, len(batch))
        task = TrainingStep(self.net, loss, batch, parts, (self.seed, step), self.workers.spawn, self.gradients)
        task.start()
        self.workers.wait()
        return task.report()

    def update(self, update_stage: Callable[[str, list[Tensor]], None]) -> None:
        """Applies the last step's gradients: one task a stage, since stages have no parameter in common."""
        for i, (name, gradients) in enumerate(self.gradients.items()):
            self.workers.spawn((i,), update_stage, name, gradients)
        self.workers.wait()

    def outputs(self, readers: Sequence[Callable[[], Batch]]) -> Iterator[tuple[Tensor, Value]]:
        """Outputs [M, b, C] and targets of each batch in order, without dropout."""
        self.net.eval()
        passes = [ForwardPass(self.net, read, i, self.workers.spawn) for i, read in enumerate(readers)]
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
            self.workers.wait()  # whoever asked may have lost interest before the end

    def close(self) -> None:
        self.workers.close()


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def auto_micro_batches(batch_size: int, net: TreeNet) -> int:
    """How many micro-batches a batch is cut into: a pure rule on sizes, never on the machine.

    About 80 rows keep the working set in cache and the matrix products efficient. A power of two, so that the fixed
    pairwise sums divide evenly among two, four, ... replicas; at least two where that leaves 64 rows, so that a single
    model uses two cores. Batch statistics need the whole batch.
    """
    if net.batch_statistics_layers():
        return 1
    return max(2 if batch_size >= 128 else 1, 2 ** max(0, round(math.log2(batch_size / 80))))
