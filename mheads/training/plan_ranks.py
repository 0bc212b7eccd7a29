"""Plans a config on ranks before anything is started: which rank holds which stage, and how long a step would take.

One network and the shape of the data are enough: `place("auto", make_workload(config), Cluster(4))` is the placement
on four ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mheads.common.atomic_files import write_atomically
from mheads.common.errors import UserError
from mheads.config.schema import Config
from mheads.data import DATASETS
from mheads.distributed.planning.placement import Placement, default, explicit, place_stacks_whole
from mheads.distributed.planning.placement_search import auto
from mheads.distributed.planning.prediction import Prediction, predict
from mheads.distributed.planning.stage_loads import StageLoad, count_loads, measure_loads
from mheads.distributed.planning.workload import Cluster, Workload
from mheads.engine.large_outputs import count_given
from mheads.engine.micro_batches import check_micro_batches
from mheads.networks import INPUT_SHAPES
from mheads.training.build_from_config import (
    build_loss,
    count_micro_batches,
    count_pieces_asked,
    find_stacks,
    make_tree,
    needs_whole_batches,
)
from mheads.trees.multiply_adds import make_example
from mheads.trees.tree_spec import Tree
from mheads.trees.treenet import TreeNet

Way = tuple[Placement, Prediction]
MEASURED = "measured on this machine"
FINER = {"shared_micro_batches": "shared micro-batches", "micro_batches": "micro-batches"}


@dataclass(frozen=True)
class ConfigWorkload(Workload):
    """A step of a config, with one of its networks, whose costs can be measured or counted."""

    config: Config = field(kw_only=True)
    net: TreeNet = field(kw_only=True)
    stacked: tuple[tuple[str, ...], ...] = field(default=(), kw_only=True)

    @cached_property
    def example(self) -> Tensor:
        """An example [1, ...], checked with the network; made only when costs are asked for."""
        shape = input_shape(self.config)
        sided = next((m for m in self.net.network().modules() if hasattr(m, "takes")), None)
        if sided is not None:
            raise UserError(
                f"{self.config.model} has a {type(sided).__name__}, which takes a side input: the costs of its stages "
                "are not known without the data; give placement=default, or a rank for each stage"
            )
        return make_example(self.net, shape)

    def measure_loads(self) -> dict[str, StageLoad]:
        """The loads of the stages on this machine."""
        return measure_loads(self, self.net, self.example)

    def count_loads(self, flops: float) -> dict[str, StageLoad]:
        """The loads of the stages at `flops` operations per second and core."""
        return count_loads(self, self.net, self.example, flops)


def make_workload(config: Config) -> ConfigWorkload:
    """The step of a config; one network is drawn, and no stage is built."""
    net = make_tree(config, only=())
    net.freeze(config.freeze)  # frozen BatchNorm needs no whole batch
    tree = net.tree
    loss = build_loss(config)
    rows = config.optim.batch_size * config.optim.accumulate
    parts = min(count_micro_batches(config, net, loss) * config.optim.accumulate, rows)
    share = min(1.0, (loss.winners or tree.num_members) / tree.num_members)
    in_order = bool(net.batch_statistics_layers())
    stacked = find_stacks(config, net, loss)
    floats = partial(count_given, loss)
    pieces = count_pieces_asked(config, net, loss)
    check_micro_batches(net, count_micro_batches(config, net, loss), pieces)
    return ConfigWorkload(
        tree, rows, parts, loss.separable, share, in_order, floats, pieces, config=config, net=net, stacked=stacked
    )


def place(
    how: str | Mapping[str, int],
    workload: ConfigWorkload,
    cluster: Cluster,
    loads: Mapping[str, StageLoad] | None = None,
) -> Placement:
    """The placement that a config names: default, auto (by these loads, or measured ones), or a rank for each stage."""
    if isinstance(how, Mapping):
        return explicit(workload.tree, how, cluster.ranks, workload.divisible)
    if how not in ("default", "auto"):
        raise UserError(f"the placement is default or auto, not {how!r}")
    if how == "auto" and loads is None:
        loads = workload.measure_loads()

    def place_tree(tree: Tree) -> Placement:
        if loads is None or how == "default":
            return default(tree, cluster.ranks, workload.divisible)
        return auto(replace(workload, tree=tree), cluster, loads)

    return place_stacks_whole(workload.tree, workload.stacked, place_tree)


def input_shape(config: Config) -> tuple[int, ...]:
    """The shape of an example, as its dataset or else its network is known to have it."""
    entry = DATASETS.get(config.data.name)
    shape = None if entry is None else entry.example_shape(**dict(config.data))
    if shape is None:
        shape = INPUT_SHAPES.get(config.model)
    if shape is None:
        known = [name for name, other in DATASETS.items() if isinstance(other.shape, tuple)]
        raise UserError(
            f"the shape of an example of {config.data.name!r} is not known: give data.path of an .npz file that "
            f"exists, or data.name={' or '.join(known)}"
        )
    return shape


@dataclass(frozen=True)
class RankPlan:
    """A workload on a cluster in one or more ways; the first is one rank, for comparison."""

    name: str
    workload: Workload
    cluster: Cluster
    speed: str
    ways: dict[str, Way]
    key: str | None  # what a config needs for more micro-batches, if a way has more

    @property
    def measured(self) -> bool:
        return self.speed == MEASURED

    def to_json(self) -> dict[str, Any]:
        workload, cluster = self.workload, self.cluster
        return {
            "recipe": self.name,
            "members": workload.tree.num_members,
            "batch": workload.rows,
            "micro_batches": workload.micro_batches,
            "ranks": cluster.ranks,
            "workers": cluster.workers,
            "bandwidth_bytes_per_second": cluster.bandwidth,
            "latency_seconds": cluster.latency,
            "speed": self.speed,
            "faster_with": self.key,
            "placements": {
                way: {
                    "replicas": placement.replicas,
                    "slots": placement.slots,
                    "stages": dict(placement.stages),
                    "images_per_second": workload.rows / prediction.step_seconds,
                    **asdict(prediction),
                }
                for way, (placement, prediction) in self.ways.items()
            },
        }

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(self.to_json(), indent=1) + "\n")


def make_plan(config: Config, cluster: Cluster, flops: float | None, how: str | None, name: str) -> RankPlan:
    """The plan at `flops` per second and rank (None: measured), placed by `how` (None: the config's way, and auto)."""
    if flops is not None and not flops > 0:
        raise UserError(f"--flops is {flops:g}: it must be above 0")
    by_config = "as given" if isinstance(config.placement, Mapping) else "default"
    ways = {by_config: config.placement if by_config == "as given" else "default", "auto": "auto"}
    workload = make_workload(config)
    loads = _find_loads(workload, cluster, flops)
    ranks: dict[str, Way] = {"one rank": _predict(workload, Cluster(1, cluster.workers), loads, "default")}
    key = None
    for way, value in ways.items() if how is None else [(how, how)]:
        ranks[way] = _predict(workload, cluster, loads, value)
        if value != "auto" and (cut := _cut_finer(config, workload, cluster, flops, value, ranks[way])) is not None:
            option, count, way_of_cut = cut
            ranks[f"{count} {FINER[option]}"] = way_of_cut
            key = f"engine.{option}={count}"
    speed = MEASURED if flops is None else f"{flops / 1e12:g} TFLOP/s per rank"
    return RankPlan(name, workload, cluster, speed, ranks, key)


def _find_loads(workload: ConfigWorkload, cluster: Cluster, flops: float | None) -> dict[str, StageLoad]:
    return workload.measure_loads() if flops is None else workload.count_loads(flops / cluster.workers)


def _predict(
    workload: ConfigWorkload, cluster: Cluster, loads: Mapping[str, StageLoad], how: str | Mapping[str, int]
) -> Way:
    placement = place(how, workload, cluster, loads)
    return placement, predict(workload, cluster, loads, placement)


def _cut_finer(
    config: Config,
    workload: ConfigWorkload,
    cluster: Cluster,
    flops: float | None,
    how: str | Mapping[str, int],
    by_auto: Way,
) -> tuple[str, int, Way] | None:
    """The key of the section `engine`, and its value, that make a step on these ranks at least 5% faster: more
    micro-batches than `auto` makes, of the shared stages or of all.

    No more ranks run a stage than there are micro-batches, but fewer rows at a time take longer each. `auto` does not
    look at the ranks, because the number of micro-batches decides the bits.
    """
    finer_cut: tuple[str, int, Way] | None = None
    for option in FINER:
        if _may_cut(config, workload, option):
            fastest = finer_cut[2] if finer_cut else by_auto
            first = 2 * workload.micro_batches // config.optim.accumulate
            best = _find_count(config, cluster, flops, how, option, first)
            if best is not None and best[1][1].step_seconds < 0.95 * fastest[1].step_seconds:
                finer_cut = (option, *best)
    return finer_cut


def _find_count(
    config: Config, cluster: Cluster, flops: float | None, how: str | Mapping[str, int], option: str, first: int
) -> tuple[int, Way] | None:
    """The value of this key with the fastest step among `first`, twice that and so on, as long as steps get faster."""
    best: tuple[int, Way] | None = None
    count = first
    while count < 2 * cluster.ranks and count <= config.optim.batch_size:
        engine = config.engine.model_copy(update={option: count})
        finer = make_workload(config.model_copy(update={"engine": engine}))
        way = _predict(finer, cluster, _find_loads(finer, cluster, flops), how)
        if best is not None and way[1].step_seconds >= best[1][1].step_seconds:
            break
        best, count = (count, way), 2 * count
    return best


def _may_cut(config: Config, workload: ConfigWorkload, option: str) -> bool:
    """Whether the number that this key gives may be another than `auto` makes."""
    if workload.in_order or getattr(config.engine, option) != "auto":
        return False
    if option == "shared_micro_batches":
        return any(node.children for node in workload.tree.nodes.values()) and not workload.net.facts.side_inputs
    # A given number of shared micro-batches is a multiple of those that `auto` makes.
    return config.engine.shared_micro_batches == "auto" and not needs_whole_batches(config, build_loss(config))
