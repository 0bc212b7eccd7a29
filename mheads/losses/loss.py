"""What every loss takes and gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.common.safe_yaml import short
from mheads.losses.base_loss import BaseLossSpec, make_base_loss, masks_rows, name_base_loss
from mheads.problems import BaseLoss, Problem, cross_entropies
from mheads.trees import member_scores


@dataclass(frozen=True)
class LossValue:
    """A loss on B examples.

    `total` is the sum over examples; the caller divides it by the size of the whole batch, so that cutting a batch
    changes nothing but rounding. `assignment` [M, B] says how much each member learns from each example; `losses`
    [M, B] are the members' own losses.
    """

    total: Tensor
    assignment: Tensor
    losses: Tensor

    @property
    def mean(self) -> Tensor:
        return self.total / self.losses.shape[1]


@dataclass(frozen=True)
class Loss:
    """A loss function with what an engine must know of it.

    `function` is given outputs [M, B, C], labels [B] and, where it asks for them, sample weights and tie-breaking keys,
    each [M, B] or None. It returns a LossValue, or simply the losses [M, B]: weighted by the sample weights, they make
    the total.

    `separable`: the loss of a member does not depend on the outputs of the others, so each member's forward and
    backward can run back to back. `winners`: how many members learn from an example, None for all; the others (their
    assignment is 0) cost no backward for it. `averaged`: the members' outputs are averaged before the loss, which
    divides their gradients by M and makes sample weights meaningless. `of_scores`: the mean that it trains is that of
    scores, so that the ensemble answers with it, and not with the mean of probabilities. `check_members`: refuses a
    number of members that it cannot teach. `whole_batch`: the loss of an example depends on the others in its batch,
    which is therefore not cut; `each_batch`: of the batches that a step accumulates each is one by itself. `masks`:
    outputs of a member on examples whose sample weight is 0 change nothing in the total, so that they are not computed
    and are zeros; a loss that does not say so sees them all. `options`: the options that it was made with. `schedule`:
    for a loss that changes over training, its form at an iteration, given (iteration, iterations, members); see `at`.

    `base_loss`, for functions that take such an argument, is the loss of one member on one example, outputs and targets
    to [M, B], as `base_loss.py` describes; that of the problem where none is given, which looks at the answer alone
    where a network gives more; cross-entropy without a problem.
    """

    name: str
    function: Callable[..., LossValue | Tensor]
    separable: bool = False
    winners: int | None = None
    averaged: bool = False
    of_scores: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    base_loss: BaseLossSpec = None
    check_members: Callable[[int], None] | None = None
    schedule: Callable[[int, int, int], Loss] | None = None
    whole_batch: bool = False
    each_batch: bool = False
    masks: bool = False

    def on(self, problem: Problem) -> Loss:
        """This loss for a problem; refuses the loss of an example that is for other targets."""
        if self.name in getattr(problem, "other_losses", ()):
            raise UserError(
                f"loss.name = {self.name} is about the probabilities of classes alone, and {problem.name} learns more: "
                "use independent, score_averaged, mcl, relaxed, evolving or annealed"
            )
        if self.base_loss is None:
            return replace(self, base_loss=problem.losses)
        said = name_base_loss(self.base_loss_function)
        name = said["name"] if isinstance(said, dict) else said
        if name is not None and name not in problem.base_losses:
            raise UserError(
                f"loss.base_loss = {name} does not go with {problem.name}: there it is "
                f"{' or '.join(problem.base_losses)}, or a function of your own. Are the targets something else? "
                "data.problem says what"
            )
        return self

    def at(self, iteration: int, iterations: int, members: int) -> Loss:
        """What this loss is at an iteration, from 0 on, of so many: a function of these alone, so that resumed runs and
        ranks get the same bits."""
        if self.schedule is None:
            return self
        if iterations < 1:
            raise UserError(f"{self.name} changes over the iterations of training, and these are {iterations}")
        now = self.schedule(iteration, iterations, members)
        base_loss = self.base_loss if now.base_loss is None else now.base_loss
        kept = {"whole_batch": self.whole_batch, "each_batch": self.each_batch, "masks": self.masks}
        return replace(now, name=self.name, base_loss=base_loss, **kept)  # type: ignore[arg-type]

    @property
    def base_loss_function(self) -> BaseLoss | None:
        """`base_loss`, which is a function since the loss was made."""
        return self.base_loss  # type: ignore[return-value]

    @property
    def base_loss_name(self) -> str:
        """`base_loss` as messages call it."""
        function = self.base_loss.func if isinstance(self.base_loss, partial) else self.base_loss
        return str(getattr(function, "__name__", short(self.base_loss)))

    @property
    def base_loss_of_whole_batch(self) -> bool:
        """Whether `base_loss` itself, by an attribute `whole_batch`, looks at whole batches."""
        function = self.base_loss.func if isinstance(self.base_loss, partial) else self.base_loss
        return bool(getattr(function, "whole_batch", False))

    @property
    def skips_rows(self) -> bool:
        """Whether a member's outputs on examples whose sample weight is 0 need not be computed: neither this loss nor
        `base_loss`, which says so by an attribute `masks` if it is not ours, looks at them."""
        return self.masks and masks_rows(self.base_loss_function)

    def check(self, members: int, sampling: str) -> None:
        """Refuses a number of members, or a sampling, that it cannot take."""
        if self.check_members is not None:
            self.check_members(members)
        if self.averaged and sampling != "full":
            raise UserError(
                f"sampling is {sampling}, but with {self.name} all members learn from an example together: use "
                "sampling=full, or another loss"
            )

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_loss", make_base_loss(self.base_loss))
        if self.base_loss_of_whole_batch:  # what a member wins teaches it about the rest of the batch too
            object.__setattr__(self, "winners", None)
        if inspect.isclass(self.function):
            raise UserError(f"loss {self.name!r} is a class: call it, {self.name}()")
        if isinstance(self.function, nn.Module) and any(p.requires_grad for p in self.function.parameters()):
            raise UserError(
                f"loss {self.name!r} has parameters of its own, which nothing would train: put them into the network, "
                "or set requires_grad to False"
            )
        if not 2 <= self._num_arguments <= 4:
            raise UserError(
                f"the function of loss {self.name!r} asks for {self._num_arguments} arguments: "
                "it takes (outputs, y), or (outputs, y, sample_weights, ties)"
            )

    def __call__(
        self, outputs: Value, y: Value, sample_weights: Tensor | None = None, ties: Tensor | None = None
    ) -> LossValue:
        """The loss of outputs [M, B, C] on labels [B], given sample weights [M, B] and tie-breaking keys [M, B]."""
        further = {"base_loss": self._base_losses} if self.takes_base_loss else {}
        found = self.function(*(outputs, y, sample_weights, ties)[: self._num_arguments], **further)
        shape = nested_values.leaves(outputs)[0].shape[:2]
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in nested_values.leaves(outputs))
        if isinstance(found, Tensor):
            self._check(found, "losses", shape, learns)
            weights = ones_or(sample_weights, found.detach())
            return LossValue((weights * found).sum(), weights, found.detach())
        if not isinstance(found, LossValue):
            raise self._wrong(f"a {type(found).__name__}", shape)
        self._check(found.total, "a total", torch.Size(()), learns)
        self._check(found.assignment, "an assignment", shape)
        self._check(found.losses, "losses", shape)
        return LossValue(found.total, found.assignment.detach(), found.losses.detach())

    @cached_property
    def _num_arguments(self) -> int:
        """How many of (outputs, y, sample_weights, ties) the function wants; options that have defaults do not
        count."""
        parameters = self._parameters
        if parameters is None:
            return 2
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            return 4
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        wanted = [p for p in positional if p.default is p.empty or p.name in ("sample_weights", "ties")]
        return len([p for p in wanted if p.name != "base_loss"])

    def _base_losses(self, outputs: Value, y: Value) -> Tensor:
        """The losses [M, B] of the members by themselves."""
        if self.base_loss is None:
            self._refuse_numbers(y)
        found = (self.base_loss_function or cross_entropies)(member_scores.answer_of(outputs), y)
        shape = nested_values.leaves(outputs)[0].shape[:2]
        if not isinstance(found, Tensor) or found.shape != shape:
            kind = f"shape {list(found.shape)}" if isinstance(found, Tensor) else f"type {type(found).__name__}"
            raise UserError(
                f"the loss of one member on one example, base_loss = {self.base_loss_name}, gives a value of {kind}; "
                f"give the losses of all members on all examples, [M, B] (here {list(shape)}: reduction='none', and a "
                "mean over what belongs to an example?)"
            )
        return found

    def _refuse_numbers(self, y: Value) -> None:
        """Without a problem targets are classes, or their probabilities; cross-entropy would take any numbers."""
        if not isinstance(y, Tensor) or not y.is_floating_point():
            return
        if y.dim() < 2 or (y < 0).any() or ((y.sum(1) - 1).abs() > 0.01).any():
            raise UserError(
                f"targets are floats {list(y.shape)} that are not probabilities of classes (which add to 1 for each "
                f"example): say what the loss of one member is, {self.name}(base_loss='mse') for numbers, "
                f"{self.name}(base_loss='bce') for several labels; classes are integers"
            )

    @cached_property
    def takes_base_loss(self) -> bool:
        """Whether the function asks for the loss of one member on one example."""
        return any(p.name == "base_loss" and p.default is p.empty for p in self._parameters or ())

    @cached_property
    def _parameters(self) -> list[inspect.Parameter] | None:
        """What the function takes; None where it is not written in Python."""
        function = self.function.forward if isinstance(self.function, nn.Module) else self.function
        try:
            return list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return None

    def _check(self, found: Any, what: str, shape: torch.Size, learns: bool = False) -> None:
        if not isinstance(found, Tensor) or found.shape != shape or not found.is_floating_point():
            kind = f"{found.dtype} " if isinstance(found, Tensor) else f"{type(found).__name__} "
            size = list(found.shape) if isinstance(found, Tensor) else ""
            raise self._wrong(f"{what} of {kind}{size}", shape)
        if learns and not found.requires_grad:
            raise UserError(
                f"loss {self.name!r} returns {what} without a graph back to the outputs, so nothing could be learned: "
                "leave out detach(), item() and numpy() on the way"
            )

    def _wrong(self, what: str, shape: torch.Size) -> UserError:
        return UserError(
            f"loss {self.name!r} returns {what}; return the losses of all members on all examples, a float tensor "
            f"[M, B] (here {list(shape)}: reduction='none'?), or a LossValue(total, assignment [M, B], losses [M, B])"
        )


Normalize = Annotated[
    Literal["batch", "wins"],
    Field(description="what a member's sum is divided by: the size of the batch, or what it wins of it"),
]


def check_normalize(normalize: str) -> bool:
    """Whether it needs the whole batch."""
    if normalize not in ("batch", "wins"):
        raise UserError(f"loss.normalize is batch or wins, not {normalize!r}")
    return normalize == "wins"


def normalized(assignment: Tensor, normalize: str) -> Tensor:
    """The weights [M, B] of the losses in a total that is divided by B: with `wins` those of a member add to B.

    Then its loss is the mean over what it won, weighted by the sample weights. One that won nothing has none.
    """
    if normalize == "batch":
        return assignment
    wins = assignment.sum(1, keepdim=True)
    return assignment / wins.where(wins > 0, 1.0) * assignment.shape[1]  # in this order: B by next to nothing is inf


def ones_or(sample_weights: Tensor | None, losses: Tensor) -> Tensor:
    return torch.ones_like(losses) if sample_weights is None else sample_weights.to(losses.dtype)
