"""Options that were given and would do nothing, since what was chosen beside them does not look at them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mheads.common.errors import UserError
from mheads.common.options import Factories, options_by_key
from mheads.config.read import keys_of
from mheads.config.schema import Config, flatten
from mheads.data.catalog import DATASETS
from mheads.data.resampling import FACTORIES as SAMPLINGS
from mheads.losses import LOSSES
from mheads.optim.optimizers import FACTORIES as OPTIMIZERS
from mheads.optim.schedules import FACTORIES as SCHEDULES

SCALE_RATE = "loss.scale_rate"


def _owners(section: str, factories: Factories) -> dict[str, tuple[str, ...]]:
    return {f"{section}.{key}": shared.owners for key, shared in options_by_key(factories).items()}


# By the key that chooses, the options that not all of its values have.
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "sampling.name": _owners("sampling", SAMPLINGS),
    "optim.name": _owners("optim", OPTIMIZERS),
    "optim.schedule.name": _owners("optim.schedule", SCHEDULES),
    "loss.name": {
        **_owners("loss", LOSSES),
        SCALE_RATE: tuple(name for name, make in LOSSES.items() if make().averaged),
    },
    "data.name": {
        f"data.{key}": tuple(n for n, d in DATASETS.items() if d.takes(key)) for key in ("resize", "regions")
    },
}
SAID = {"loss.name": ("the loss", "loss"), "data.name": ("data.name", "data")}


def check_idle_options(config: Config, overrides: Sequence[str]) -> None:
    """Refuses options among `key=value` that would do nothing."""
    check_idle_keys(config, [key for given in overrides for key in keys_of(given)])


def check_idle_keys(config: Config, given: Iterable[str]) -> None:
    """Refuses options of something else than what the config has chosen."""
    chosen = flatten(config)
    for key in given:
        for chooser, known in OPTIONS.items():
            owners = next((known[one] for one in (key, ".".join(key.split(".")[:2])) if one in known), None)
            own = key == SCALE_RATE and chosen[chooser] not in LOSSES  # which may be averaged
            if owners is None or chosen[chooser] in owners or own:
                continue
            what, short = SAID.get(chooser, (chooser, chooser))
            raise UserError(
                f"{key} is an option of {', '.join(owners)}, and {what} is {chosen[chooser]}: give {short}={owners[0]} "
                "too, or leave it out"
            )
        if key in ("teacher.weight", "teacher.temperature") and config.teacher.answers is None:
            raise UserError(f"{key} is about a teacher's answers, and there are none: give teacher.answers too")
        if key == "data.padding" and not config.data.pad:
            raise UserError(
                f"data.padding = {config.data.padding}, but data.pad is 0: give data.pad too, or leave it out"
            )
