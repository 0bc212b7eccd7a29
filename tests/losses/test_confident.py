"""Confident MCL against numpy: who wins, and how the others are taught not to know."""

import numpy as np
import pytest
import torch
from helpers.one_step import engine_gradients
from torch import nn

from mheads import TreeNet, UserError, fit, losses
from mheads.data.batches import Batch
from mheads.data.preprocessing import Preprocess

M, B, C = 4, 6, 5


def log_softmax(z):
    return z - np.log(np.exp(z).sum(2, keepdims=True))


def reference(z, y, k, beta, w):
    """(total, assignment) example by example."""
    total, won = 0.0, np.zeros(z.shape[:2])
    logs = log_softmax(z)
    for i in range(z.shape[1]):
        ce = -logs[:, i, y[i]]
        kl = -np.log(z.shape[2]) - logs[:, i].mean(1)
        able = [m for m in np.argsort(ce - beta * kl) if w[m, i] > 0]
        for m in range(len(z)):
            won[m, i] = m in able[:k]
            total += w[m, i] * (ce[m] if won[m, i] else beta * kl[m])
    return total, won * w


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("beta", [0.0, 0.75, 2.0])
@pytest.mark.parametrize("some_may_not", [False, True])
def test_total_assignment_and_gradient_are_those_of_numpy(k, beta, some_may_not):
    generator = torch.Generator().manual_seed(k)
    z = torch.randn(M, B, C, generator=generator, dtype=torch.float64)
    y = torch.randint(C, (B,), generator=generator)
    sample_weights = torch.randint(3, (M, B), generator=generator).double() if some_may_not else None
    w = np.ones((M, B)) if sample_weights is None else sample_weights.numpy()
    loss = losses.confident(k=k, beta=beta)
    value = loss(z.requires_grad_(), y, sample_weights)
    total, won = reference(z.detach().numpy(), y.numpy(), k, beta, w)
    assert value.total.item() == pytest.approx(total, rel=1e-12)
    np.testing.assert_array_equal(value.assignment, won)
    (gradient,) = torch.autograd.grad(value.total, z)
    for at in range(0, z.numel(), 13):
        step = np.eye(1, z.numel(), at)[0].reshape(z.shape) * 1e-6
        up, down = (reference(z.detach().numpy() + s * step, y.numpy(), k, beta, w)[0] for s in (1, -1))
        assert gradient.flatten()[at].item() == pytest.approx((up - down) / 2e-6, rel=1e-6, abs=1e-9)
    if some_may_not:
        assert (gradient[sample_weights == 0] == 0).all()


def test_the_assignment_is_the_one_with_the_smallest_loss():
    generator = torch.Generator().manual_seed(9)
    z, y = torch.randn(3, 1, C, generator=generator) * 3, torch.tensor([2])
    logs = log_softmax(z.double().numpy())
    ce, kl = -logs[:, 0, 2], -np.log(C) - logs[:, 0].mean(1)
    choices = [ce[m] + 0.75 * (kl.sum() - kl[m]) for m in range(3)]
    value = losses.confident()(z, y)
    assert value.total.item() == pytest.approx(min(choices), rel=1e-5)
    assert value.assignment[:, 0].argmax() == np.argmin(choices)


def test_pixels_that_do_not_count_teach_nothing():
    z = torch.randn(2, 3, C, 4, 4, dtype=torch.float64, requires_grad=True)
    y = torch.randint(C, (3, 4, 4))
    y[0, :2] = -100
    value = losses.confident()(z, y)
    (gradient,) = torch.autograd.grad(value.total, z)
    assert (gradient[:, 0, :, :2] == 0).all()
    assert (gradient[:, 0, :, 2:] != 0).any(1).all()
    flat = z.detach().numpy()[:, 0, :, 2:].reshape(2, C, 8).transpose(0, 2, 1)
    one = [
        reference(flat[:, p : p + 1], y[0, 2:].reshape(-1)[p : p + 1].numpy(), 2, 0.75, np.ones((2, 1)))[0]
        for p in range(8)
    ]
    alone = losses.confident(k=2)(z[:, :1], y[:1])  # both win: the mean of the pixels' cross-entropies
    assert alone.total.item() == pytest.approx(np.mean(one))


def test_scores_of_any_size_give_finite_gradients():
    z = (torch.randn(M, B, C) * 1e4).requires_grad_()
    value = losses.confident()(z, torch.arange(B) % C)
    (gradient,) = torch.autograd.grad(value.total, z)
    assert torch.isfinite(value.total)
    assert torch.isfinite(gradient).all()


def test_all_rows_learn_in_the_engine_though_one_member_wins_each():
    net = TreeNet(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, C)), members=3, split="0").double()
    x, y = torch.randn(17, 3, dtype=torch.float64), torch.arange(17) % C
    loss, ties = losses.confident(), torch.rand(3, 17)
    _, found = engine_gradients(net, loss, Batch(x, y, Preprocess(), None, ties))
    expected = torch.autograd.grad(loss(net(x), y, ties=ties).total / 17, list(net.parameters()))
    named = dict(zip((name for name, _ in net.named_parameters()), expected, strict=True))
    for stage, gradients in found.items():
        names = [name for name, _ in net.stage(stage).named_parameters()]
        for name, gradient in zip(names, gradients, strict=True):
            torch.testing.assert_close(gradient, named[f"stages.{stage}.{name}"], rtol=1e-10, atol=1e-14)


def test_a_member_that_lost_an_example_becomes_unsure_there():
    x = torch.randn(200, 2)
    y = (x[:, 0] > 0).long()

    def net():
        return TreeNet(lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)), members=2)

    def certainty(loss):
        """Of those that are wrong."""
        run = fit(net(), loss, train=(x, y), test=(x, y), iterations=60, lr=0.3, log={"evaluate_every": 0})
        p = run.predict(x).softmax(-1)
        wrong = p.argmax(-1) != y
        return p.amax(-1)[wrong].mean().item() if wrong.any() else 0.0

    assert certainty(losses.confident()) < 0.75 < certainty(losses.mcl(k=1))


def test_numbers_have_no_classes_to_be_unsure_of():
    x, y = torch.randn(20, 3), torch.randn(20, 2)
    net = TreeNet(lambda: nn.Sequential(nn.Linear(3, 2)), members=2)
    with pytest.raises(UserError, match="confident teaches probabilities of classes, and the targets are floats"):
        fit(net, losses.confident(), train=(x, y), iterations=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "loss.k must be a whole number, at least 1, not 0"),
        ({"beta": -1}, "loss.beta must not be negative: -1"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        losses.confident(**options)
