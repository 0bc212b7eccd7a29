"""Finds the ranks that should hold the members: the placement with the least predicted step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mheads.distributed.planning.placement import Placement, default, meshes, spread
from mheads.distributed.planning.simulation import Simulation
from mheads.distributed.planning.stage_loads import StageLoad
from mheads.distributed.planning.workload import Cluster, Workload

# How many simulated tasks a search may take: about a second.
EFFORT = 60_000


def auto(workload: Workload, cluster: Cluster, loads: Mapping[str, StageLoad]) -> Placement:
    """The placement with the least predicted step time that a bounded search finds, never worse than the default.

    Among equally fast ones, it takes the one with fewer floats sent, then more slots.
    """
    return _Search(workload, cluster, loads).best()


Score = tuple[float, int, int]


class _Search:
    """Tries an even spread of the members on every mesh, then moves members between neighbours in the best ones."""

    def __init__(self, workload: Workload, cluster: Cluster, loads: Mapping[str, StageLoad]) -> None:
        self.workload, self.cluster, self.loads, self.tree = workload, cluster, loads, workload.tree
        self.simulation = Simulation(workload, loads, cluster.workers)
        self.work = [loads[leaf.name].forward + loads[leaf.name].backward for leaf in self.tree.leaves]
        self.spent = 0

    def best(self) -> Placement:
        first = default(self.tree, self.cluster.ranks, self.workload.divisible)
        tried = [(self.score(first), first)]
        for slots, replicas in self.meshes():
            fastest = min(score for score, _ in tried)
            if self.spent > EFFORT / 2 or self.least_seconds(slots, replicas) > fastest[0]:
                break
            placement = spread(self.tree, self.even_sizes(slots), replicas)
            tried.append((self.score(placement), placement))
        starts = sorted(tried, key=lambda pair: pair[0])[:3]
        ends = [self.improve(*start, self.spent + (EFFORT - self.spent) / len(starts)) for start in starts]
        return min(ends, key=lambda pair: pair[0])[1]

    def meshes(self) -> list[tuple[int, int]]:
        """The meshes to try, the most promising first; if they are very many, only some numbers of slots."""
        ranks = self.cluster.ranks
        candidates = meshes(self.tree, ranks, self.workload.divisible)
        most = max(slots for slots, _ in candidates)
        if len(candidates) * self.cost(1) > EFFORT:
            some = {most >> i for i in range(most.bit_length())} | {ranks // replicas for _, replicas in candidates}
            candidates = [mesh for mesh in candidates if mesh[0] in some]
        return sorted(candidates, key=lambda mesh: (self.least_seconds(*mesh), -mesh[0] * mesh[1], -mesh[0]))

    def least_seconds(self, slots: int, replicas: int) -> float:
        """Seconds that every placement on this mesh takes at least."""
        sizes, work = self.simulation.sizes[1], self.loads.values()
        rows = sum(sizes) / replicas
        spread_evenly = rows * sum(load.forward + load.backward for load in work) / (slots * self.cluster.workers)
        return max(spread_evenly, sizes[0] * max(self.simulation.paths.values()))

    def cost(self, replicas: int) -> int:
        """The number of tasks in a simulation."""
        pieces = sum(self.simulation.pieces[name] for name in self.tree.nodes)
        return 2 * pieces * self.workload.micro_batches // replicas

    def score(self, placement: Placement) -> Score:
        seconds, _ = self.simulation.run(placement, self.cluster.seconds_per_float, self.cluster.latency)
        floats = sum(self.simulation.count_by_stage(placement).values())
        self.spent += self.cost(placement.replicas)
        return float(f"{seconds:.9g}"), floats, -placement.slots  # ties in spite of rounding

    def even_sizes(self, slots: int) -> list[int]:
        """How many consecutive members each slot gets, of about the same work and at least one."""
        left, sizes, start = sum(self.work), [], 0
        for more in range(slots - 1, -1, -1):  # slots to fill after this one
            share, stop = left / (more + 1), start + 1
            last = len(self.work) - more
            while stop < last and (not more or sum(self.work[start:stop]) + self.work[stop] / 2 <= share):
                stop += 1
            left -= sum(self.work[start:stop])
            sizes.append(stop - start)
            start = stop
        return sizes

    def improve(self, score: Score, placement: Placement, stop: float) -> tuple[Score, Placement]:
        """Moves a member from slot to slot as long as that helps."""
        sizes = self.sizes_of(placement)
        better = placement.slots > 1
        while better:
            better = False
            for source in range(len(sizes)):
                for target in range(len(sizes)):
                    if self.spent > stop:
                        return score, placement
                    if source == target or sizes[source] == 1:
                        continue
                    moved = [size + (slot == target) - (slot == source) for slot, size in enumerate(sizes)]
                    changed = spread(self.tree, moved, placement.replicas)
                    if (improved := self.score(changed)) < score:
                        score, placement, sizes, better = improved, changed, moved, True
        return score, placement

    def sizes_of(self, placement: Placement) -> Sequence[int]:
        held = [placement.stages[leaf.name][0] for leaf in self.tree.leaves]
        return [held.count(slot) for slot in range(placement.slots)]
