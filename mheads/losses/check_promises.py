"""Tries a loss on a few examples before training: whether it runs, and keeps what it promises the engine."""

from __future__ import annotations

import torch
from torch import Tensor

from mheads.common import nested_values, seeds
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.losses.base_loss import masks_rows
from mheads.losses.ensemble_loss import Loss


def check_promises(loss: Loss, outputs: Value, targets: Value, members: int, weighted: bool = False) -> list[Tensor]:
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

    def compute_totals() -> list[Tensor]:
        return [loss(nested_values.map_leaves(lambda t, p=p: t[p], same), targets, None, ties[p]).total for p in parts]

    try:
        totals = compute_totals()
        gradients = _gradients(sum(totals), leaves)  # type: ignore[arg-type]
        again = compute_totals()
    except UserError:
        raise
    except Exception as error:  # the user's function may raise anything
        shapes = [list(t.shape) for t in leaves]
        raise UserError(
            f"loss {loss.name!r} fails on outputs {shapes[0] if len(shapes) == 1 else shapes} with "
            f"{type(error).__name__}: {error}"
        ) from error
    if not all(torch.allclose(a, b, rtol=1e-5, equal_nan=True) for a, b in zip(totals, again, strict=True)):
        raise UserError(
            f"loss {loss.name!r} gives {sum(totals):.6g} and then {sum(again):.6g} for the same outputs: it draws "
            "random numbers, or keeps state between calls, which a resumed run would lose. For a loss that changes "
            "over training use Loss(..., schedule=...)"
        )
    if not (loss.whole_batch or loss.base_loss_of_whole_batch):
        _check_cutting(loss, same, targets, ties, parts, gradients)
    _check_declarations(loss, same, targets, ties, weighted)
    return gradients


def _check_cutting(
    loss: Loss, outputs: Value, targets: Value, ties: Tensor, parts: list[slice], whole: list[Tensor]
) -> None:
    """Raises UserError for a loss whose gradients are others when the batch is cut, after its first example."""
    leaves = _floats(outputs)
    cut = [torch.zeros_like(t) for t in leaves]
    for rows in (slice(0, 1), slice(1, None)):
        y = nested_values.map_leaves(lambda t, rows=rows: t[rows], targets)
        for p in parts:
            some = nested_values.map_leaves(lambda t, p=p, rows=rows: t[p, rows], outputs)
            try:
                gradients = _gradients(loss(some, y, None, ties[p, rows]).total, leaves)
            except Exception:  # the user's function may need more than one example
                return
            cut = [a + b for a, b in zip(cut, gradients, strict=True)]
    if not all(map(_close, whole, cut)):
        own = loss.takes_base_loss and not masks_rows(loss.base_loss_function)
        who = f"the loss of one member, base_loss = {loss.base_loss_name}," if own else f"loss {loss.name!r}"
        remedy = "function.whole_batch = True" if own else "mheads.losses.Loss(name, function, whole_batch=True)"
        raise UserError(
            f"{who} gives an example another gradient when others in its batch are left out: it looks at the whole "
            f"batch (a mean over it?), and batches are cut. Let it treat each example by itself, or say so: {remedy}"
        )


def _check_declarations(loss: Loss, same: Value, targets: Value, ties: Tensor, weighted: bool) -> None:
    """Raises UserError for a loss that is not what it declares, on members that give different outputs."""
    generator = seeds.generator("loss", "outputs")
    outputs = nested_values.map_leaves(lambda t: _perturb(t, generator), same)
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
        by_scale = [_gradients(loss(outputs, targets, s * sample_weights, ties).total, leaves) for s in scales]
    except Exception:  # the user's function may not take every output
        return
    if loss.winners is not None and loss.winners < members:
        _check_winners(loss.name, loss.winners, value.assignment, whole)
    if loss.separable and not all(map(_close, whole, one_by_one)):
        raise UserError(
            f"loss {loss.name!r} promises separable=True, that the loss of a member does not depend on the others, and "
            "gives other gradients to one member at a time: leave separable out"
        )
    if by_scale and loss.skips_rows:
        _check_masks(loss, outputs, targets, ties, sample_weights, by_scale[0])
    if by_scale:
        _check_sample_weights(loss, whole, *by_scale)


def _check_winners(name: str, winners: int, assignment: Tensor, gradients: list[Tensor]) -> None:
    learns = torch.stack([g.flatten(2).ne(0).any(2) if g.dim() > 2 else g.ne(0) for g in gradients]).any(0)
    assigned = assignment != 0
    leaks = (learns & ~assigned).any()
    if leaks or (assigned.sum(0) > winners).any():
        mistake = "gives gradients to members whose assignment is 0" if leaks else "assigns more"
        raise UserError(
            f"loss {name!r} promises winners={winners}, that no more members learn from an example, and "
            f"{mistake}: leave winners out, or let it keep that"
        )


def _check_sample_weights(loss: Loss, without: list[Tensor], once: list[Tensor], twice: list[Tensor]) -> None:
    """Of gradients without sample weights, with some, and with twice these."""
    if any(g.any() for g in once) and all(_close(b, 4 * a) for a, b in zip(once, twice, strict=True)):
        raise UserError(
            f"loss {loss.name!r} counts the sample weights twice, since mheads multiplies the losses [M, B] that it "
            "returns by them: return losses without sample weights, or a LossValue with your own total"
        )
    if all(map(_close, once, without)):
        raise UserError(
            f"loss {loss.name!r} makes its own total and does not look at the sample weights, which these data or "
            "members have: let its function take (outputs, y, sample_weights, ties) and multiply by "
            "sample_weights [M, B], or return the losses [M, B]"
        )


def _check_masks(
    loss: Loss, outputs: Value, targets: Value, ties: Tensor, sample_weights: Tensor, gradients: list[Tensor]
) -> None:
    """Raises UserError for a loss that looks at outputs on examples of sample weight 0, but declares otherwise."""
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


def _perturb(t: Tensor, generator: torch.Generator) -> Tensor:
    """The same with other numbers for every member and example."""
    t = t.detach()
    if not t.is_floating_point():
        return t
    return t + (1 + t.abs().max()) * torch.randn(t.shape, generator=generator, dtype=t.dtype)


def _gradients(total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, gradients, strict=True)]


def _close(one: Tensor, other: Tensor) -> bool:
    scale = one[one.isfinite()].abs().max().item() if one.isfinite().any() else 0.0
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4 * scale, equal_nan=True)
