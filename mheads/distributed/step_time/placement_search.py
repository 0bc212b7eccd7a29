"""Predicts how long a step on several ranks takes, and finds where the stages are best held.

`predict` plays the tasks and messages of the ranks engine in simulated time; `auto` looks for the placement that takes
least time.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from mheads.distributed.placement import Placement, default, meshes, num_first_together, spread_stages
from mheads.distributed.step_time.simulation import Simulation
from mheads.distributed.step_time.stage_loads import StageLoad
from mheads.distributed.step_time.workload import Cluster, Workload

# How many simulated tasks a search may take: about a second.
EFFORT = 60_000


@dataclass(frozen=True)
class Edge:
    """What a step moves between two slots for the output of a stage: floats of the whole batch, there and back."""

    stage: str
    source: int
    target: int
    forward: int
    backward: int


def traffic(workload: Workload, loads: Mapping[str, StageLoad], placement: Placement) -> list[Edge]:
    """Every edge between ranks: stages to their children, and members to the loss where that needs all of them."""
    slot, tree = placement.stages, workload.tree
    edges = []
    for name, node in tree.nodes.items():
        size = workload.rows * loads[name].output_floats
        held = [slot[child] for child in node.children]
        for target in sorted(set(held) - {slot[name]}):
            # If the first children are together, their gradients are added before they are sent.
            messages = held.count(target) - (num_first_together(held) - 1 if target == held[0] else 0)
            edges.append(Edge(name, slot[name], target, size, messages * size))
        loss = slot[tree.roots[0].name]
        if not node.children and not workload.separable and slot[name] != loss:
            edges.append(Edge(name, slot[name], loss, size, size))
    return edges


def count_exchanged_floats(loads: Mapping[str, StageLoad], placement: Placement) -> int:
    """Floats of weight gradients that the replicas send each other in a step: parts, and their sums back."""
    return 2 * (placement.replicas - 1) * sum(loads[name].parameters for name in placement.stages)


@dataclass(frozen=True)
class Prediction:
    """A training step with its update: its time, the part in which cores have nothing to do, and what is sent.

    `compute_seconds` are those of all workers of each rank. `exposed_seconds`: how much shorter the step would be if
    sending took no time. `floats_sent` also counts weight gradients between replicas, which no edge does.
    """

    step_seconds: float
    compute_seconds: tuple[float, ...]
    idle_share: float
    exposed_seconds: float
    floats_sent: int
    edges: tuple[Edge, ...]


def predict(workload: Workload, cluster: Cluster, loads: Mapping[str, StageLoad], placement: Placement) -> Prediction:
    """Predicts a step."""
    simulation = Simulation(workload, loads, cluster.workers)
    seconds, compute = simulation.run(placement, cluster.seconds_per_float, cluster.latency)
    ideal, _ = simulation.run(placement, 0.0, 0.0)
    edges = tuple(traffic(workload, loads, placement))
    return Prediction(
        seconds,
        tuple(compute),
        max(0.0, 1 - sum(compute) / (placement.ranks * cluster.workers * seconds)) if seconds else 0.0,
        max(0.0, seconds - ideal),  # a greedy order can, rarely, gain from a late message
        sum(edge.forward + edge.backward for edge in edges) + count_exchanged_floats(loads, placement),
        edges,
    )


def auto(workload: Workload, cluster: Cluster, loads: Mapping[str, StageLoad]) -> Placement:
    """The placement with the least predicted step time that a bounded search finds, never worse than the default.

    Among equally fast ones, it takes the one with fewer floats sent, then more slots.
    """
    return _Search(workload, cluster, loads).best()


Score = tuple[float, int, int]


class _Search:
    """Tries two simple placements on every mesh; then moves and swaps stages in the best ones."""

    def __init__(self, workload: Workload, cluster: Cluster, loads: Mapping[str, StageLoad]) -> None:
        self.workload, self.cluster, self.loads, self.tree = workload, cluster, loads, workload.tree
        self.simulation = Simulation(workload, loads, cluster.workers)
        self.work = {name: load.forward + load.backward for name, load in loads.items()}
        self.spent = 0
        self.scores: dict[tuple[int, ...], Score] = {}
        siblings: defaultdict[tuple[str | None, tuple[str, ...]], list[str]] = defaultdict(list)
        for leaf in self.tree.leaves:
            siblings[leaf.parent, leaf.layers].append(leaf.name)
        self.equal = list(siblings.values())

    def best(self) -> Placement:
        first = default(self.tree, self.cluster.ranks, self.workload.divisible)
        best_of_mesh = {(first.slots, first.replicas): (self.score(first), first)}
        for mesh in self.meshes():
            fastest = min(score for score, _ in best_of_mesh.values())
            if self.spent > EFFORT / 2 or self.least_seconds(*mesh) > fastest[0]:
                break
            for stages in (spread_stages(self.tree, mesh[0]), self.longest_first(mesh[0])):
                placement = Placement(stages, *mesh)
                candidate = (self.score(placement), placement)
                best_of_mesh[mesh] = min(best_of_mesh.get(mesh, candidate), candidate, key=lambda pair: pair[0])
        starts = sorted(best_of_mesh.values(), key=lambda pair: pair[0])[:3]
        budget = (EFFORT - self.spent) / len(starts)
        ends = [self.improve(*start, self.spent + budget) for start in starts]
        return min(ends, key=lambda pair: pair[0])[1]

    def meshes(self) -> list[tuple[int, int]]:
        """The meshes to try, the most promising first; if they are very many, only some numbers of slots."""
        ranks = self.cluster.ranks
        candidates = meshes(len(self.tree.nodes), ranks, self.workload.divisible)
        most = max(slots for slots, _ in candidates)
        if 2 * len(candidates) * self.cost(1) > EFFORT:
            some = {most >> i for i in range(most.bit_length())} | {ranks // replicas for _, replicas in candidates}
            candidates = [mesh for mesh in candidates if mesh[0] in some]
        return sorted(candidates, key=lambda mesh: (self.least_seconds(*mesh), -mesh[0] * mesh[1], -mesh[0]))

    def least_seconds(self, slots: int, replicas: int) -> float:
        """Seconds that every placement on this mesh takes at least."""
        simulation = self.simulation
        rows = sum(simulation.sizes[: len(simulation.sizes) // replicas])
        spread_evenly = rows * sum(self.work.values()) / (slots * simulation.workers)
        in_a_row = simulation.sizes[0] * max(simulation.paths)
        parameters = sum(load.parameters for load in self.loads.values()) / slots
        sending = 2 * (replicas - 1) / replicas * parameters * self.cluster.seconds_per_float
        return max(spread_evenly, in_a_row, sending)

    def cost(self, replicas: int) -> int:
        """The number of tasks in a simulation."""
        return 2 * len(self.tree.nodes) * len(self.simulation.sizes) // replicas

    def score(self, placement: Placement) -> Score:
        key = (placement.slots, placement.replicas, *placement.stages.values())
        if key not in self.scores:
            seconds, _ = self.simulation.run(placement, self.cluster.seconds_per_float, self.cluster.latency)
            edges = traffic(self.workload, self.loads, placement)
            floats = sum(edge.forward + edge.backward for edge in edges) + count_exchanged_floats(self.loads, placement)
            self.spent += self.cost(placement.replicas)
            self.scores[key] = (float(f"{seconds:.9g}"), floats, -placement.slots)  # ties in spite of rounding
        return self.scores[key]

    def longest_first(self, slots: int) -> dict[str, int]:
        """Gives each stage, those with the most work first, to the slot that has the least work so far."""
        stages: dict[str, int] = {}
        held = [(0.0, 0)] * slots  # work and number of stages, so that no slot is left empty
        for name in sorted(self.tree.nodes, key=lambda name: -self.work[name]):
            slot = min(range(slots), key=lambda slot: held[slot])
            held[slot] = (held[slot][0] + self.work[name], held[slot][1] + 1)
            stages[name] = slot
        return self.tidy(stages)

    def improve(self, score: Score, placement: Placement, stop: float) -> tuple[Score, Placement]:
        """Moves a stage, or swaps two, as long as that helps."""
        names = sorted(self.tree.nodes, key=lambda name: -self.work[name])
        moves = [(name, slot) for name in names for slot in range(placement.slots)]
        swaps = list(itertools.combinations(names, 2))
        better = placement.slots > 1
        while better:
            better = False
            for name, to in itertools.chain[tuple[str, int | str]](moves, swaps):
                if self.spent > stop:
                    return score, placement
                self.spent += len(names) // 4  # looking at a change costs too
                stages = dict(placement.stages)
                if isinstance(to, int):
                    stages[name] = to
                else:
                    stages[name], stages[to] = stages[to], stages[name]
                if len(set(stages.values())) < placement.slots:
                    continue
                changed = Placement(self.tidy(stages), placement.slots, placement.replicas)
                if self.score(changed) < score:
                    score, placement, better = self.score(changed), changed, True
        return score, placement

    def tidy(self, stages: Mapping[str, int]) -> dict[str, int]:
        """The same work per slot: equal siblings in runs, the last of them beside their parent, and slots in order."""
        tidied = dict(stages)
        for siblings in self.equal:
            held = [stages[name] for name in siblings]
            beside, count = tidied[self.tree.nodes[siblings[0]].parent or siblings[0]], Counter(held)
            held.sort(key=lambda slot: (slot == beside, -count[slot], slot))
            tidied.update(zip(siblings, held, strict=True))
        order = {slot: i for i, slot in enumerate(dict.fromkeys(tidied[name] for name in self.tree.nodes))}
        return {name: order[tidied[name]] for name in self.tree.nodes}
