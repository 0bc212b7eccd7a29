"""The kin of MCL: who learns how much from an example, against numpy, and over training."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.one_step import engine_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mheads import TreeNet, UserError, fit, losses
from mheads.data.batches import Batch
from mheads.data.preprocessing import Preprocess

M, B, C = 4, 6, 5


def made(members=M, seed=0, rows=B):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(members, rows, C, generator=generator, dtype=torch.float64)
    return outputs, torch.randint(C, (rows,), generator=generator)


def cross_entropies(outputs, y):
    z = outputs.numpy()
    return (np.log(np.exp(z).sum(-1)) - z[:, np.arange(len(y)), y.numpy()]).reshape(z.shape[:2])


def relaxed_weights(ce, epsilon):
    """Each example by itself, as the formula says."""
    weights = np.zeros_like(ce)
    for i, column in enumerate(ce.T):
        able = np.flatnonzero(np.isfinite(column))
        if len(able):
            best = able[column[able].argmin()]
            weights[able, i] = epsilon / max(1, len(able) - 1)
            weights[best, i] = 1 - epsilon if len(able) > 1 else 1
    return weights


def evolving_weights(ce, k):
    weights = np.zeros_like(ce)
    for i, column in enumerate(ce.T):
        chosen = [m for m in np.argsort(column)[:k] if np.isfinite(column[m])]
        weights[chosen, i] = 1 / max(1, len(chosen))
    return weights


def annealed_weights(ce, temperature):
    able = np.isfinite(ce)
    e = np.where(able, np.exp(-np.where(able, ce, 0) / temperature), 0)
    return e / np.maximum(e.sum(0), 1e-300)


RULES = {
    "relaxed": (losses.relaxed(epsilon=0.2), lambda ce: relaxed_weights(ce, 0.2)),
    "relaxed, all to the others": (losses.relaxed(epsilon=1), lambda ce: relaxed_weights(ce, 1.0)),
    "evolving, at first": (losses.evolving(), lambda ce: evolving_weights(ce, len(ce))),
    "evolving, on the way": (losses.evolving(until=1).at(6, 10, M), lambda ce: evolving_weights(ce, 3)),
    "evolving, at last": (losses.evolving().at(9, 10, M), lambda ce: evolving_weights(ce, 1)),
    "annealed, at first": (losses.annealed(temperature=0.7), lambda ce: annealed_weights(ce, 0.7)),
    "annealed, on the way": (
        losses.annealed(temperature=4, floor=0.25, until=1).at(5, 10, M),
        lambda ce: annealed_weights(ce, 1.0),
    ),
    "annealed, at last": (losses.annealed().at(5, 10, M), lambda ce: evolving_weights(ce, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("some_may_not", [False, True])
def test_weights_total_and_gradient_are_those_of_numpy(name, some_may_not):
    loss, weights = RULES[name]
    outputs, y = made()
    sample_weights = None
    ce = cross_entropies(outputs, y)
    if some_may_not:  # nobody may learn from example 0, one member from 1, two from 2
        sample_weights = 0.5 + torch.rand(M, B, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for i, able in enumerate((0, 1, 2)):
            sample_weights[able:, i] = 0
    w = np.ones((M, B)) if sample_weights is None else sample_weights.numpy()
    expected = weights(np.where(w > 0, ce, np.inf)) * w
    value = loss(outputs.requires_grad_(), y, sample_weights)
    np.testing.assert_allclose(value.assignment, expected, rtol=1e-12)
    assert value.total.item() == pytest.approx((expected * ce).sum(), rel=1e-12)
    (gradient,) = torch.autograd.grad(value.total, outputs)
    # No gradient goes through the weights: they are numbers, as in the finite differences here.
    flat = outputs.detach().numpy().reshape(-1)
    for at in range(0, flat.size, 11):
        step = np.eye(1, flat.size, at)[0] * 1e-6
        up, down = (cross_entropies(torch.tensor((flat + s * step).reshape(M, B, C)), y) for s in (1, -1))
        slope = (expected * (up - down)).sum() / 2e-6
        assert gradient.reshape(-1)[at].item() == pytest.approx(slope, rel=1e-6, abs=1e-9)


@given(
    members=st.integers(1, 5), scale=st.floats(0, 1e30), temperature=st.floats(1e-30, 1e30), seed=st.integers(0, 99),
    floor=st.floats(1e-37, 1e30), at=st.integers(0, 19), until=st.floats(1e-3, 1), absent=st.floats(0, 1),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_weights_of_an_example_add_to_one_whatever_the_losses(
    members, scale, temperature, seed, floor, at, until, absent
):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(members, 8, 2, generator=generator) * scale
    y = torch.zeros(8, 2)
    sample_weights = (torch.rand(members, 8, generator=generator) >= absent).float()
    loss = losses.annealed(temperature, floor, base_loss="mae", until=until)
    linear = losses.annealed(temperature, floor, "linear", until, base_loss="mae")
    for rule in (loss, linear, losses.evolving(until, base_loss="mae"), losses.relaxed(0.3, base_loss="mae")):
        value = rule.at(at, 20, members)(outputs, y, sample_weights)
        assert torch.isfinite(value.assignment).all()
        assert (value.assignment[sample_weights == 0] == 0).all()
        somebody = (sample_weights.sum(0) > 0).float()
        torch.testing.assert_close(value.assignment.sum(0), somebody, atol=1e-5, rtol=0)


@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("until", [0.3, 1.0])
def test_evolving_falls_from_all_members_to_one_by_ones(members, until):
    loss = losses.evolving(until=until)
    ks = [loss.at(t, 40, members).winners for t in range(40)]
    assert ks[0] == members
    assert set(np.diff(ks)) <= {0, -1}
    reached = [t for t, k in enumerate(ks) if k == 1]
    if members == 1 or until < 1:
        assert ks[-1] == 1
    if until == 0.3 and members > 1:
        assert reached[0] == 12
    assert losses.evolving(until=until).at(40, 40, members).winners == 1


def test_evolving_falls_on_time_where_until_has_no_exact_float():
    assert [losses.evolving(until=0.07).at(t, 100, 4).winners for t in (0, 2, 3, 4, 5, 6, 7)] == [4, 4, 3, 3, 2, 2, 1]


@pytest.mark.parametrize(("fall", "middle"), [("exponential", 0.2), ("linear", 1.01)])
def test_annealed_cools_to_its_floor_and_is_hard_from_there(fall, middle):
    loss = losses.annealed(temperature=2, floor=0.02, fall=fall, until=0.5)

    def temperature(t):
        return loss.at(t, 100, M).function.keywords["temperature"]

    assert temperature(0) == 2
    assert temperature(25) == pytest.approx(middle)
    falling = [temperature(t) for t in range(50)]
    assert all(a > b for a, b in pairwise(falling))
    assert falling[-1] > 0.02
    outputs, y = made()
    for t in range(50, 100, 10):
        assert loss.at(t, 100, M).winners == 1
        assert torch.equal(loss.at(t, 100, M)(outputs, y).assignment, losses.mcl(k=1)(outputs, y).assignment)
    assert losses.annealed(temperature=0.1, floor=1).at(0, 10, M).winners == 1  # cold from the start


def test_a_member_alone_learns_everything():
    outputs, y = made(members=1)
    whole = losses.independent()(outputs, y).total.item()
    for loss in (losses.relaxed(), losses.evolving(), losses.annealed()):
        assert loss(outputs, y).total.item() == pytest.approx(whole)


def test_relaxed_without_relaxation_is_mcl():
    outputs, y = made()
    ties = torch.rand(M, B)
    relaxed, mcl = losses.relaxed(epsilon=0), losses.mcl(k=1)
    assert torch.equal(relaxed(outputs, y, ties=ties).assignment, mcl(outputs, y, ties=ties).assignment)
    assert relaxed.winners == mcl.winners
    assert losses.relaxed().winners is None  # all learn: nothing can be left out


def layers():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


SPLIT = {"0": [{"2": 2}, 1]}


@pytest.mark.parametrize("name", ["relaxed", "evolving", "annealed"])
@pytest.mark.parametrize("at", [0, 5, 19])
@pytest.mark.parametrize("bagged", [False, True])
def test_the_engine_teaches_a_tree_of_numbers_what_autograd_does(name, at, bagged):
    """Whether or not rows are left out, for a loss and a target that it was not written for."""
    net = TreeNet(layers, tree=SPLIT, seed=3).double()
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(23, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(23, 2, generator=generator, dtype=torch.float64)
    ties = torch.rand(3, 23, generator=generator)
    sample_weights = torch.randint(3, (3, 23), generator=generator).double() if bagged else None
    loss = losses.LOSSES[name](base_loss="mae").at(at, 20, 3)
    report, found = engine_gradients(net, loss, Batch(x, y, Preprocess(), sample_weights, ties))
    value = loss(net(x), y, sample_weights, ties)
    assert report.loss == pytest.approx(value.total.item() / 23, rel=1e-12)
    named = [(stage, p) for stage in found for p in net.stage(stage).parameters()]
    expected = torch.autograd.grad(value.total / 23, [p for _, p in named])
    flat = [g for stage in found for g in found[stage]]
    for one, other in zip(flat, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.relaxed(epsilon=1.5), "loss.epsilon is a part of an example, from 0 to 1, not 1.5"),
        (lambda: losses.evolving(until=0), "loss.until is a part of the iterations, above 0 and at most 1, not 0"),
        (lambda: losses.annealed(until=2), "loss.until is a part of the iterations"),
        (lambda: losses.annealed(temperature=0), "temperatures are above 0: loss.temperature is 0, loss.floor 0.01"),
        (lambda: losses.annealed(fall="cubic"), "loss.fall is exponential or linear, not 'cubic'"),
    ],
)
def test_options_that_mean_nothing_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_fit_follows_the_schedule_after_pretraining_and_does_not_resume_another(tmp_path):
    x = torch.randn(60, 3)
    y = x[:, :2].abs()
    options = {"train": (x, y), "pretrain": 4, "log": {"every": 1}, "batch_size": 20, "folder": tmp_path / "run"}

    def net():
        return TreeNet(layers, members=3)

    run = fit(net(), losses.evolving(until=1), iterations=6, **options)
    loss = [line["loss"] for line in run.history.steps]
    singles = [sum(line["member_losses"]) / 3 for line in run.history.steps]
    assert loss[3] == pytest.approx(3 * singles[3], rel=1e-5)  # independent: the sum over members
    assert loss[4] == pytest.approx(singles[4], rel=1e-5)  # k = 3 of 3, divided by k
    assert loss[-1] < 0.999 * singles[-1]  # k < 3: the best of them
    with pytest.raises(UserError, match="the loss follows a schedule of 6 iterations there, of 9 iterations now"):
        fit(net(), losses.evolving(until=1), iterations=9, **options)


def test_members_that_start_alike_are_parted_by_a_loss_that_hardens():
    x, y = torch.randn(40, 3), torch.randn(40, 2)
    for loss in (losses.evolving(), losses.annealed()):
        run = fit(TreeNet(layers, members=2, init="same"), loss, train=(x, y), iterations=12, batch_size=10)
        first, second = (torch.cat([p.flatten() for p in run.net.member(m).parameters()]) for m in (0, 1))
        assert not torch.equal(first, second)
    with pytest.raises(UserError, match="identical for ever"):
        fit(TreeNet(layers, members=2, init="same"), losses.independent(), train=(x, y), iterations=2)
