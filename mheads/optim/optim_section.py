"""The keys of a config's `optim` section."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from mheads.common.options import Section, expand_name, make_section, one_of, option, select_options
from mheads.optim.optimizers import FACTORIES, OPTIMIZERS, OptimizerEntry
from mheads.optim.schedules import ScheduleOptions


class GroupOptions(Section):
    """What a group of parameters has of its own; None leaves it as it is for the others."""

    lr: float | None = option(None, "its first learning rate, instead of optim.lr", gt=0)
    weight_decay: float | None = option(None, "its weight decay, instead of optim.weight_decay", ge=0)
    until: float = option(
        1.0, "the fraction of the iterations over which its schedule runs; then it learns no more", gt=0, le=1
    )


class OptimSection(Section):
    """The keys that every optimizer has."""

    name: Annotated[str, one_of(OPTIMIZERS, "an optimizer")] = option(
        "sgd", f"the optimizer: {', '.join(OPTIMIZERS)}; the last four as in Caffe"
    )
    lr: float = option(0.01, "the first learning rate", gt=0)
    weight_decay: float = option(0.0, "weight decay", ge=0)
    regularization: Literal["l2", "l1"] = option(
        "l2", "the form of weight decay: l2 by the size of a weight, l1 by its sign"
    )
    parameter_groups: dict[str, GroupOptions] = option(
        {}, "learning rates by layer: maps names, such as head or *.bias, to {lr: , weight_decay: , until: }"
    )
    shared_gradients: Literal["sum", "mean"] = option(
        "sum", "gradients of layers that members share: their sum over these members, or their mean"
    )
    clip: float | None = option(None, "the gradient of all weights together is clipped to this norm", gt=0)
    batch_size: int = option(100, "examples per batch", ge=1, le=1_000_000)
    accumulate: int = option(1, "batches per step: gradients are averaged over them", ge=1, le=100_000)
    iterations: int = option(500, "steps", ge=1)
    schedule: Annotated[ScheduleOptions, BeforeValidator(expand_name)] = option(
        ScheduleOptions(), "how the learning rate changes"
    )

    @property
    def entry(self) -> OptimizerEntry:
        return OPTIMIZERS[self.name]

    @property
    def has_early_ends(self) -> bool:
        """Whether some parameters learn in a part of the iterations alone, and so depend on their number."""
        return any(group.until < 1 for group in self.parameter_groups.values())

    @property
    def options(self) -> dict[str, Any]:
        return select_options(self, self.entry.make)


if TYPE_CHECKING:
    OptimOptions = OptimSection
else:
    OptimOptions = make_section("OptimOptions", OptimSection, FACTORIES)
