"""Plays the tasks and collectives of a step on ranks in simulated time.

Left out, being small or unknown: preparing the data, the loss itself, and what sending costs the cores. `python -m
benchmarks comm` compares predictions with the clock.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

from mheads.distributed.planning.placement import Division, Placement
from mheads.distributed.planning.stage_loads import StageLoad
from mheads.distributed.planning.step_plan import Key, Order, plan_step
from mheads.distributed.planning.wires import Wires
from mheads.distributed.planning.workload import Workload
from mheads.engine.gradient_sums import subtrees
from mheads.engine.micro_batches import cut_pieces
from mheads.engine.training_step import BACKWARD, FORWARD


@dataclass
class Collective:
    """`slots` run it together once `missing` inputs have been given and it is the next one of each."""

    order: Order
    slots: Sequence[int]
    missing: int
    seconds: float
    floats: float
    arrive: Callable[[], None]
    reached: int = field(default=0)


class Simulation:
    """The tasks of a step, for any placement. Stages go by their index in the tree, parents before children."""

    def __init__(self, workload: Workload, loads: Mapping[str, StageLoad], workers: int) -> None:
        tree = workload.tree
        self.workload, self.tree, self.loads, self.workers = workload, tree, loads, workers
        self.pieces = workload.pieces_by_stage
        self.sizes = {
            count: [stop - start for start, stop in cut_pieces(workload.rows, workload.micro_batches, count)]
            for count in {1, *self.pieces.values()}
        }
        self.leaves = [leaf.name for leaf in tree.leaves]
        self.roots = [root.name for root in tree.roots]
        self.groups: dict[str, int] = {}
        self.paths: dict[str, float] = {}
        for name, node in tree.nodes.items():
            own = (loads[name].forward + loads[name].backward) / self.pieces[name]
            above = node.parent
            root = self.roots.index(name) if above is None and workload.separable else 0
            self.groups[name] = root if above is None else self.groups[above]
            self.paths[name] = own + (0.0 if above is None else self.paths[above])  # seconds per row from the root on

    def run(self, placement: Placement, seconds_per_float: float, latency: float) -> tuple[float, list[float]]:
        """Seconds of the step, and of computing on each rank."""
        played = self._play(placement, Wires(seconds_per_float, latency))
        seconds = max(replica.now for replica in played)
        # All ranks hear of all losses; then every rank updates its stages, one task per stage.
        seconds += Wires(seconds_per_float, latency).gather(placement.ranks, 0)
        updates = [[0.0] * self.workers for _ in range(placement.slots)]
        for name, slots in placement.stages.items():
            for slot in slots:
                ends = updates[slot]
                ends[ends.index(min(ends))] += self.loads[name].update
        seconds += max(max(ends) for ends in updates)
        spent = [sum(ends) for ends in updates]
        return seconds, [busy + more for one in played for busy, more in zip(one.computed, spent, strict=True)]

    def divide(self, placement: Placement) -> Division:
        return Division(placement, self.workload.micro_batches, self.workload.in_order, self.pieces)

    def count(self, placement: Placement) -> tuple[int, int]:
        """Collectives that the ranks of a step take part in, and the floats that they give; without reports."""
        division = self.divide(placement)
        planned = [
            one
            for r in range(placement.replicas)
            for one in _Replica(self, placement, division, r, Wires(0.0, 0.0)).collectives
        ]
        return sum(len(one.slots) for one in planned), round(sum(one.floats for one in planned))

    def count_by_stage(self, placement: Placement) -> dict[tuple[str, str], int]:
        """The floats given to the collectives of a step, by kind and stage (none for the loss)."""
        floats: Counter[tuple[str, str]] = Counter()
        division = self.divide(placement)
        for replica in range(placement.replicas):
            for key, one in _Replica(self, placement, division, replica, Wires(0.0, 0.0)).given.items():
                floats[key[0], key[1] if key[0] != "loss" else ""] += round(one.floats)
        return dict(floats)

    def _play(self, placement: Placement, wires: Wires) -> list[_Replica]:
        """Every replica; those with micro-batches of equal sizes are alike."""
        whole = self.divide(placement)
        shares = [tuple(self.sizes[1][i] for i in share) for share in whole.shares]
        played = {shares[r]: _Replica(self, placement, whole, r, wires) for r in reversed(range(len(shares)))}
        for replica in played.values():
            replica.play()
        return [played[share] for share in shares]


class _Replica:
    """Plays a replica: `now` is when it is done, `computed` the seconds that each slot computes."""

    def __init__(self, step: Simulation, placement: Placement, whole: Division, replica: int, wires: Wires) -> None:
        self.step, self.loads, self.wires, self.all = step, step.loads, wires, whole
        share, self.pieces, self.in_order = whole.shares[replica], step.pieces, step.workload.in_order
        self.sizes = {k: sizes[share.start * k : share.stop * k] for k, sizes in step.sizes.items()}
        self.placement = placement
        self.division = Division(replace(placement, replicas=1), len(share), self.in_order, self.pieces)
        self.turn = self.division.turns(0)
        slots = range(placement.slots)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = itertools.count()  # of two things at the same time, the earlier one goes first
        self.queues: list[list[tuple[Any, ...]]] = [[] for _ in slots]
        self.woken: set[int] = set()  # slots where there may be something to start
        self.idle = [step.workers for _ in slots]
        self.computed = [0.0 for _ in slots]
        self.heard: Counter[Any] = Counter()  # children taken back and outputs computed, by stage and micro-batch
        self.collectives: list[Collective] = []
        self.given: dict[Key, Collective] = {}
        self._plan()
        ordered = sorted(self.collectives, key=lambda one: one.order)
        self.plans: list[list[Collective]] = [[] for _ in slots]
        for one in ordered:
            for slot in one.slots:
                self.plans[slot].append(one)
        self.next = [0 for _ in slots]

    # Collectives.

    def _plan(self) -> None:
        tree, workload = self.step.tree, self.step.workload
        summed = {name for name in tree.nodes if self.loads[name].parameters and self._num_holders(name) > 1}
        groups = self.step.groups if workload.separable else None
        plan = {"down": self._plan_down, "up": self._plan_up, "loss": self._plan_loss, "sum": self._plan_sum}
        for key, order in plan_step(tree, self.division, 0, tree.nodes, summed, groups):
            one: Collective = plan[key[0]](order, *key[1:])  # type: ignore[operator]
            self.given[key] = one
            self.collectives.append(one)

    def _num_holders(self, name: str) -> int:
        return len(self.placement.stages[name]) * self.placement.replicas

    def _rows(self, name: str, i: int) -> int:
        return self.sizes[self.pieces[name]][i]

    def _floats(self, name: str, i: int) -> float:
        return self._rows(name, i) * self.loads[name].output_floats

    def _plan_down(self, order: Order, name: str, j: int) -> Collective:
        slots, owned = self.placement.stages[name], self.division.rounds(name, 0)[j]
        blocks = [self._floats(name, i) for i in owned.values()]

        def arrive() -> None:
            for slot in slots:
                for i in owned.values():
                    self._deliver(slot, name, i)

        seconds = self.wires.gather(len(slots), max(blocks))
        return Collective(order, slots, len(owned), seconds, sum(blocks), arrive)

    def _plan_up(self, order: Order, name: str, j: int) -> Collective:
        slots, node = self.placement.stages[name], self.step.tree.nodes[name]
        owned = self.division.rounds(name, 0)[j]
        sent: Counter[int] = Counter()
        taken: Counter[int] = Counter()
        for target, i in owned.items():
            for slot, parts in self.division.parts_of_split(node, i).items():
                if slot != target:
                    sent[slot] += len(parts) * self._floats(name, i)  # type: ignore[assignment]
                    taken[target] += len(parts) * self._floats(name, i)  # type: ignore[assignment]

        def arrive() -> None:
            for slot, i in owned.items():
                self._spawn(slot, BACKWARD, name, i)

        most = max([*sent.values(), *taken.values()], default=0)
        missing = len(node.children) * len(set(owned.values()))
        return Collective(order, slots, missing, self.wires.exchange(most), sum(sent.values()), arrive)

    def _plan_loss(self, order: Order, i: int) -> Collective:
        slots, blocks = range(self.placement.slots), Counter[int]()
        for leaf in self.step.leaves:
            given = self.step.workload.loss_floats(self.loads[leaf].output_floats)
            blocks[self.placement.stages[leaf][0]] += self._rows(leaf, i) * given

        def arrive() -> None:
            for leaf in self.step.leaves:
                self._spawn(self.placement.stages[leaf][0], BACKWARD, leaf, i)

        seconds, leaves = self.wires.gather(len(slots), max(blocks.values())), len(self.step.leaves)
        return Collective(order, slots, leaves, seconds, sum(blocks.values()), arrive)

    def _plan_sum(self, order: Order, name: str) -> Collective:
        """The other replicas do the same at the same time."""
        ranks, parameters = self.placement.all_holders(name), self.loads[name].parameters
        roots = [len(subtrees(self.all.count(name), self.all.runs(name, rank))) for rank in ranks]
        chunk = parameters / len(ranks)
        most = max(max(own * (len(ranks) - 1), sum(roots) - own) for own in roots) * chunk
        seconds = self.wires.exchange(most) + self.wires.gather(len(ranks), chunk)
        slots = self.placement.stages[name]
        floats = sum(roots) / self.placement.replicas * parameters
        return Collective(order, slots, self.division.count(name), seconds, floats, lambda: None)

    def _give(self, key: Key) -> None:
        one = self.given.get(key)
        if one is not None:
            one.missing -= 1
            self._begin(one)

    def _reach(self, slot: int) -> None:
        if self.next[slot] < len(self.plans[slot]):
            one = self.plans[slot][self.next[slot]]
            one.reached += 1
            self._begin(one)

    def _begin(self, one: Collective) -> None:
        if one.missing == 0 and one.reached == len(one.slots):
            one.reached = -1  # once
            self._after(self.now + one.seconds, self._end, one)

    def _end(self, one: Collective) -> None:
        for slot in one.slots:
            self.next[slot] += 1
            self._reach(slot)
        one.arrive()

    # Tasks.

    def play(self) -> None:
        for slot in range(self.placement.slots):
            self._reach(slot)
        for i in range(1 if self.in_order else self.division.parts):
            self._start_micro_batch(i)
        while self.woken or self.events:
            for slot in sorted(self.woken):
                while self.queues[slot] and self.idle[slot]:
                    self._start(slot, *heappop(self.queues[slot])[-3:])
            self.woken.clear()
            # Everything that happens at this time, before any slot chooses what to do next.
            self.now = self.events[0][0] if self.events else self.now
            while self.events and self.events[0][0] == self.now:
                _, _, happen, args = heappop(self.events)
                happen(*args)

    def _after(self, when: float, happen: Callable[..., None], *args: object) -> None:
        heappush(self.events, (when, next(self.numbers), happen, args))

    def _start_micro_batch(self, i: int) -> None:
        for root in self.step.roots:
            for slot in self.placement.stages[root]:
                for j in self.pieces.of(root, i):
                    if j in self.division.runs(root, slot):
                        self._spawn(slot, FORWARD, root, j)

    def _spawn(self, slot: int, phase: int, name: str, i: int) -> None:
        shared = bool(self.step.tree.nodes[name].children) and len(self.placement.stages[name]) > 1
        when = 0 if not shared or self.in_order else 1 if phase == BACKWARD else -1
        turn = self.turn[self.pieces.whole(name, i)]
        task = (self.step.groups[name], when, turn, phase, next(self.numbers), phase, name, i)
        heappush(self.queues[slot], task)
        self.woken.add(slot)

    def _start(self, slot: int, phase: int, name: str, i: int) -> None:
        load = self.loads[name]
        seconds = self._rows(name, i) * load.forward if phase == FORWARD else 0.0
        if phase == BACKWARD or self._goes_straight_back(name):
            seconds += self._rows(name, i) * load.backward
        self.idle[slot] -= 1
        self.computed[slot] += seconds
        self._after(self.now + seconds, self._finish, slot, phase, name, i)

    def _goes_straight_back(self, name: str) -> bool:
        return self.step.workload.separable and not self.step.tree.nodes[name].children

    def _finish(self, slot: int, phase: int, name: str, i: int) -> None:
        self.idle[slot] += 1
        self.woken.add(slot)
        node = self.step.tree.nodes[name]
        if phase == FORWARD and node.children:
            j = self.division.runs(name, slot).index(i)
            if ("down", name, j) in self.given:
                self._give(("down", name, j))
            else:
                self._deliver(slot, name, i)
        elif phase == FORWARD and not self._goes_straight_back(name):
            self._hand_over(slot, i)
        else:
            self._give(("sum", name))
            if node.parent is not None:
                self._hand_up(slot, name, node.parent, i)
            elif self.in_order:
                self._finish_micro_batch(slot, i)

    def _deliver(self, slot: int, name: str, i: int) -> None:
        pieces, whole = self.pieces[name], self.pieces.whole(name, i)
        self.heard["join", slot, name, whole] += 1
        joined = self.heard["join", slot, name, whole] == pieces
        for child in self.step.tree.nodes[name].children:
            j = self.pieces.below(name, child, i)
            runs_child = slot in self.placement.stages[child] and j in self.division.runs(child, slot)
            if runs_child and (joined or self.pieces[child] == pieces):
                self._spawn(slot, FORWARD, child, j)

    def _hand_over(self, slot: int, i: int) -> None:
        if ("loss", i) in self.given:
            self._give(("loss", i))
            return
        self.heard["loss", i] += 1
        if self.heard["loss", i] == len(self.step.leaves):
            for leaf in self.step.leaves:
                self._spawn(slot, BACKWARD, leaf, i)

    def _hand_up(self, slot: int, name: str, parent: str, i: int) -> None:
        alike = self.pieces[name] == self.pieces[parent]
        for j in [i] if alike else self.pieces.of(parent, i):
            if len(self.placement.stages[parent]) > 1:
                if slot == self.division.owner(name, i):
                    self._give(("up", parent, self.division.round_of(parent, j)))
                continue
            self.heard[slot, parent, j] += 1
            if self.heard[slot, parent, j] == len(self.step.tree.nodes[parent].children):
                self._spawn(slot, BACKWARD, parent, j)

    def _finish_micro_batch(self, slot: int, i: int) -> None:
        roots = [root for root in self.step.roots if slot in self.placement.stages[root]]
        self.heard[slot, i] += 1
        if self.heard[slot, i] == len(roots) and i + 1 < self.division.parts:
            for root in roots:
                self._spawn(slot, FORWARD, root, i + 1)
