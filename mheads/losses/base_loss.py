"""What `of` may be, the loss of one member on one example: a name, a name with options, or a function.

mcl(k=1, of="mae")
mcl(k=1, of={"name": "smooth_l1", "beta": 0.5})
mcl(k=1, of="my_losses:angles")
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
from mheads.problems import MEMBER_LOSSES, MemberLoss

Of = MemberLoss | str | Mapping[str, Any] | None


def checked(of: Any) -> Any:
    """`of` as a config has it, if it names a loss and options that this loss has; the code of users is not imported."""
    if of is None:
        return None
    name, given = _parts(of)
    if name not in MEMBER_LOSSES:
        if ":" not in name:
            raise UserError(f"it is one of {', '.join(MEMBER_LOSSES)}, or package.module:function of your own")
        return of
    known = options_of(MEMBER_LOSSES[name])
    for key, value in given.items():
        if key not in known:
            raise UserError(f"{name} has no option {short(key)}; it has {', '.join(known) or 'none'}")
        try:
            TypeAdapter(known[key].type).validate_python(value)
        except ValidationError as error:
            raise UserError(f"{key} = {short(value)}: {error.errors()[0]['msg'].lower()}") from None
    return of


def member_loss(of: Of) -> MemberLoss | None:
    """The function that `of` says; None where the problem's own is meant."""
    if of is None or (callable(of) and not isinstance(of, type)):
        return of
    try:
        name, given = _parts(checked(of))
    except UserError as error:
        raise UserError(f"loss.of = {short(of)}: {error}") from None
    function = MEMBER_LOSSES.get(name) or import_factory(name, "loss.of")
    return partial(function, **given) if given else function


def masks_rows(of: MemberLoss | None) -> bool:
    """Whether the losses of some examples are the same, and finite, whatever stands for the outputs of others: that of
    our own ones, and of a user's with an attribute `masks`."""
    if isinstance(of, partial):
        return masks_rows(of.func) and masks_rows(of.keywords.get("of"))
    ours = of is None or str(getattr(of, "__module__", "")).startswith("mheads.")
    return ours or bool(getattr(of, "masks", False))


def named(of: MemberLoss | None) -> str | dict[str, Any] | None:
    """How a config says this function; None where no name does."""
    function, given = (of.func, of.keywords) if isinstance(of, partial) else (of, {})
    name = next((name for name, known in MEMBER_LOSSES.items() if known is function), None)
    return {"name": name, **given} if name and given else name


def _parts(of: Any) -> tuple[str, dict[str, Any]]:
    of = {"name": of} if isinstance(of, str) else of
    if not isinstance(of, Mapping) or not isinstance(of.get("name"), str):
        raise UserError("give a name, or a mapping with a name and options, such as {name: smooth_l1, beta: 0.5}")
    return of["name"], {key: value for key, value in of.items() if key != "name"}
