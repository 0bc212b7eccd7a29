"""An experiment on several ranks: each builds the stages that it owns, after all agree on what there is to build."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from mheads import config as configs
from mheads import experiment as experiments
from mheads import problems
from mheads.config import Config
from mheads.data import Data, Preprocess
from mheads.data.batch import Batches
from mheads.data.split import Beside
from mheads.device import default_workers, resolve
from mheads.distributed.placement import Placement
from mheads.distributed.ranks import RanksEngine, ReceivedStream, SendingStream, inputs_needed
from mheads.distributed.world import World
from mheads.engine.engine import Engine
from mheads.experiment import Experiment
from mheads.planning import recipe
from mheads.planning.job import BANDWIDTH, Cluster


@dataclass(frozen=True)
class RanksExperiment(Experiment):
    """Everything that training needs on this rank."""

    world: World
    placement: Placement

    def engine(self) -> RanksEngine:
        config = self.config
        device = resolve(config.device, self.world.launch.local_rank)
        workers = config.engine.workers
        if workers == "auto":
            workers = default_workers(device, self.world.cores)
        count = experiments.micro_batches(config, self.net)
        lead_reads = config.data.reader == "lead"
        world, placement, accumulate = self.world, self.placement, config.optim.accumulate
        return RanksEngine(
            self.net, workers, count, config.seed, device, world, placement, lead_reads, accumulate=accumulate
        )

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
        if not engine.lead:
            return ReceivedStream(engine, self.data.preprocess)
        return SendingStream(engine, self.stream(), {rank: needs(rank) for rank in range(1, self.world.size)})


def build(config: Config, world: World) -> RanksExperiment:
    """The experiment on this rank. Refuses, on all, if the ranks differ in recipe, code or data."""
    world.compare("recipe", world.facts() | {k: v for k, v in configs.flatten(config).items() if _shared(k)})
    world.watch.timeout = config.timeout
    resolve(config.device)
    placement = place(config, world)
    loss = experiments.build_loss(config)
    net = experiments.build_net(config, only=placement.owned(world.rank))
    world.compare("start", {"init": experiments.donor_digest(config.init) or config.init})
    if config.data.reader == "lead" and not world.lead:
        absent = _absent_data(world)
        return RanksExperiment(config, net, loss.on(absent.problem), absent, None, world, placement)
    data = experiments.load_data(config)
    if config.data.reader == "lead":
        world.share("data", lambda: _facts(data))
    else:
        world.compare("data", {"data checksum": data.fingerprint})
    checked = experiments.assemble(config, net, loss, data)
    return RanksExperiment(config, net, checked.loss, data, checked.prior, world, placement)


def _shared(key: str) -> bool:
    """Whether a key must be equal on all ranks: a folder may lie elsewhere on another machine."""
    return key not in ("engine.workers", "device", "data.root", "data.path", "init")


def place(config: Config, world: World) -> Placement:
    """Who holds what: decided by the lead, since measured costs differ from rank to rank."""
    bandwidth = world.bandwidth() if config.placement == "auto" else BANDWIDTH

    def decide() -> dict:
        workers = config.engine.workers if config.engine.workers != "auto" else world.cores
        cluster = Cluster(world.size, workers, bandwidth)
        found = recipe.place(config.placement, recipe.job_of(config), cluster)
        return {"stages": dict(found.stages), "slots": found.slots, "replicas": found.replicas}

    return Placement(**world.share("placement", decide))


def _facts(data: Data) -> dict:
    return {
        "name": data.name,
        "problem": data.problem.to_dict(),
        "scale": data.preprocess.scale,
        "tensors": base64.b64encode(save_tensors(data.preprocess.tensors())).decode(),
        "shape": list(data.train.shape),
        "fingerprint": data.fingerprint,
        "train": len(data.train),
        "test": len(data.test),
    }


def _absent_data(world: World) -> Data:
    """What is known of data that only the lead reads."""
    facts = world.share("data", dict)
    preprocess = Preprocess.from_tensors(load_tensors(base64.b64decode(facts["tensors"])), facts["scale"])
    shape = tuple(facts["shape"])
    train, test = (AbsentSplit(facts[name], shape) for name in ("train", "test"))
    problem = problems.from_dict(facts["problem"])
    return Data(facts["name"], train, test, problem, preprocess, facts["fingerprint"])


class AbsentSplit:
    """Examples that are on another rank."""

    def __init__(self, length: int, shape: tuple[int, ...]) -> None:
        self.targets = np.zeros(length, np.int64)
        self.shape = shape

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        raise AssertionError("data.reader is lead: only rank 0 reads")

    def beside(self, rows: np.ndarray, seeds: np.ndarray | None) -> Beside:
        raise AssertionError("data.reader is lead: only rank 0 reads")

    def places(self, seeds: np.ndarray) -> torch.Tensor | None:
        return None
