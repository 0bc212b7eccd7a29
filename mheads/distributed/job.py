"""What a config would have ranks do, known before anything is started: one of its networks and the shape of its data
are enough. `Cluster(ranks=4).place("auto", job_of(config))` is the placement for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch

from mheads.config import Config
from mheads.distributed.placement import Placement, default, explicit
from mheads.distributed.plan import Prediction, StageLoad, auto, counted_loads, measured_loads, predict
from mheads.errors import UserError
from mheads.experiment import build_loss, factory, micro_batches
from mheads.models import INPUT_SHAPES
from mheads.tree import Tree, TreeNet, describe, parse, whole_spec

BANDWIDTH = 1.25e9  # bytes a second: 10 Gbit/s
LATENCY = 50e-6
_SHAPES = {"digits": (1, 8, 8), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32)}


@dataclass(frozen=True)
class Job:
    """A step as the planner needs to know it: the tree, a net of one member, and how the batch is cut.

    `share` is the part of the rows that a member learns from.
    """

    config: Config
    tree: Tree
    net: TreeNet
    rows: int
    micro_batches: int
    separable: bool
    share: float

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of an example, one that the network takes; asked for only where costs are."""
        shape = input_shape(self.config)
        self.net.probe(torch.zeros(2, *shape, dtype=self.net.dtype))
        return shape

    def measured(self) -> dict[str, StageLoad]:
        """What the stages take on this machine."""
        rows = -(-self.rows // self.micro_batches)
        return measured_loads(self.tree, self.net.member(0), self.shape, rows, self.share)

    def counted(self, flops: float) -> dict[str, StageLoad]:
        """What they would take at so many operations a second a core."""
        return counted_loads(self.tree, self.net.member(0), self.shape, flops, self.share)


@dataclass(frozen=True)
class Cluster:
    """Ranks of so many workers, that send so many bytes a second."""

    ranks: int
    workers: int = 1
    bandwidth: float = BANDWIDTH
    latency: float = LATENCY

    def __post_init__(self) -> None:
        for name, value in (("ranks", self.ranks), ("workers", self.workers), ("bandwidth", self.bandwidth)):
            if not value > 0:
                raise UserError(f"--{name} is {value:g}: it must be above 0")
        if not self.latency >= 0:
            raise UserError(f"--latency is {self.latency:g}: it must not be below 0")

    def predict(self, job: Job, loads: Mapping[str, StageLoad], placement: Placement) -> Prediction:
        wires = (self.workers, self.bandwidth, self.latency)
        return predict(job.tree, loads, placement, job.rows, job.micro_batches, *wires, job.separable)

    def place(self, how: str | Mapping[str, int], job: Job, loads: Mapping[str, StageLoad] | None = None) -> Placement:
        """As a config says: default, auto, or a rank for each stage."""
        if how == "default":
            return default(job.tree, self.ranks, job.micro_batches)
        if isinstance(how, Mapping):
            return explicit(job.tree, how, self.ranks, job.micro_batches)
        if how != "auto":
            raise UserError(f"the placement is default or auto, not {how!r}")
        wires = (self.workers, self.bandwidth, self.latency)
        loads = job.measured() if loads is None else loads
        return auto(job.tree, loads, self.ranks, job.rows, job.micro_batches, *wires, job.separable)


def job_of(config: Config) -> Job:
    """What a step of this config is; of its networks one is built."""
    net = TreeNet(factory(config), members=1)
    tree = parse(whole_spec(config.members, config.split), describe(net.member(0)), config.members, config.model)
    loss = build_loss(config)
    rows = config.optim.batch_size * config.optim.accumulate
    parts = min(micro_batches(config, net) * config.optim.accumulate, rows)
    share = min(1.0, (loss.winners or tree.num_members) / tree.num_members)
    return Job(config, tree, net, rows, parts, loss.separable, share)


def input_shape(config: Config) -> tuple[int, ...]:
    """The shape of an example: what its data set is known for, or else what its network is."""
    data = config.data
    if data.name in _SHAPES:
        return _SHAPES[data.name]
    if data.name == "folder":
        side = data.resize if data.crop is None else data.crop
        return (3, side, side)
    if data.name == "npz" and data.path is not None and data.path.is_file():
        return _npz_shape(data.path)
    if config.model in INPUT_SHAPES:
        return INPUT_SHAPES[config.model]
    raise UserError(
        f"the shape of an example of {data.name!r} is not known: give data.path of an .npz file that exists, "
        f"or data.name={' or '.join(_SHAPES)}"
    )


def _npz_shape(path: Path) -> tuple[int, ...]:
    """From the header alone: the arrays may be large."""
    try:
        with ZipFile(path) as file, file.open("x_train.npy") as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape = read(stream)[0]
    except (BadZipFile, KeyError, ValueError, OSError) as error:
        raise UserError(f"{path} has no array x_train to take the shape of an example from ({error})") from error
    return (1, *shape[1:]) if len(shape) == 3 else tuple(shape[1:])  # images without channels have one
