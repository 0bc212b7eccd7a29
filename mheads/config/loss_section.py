"""The keys of `loss.`: those that every loss has, and the options of single losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from mheads.common.errors import UserError, did_you_mean
from mheads.common.options import Section, make_section, option, options_of, select_options
from mheads.losses import BASE_LOSSES, LOSSES, WITH_SCORES, base_loss


def _loss_name(name: str) -> str:
    if name in BASE_LOSSES:
        raise ValueError(f"it is a base loss, that of one member on one example: give loss.base_loss={name}")
    if name not in LOSSES and ":" not in name:
        known = f"{', '.join(LOSSES)}, or package.module:factory of your own"
        raise ValueError(f"a loss is one of {known}{did_you_mean(name, LOSSES)}")
    return name


def _base_loss(given: Any) -> Any:
    try:
        return base_loss.check_base_loss(given)
    except UserError as error:
        raise ValueError(str(error)) from None


class LossSection(Section):
    """The keys that every loss has; the others in the section are options of single losses."""

    name: Annotated[str, AfterValidator(_loss_name)] = option(
        "independent", f"{', '.join(LOSSES)}, or package.module:factory of your own"
    )
    args: dict[str, Any] = option({}, "arguments of the factory of your own loss")
    base_loss: Annotated[str | dict[str, Any] | None, AfterValidator(_base_loss)] = option(
        None,
        f"the base loss, of one member on one example: {', '.join(BASE_LOSSES)}, or package.module:function of your "
        "own, with options as {name: smooth_l1, beta: 0.5}; null: the problem's own",
    )
    scores: float = option(
        0.0,
        "weight of the members' scores beside any loss: each member also learns on which examples it does best; "
        "0: no scores",
        ge=0,
    )
    scale_rate: bool = option(True, "averaged losses with sgd: multiply the learning rate by the number of members")

    @property
    def whole_batch(self) -> bool:
        """Whether the loss of an example depends on the others in its batch, which then is not cut."""
        return self.options.get("normalize") == "wins" and self.name in LOSSES

    @property
    def has_scores(self) -> bool:
        """Whether the network gives a score beside its answer."""
        return self.name in WITH_SCORES or self.scores > 0

    @property
    def told(self) -> dict[str, Any]:
        """What a description names: the options, and the weight of scores where the loss has them beside."""
        return self.options | ({"scores": self.scores} if self.scores else {})

    @property
    def summary(self) -> dict[str, Any]:
        """The same without options that have their default, but with k."""
        defaults = (
            {key: one.default for key, one in options_of(LOSSES[self.name]).items()} if self.name in LOSSES else {}
        )
        return {key: value for key, value in self.told.items() if key == "k" or value != defaults.get(key)}

    @property
    def options(self) -> dict[str, Any]:
        """The arguments for the factory of the loss."""
        if self.name not in LOSSES:
            return self.args
        return select_options(self, LOSSES[self.name])


if TYPE_CHECKING:
    LossOptions = LossSection
else:
    LossOptions = make_section("LossOptions", LossSection, LOSSES)
