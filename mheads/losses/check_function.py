"""What the function of a loss may take and return: its signature, its value, and that of its base loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.common.safe_yaml import short


def check_not_negative(key: str, value: Any) -> None:
    """Raises unless an option of a loss is a finite number, 0 or more."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(f"{key} must be a finite number: {short(value)}")
    if float(value) < 0:
        raise UserError(f"{key} must not be negative: {value}")


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function; None if it is not written in Python."""
    function = function.forward if isinstance(function, nn.Module) else function
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def count_arguments(function: Callable[..., Any]) -> int:
    """How many of (outputs, y, sample_weights, ties) a function takes; options that have defaults do not count."""
    parameters = _parameters(function)
    if parameters is None:
        return 2
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 4
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    wanted = [p for p in positional if p.default is p.empty or p.name in ("sample_weights", "ties")]
    return len([p for p in wanted if p.name != "base_loss"])


def takes_base_loss(function: Callable[..., Any]) -> bool:
    return any(p.name == "base_loss" and p.default is p.empty for p in _parameters(function) or ())


def check_function(name: str, function: Callable[..., Any], num_arguments: int) -> None:
    if inspect.isclass(function):
        raise UserError(f"loss {name!r} is a class: call it, {name}()")
    if isinstance(function, nn.Module) and any(p.requires_grad for p in function.parameters()):
        raise UserError(
            f"loss {name!r} has parameters of its own, which nothing would train: put them into the network, "
            "or set requires_grad to False"
        )
    if not 2 <= num_arguments <= 4:
        raise UserError(
            f"the function of loss {name!r} asks for {num_arguments} arguments: "
            "it takes (outputs, y), or (outputs, y, sample_weights, ties)"
        )


def check_value(name: str, value: Any, shape: torch.Size, learns: bool) -> None:
    """Raises UserError unless a function returned losses or a LossValue of this shape, with a graph if one `learns`."""
    if isinstance(value, Tensor):
        parts = [("losses", value, shape)]
    elif all(hasattr(value, part) for part in ("total", "assignment", "losses")):
        parts = [("a total", value.total, torch.Size(())), ("an assignment", value.assignment, shape)]
        parts += [("losses", value.losses, shape)]
    else:
        raise _wrong_value(name, f"a {type(value).__name__}", shape)
    for what, part, expected in parts:
        if not isinstance(part, Tensor):
            raise _wrong_value(name, f"{what} of {type(part).__name__}", expected)
        if part.shape != expected or not part.is_floating_point():
            raise _wrong_value(name, f"{what} of {part.dtype} {list(part.shape)}", expected)
    what, summed, _ = parts[0]
    if learns and not summed.requires_grad:
        raise UserError(
            f"loss {name!r} returns {what} without a graph back to the outputs, so nothing could be learned: "
            "leave out detach(), item() and numpy() on the way"
        )


def _wrong_value(name: str, what: str, shape: torch.Size) -> UserError:
    return UserError(
        f"loss {name!r} returns {what}; return the losses of all members on all examples, a float tensor "
        f"[M, B] (here {list(shape)}: reduction='none'?), or a LossValue(total, assignment [M, B], losses [M, B])"
    )


def check_base_losses(name: str, losses: Any, shape: torch.Size) -> None:
    """Raises UserError unless a base loss of this name returned losses [M, B]."""
    if not isinstance(losses, Tensor) or losses.shape != shape:
        kind = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else f"type {type(losses).__name__}"
        raise UserError(
            f"the loss of one member on one example, base_loss = {name}, gives a value of {kind}; "
            f"give the losses of all members on all examples, [M, B] (here {list(shape)}: reduction='none', and a "
            "mean over what belongs to an example?)"
        )


def check_class_targets(name: str, y: Value) -> None:
    """Raises UserError unless targets are classes or their probabilities; cross-entropy would take any numbers."""
    if not isinstance(y, Tensor) or not y.is_floating_point():
        return
    if y.dim() < 2 or (y < 0).any() or ((y.sum(1) - 1).abs() > 0.01).any():
        raise UserError(
            f"targets are floats {list(y.shape)} that are not probabilities of classes (which add to 1 for each "
            f"example): say what the loss of one member is, {name}(base_loss='mse') for numbers, "
            f"{name}(base_loss='bce') for several labels; classes are integers"
        )
