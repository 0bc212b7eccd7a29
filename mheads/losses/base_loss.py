"""The base loss, of one member on one example, as it may be given: a name, a name with options, or a function.

mcl(k=1, base_loss="mae")
mcl(k=1, base_loss={"name": "smooth_l1", "beta": 0.5})
mcl(k=1, base_loss="my_losses:angles")
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mheads.common.errors import UserError
from mheads.common.options import options_of
from mheads.common.safe_yaml import short
from mheads.networks import import_factory
from mheads.problems import BASE_LOSSES, BaseLoss

BaseLossSpec = BaseLoss | str | Mapping[str, Any] | None


def check_base_loss(base_loss: Any) -> Any:
    """Raises for a name or an option that does not exist; does not import the code of users."""
    if base_loss is None:
        return None
    name, given = _parts(base_loss)
    if name not in BASE_LOSSES:
        if ":" not in name:
            raise UserError(f"it is one of {', '.join(BASE_LOSSES)}, or package.module:function of your own")
        return base_loss
    known = options_of(BASE_LOSSES[name])
    for key, value in given.items():
        if key not in known:
            raise UserError(f"{name} has no option {short(key)}; it has {', '.join(known) or 'none'}")
        try:
            TypeAdapter(known[key].type).validate_python(value)
        except ValidationError as error:
            raise UserError(f"{key} = {short(value)}: {error.errors()[0]['msg'].lower()}") from None
    return base_loss


def make_base_loss(base_loss: BaseLossSpec) -> BaseLoss | None:
    """The function that is meant; None for the problem's own."""
    if base_loss is None or (callable(base_loss) and not isinstance(base_loss, type)):
        return base_loss
    try:
        name, given = _parts(check_base_loss(base_loss))
    except UserError as error:
        raise UserError(f"loss.base_loss = {short(base_loss)}: {error}") from None
    function = BASE_LOSSES.get(name) or import_factory(name, "loss.base_loss")
    return partial(function, **given) if given else function


def masks_rows(base_loss: BaseLoss | None) -> bool:
    """Whether the losses of some examples are the same, and finite, whatever stands for the outputs of others: that of
    our own ones, and of a user's with an attribute `masks`."""
    if isinstance(base_loss, partial):
        return masks_rows(base_loss.func) and masks_rows(base_loss.keywords.get("base_loss"))
    ours = base_loss is None or str(getattr(base_loss, "__module__", "")).startswith("mheads.")
    return ours or bool(getattr(base_loss, "masks", False))


def name_base_loss(base_loss: BaseLoss | None) -> str | dict[str, Any] | None:
    """How a config names this function; None if it has no name."""
    function, given = (base_loss.func, base_loss.keywords) if isinstance(base_loss, partial) else (base_loss, {})
    name = next((name for name, known in BASE_LOSSES.items() if known is function), None)
    return {"name": name, **given} if name and given else name


def _parts(base_loss: Any) -> tuple[str, dict[str, Any]]:
    base_loss = {"name": base_loss} if isinstance(base_loss, str) else base_loss
    if not isinstance(base_loss, Mapping) or not isinstance(base_loss.get("name"), str):
        raise UserError("give a name, or a mapping with a name and options, such as {name: smooth_l1, beta: 0.5}")
    return base_loss["name"], {key: value for key, value in base_loss.items() if key != "name"}
