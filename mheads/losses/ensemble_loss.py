"""The loss of an ensemble: what every loss takes, gives, and declares to the engine.

The engine calls `loss(outputs, targets, sample_weights, ties)`; the loss's function calls its base loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.common.safe_yaml import short
from mheads.losses import check_function
from mheads.losses.base_loss import BaseLossSpec, make_base_loss, masks_rows, name_base_loss
from mheads.losses.winners import assign, score_losses
from mheads.problems import BASE_LOSSES, BaseLoss, Problem, cross_entropies
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

    `function` takes outputs [M, B, C], labels [B] and, where it asks for them, sample weights and tie-breaking keys,
    each [M, B] or None. It returns a LossValue, or simply the losses [M, B]: weighted by the sample weights, they make
    the total. A function with an argument `base_loss` is also given the loss of one member on one example, outputs and
    targets to [M, B]: that of the problem unless another is named, cross-entropy without a problem.

    `separable`: the loss of a member does not depend on the outputs of the others, so each member's forward and
    backward can run back to back. `winners`: how many members learn from an example, None for all; the others (their
    assignment is 0) cost no backward for it. `averaged`: the members' outputs are averaged before the loss, which
    divides their gradients by M and makes sample weights meaningless. `together`: all members learn from an example as
    one, so that they cannot have sample weights of their own, only those of all. `of_scores`: it trains the mean of
    scores, so the ensemble answers with that mean, and not with the mean of probabilities. `check_members` raises for a
    number of members that it cannot train. `whole_batch`: the loss of an example depends on the others in its batch,
    which is therefore not cut; `each_batch`: a step that accumulates batches treats each by itself. `masks`: a member's
    outputs on examples whose sample weight is 0 change nothing in the total, so they are not computed and are zeros.
    `options`: the options that it was made with. `of_losses`: it looks at outputs by its base loss alone, so that the
    losses of the members are all it needs (`given_losses`). `schedule`: for a loss that changes over training, its form
    at an iteration, given (iteration, iterations, members); see `at`. `score_weight`: see `with_scores`. `in_units_of`:
    for options that are relative to the loss at the start, the loss given that number. `teaches_scores`: its function
    trains the scores that members give beside their answers. `gives_variances`: so it does with a variance beside each
    number. `description`: how members learn, in words that follow "trained".
    """

    name: str
    function: Callable[..., LossValue | Tensor]
    separable: bool = False
    winners: int | None = None
    averaged: bool = False
    together: bool = False
    of_scores: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    base_loss: BaseLossSpec = None
    check_members: Callable[[int], None] | None = None
    schedule: Callable[[int, int, int], Loss] | None = None
    whole_batch: bool = False
    each_batch: bool = False
    masks: bool = False
    of_losses: bool = False
    score_weight: float = 0.0
    in_units_of: Callable[[float], Loss] | None = None
    teaches_scores: bool = False
    gives_variances: bool = False
    description: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_loss", make_base_loss(self.base_loss))
        if self.base_loss_of_whole_batch:  # what a member wins teaches it about the rest of the batch too
            object.__setattr__(self, "winners", None)
        if self.score_weight:  # every score learns from every example, and who won it
            object.__setattr__(self, "winners", None)
            object.__setattr__(self, "separable", False)
        check_function.check_function(self.name, self.function, self._num_arguments)

    def __call__(
        self, outputs: Value, y: Value, sample_weights: Tensor | None = None, ties: Tensor | None = None
    ) -> LossValue:
        """The loss of outputs [M, B, C] on labels [B], given sample weights [M, B] and tie-breaking keys [M, B]."""
        self._refuse_without_units("(outputs, y)")
        base_loss = {"base_loss": self.base_losses} if self.takes_base_loss else {}
        value = self.function(*(outputs, y, sample_weights, ties)[: self._num_arguments], **base_loss)
        leaves = nested_values.leaves(outputs)
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in leaves)
        check_function.check_value(self.name, value, leaves[0].shape[:2], learns)
        if isinstance(value, Tensor):
            weights = ones_or(sample_weights, value.detach())
            value = LossValue((weights * value).sum(), weights, value.detach())
        value = LossValue(value.total, value.assignment.detach(), value.losses.detach())
        return self._add_scores(value, outputs, sample_weights, ties) if self.score_weight else value

    def _add_scores(
        self, value: LossValue, outputs: Value, sample_weights: Tensor | None, ties: Tensor | None
    ) -> LossValue:
        won = assign(value.losses, 1, sample_weights, ties)
        learned = ones_or(sample_weights, won) * score_losses(self.name, outputs, won)
        return replace(value, total=value.total + self.score_weight * learned.sum())

    def with_scores(self, weight: float = 1.0) -> Loss:
        """This loss, and `weight` times the cross-entropy of the members' scores with who does best on an example.

        The network must give scores (`mheads.with_scores`), and the ensemble then has one answer weighted by them.
        """
        check_function.check_not_negative("loss.scores", weight)
        if weight and self.teaches_scores:
            raise UserError(f"loss.scores = {weight:g}: {self.name} teaches scores by itself; leave loss.scores out")
        return replace(self, score_weight=weight)

    def base_losses(self, outputs: Value, y: Value) -> Tensor:
        """The losses [M, B] of the members by themselves."""
        if self.base_loss is None:
            check_function.check_class_targets(self.name, y)
        losses = (self.base_loss_function or cross_entropies)(member_scores.answer_of(outputs), y)
        check_function.check_base_losses(self.base_loss_name, losses, nested_values.leaves(outputs)[0].shape[:2])
        return losses

    def given_losses(self) -> Loss:
        """This loss, for the losses [M, B] of the members in the place of their outputs."""
        return replace(self, base_loss=_take_losses)

    def on(self, problem: Problem) -> Loss:
        """This loss for a problem; raises UserError if its base loss is for other targets."""
        if self.name in problem.other_losses:
            raise UserError(
                f"loss.name = {self.name} is about the probabilities of classes alone, and {problem.name} learns more: "
                "use independent, score_averaged, mcl, relaxed, evolving or annealed"
            )
        if self.base_loss is None:
            return replace(self, base_loss=problem.losses)
        spec = name_base_loss(self.base_loss_function)
        name = spec["name"] if isinstance(spec, dict) else spec
        if name is not None and name not in problem.base_losses:
            raise UserError(
                f"loss.base_loss = {name} does not go with {problem.name}: use {' or '.join(problem.base_losses)}, or "
                "a function of your own. If the targets are of another kind, set data.problem"
            )
        return self

    def at(self, iteration: int, iterations: int, members: int) -> Loss:
        """The form of this loss at an iteration, from 0 on: a function of these numbers alone, so that resumed runs and
        ranks get the same bits."""
        if self.schedule is None:
            return self
        if iterations < 1:
            raise UserError(f"{self.name} changes over training: at() needs 1 iteration or more, not {iterations}")
        self._refuse_without_units(".at(...)")
        now = self.schedule(iteration, iterations, members)
        base_loss = self.base_loss if now.base_loss is None else now.base_loss
        names = ("whole_batch", "each_batch", "masks", "score_weight")
        kept = {name: getattr(self, name) for name in names}
        return replace(now, name=self.name, base_loss=base_loss, **kept)

    def _refuse_without_units(self, call: str) -> None:
        if self.in_units_of is not None:
            raise UserError(
                f"{self.name} with relative=True needs the loss at the start of training: use "
                f"loss.in_units_of(number){call}"
            )

    def check(self, members: int, sampling: str) -> None:
        """Raises UserError for a number of members, or a sampling, that it cannot take."""
        if self.check_members is not None:
            self.check_members(members)
        if (self.averaged or self.together) and sampling != "full":
            raise UserError(
                f"sampling is {sampling}, but with {self.name} all members learn from an example together: use "
                "sampling=full, or another loss"
            )

    @cached_property
    def takes_base_loss(self) -> bool:
        """Whether the function asks for the loss of one member on one example."""
        return check_function.takes_base_loss(self.function)

    @cached_property
    def _num_arguments(self) -> int:
        return check_function.count_arguments(self.function)

    @property
    def base_loss_function(self) -> BaseLoss | None:
        """`base_loss`, which is a function since the loss was made."""
        return self.base_loss  # type: ignore[return-value]

    @property
    def _plain_base_loss(self) -> Any:
        return self.base_loss.func if isinstance(self.base_loss, partial) else self.base_loss

    @property
    def base_loss_name(self) -> str:
        """The base loss as messages call it."""
        return str(getattr(self._plain_base_loss, "__name__", short(self.base_loss)))

    @property
    def has_own_function(self) -> bool:
        """Whether its function is none of ours."""
        return _is_own(self.function.func if isinstance(self.function, partial) else self.function)

    @property
    def uses_own_code(self) -> bool:
        """Whether its function or base loss is none of ours, and may use anything that a network gives."""
        return self.has_own_function or (self.base_loss is not None and _is_own(self._plain_base_loss))

    @property
    def has_scores(self) -> bool:
        """Whether members learn scores, which the network must give beside their answers."""
        return self.teaches_scores or self.score_weight > 0

    @property
    def learns_variances(self) -> bool:
        """Whether members learn a variance beside each number that they answer."""
        return self.gives_variances or self._plain_base_loss is BASE_LOSSES["gaussian_nll"]

    @property
    def base_loss_of_whole_batch(self) -> bool:
        """Whether the base loss looks at whole batches, which it declares by an attribute `whole_batch`."""
        return bool(getattr(self._plain_base_loss, "whole_batch", False))

    @property
    def skips_rows(self) -> bool:
        """Whether a member's outputs on examples whose sample weight is 0 need not be computed: neither this loss nor
        its base loss, which declares that by an attribute `masks` if it is a user's, looks at them."""
        return self.masks and masks_rows(self.base_loss_function)


def _is_own(function: Any) -> bool:
    return not f"{function.__module__}.".startswith(("mheads.losses.", "mheads.problems."))


def _take_losses(losses: Tensor, y: Value) -> Tensor:
    return losses


def ones_or(sample_weights: Tensor | None, losses: Tensor) -> Tensor:
    """The sample weights in the precision of the losses, ones where there are none."""
    return torch.ones_like(losses) if sample_weights is None else sample_weights.to(losses.dtype)
