"""Losses against a few lines of numpy, and their gradients against finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mheads import UserError, losses
from mheads.losses import assign

M, B, C = 4, 6, 5
ALL = {
    "independent": losses.independent(),
    "score": losses.score_averaged(),
    "prob": losses.prob_averaged(),
    "prob naive": losses.prob_averaged(stable=False),
    "mcl k=1": losses.mcl(k=1),
    "mcl k=3": losses.mcl(k=3),
    "mcl + ce": losses.mcl(k=1, ce_weight=0.3),
}


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(M, B, C, generator=generator, dtype=torch.float64)
    return outputs, torch.randint(C, (B,), generator=generator)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def numpy_total(name, z, y):
    rows = np.arange(len(y))
    ce = -np.log(softmax(z)[:, rows, y])
    if name == "independent":
        return ce.sum()
    if name == "score":
        return -np.log(softmax(z.mean(0))[rows, y]).sum()
    if name.startswith("prob"):
        return -np.log(softmax(z).mean(0)[rows, y]).sum()
    k = 3 if name == "mcl k=3" else 1
    return np.sort(ce, 0)[:k].sum() + (0.3 * ce.sum() if name == "mcl + ce" else 0)


@pytest.mark.parametrize("name", ALL)
def test_total_equals_numpy(name):
    outputs, y = problem()
    value = ALL[name](outputs, y)
    assert value.total.item() == pytest.approx(numpy_total(name, outputs.numpy(), y.numpy()), rel=1e-12)
    assert value.mean.item() == pytest.approx(value.total.item() / B)
    ce = -np.log(softmax(outputs.numpy())[:, np.arange(B), y.numpy()])
    np.testing.assert_allclose(value.losses.numpy(), ce, rtol=1e-12)
    assert value.assignment.shape == (M, B)


@pytest.mark.parametrize("name", ALL)
def test_gradient_equals_finite_differences(name):
    outputs, y = problem(1)
    ties = torch.rand(M, B)
    outputs.requires_grad_()
    (gradient,) = torch.autograd.grad(ALL[name](outputs, y, ties=ties).total, outputs)
    flat = outputs.detach().clone().view(-1)
    for i in range(0, flat.numel(), 7):
        step = torch.zeros_like(flat)
        step[i] = 1e-6
        up, down = ((flat + s * step).view(M, B, C) for s in (1, -1))
        slope = (ALL[name](up, y, ties=ties).total - ALL[name](down, y, ties=ties).total) / 2e-6
        assert gradient.view(-1)[i].item() == pytest.approx(slope.item(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_mcl_sends_gradient_only_to_the_winners(k):
    outputs, y = problem(2)
    outputs.requires_grad_()
    value = losses.mcl(k=k)(outputs, y)
    (gradient,) = torch.autograd.grad(value.total, outputs)
    learned = gradient.abs().sum(-1) > 0
    assert torch.equal(learned, value.assignment > 0)
    assert (learned.sum(0) == k).all()
    worst_winner = value.losses.masked_fill(~learned, -math.inf).max(0).values
    best_loser = value.losses.masked_fill(learned, math.inf).min(0).values
    assert (worst_winner <= best_loser).all()


def test_mcl_does_not_divide_by_k():
    outputs, y = problem(3)
    one, three = losses.mcl(k=1)(outputs, y), losses.mcl(k=3)(outputs, y)
    won = one.assignment > 0
    assert (three.assignment[won] == 1).all()


def test_mcl_with_all_members_is_independent_cross_entropy():
    outputs, y = problem(4)
    assert losses.mcl(k=M)(outputs, y).total.item() == pytest.approx(losses.independent()(outputs, y).total.item())


def test_ties_follow_the_keys_and_nothing_else():
    equal = torch.zeros(M, 1000)
    ties = torch.rand(M, 1000, generator=torch.Generator().manual_seed(0))
    chosen = assign(equal, 1, ties=ties)
    assert torch.equal(chosen.argmax(0), ties.argmin(0))
    assert torch.equal(chosen, assign(equal, 1, ties=ties))
    shares = chosen.mean(1)
    assert ((shares > 0.2) & (shares < 0.3)).all()  # ties are shared out, not given to member 0


def test_keys_never_reorder_close_losses():
    close = torch.tensor([[1.0], [1.0 + 1e-6]])
    for ties in (torch.tensor([[0.9], [0.1]]), torch.tensor([[0.1], [0.9]])):
        assert assign(close, 1, ties=ties)[:, 0].tolist() == [1, 0]


def test_members_whose_prior_is_zero_are_never_chosen():
    outputs, y = problem(5)
    prior = torch.ones(M, B, dtype=torch.float64)
    prior[1:, 0] = 0
    prior[:, 1] = 0
    prior[0, 2] = 2.5
    value = losses.mcl(k=2)(outputs, y, prior=prior)
    assert value.assignment[:, 0].tolist() == [1, 0, 0, 0]
    assert value.assignment[:, 1].sum() == 0
    assert value.assignment[0, 2] in (0.0, 2.5)


def test_priors_weight_the_independent_loss():
    outputs, y = problem(6)
    prior = torch.rand(M, B, dtype=torch.float64)
    value = losses.independent()(outputs, y, prior=prior)
    assert value.total.item() == pytest.approx((prior * value.losses).sum().item())


@pytest.mark.parametrize("name", ["score", "prob"])
def test_averaged_losses_refuse_priors(name):
    outputs, y = problem()
    with pytest.raises(UserError, match="sampling must be full"):
        ALL[name](outputs, y, prior=torch.ones(M, B))


def test_averaging_gives_every_member_the_same_gradient_under_score_averaging():
    outputs, y = problem(7)
    outputs.requires_grad_()
    (gradient,) = torch.autograd.grad(losses.score_averaged()(outputs, y).total, outputs)
    assert torch.equal(gradient[0], gradient[3])


@given(st.floats(-1e4, 1e4), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_prob_averaged_stays_finite_for_scores_of_any_size(scale, seed):
    outputs = torch.randn(M, B, C, generator=torch.Generator().manual_seed(seed)) * scale
    outputs.requires_grad_()
    value = losses.prob_averaged()(outputs, torch.arange(B) % C)
    (gradient,) = torch.autograd.grad(value.total, outputs)
    assert torch.isfinite(value.total)
    assert torch.isfinite(gradient).all()


def test_the_direct_form_of_prob_averaging_loses_its_gradient():
    outputs = torch.zeros(2, 1, 3)
    outputs[:, 0, 1] = 200.0
    outputs.requires_grad_()
    y = torch.tensor([0])
    (naive,) = torch.autograd.grad(losses.prob_averaged(stable=False)(outputs, y).total, outputs)
    (stable,) = torch.autograd.grad(losses.prob_averaged()(outputs, y).total, outputs)
    assert naive.abs().sum() == 0
    assert stable.abs().sum() > 0.5


def test_cutting_the_batch_changes_nothing_but_rounding():
    outputs, y = problem(8)
    for loss in ALL.values():
        ties = torch.rand(M, B)
        whole = loss(outputs, y, ties=ties)
        parts = [loss(outputs[:, s], y[s], ties=ties[:, s]) for s in (slice(0, 2), slice(2, B))]
        assert whole.total.item() == pytest.approx(sum(p.total.item() for p in parts), rel=1e-12)
        assert torch.equal(whole.assignment, torch.cat([p.assignment for p in parts], 1))


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_one_is_refused(k):
    with pytest.raises(UserError, match="at least 1"):
        losses.mcl(k=k)


def test_k_above_the_members_is_refused():
    outputs, y = problem()
    with pytest.raises(UserError, match="only 4 members"):
        losses.mcl(k=5)(outputs, y)


def test_separable_losses_are_sums_over_members():
    outputs, y = problem(9)
    for loss in ALL.values():
        if loss.separable:
            parts = sum(loss(outputs[m : m + 1], y).total.item() for m in range(M))
            assert loss(outputs, y).total.item() == pytest.approx(parts)
