"""What ranks would do for a config, found before anything is started: one network and the shape of the data are
enough. `place("auto", job_of(config), Cluster(4))` is the placement for it on four ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from mheads.common.errors import UserError
from mheads.config.schema import Config
from mheads.data import DATASETS
from mheads.distributed.placement import Placement, default, explicit
from mheads.distributed.planning.job import Cluster, Job
from mheads.distributed.planning.loads import StageLoad, counted_loads, measured_loads
from mheads.distributed.planning.search import auto
from mheads.networks import INPUT_SHAPES
from mheads.training.build import build_loss, micro_batches, tree_of
from mheads.trees.multiply_adds import make_example
from mheads.trees.treenet import TreeNet


@dataclass(frozen=True)
class RecipeJob(Job):
    """A step of a config, with one of its networks, from which costs are found."""

    config: Config = field(kw_only=True)
    net: TreeNet = field(kw_only=True)

    @cached_property
    def example(self) -> Tensor:
        """An example [1, ...], checked with the network; found only when costs are asked for."""
        shape = input_shape(self.config)
        sided = next((m for m in self.net.network().modules() if hasattr(m, "takes")), None)
        if sided is not None:
            raise UserError(
                f"{self.config.model} has a {type(sided).__name__}, which takes a side input: the costs of its stages "
                "are not known without the data; give placement=default, or a rank for each stage"
            )
        return make_example(self.net, shape)

    def measured(self) -> dict[str, StageLoad]:
        """What the stages take on this machine."""
        return measured_loads(self, self.net, self.example)

    def counted(self, flops: float) -> dict[str, StageLoad]:
        """What they would take at `flops` operations per second and core."""
        return counted_loads(self, self.net, self.example, flops)


def job_of(config: Config) -> RecipeJob:
    """What a step of this config is; of its networks one is drawn, and no stage is built."""
    net = tree_of(config, only=())
    tree = net.tree
    loss = build_loss(config)
    rows = config.optim.batch_size * config.optim.accumulate
    parts = min(micro_batches(config, net, loss) * config.optim.accumulate, rows)
    share = min(1.0, (loss.winners or tree.num_members) / tree.num_members)
    in_order = bool(net.batch_statistics_layers())
    return RecipeJob(tree, rows, parts, loss.separable, share, in_order, config=config, net=net)


def place(
    how: str | Mapping[str, int], job: RecipeJob, cluster: Cluster, loads: Mapping[str, StageLoad] | None = None
) -> Placement:
    """The placement that a config names: default, auto (by these loads, or measured ones), or a rank for each stage."""
    if how == "default":
        return default(job.tree, cluster.ranks, job.divisible)
    if isinstance(how, Mapping):
        return explicit(job.tree, how, cluster.ranks, job.divisible)
    if how != "auto":
        raise UserError(f"the placement is default or auto, not {how!r}")
    return auto(job, cluster, job.measured() if loads is None else loads)


def input_shape(config: Config) -> tuple[int, ...]:
    """The shape of an example, as its dataset or else its network is known to have it."""
    entry = DATASETS.get(config.data.name)
    shape = None if entry is None else entry.example_shape(**config.data.model_dump())
    if shape is None:
        shape = INPUT_SHAPES.get(config.model)
    if shape is None:
        known = [name for name, other in DATASETS.items() if isinstance(other.shape, tuple)]
        raise UserError(
            f"the shape of an example of {config.data.name!r} is not known: give data.path of an .npz file that "
            f"exists, or data.name={' or '.join(known)}"
        )
    return shape
