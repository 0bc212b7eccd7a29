"""An experiment on several ranks: each builds the stages that it owns, after all agree on what there is to build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mheads.common.device import resolve
from mheads.common.errors import UserError
from mheads.config import schema as configs
from mheads.config.schema import Config
from mheads.data.batches import Batches
from mheads.distributed.placement import Placement
from mheads.distributed.planning.job import BANDWIDTH, Cluster
from mheads.distributed.ranks import RanksEngine
from mheads.distributed.reading import ReceivedStream, SendingStream, absent_data, facts_of, inputs_needed
from mheads.distributed.world import World
from mheads.distributed.written import Written, WrittenEngine
from mheads.engine.interface import Engine
from mheads.training import build as parts
from mheads.training import experiment as experiments
from mheads.training import init_weights, rank_plan
from mheads.training.experiment import Experiment


@dataclass(frozen=True)
class RanksExperiment(Experiment):
    """Everything that training needs on this rank."""

    world: World
    placement: Placement

    def engine(self) -> RanksEngine:
        device = resolve(self.config.device, self.world.launch.local_rank)
        options = parts.engine_options(self.config, self.net, device, self.world.cores, self.loss)
        lead_reads = self.config.data.reader == "lead"
        return RanksEngine(self.net, options, self.world, self.placement, lead_reads)

    def batches(self, engine: Engine) -> Batches:
        assert isinstance(engine, RanksEngine)
        optim = self.config.optim
        rows = optim.batch_size * optim.accumulate
        parts = engine.parts(rows)
        engine.share(parts)  # refuses what does not divide

        def needs(rank: int) -> range:
            return inputs_needed(self.net.tree, self.placement, rank, rows, parts)

        if not engine.lead_reads:
            return self.stream(needs(self.world.rank))
        if not engine.is_main:
            return ReceivedStream(engine, self.data.preprocess)
        return SendingStream(engine, self.stream(), {rank: needs(rank) for rank in range(1, self.world.size)})


@dataclass(frozen=True)
class WrittenExperiment(Experiment):
    """Everything that training needs on this rank of a net that says which rank runs what."""

    world: World
    written: Written

    def engine(self) -> WrittenEngine:
        options = parts.engine_options(self.config, self.net, resolve(self.config.device), 1, self.loss)
        return WrittenEngine(self.net, options, self.world, self.written)


def build(config: Config, world: World) -> Experiment:
    """The experiment on this rank. Refuses, on all, if the ranks differ in recipe, code or data."""
    shared = {k: v for k, v in configs.flatten(config).items() if _shared(k)}
    shared["teacher.answers"] = "none" if config.teacher.answers is None else "given"
    world.compare("recipe", world.facts() | shared)
    world.watch.timeout = config.timeout
    resolve(config.device)
    written = getattr(parts.factory(config)(), "written", None) if config.members == 1 else None
    if isinstance(written, Written):
        return _as_written(config, world, written)
    placement = place(config, world)
    loss = parts.build_loss(config)
    net = parts.build_net(config, only=placement.owned(world.rank))
    world.compare("start", {"init": init_weights.donor_digest(config.init) or config.init})
    clustered = None
    if config.sampling.entry.from_run:
        clustered = world.share("groups", lambda: experiments.cluster_classes(config))
    if config.data.reader == "lead" and not world.is_main:
        absent = absent_data(world)
        return RanksExperiment(config, net, parts.final_loss(loss, absent, config), absent, None, world, placement)
    data = parts.load_data(config)
    if config.data.reader == "lead":
        world.share("data", lambda: facts_of(data))
    else:
        world.compare("data", {"data checksum": data.fingerprint})
    checked = experiments.assemble(config, net, loss, data, clustered=clustered)
    groups, sampled = checked.groups, checked.sampled
    if sampled and config.data.reader != "lead":
        what = (
            "the sample weights"
            if config.teacher.answers is None
            else "the sample weights and of the teacher's answers"
        )
        world.compare("sampling", {f"digest of {what}": list(sampled.values())})
    return RanksExperiment(
        config,
        net,
        checked.loss,
        checked.data,
        checked.sample_weights,
        world,
        placement,
        groups=groups,
        sampled=sampled,
    )


def _as_written(config: Config, world: World, written: Written) -> WrittenExperiment:
    if world.size != written.ranks:
        raise UserError(
            f"the layers of this net are on ranks 0 to {written.ranks - 1}, and its ranks make no tree: start "
            f"{written.ranks} processes, not {world.size}, or one, which runs them all"
        )
    if resolve(config.device).type != "cpu":
        raise UserError(f"device = {config.device}: layers that say their ranks run on CPUs: give device=cpu")
    data = parts.load_data(config)
    world.compare("data", {"data checksum": data.fingerprint})
    found = experiments.assemble(config, parts.build_net(config), parts.build_loss(config), data)
    return WrittenExperiment(config, found.net, found.loss, found.data, found.sample_weights, world, written)


def _shared(key: str) -> bool:
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


def place(config: Config, world: World) -> Placement:
    """Who holds what: decided by the main rank, since measured costs differ from rank to rank."""
    bandwidth = world.bandwidth() if config.placement == "auto" else BANDWIDTH

    def decide() -> dict[str, Any]:
        workers = config.engine.workers if config.engine.workers != "auto" else world.cores
        cluster = Cluster(world.size, workers, bandwidth)
        found = rank_plan.place(config.placement, rank_plan.job_of(config), cluster)
        return {"stages": dict(found.stages), "slots": found.slots, "replicas": found.replicas}

    return Placement(**world.share("placement", decide))
