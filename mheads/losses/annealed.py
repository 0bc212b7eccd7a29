"""Annealed Multiple Choice Learning: who learns from an example is a soft choice that hardens as training goes on."""

from __future__ import annotations

import math
from functools import partial
from numbers import Real
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.losses.base_loss import BaseLossSpec
from mheads.losses.ensemble_loss import Loss, LossValue, ones_or
from mheads.losses.evolving import Until, check_until
from mheads.losses.mcl import mcl
from mheads.losses.normalize import Normalize, check_normalize, normalize_assignment
from mheads.problems import BaseLoss


def annealed(
    temperature: Annotated[float, Field(gt=0, description="the first temperature, in units of the loss")] = 1.0,
    floor: Annotated[float, Field(gt=0, description="the temperature at which only the best member learns")] = 0.01,
    fall: Annotated[
        Literal["exponential", "linear"], Field(description="how the temperature falls to the floor")
    ] = "exponential",
    until: Until = 0.5,
    relative: Annotated[
        bool, Field(description="temperatures are in units of the loss at the start, that of outputs of 0")
    ] = False,
    normalize: Normalize = "batch",
    base_loss: BaseLossSpec = None,
) -> Loss:
    """Sum over i and m of q_mi w_mi l_mi with q_i the softmin of l_i / T over the members, which has no gradient.

    l is the problem's own loss or `base_loss`, w the sample weights; members whose sample weight is 0 have a q of 0.
    The temperature T goes from `temperature` to `floor`, where `until` of the iterations are over; from there on the
    best member alone learns. With `relative` both are multiplied by the mean loss of outputs that are 0 on the training
    examples, about that of the start: log C for C classes. `normalize` as in `mcl`.
    """
    if not all(isinstance(number, Real) and 0 < number < math.inf for number in (temperature, floor)):
        raise UserError(f"temperatures are above 0: loss.temperature is {temperature!r}, loss.floor {floor!r}")
    if fall not in ("exponential", "linear"):
        raise UserError(f"loss.fall is exponential or linear, not {fall!r}")
    check_until(until)
    options = {"temperature": temperature, "floor": floor, "fall": fall, "until": until, "normalize": normalize}
    in_units_of = partial(_in_units_of, {**options, "base_loss": base_loss}) if relative else None
    return Loss(
        "annealed",
        partial(_annealed, temperature=temperature, normalize=normalize),
        whole_batch=check_normalize(normalize),
        options={**options, "relative": relative},
        base_loss=base_loss,
        schedule=partial(_cooled, options),
        masks=True,
        of_losses=True,
        in_units_of=in_units_of,
    )


def _in_units_of(options: dict[str, Any], unit: float) -> Loss:
    """Annealed from these temperatures times the unit."""
    return annealed(**{**options, "temperature": options["temperature"] * unit, "floor": options["floor"] * unit})


def _cooled(options: dict[str, Any], iteration: int, iterations: int, members: int) -> Loss:
    first, floor, normalize = options["temperature"], options["floor"], options["normalize"]
    part = iteration / (options["until"] * iterations)
    if part >= 1 or first <= floor:
        return mcl(k=1, normalize=normalize)
    now = first * (floor / first) ** part if options["fall"] == "exponential" else first + (floor - first) * part
    return Loss("annealed", partial(_annealed, temperature=now, normalize=normalize), of_losses=True)


def _annealed(
    outputs: Value,
    y: Tensor,
    sample_weights: Tensor | None,
    ties: Tensor | None,
    base_loss: BaseLoss,
    temperature: float,
    normalize: str,
) -> LossValue:
    losses = base_loss(outputs, y)
    fixed = losses.detach()
    weights = ones_or(sample_weights, fixed)
    able = fixed.masked_fill(weights == 0, float("inf"))
    # The lowest loss is taken off first: e^(-l / T) underflows, and l / T may be infinite for all.
    soft = (-(able - able.amin(0)) / temperature).softmax(0).masked_fill(weights == 0, 0.0)
    assignment = soft * weights
    return LossValue((normalize_assignment(assignment, normalize) * losses).sum(), assignment, fixed)
