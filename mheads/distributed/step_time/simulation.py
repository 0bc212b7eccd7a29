"""Plays the tasks and messages of a step on ranks in simulated time.

Left out, being small or unknown: preparing the data, the loss itself, and what sending costs the cores. `python -m
benchmarks comm` compares predictions with the clock.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from mheads.common.number_ranges import cuts
from mheads.distributed.placement import Placement, num_first_together
from mheads.distributed.step_time.stage_loads import StageLoad
from mheads.distributed.step_time.workload import Workload
from mheads.engine.training_step import BACKWARD, FORWARD, LOSS


class Simulation:
    """The tasks of a step, for any placement. Stages go by their index in the tree, parents before children."""

    def __init__(self, workload: Workload, loads: Mapping[str, StageLoad], workers: int) -> None:
        tree = workload.tree
        self.workload, self.workers, self.separable = workload, workers, workload.separable
        self.sizes = [stop - start for start, stop in cuts(workload.rows, workload.micro_batches)]
        self.names = list(tree.nodes)
        index = {name: s for s, name in enumerate(self.names)}
        self.loads = [loads[name] for name in self.names]
        nodes = list(tree.nodes.values())
        self.parents = [-1 if node.parent is None else index[node.parent] for node in nodes]
        self.children = [[index[child] for child in node.children] for node in nodes]
        self.roots = [s for s, parent in enumerate(self.parents) if parent < 0]
        self.leaves = [s for s, below in enumerate(self.children) if not below]
        # As in tasks.py: members that have nothing in common run one after the other, if the loss allows it.
        order = {s: i for i, s in enumerate(self.roots)} if workload.separable else {}
        self.groups = [order.get(s, 0) for s in range(len(nodes))]
        self.paths = [load.forward + load.backward for load in self.loads]  # seconds per row from the root on
        for s, parent in enumerate(self.parents):
            if parent >= 0:
                self.groups[s] = self.groups[parent]
                self.paths[s] += self.paths[parent]

    def run(self, placement: Placement, seconds_per_float: float, latency: float) -> tuple[float, list[float]]:
        """Seconds of the step, and of computing on each rank."""
        shares, played = self._play(placement, seconds_per_float, latency)
        held = [placement.stages[name] for name in self.names]
        done = [max(replica.done[slot] for replica in played.values()) for slot in range(placement.slots)]
        # Reports go to rank 0 and its decision comes back; then every rank updates its stages, one task per stage.
        seconds = max(done) + (2 * latency if placement.ranks > 1 else 0)
        updates = [[0.0] * self.workers for _ in range(placement.slots)]
        for slot, load in zip(held, self.loads, strict=True):
            ends = updates[slot]
            ends[ends.index(min(ends))] += load.update
        seconds += max(max(ends_of_slot) for ends_of_slot in updates)
        spent = [sum(ends_of_slot) for ends_of_slot in updates]
        return seconds, [
            busy + more for share in shares for busy, more in zip(played[share].computed, spent, strict=True)
        ]

    def count_messages(self, placement: Placement) -> tuple[int, int]:
        """Messages of a step between all ranks, and the floats in them; without reports and decisions."""
        shares, played = self._play(placement, 0.0, 0.0)
        replicas = [played[share] for share in shares]
        return sum(replica.messages for replica in replicas), round(sum(replica.floats for replica in replicas))

    def _play(
        self, placement: Placement, seconds_per_float: float, latency: float
    ) -> tuple[list[tuple[int, ...]], dict[tuple[int, ...], _Replica]]:
        """The sizes of each replica's micro-batches, and one replica played for all that have the same sizes."""
        held = [placement.stages[name] for name in self.names]
        each = len(self.sizes) // placement.replicas
        shares = [tuple(self.sizes[r * each : (r + 1) * each]) for r in range(placement.replicas)]
        return shares, {
            share: _Replica(self, held, placement, share, seconds_per_float, latency) for share in dict.fromkeys(shares)
        }


class _Replica:
    """Plays a replica on micro-batches of these sizes: `done` is when each slot finishes, `computed` its seconds."""

    def __init__(
        self,
        step: Simulation,
        held: list[int],
        placement: Placement,
        sizes: tuple[int, ...],
        seconds_per_float: float,
        latency: float,
    ) -> None:
        self.step, self.held, self.sizes = step, held, sizes
        self.seconds_per_float, self.latency = seconds_per_float, latency
        self.to_others = (placement.replicas - 1) / placement.replicas  # of a stage's parameters
        self.num_others = placement.replicas - 1
        self.messages, self.floats = 0, 0.0
        self.loss_slot = held[step.roots[0]]
        self.where: list[dict[int, list[int]]] = []  # the children of each stage by slot
        self.together = [1] * len(held)  # siblings whose gradients are added before they are sent
        for children in step.children:
            where: defaultdict[int, list[int]] = defaultdict(list)
            for child in children:
                where[held[child]].append(child)
            self.where.append(where)
            first = num_first_together([held[child] for child in children])
            for child in children[:first]:
                self.together[child] = first
        slots = placement.slots
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = itertools.count()  # of two things at the same time, the earlier one goes first
        self.queues: list[list[tuple[int, int, int, int, int]]] = [[] for _ in range(slots)]
        self.woken: set[int] = set()  # slots where there may be something to start
        self.idle = [step.workers] * slots
        self.computed, self.done, self.sent, self.received = ([0.0] * slots for _ in range(4))
        # By stage and micro-batch: gradients of the first children added, children heard of. By stage: micro-batches
        # taken back. By micro-batch: outputs at the loss.
        self.added: Counter[tuple[int, int]] = Counter()
        self.heard: Counter[tuple[int, int]] = Counter()
        self.taken_back: Counter[int] = Counter()
        self.outputs: Counter[int] = Counter()
        self._play()

    def _play(self) -> None:
        for i in range(len(self.sizes)):
            self._spawn(FORWARD, i, self.step.roots)
        while self.woken or self.events:
            for slot in sorted(self.woken):
                while self.queues[slot] and self.idle[slot]:
                    self._start(slot, heappop(self.queues[slot]))
            self.woken.clear()
            # Everything that happens at this time, before any slot chooses what to do next.
            self.now = self.events[0][0] if self.events else self.now
            while self.events and self.events[0][0] == self.now:
                _, _, happen, args = heappop(self.events)
                happen(*args)
        self.done = [max(pair) for pair in zip(self.done, self.sent, strict=True)]

    def _after(self, when: float, happen: Callable[..., None], *args: object) -> None:
        heappush(self.events, (when, next(self.numbers), happen, args))

    # Tasks.

    def _spawn(self, phase: int, i: int, stages: Sequence[int]) -> None:
        for s in stages:
            slot = self.loss_slot if phase == LOSS else self.held[s]
            heappush(self.queues[slot], (self.step.groups[s], i, phase, next(self.numbers), s))
            self.woken.add(slot)

    def _start(self, slot: int, task: tuple[int, int, int, int, int]) -> None:
        _, i, phase, _, s = task
        load = self.step.loads[s]
        seconds = self.sizes[i] * load.forward if phase == FORWARD else 0.0
        if phase == BACKWARD or (phase == FORWARD and self._goes_straight_back(s)):
            seconds += self.sizes[i] * load.backward
        self.idle[slot] -= 1
        self.computed[slot] += seconds
        self._after(self.now + seconds, self._finish, slot, phase, i, s)

    def _goes_straight_back(self, s: int) -> bool:
        return self.step.separable and not self.step.children[s]

    def _finish(self, slot: int, phase: int, i: int, s: int) -> None:
        self.idle[slot] += 1
        self.done[slot] = self.now
        self.woken.add(slot)
        if phase == LOSS:
            for leaf in self.step.leaves:
                self._send(slot, self.held[leaf], i, leaf, self._spawn, BACKWARD, i, (leaf,))
        elif phase == FORWARD and self.step.children[s]:
            for target, children in self.where[s].items():
                self._send(slot, target, i, s, self._spawn, FORWARD, i, children)
        elif phase == FORWARD and not self.step.separable:
            self._send(slot, self.loss_slot, i, s, self._gather, i)
        else:
            self._keep(slot, s)
            if self.step.parents[s] >= 0:
                self._hand_up(slot, i, s, self.step.parents[s])

    # What goes from one stage to another.

    def _hand_up(self, slot: int, i: int, s: int, parent: int) -> None:
        """Sends the gradient of a stage's input; the first children wait for each other where they are together."""
        if self.together[s] > 1:
            self.added[parent, i] += 1
            if self.added[parent, i] < self.together[s]:
                return
        self._send(slot, self.held[parent], i, parent, self._collect, i, parent, self.together[s])

    def _collect(self, i: int, parent: int, children: int) -> None:
        self.heard[parent, i] += children
        if self.heard[parent, i] == len(self.step.children[parent]):
            self._spawn(BACKWARD, i, (parent,))

    def _gather(self, i: int) -> None:
        self.outputs[i] += 1
        if self.outputs[i] == len(self.step.leaves):
            self._spawn(LOSS, i, self.step.roots[:1])

    def _keep(self, slot: int, s: int) -> None:
        """Exchanges the complete gradients of a stage: each replica adds up a part of them and sends the sum back.

        The other replicas do the same, so what comes in from them is what this one sends.
        """
        self.taken_back[s] += 1
        if self.to_others and self.taken_back[s] == len(self.sizes):
            floats = self.to_others * self.step.loads[s].parameters
            self.messages += 2 * (self.num_others - 1)  # all parts at once, and all sums, are one message each in time
            self._post(slot, slot, floats, self._post, slot, slot, floats, self._rest, slot)

    def _rest(self, slot: int) -> None:
        self.done[slot] = self.now

    def _send(self, source: int, target: int, i: int, s: int, arrive: Callable[..., None], *args: object) -> None:
        """Sends a tensor like the output of stage s on micro-batch i."""
        if source == target:
            arrive(*args)
        else:
            self._post(source, target, self.sizes[i] * self.step.loads[s].output_floats, arrive, *args)

    def _post(self, source: int, target: int, floats: float, arrive: Callable[..., None], *args: object) -> None:
        self.messages += 1
        self.floats += floats
        seconds = floats * self.seconds_per_float
        start = max(self.now, self.sent[source])
        self.sent[source] = start + seconds
        self._after(start + self.latency, self._receive, target, seconds, arrive, *args)

    def _receive(self, target: int, seconds: float, arrive: Callable[..., None], *args: object) -> None:
        self.received[target] = max(self.now, self.received[target]) + seconds
        self._after(self.received[target], arrive, *args)
