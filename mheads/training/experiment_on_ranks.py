"""An experiment on several ranks: each builds the stages that it owns, after all agree on what there is to build."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mheads
from mheads.common.device import resolve
from mheads.common.errors import UserError, warn
from mheads.common.number_words import count
from mheads.config import schema
from mheads.config.schema import Config
from mheads.data.batches import Batches
from mheads.distributed.layers.graph_engine import GraphEngine, RankGraph
from mheads.distributed.planning.measure_bandwidth import measure_bandwidth
from mheads.distributed.planning.placement import Placement
from mheads.distributed.planning.workload import BANDWIDTH, Cluster
from mheads.distributed.process_group import World
from mheads.distributed.ranks_engine import RanksEngine
from mheads.engine.interface import Engine
from mheads.training.build_from_config import (
    build_loss,
    build_net,
    load_data,
    make_engine_options,
    make_network_factory,
)
from mheads.training.build_sample_weights import cluster_classes
from mheads.training.experiment import Experiment, assemble_experiment
from mheads.training.init_weights import digest_init
from mheads.training.plan_ranks import make_workload, place


@dataclass(frozen=True)
class RanksExperiment(Experiment):
    """Everything that training needs on this rank."""

    world: World
    placement: Placement

    def make_engine(self) -> RanksEngine:
        device = resolve(self.config.device, self.world.launch.local_rank)
        options = make_engine_options(self.config, self.net, device, self.world.cores, self.loss)
        return RanksEngine(self.net, options, self.world, self.placement, self.config.distributed.sums)

    def batches(self, engine: Engine) -> Batches:
        assert isinstance(engine, RanksEngine)
        rows = self.config.optim.batch_size * self.config.optim.accumulate
        return self.stream(engine.divide(rows).inputs_needed(self.net.tree, self.world.rank, rows))


@dataclass(frozen=True)
class GraphExperiment(Experiment):
    """Everything that training needs on this rank of a net that says which rank runs what."""

    world: World
    rank_graph: RankGraph

    def make_engine(self) -> GraphEngine:
        options = make_engine_options(self.config, self.net, resolve(self.config.device), 1, self.loss)
        return GraphEngine(self.net, options, self.world, self.rank_graph)


def build_experiment_on_rank(config: Config, world: World) -> Experiment:
    """The experiment on this rank. Raises, on all ranks, if they differ in recipe, code or data."""
    shared = {k: v for k, v in schema.flatten(config).items() if _must_agree(k)}
    shared["teacher.answers"] = "none" if config.teacher.answers is None else "given"
    world.compare("recipe", _find_versions() | shared)
    world.watch.timeout = config.timeout
    resolve(config.device)
    rank_graph = getattr(make_network_factory(config)(), "rank_graph", None) if config.members == 1 else None
    if isinstance(rank_graph, RankGraph):
        return _build_graph(config, world, rank_graph)
    placement = agree_on_placement(config, world)
    loss = build_loss(config)
    net = build_net(config, only=placement.stages_on(world.rank))
    world.compare("start", {"init": digest_init(config.init) or config.init})
    clusters = None
    if config.sampling.entry.from_run:
        clusters = world.share("groups", lambda: cluster_classes(config))
    data = load_data(config)
    world.compare("data", {"data checksum": data.fingerprint})
    experiment = assemble_experiment(config, net, loss, data, clusters=clusters)
    if experiment.digests:
        what = "the sample weights" + (" and of the teacher's answers" if config.teacher.answers is not None else "")
        world.compare("sampling", {f"digest of {what}": list(experiment.digests.values())})
    return RanksExperiment(**vars(experiment), world=world, placement=placement)


def _build_graph(config: Config, world: World, rank_graph: RankGraph) -> GraphExperiment:
    if world.size != rank_graph.ranks:
        raise UserError(
            f"the layers of this net are on ranks 0 to {rank_graph.ranks - 1}, and its ranks make no tree: start "
            f"{rank_graph.ranks} processes, not {world.size}, or one, which runs them all"
        )
    if resolve(config.device).type != "cpu":
        raise UserError(f"device = {config.device}: layers that say their ranks run on CPUs: give device=cpu")
    data = load_data(config)
    world.compare("data", {"data checksum": data.fingerprint})
    experiment = assemble_experiment(config, build_net(config), build_loss(config), data)
    return GraphExperiment(**vars(experiment), world=world, rank_graph=rank_graph)


def _must_agree(key: str) -> bool:
    """Whether a key must be equal on all ranks: a folder may lie elsewhere on another machine."""
    return key not in (
        "engine.workers",
        "device",
        "data.root",
        "data.path",
        "data.test_path",
        "sampling.generalist",
        "sampling.path",
        "teacher.answers",
        "init",
    )


def agree_on_placement(config: Config, world: World) -> Placement:
    """Which rank holds which stage. The main rank decides, since measured costs differ from rank to rank."""
    bandwidth = measure_bandwidth(world) if config.placement == "auto" else BANDWIDTH

    def decide() -> Placement:
        workers = config.engine.workers if config.engine.workers != "auto" else world.cores
        workload = make_workload(config)
        placement = place(config.placement, workload, Cluster(world.size, workers, bandwidth))
        _warn_of_idle_ranks(placement, world.size, bool(workload.stacked))
        return placement

    return world.share("placement", decide)


def _warn_of_idle_ranks(placement: Placement, ranks: int, stacked: bool) -> None:
    if placement.ranks < ranks:
        mesh = f"members are on {count(placement.slots, 'rank')}, in {count(placement.replicas, 'replica')}"
        remedy = f"start {placement.ranks} ranks, or look for a better number with mheads plan"
        if stacked:
            mesh, remedy = "small members run as one stage on one rank", "engine.stack=never spreads them"
        warn(f"{ranks - placement.ranks} of {ranks} ranks have nothing to do: {mesh}; {remedy}")


def _find_versions() -> dict[str, Any]:
    """What must be equal on all ranks before anything is built, beside the recipe."""
    digest, root = hashlib.sha256(), Path(mheads.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return {
        "mheads version": mheads.__version__,
        "code (checksum of the package)": digest.hexdigest()[:12],
        "torch version": torch.__version__,
        "Python version": platform.python_version(),
    }
