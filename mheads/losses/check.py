"""Tries a loss on a few examples before training: whether it runs, and keeps what it promises the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mheads.common import nested_values, seeds
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.losses.base_loss import masks_rows
from mheads.losses.loss import Loss


def check(loss: Loss, outputs: Value, targets: Value, members: int, weighted: bool = False) -> list[Tensor]:
    """The gradients [M, ...] that the loss gives members with equal outputs, each with its own tie-breaking keys.

    A loss of the user's own is called here for the first time, so that its mistakes are reported before a run starts.
    `weighted`: whether examples will have sample weights.
    """
    rows = torch.arange(32) % nested_values.num_rows(targets)
    targets = nested_values.map_leaves(lambda t: t[rows], targets)
    same = nested_values.map_leaves(lambda t: torch.stack([t.detach()[rows]] * members), outputs)
    leaves = [t.requires_grad_() for t in _floats(same)]
    ties = torch.rand(members, len(rows), generator=seeds.generator("ties"))
    parts = [slice(m, m + 1) for m in range(members)] if loss.separable else [slice(None)]

    def told() -> list[Tensor]:
        return [loss(nested_values.map_leaves(lambda t, p=p: t[p], same), targets, None, ties[p]).total for p in parts]

    try:
        totals = told()
        found = torch.autograd.grad(sum(totals), leaves, allow_unused=True)  # type: ignore[arg-type]
        again = told()
    except UserError:
        raise
    except Exception as error:  # the user's function may raise anything
        shapes = [list(t.shape) for t in leaves]
        raise UserError(
            f"loss {loss.name!r} fails on outputs {shapes[0] if len(shapes) == 1 else shapes} with "
            f"{type(error).__name__}: {error}"
        ) from error
    if not all(torch.allclose(one, other, rtol=1e-5, equal_nan=True) for one, other in zip(totals, again, strict=True)):
        raise UserError(
            f"loss {loss.name!r} gives {sum(totals):.6g} for some outputs and {sum(again):.6g} for the same again: it "
            "draws random numbers, or keeps something from call to call, which a resumed run would not have. What "
            "changes over training is a function of the iteration: Loss(..., schedule=...)"
        )
    if not (loss.whole_batch or loss.base_loss_of_whole_batch):
        _refuse_mixing(loss, same, targets, ties, parts, found)
    _refuse_broken(loss, same, targets, ties, weighted)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


def _refuse_mixing(
    loss: Loss, outputs: Value, targets: Value, ties: Tensor, parts: list[slice], whole: Sequence[Tensor | None]
) -> None:
    """Refuses a loss whose gradients are others when the batch is cut, after its first example."""
    leaves = _floats(outputs)
    cut: list[Tensor] = [torch.zeros_like(t) for t in leaves]
    for rows in (slice(0, 1), slice(1, None)):
        y = nested_values.map_leaves(lambda t, rows=rows: t[rows], targets)
        for p in parts:
            some = nested_values.map_leaves(lambda t, p=p, rows=rows: t[p, rows], outputs)
            try:
                gradients = torch.autograd.grad(loss(some, y, None, ties[p, rows]).total, leaves, allow_unused=True)
            except Exception:  # the user's function may need more than one example
                return
            for sums, gradient in zip(cut, gradients, strict=True):
                sums += 0 if gradient is None else gradient
    for one, other in zip(whole, cut, strict=True):
        if not _close(torch.zeros_like(other) if one is None else one, other):
            own = loss.takes_base_loss and not masks_rows(loss.base_loss_function)
            who = f"the loss of one member, base_loss = {loss.base_loss_name}," if own else f"loss {loss.name!r}"
            said = "function.whole_batch = True" if own else "mheads.losses.Loss(name, function, whole_batch=True)"
            raise UserError(
                f"{who} gives an example another gradient when others in its batch are left out: it looks at the whole "
                "batch (a mean over it?), and batches are cut. Let it treat each example by itself, or say so: "
                f"{said}"
            )


def _refuse_broken(loss: Loss, same: Value, targets: Value, ties: Tensor, weighted: bool) -> None:
    """Refuses a loss that is not what it says, on members that give different outputs."""
    generator = seeds.generator("loss", "outputs")
    outputs = nested_values.map_leaves(lambda t: _shaken(t, generator), same)
    leaves, members = [t.requires_grad_() for t in _floats(outputs)], len(ties)
    try:
        value = loss(outputs, targets, None, ties)
        whole = _gradients(value.total, leaves)
        one_by_one = [torch.zeros_like(t) for t in leaves]
        for p in (slice(m, m + 1) for m in range(members)) if loss.separable else ():
            alone = loss(nested_values.map_leaves(lambda t, p=p: t[p], outputs), targets, None, ties[p])
            one_by_one = [a + b for a, b in zip(one_by_one, _gradients(alone.total, leaves), strict=True)]
        sample_weights = 0.5 + torch.rand(ties.shape, generator=generator, dtype=leaves[0].dtype)
        sample_weights[torch.rand(ties.shape, generator=generator) < 0.3] = 0  # a loss may ask just for that
        scales = (1, 2) if weighted and not loss.averaged else ()
        told = [_gradients(loss(outputs, targets, s * sample_weights, ties).total, leaves) for s in scales]
    except Exception:  # the user's function may not take every output
        return
    if loss.winners is not None and loss.winners < members:
        learns = torch.stack([g.flatten(2).ne(0).any(2) if g.dim() > 2 else g.ne(0) for g in whole]).any(0)
        taught = value.assignment != 0
        if (learns & ~taught).any() or (taught.sum(0) > loss.winners).any():
            found = "gives gradients to members whose assignment is 0" if (learns & ~taught).any() else "assigns more"
            raise UserError(
                f"loss {loss.name!r} promises winners={loss.winners}, that no more members learn from an example, and "
                f"{found}: leave winners out, or let it keep that"
            )
    if loss.separable and not all(map(_close, whole, one_by_one)):
        raise UserError(
            f"loss {loss.name!r} promises separable=True, that the loss of a member does not depend on the others, and "
            "gives other gradients to one member at a time: leave separable out"
        )
    if not told:
        return
    once, twice = told
    if loss.skips_rows:
        _refuse_unmasked(loss, outputs, targets, ties, sample_weights, once)
    if any(g.any() for g in once) and all(_close(b, 4 * a) for a, b in zip(once, twice, strict=True)):
        raise UserError(
            f"loss {loss.name!r} counts the sample weights twice: losses [M, B] that a function "
            "returns are multiplied by them, so that it must not do that itself; what makes its own total returns a "
            "LossValue"
        )
    if all(map(_close, once, whole)):
        raise UserError(
            f"loss {loss.name!r} makes its own total and does not look at the sample weights, which "
            "these data or members have: let its function take (outputs, y, sample_weights, ties) and multiply by "
            "sample_weights [M, B], or return the losses [M, B]"
        )


def _refuse_unmasked(
    loss: Loss, outputs: Value, targets: Value, ties: Tensor, sample_weights: Tensor, gradients: list[Tensor]
) -> None:
    """Refuses a loss that looks at a member's outputs on examples that it does not learn from, but says otherwise."""
    hidden = sample_weights == 0  # [M, B]

    def blank(t: Tensor) -> Tensor:
        return t.detach().masked_fill(hidden.view(*hidden.shape, *[1] * (t.dim() - 2)), 0)

    zeros = nested_values.map_leaves(blank, outputs)
    leaves = [t.requires_grad_() for t in _floats(zeros)]
    without = _gradients(loss(zeros, targets, sample_weights, ties).total, leaves)
    if not all(_close(a[~hidden], b[~hidden]) for a, b in zip(gradients, without, strict=True)):
        raise UserError(
            f"loss {loss.name!r} promises masks=True, that a member's outputs on examples whose sample weight is 0 "
            "change nothing, and gives other gradients without them: leave masks out"
        )


def _floats(value: Value) -> list[Tensor]:
    return [t for t in nested_values.leaves(value) if t.is_floating_point()]


def _shaken(t: Tensor, generator: torch.Generator) -> Tensor:
    """The same with other numbers for every member and example."""
    t = t.detach()
    if not t.is_floating_point():
        return t
    return t + (1 + t.abs().max()) * torch.randn(t.shape, generator=generator, dtype=t.dtype)


def _gradients(total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


def _close(one: Tensor, other: Tensor) -> bool:
    scale = one[one.isfinite()].abs().max().item() if one.isfinite().any() else 0.0
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4 * scale, equal_nan=True)
