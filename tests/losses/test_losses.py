"""Losses against a few lines of numpy, and their gradients against finite differences."""

import inspect
import math
import sys
from collections import OrderedDict
from typing import Annotated, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field
from torch import nn

from mheads import TreeNet, UserError, losses
from mheads.common.options import options_by_key, options_of
from mheads.config import read as configs
from mheads.losses import assign
from mheads.training.build_from_config import build_loss

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


def test_members_whose_sample_weights_is_zero_are_never_chosen():
    outputs, y = problem(5)
    sample_weights = torch.ones(M, B, dtype=torch.float64)
    sample_weights[1:, 0] = 0
    sample_weights[:, 1] = 0
    sample_weights[0, 2] = 2.5
    value = losses.mcl(k=2)(outputs, y, sample_weights=sample_weights)
    assert value.assignment[:, 0].tolist() == [1, 0, 0, 0]
    assert value.assignment[:, 1].sum() == 0
    assert value.assignment[0, 2] in (0.0, 2.5)


def test_sample_weights_weight_all_of_a_mixture():
    """(a + 0.3) w l: who did not win an example learns 0.3 w of it, nothing where w is 0; by numpy."""
    generator = torch.Generator().manual_seed(4)
    outputs = torch.randn(3, 20, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(5, (20,), generator=generator)
    sample_weights = torch.randint(0, 4, (3, 20), generator=generator).double()
    value = losses.mcl(k=1, ce_weight=0.3)(outputs, y, sample_weights)
    logits, w = outputs.numpy(), sample_weights.numpy()
    ce = np.log(np.exp(logits).sum(-1)) - logits[:, np.arange(20), y.numpy()]
    won = (np.where(w > 0, ce, np.inf).argmin(0) == np.arange(3)[:, None]) * (w > 0)
    np.testing.assert_allclose(value.assignment.numpy(), (won + 0.3) * w, rtol=1e-12)
    assert value.total.item() == pytest.approx(((won + 0.3) * w * ce).sum(), rel=1e-12)


def test_sample_weights_weight_the_independent_loss():
    outputs, y = problem(6)
    sample_weights = torch.rand(M, B, dtype=torch.float64)
    value = losses.independent()(outputs, y, sample_weights=sample_weights)
    assert value.total.item() == pytest.approx((sample_weights * value.losses).sum().item())


@pytest.mark.parametrize("name", ["score", "prob"])
def test_averaged_losses_refuse_sample_weights(name):
    outputs, y = problem()
    with pytest.raises(UserError, match="sampling must be full"):
        ALL[name](outputs, y, sample_weights=torch.ones(M, B))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_direct_form_of_prob_averaging_has_caffes_gradient(dtype):
    """Softmax, Eltwise (mean) and MultinomialLogisticLoss, layer by layer as Caffe takes them back."""
    outputs, y = problem(10)
    outputs[:, 0, y[0]] -= 52  # p of about 1e-23: below the threshold, but not zero
    outputs[:2, 1, y[1]] -= 60
    outputs = outputs.to(dtype).requires_grad_()
    value = losses.prob_averaged(stable=False)(outputs, y)
    (gradient,) = torch.autograd.grad(value.total, outputs)
    p = softmax(outputs.detach().numpy().astype(np.float64))
    mean = p.mean(0)
    clamped = np.maximum(mean[np.arange(B), y], 1e-20)
    assert value.total.item() == pytest.approx(-np.log(clamped).sum(), rel=1e-6)
    d_mean = np.zeros_like(mean)
    d_mean[np.arange(B), y] = -1 / clamped
    d_p = np.repeat(d_mean[None] / M, M, 0)
    expected = p * (d_p - (d_p * p).sum(-1, keepdims=True))
    assert np.abs(expected[:, 0]).max() > 1e-6  # where clamping in autograd would give nothing
    rtol = 1e-4 if dtype == torch.float32 else 1e-10
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=rtol, atol=1e-30)


def own_cross_entropies(outputs, y):
    return torch.stack([nn.functional.cross_entropy(z, y, reduction="none") for z in outputs])


def test_a_plain_function_of_outputs_and_labels_is_a_loss():
    outputs, y = problem(11)
    outputs.requires_grad_()
    loss, expected = losses.Loss("mine", own_cross_entropies), losses.independent()
    for sample_weights in (None, torch.rand(M, B, dtype=torch.float64)):
        got, want = loss(outputs, y, sample_weights), expected(outputs, y, sample_weights)
        assert got.total.item() == pytest.approx(want.total.item())
        torch.testing.assert_close(got.assignment, want.assignment)
        torch.testing.assert_close(got.losses, want.losses)
        assert not got.losses.requires_grad
        gradients = [torch.autograd.grad(value.total, outputs)[0] for value in (got, want)]
        torch.testing.assert_close(*gradients)


def test_a_function_of_four_arguments_is_a_loss_and_not_a_factory():
    loss = build_loss(configs.load("digits", ["loss.name=user_networks:weighted_squares"]))
    outputs, y = problem(14)
    expected = np.abs(softmax(outputs.numpy()) - np.eye(C)[y]) ** 2
    assert loss(outputs, y).total.item() == pytest.approx(expected.sum())


@pytest.mark.parametrize("power", [1, 2])
def test_a_config_may_name_a_plain_function(power):
    config = configs.load("digits", ["loss.name=user_networks:squared", f"loss.args.power={power}"])
    loss = build_loss(config)
    outputs, y = problem(14)
    expected = np.abs(softmax(outputs.numpy()) - np.eye(C)[y]) ** power
    assert loss(outputs, y).total.item() == pytest.approx(expected.sum())
    assert loss.options == {"power": power}


def test_a_run_is_evaluated_without_the_code_of_its_loss(mheads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "passing_loss.py").write_text("from mheads.losses import independent as mine")
    trained = mheads("train", "digits", "loss=passing_loss:mine", "data.limit=50", "optim.iterations=2", "--run", "run")
    assert trained.code == 0, trained.err
    (tmp_path / "passing_loss.py").unlink()
    monkeypatch.delitem(sys.modules, "passing_loss")
    assert mheads("eval", "run").code == 0
    assert mheads("train", "digits", "loss=passing_loss:mine", "--run", "other").code == 2


@pytest.mark.parametrize("name", losses.LOSSES)
def test_a_config_knows_the_options_of_a_loss_by_its_factory(name):
    factory = losses.LOSSES[name]
    known = options_of(factory)
    assert known.keys() == inspect.signature(factory).parameters.keys() - {"base_loss"}
    assert factory().options == {key: option.default for key, option in known.items()}
    config = configs.load("digits", [f"loss={name}"])
    assert build_loss(config).options == factory().options == config.loss.options


def test_only_arguments_that_say_what_they_mean_are_options():
    def odd(
        a: Annotated[Literal["x", "y"], Field(description="one")] = "x",
        b: int = 0,
        *,
        c: Annotated[list[float] | None, Field(description="two")] = None,
        d=3,
    ): ...

    found = options_of(odd)
    assert [(key, option.default, option.description) for key, option in found.items()] == [
        ("a", "x", "one"), ("c", None, "two"),
    ]  # fmt: skip


def test_an_option_has_a_default_and_a_description():
    def no_default(a: Annotated[int, Field(description="x")]): ...
    def no_description(a: Annotated[int, Field(ge=1)] = 1): ...
    def no_field(a: Annotated[int, 1] = 1): ...

    for factory in (no_default, no_description, no_field):
        with pytest.raises(TypeError, match=r"option a of no_\w+ needs a default and Field\(description=\.\.\.\)"):
            options_of(factory)


def test_losses_that_share_an_option_declare_it_alike():
    def other(k: Annotated[int, Field(ge=1, description="how many members learn from each example")] = 1): ...
    def third(k: Annotated[int, Field(ge=1, description="how many members learn from each example")] = 2): ...

    def fourth(k: Annotated[int, Field(ge=0, description="how many members learn from each example")] = 1): ...
    def fifth(k: Annotated[int, Field(ge=1, description="how many members are asked")] = 1): ...

    shared = options_by_key({"mcl": losses.mcl, "other": other, "fifth": fifth})["k"]
    assert shared.owners == ("mcl", "other", "fifth")
    said = "mcl, other: how many members learn from each example; fifth: how many members are asked"
    assert shared.description == said
    with pytest.raises(TypeError, match=r"mcl and third.* k, .*= 1 and .*= 2.*another name"):
        options_by_key({"mcl": losses.mcl, "third": third})
    with pytest.raises(TypeError, match=r"mcl and fourth.* k, .*ge=1.*ge=0"):
        options_by_key({"mcl": losses.mcl, "fourth": fourth})


def test_a_function_gets_what_it_asks_for():
    outputs, y = problem(12)
    sample_weights, ties = torch.rand(M, B), torch.rand(M, B)
    seen = []

    def two(outputs, y, gamma=2.0):
        seen.append(gamma)
        return own_cross_entropies(outputs, y)

    def three(outputs, y, sample_weights=None):
        seen.append(sample_weights)
        return own_cross_entropies(outputs, y)

    def four(outputs, y, p, t):
        seen.append((p, t))
        return own_cross_entropies(outputs, y)

    for function in (two, three, four):
        losses.Loss("mine", function)(outputs, y, sample_weights, ties)
    assert seen[0] == 2.0
    assert seen[1] is sample_weights
    assert seen[2][0] is sample_weights
    assert seen[2][1] is ties
    for function in (lambda outputs: outputs, lambda a, b, c, d, e: a):
        with pytest.raises(UserError, match=r"'odd' asks for [15] arguments.*\(outputs, y\)"):
            losses.Loss("odd", function)


WRONG = {
    "a mean": (lambda outputs, y: own_cross_entropies(outputs, y).mean(), r"\[\].*\[M, B\].*\[4, 6\].*reduction"),
    "a row": (lambda outputs, y: own_cross_entropies(outputs, y).sum(0), r"\[6\].*\[M, B\]"),
    "turned": (lambda outputs, y: own_cross_entropies(outputs, y).T, r"\[6, 4\].*\[M, B\]"),
    "whole numbers": (lambda outputs, y: own_cross_entropies(outputs, y).long(), r"int64.*float tensor"),
    "a number": (lambda outputs, y: own_cross_entropies(outputs, y).sum().item(), r"float;.*LossValue"),
    "nothing": (lambda outputs, y: None, r"NoneType;.*LossValue"),
    "no graph": (lambda outputs, y: own_cross_entropies(outputs.detach(), y), r"without a graph"),
    "a total that is none": (
        lambda outputs, y: losses.LossValue(torch.ones(M, B, requires_grad=True), torch.ones(M, B), torch.ones(M, B)),
        r"total of torch.float32 \[4, 6\]",
    ),
    "an assignment of another shape": (
        lambda outputs, y: losses.LossValue(outputs.sum(), torch.ones(B), torch.ones(M, B)),
        r"assignment of torch.float32 \[6\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_loss_is_explained(name):
    function, words = WRONG[name]
    outputs, y = problem(13)
    with pytest.raises(UserError, match=rf"loss 'mine' returns .*{words}"):
        losses.Loss("mine", function)(outputs.requires_grad_(), y)


@pytest.mark.parametrize(
    "loss", [losses.independent(), losses.mcl(k=1), losses.prob_averaged(), losses.Loss("mine", own_cross_entropies)]
)
@pytest.mark.parametrize("split", [None, "a"])
def test_a_loop_of_ones_own_with_any_optimizer(loss, split):
    def factory():
        return torch.nn.Sequential(
            OrderedDict(
                a=torch.nn.Linear(4, 8), act=torch.nn.Tanh(), drop=torch.nn.Dropout(0.1), b=torch.nn.Linear(8, C)
            )
        )

    torch.manual_seed(0)
    net = TreeNet(factory, members=3, split=split)
    x = torch.randn(60, 4)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    history = []
    for _ in range(40):
        total = loss(net(x), y).total / len(x)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        history.append(total.item())
    assert history[-1] < 0.5 * history[0]


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
