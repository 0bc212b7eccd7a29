"""Our engine on the tasks that are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from benchmarks import peers
from mheads.data.batches import Batch
from mheads.data.preprocessing import Preprocess
from mheads.engine.engine_options import EngineOptions
from mheads.engine.micro_batches import auto_micro_batches
from mheads.engine.threads import ThreadsEngine, available_cores
from mheads.losses import Loss
from mheads.networks import NETWORKS
from mheads.optim.optim_section import OptimOptions
from mheads.optim.stage_updates import Optimizer
from mheads.trees.treenet import TreeNet

SHAPE, BATCH, MEMBERS = (3, 32, 32), 350, 4


def network() -> torch.nn.Module:
    return NETWORKS["cifar10_quick"]()


def tiny() -> torch.nn.Module:
    """A network whose arithmetic takes no time: 3,072 numbers, 8 of which go on."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10))


OPTIONS = {"lr": peers.RATE, "momentum": peers.MOMENTUM, "weight_decay": peers.DECAY}


class Closes(Protocol):
    def close(self) -> None: ...


class Ours:
    """Our engine on the same task as the peers: raw pixels in, updated weights out."""

    def __init__(
        self,
        tree: Any,
        loss: Loss,
        workers: int | None = None,
        rows: int = BATCH,
        micro_batches: int | None = None,
        factory: Callable[[], torch.nn.Module] = network,
        precision: torch.dtype = torch.float32,
    ) -> None:
        self.net = TreeNet(factory, tree=tree)
        self.loss = loss
        self.batch = pixels(rows, self.net.num_members)
        parts = micro_batches or auto_micro_batches(rows, self.net)
        self.engine = ThreadsEngine(self.net, EngineOptions(workers or available_cores(), parts, precision=precision))
        self.optimizer = optimizer(self.net)
        self.count = 0

    def step(self) -> None:
        self.engine.step(self.count, self.batch, self.loss)
        self.engine.update(self.optimizer.update)
        self.count += 1

    def close(self) -> None:
        self.engine.close()

    def weights(self) -> peers.Weights:
        return [dict(self.net.member(m).named_parameters()) for m in range(self.net.num_members)]


def optimizer(net: TreeNet) -> Optimizer:
    """An optimizer like that of the peers."""
    found = Optimizer(net, OptimOptions.model_validate(OPTIONS))
    found.set_rate(peers.RATE)
    return found


def pixels(rows: int, members: int) -> Batch:
    """A batch as the data gives it: uint8 images, smooth with some noise as photos are, and a mean image to subtract.

    Without the noise, flat regions make ties in max pooling, which may rightly be broken in other ways.
    """
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(rows, 3, 8, 8, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=SHAPE[1:], mode="bilinear")
    images = (215 * smooth + 40 * torch.rand(smooth.shape, generator=generator)).byte()
    targets = torch.randint(10, (rows,), generator=generator)
    ties = torch.rand(members, rows, generator=generator)
    return Batch(images.permute(0, 2, 3, 1).contiguous(), targets, Preprocess(mean=torch.full(SHAPE, 120.0)), ties=ties)


@contextmanager
def running(*sides: Closes) -> Iterator[None]:
    try:
        yield
    finally:
        for side in sides:
            side.close()
