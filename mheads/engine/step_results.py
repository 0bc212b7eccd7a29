"""What a step finds out: the loss of every micro-batch, its gradient, and who learns from what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.nested_values import Value
from mheads.data.batches import Batch
from mheads.engine.large_outputs import MemberLosses
from mheads.losses import Loss, LossValue


@dataclass(frozen=True)
class StepReport:
    """What a training step reports: the loss, the signal that asks to stop after it (0: none), and, where
    the step is logged, [M, B] losses and assignment."""

    loss: float
    losses: Tensor
    assignment: Tensor
    stop: int = 0


class StepResults:
    """Applies the loss to outputs and fills in `losses` [M, B]; `slices` are the rows of each micro-batch."""

    def __init__(self, loss: Loss, batches: Mapping[int, Batch], slices: Sequence[slice], losses: Tensor) -> None:
        self.loss, self.batches, self.slices = loss, batches, slices
        self.losses, self.assignment = losses, torch.zeros_like(losses)
        self.totals: dict[tuple[int, int], float | Tensor] = {}  # on an accelerator, tensors until the report
        self.dtype, self.num_rows, self.on_host = losses.dtype, losses.shape[1], losses.device.type == "cpu"
        self._of_mean = losses.new_ones(()) / max(1, self.num_rows)  # the gradient of the rows' mean by their sum

    def apply_loss(self, i: int, members: tuple[int, ...] | None, outputs: Value) -> Value:
        """The gradient of the loss with respect to the outputs of all members, or of some if the loss is separable."""
        if members is not None and len(members) > 1 and self.loss.has_own_function:  # which takes one member at a time
            each = [
                self.apply_loss(i, (m,), nested_values.map_leaves(lambda t, j=j: t[j : j + 1], outputs))
                for j, m in enumerate(members)
            ]
            return nested_values.map_leaves(lambda *ts: torch.cat(ts), *each)
        batch = self.batches[i]
        which = slice(None) if members is None else slice(members[0], members[-1] + 1)
        with torch.enable_grad():
            stacked = nested_values.map_leaves(lambda t: t.detach().to(self.dtype).requires_grad_(), outputs)
            of_losses = isinstance(stacked, MemberLosses)
            value = (self.loss.given_losses() if of_losses else self.loss)(
                stacked.losses if of_losses else stacked,
                batch.targets,
                None if batch.sample_weights is None else batch.sample_weights[which],
                None if batch.ties is None else batch.ties[which],
            )
            leaves = nested_values.leaves(stacked)
            gradients = torch.autograd.grad(value.total, leaves, self._of_mean.to(value.total), allow_unused=True)
        if members is None or len(members) == 1:
            self.totals[members[0] if members else 0, i] = value.total.item() if self.on_host else value.total.detach()
        else:
            self.totals |= {(m, i): total for m, total in zip(members, self._member_totals(value), strict=True)}
        self.losses[which, self.slices[i]] = value.losses
        self.assignment[which, self.slices[i]] = value.assignment
        return nested_values.rebuild(stacked, fill(gradients, leaves))

    def _member_totals(self, value: LossValue) -> Sequence[float | Tensor]:
        """What each member adds to the total of a separable loss."""
        totals = (value.assignment * value.losses).sum(1)
        return totals.tolist() if self.on_host else totals.detach().unbind()

    def report(self, stop: int = 0) -> StepReport:
        """The report of the step, once no task is left."""
        self.bring_to_host()
        total = sum(float(self.totals[key]) for key in sorted(self.totals))  # an order of its own, as every sum
        return StepReport(total / max(1, self.num_rows), self.losses, self.assignment, stop)

    def bring_to_host(self) -> None:
        """Brings what the step reports from an accelerator, in one copy: each would make the host wait."""
        if self.on_host:
            return
        places = sorted(self.totals)
        totals = [torch.as_tensor(self.totals[place]) for place in places]
        together = torch.cat([t.flatten() for t in (self.losses, self.assignment, *totals)]).cpu()
        sizes = [self.losses.numel(), self.assignment.numel(), len(totals)]
        losses, assignment, sums = together.split(sizes)
        self.losses, self.assignment = (t.to(self.dtype).view_as(self.losses) for t in (losses, assignment))
        self.totals = dict(zip(places, sums.tolist(), strict=True))
        self.on_host = True


def fill(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """Gradients, zeros where there are none."""
    return [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, like, strict=True)]
