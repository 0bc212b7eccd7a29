"""A loss of one's own sees real outputs on all examples, also those that a member does not learn from."""

import numpy as np
import pytest
import torch
from helpers.one_step import engine_gradients
from torch import nn

import mheads
from mheads.common.errors import UserError
from mheads.data.batches import Batch
from mheads.losses import Loss, LossValue, mcl
from mheads.losses.ensemble_loss import ones_or

M, B, LAMBDA = 4, 40, 0.5


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def case(seed=0):
    """A tree in float64, a batch of numbers, and sample weights as bagging gives them: many are 0."""
    torch.manual_seed(seed)
    net = mheads.TreeNet(mlp, M).double()
    x, y = torch.randn(B, 5, dtype=torch.float64), torch.randn(B, 3, dtype=torch.float64)
    sample_weights = torch.from_numpy(np.random.default_rng(seed).poisson(1.0, (M, B)).astype(float))
    assert (sample_weights == 0).double().mean() > 0.2
    batch = Batch(x, y, lambda raw, dtype: raw, sample_weights=sample_weights, ties=torch.rand(M, B))
    return net, batch


def negative_correlation(outputs, y):
    """Liu and Yao 1999: each member's error, less how far it is from the mean of all."""
    mean = outputs.mean(0, keepdim=True)
    return (outputs - y).square().sum(-1) - LAMBDA * (outputs - mean).square().sum(-1)


def cosine(outputs, y):
    """A loss with a norm, which has no gradient where outputs are 0."""
    return 1 - (outputs * y).sum(-1) / (outputs.norm(dim=-1) * y.norm(dim=-1))


def centred(outputs, y):
    """A loss of the whole batch: outputs are compared with their mean over it."""
    return (outputs - outputs.mean(1, keepdim=True) - y).square().sum(-1)


def dense(net, batch, losses):
    """The gradients of all members by plain autograd on all rows."""
    outputs = torch.stack([net.member(m)(batch.inputs) for m in range(M)])
    total = (batch.sample_weights * losses(outputs, batch.targets)).sum() / B
    total.backward()
    return total.item(), {name: p.grad for name, p in net.named_parameters()}


def assert_equal(net, gradients, expected):
    for stage, found in gradients.items():
        names = [name for name, _ in net.named_parameters() if name.startswith(f"stages.{stage}.")]
        for name, gradient in zip(names, found, strict=True):
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("losses", [negative_correlation, cosine])
def test_a_loss_of_ones_own_with_bagging_is_that_of_all_rows(losses, micro_batches):
    net, batch = case()
    report, gradients = engine_gradients(net, Loss("own", losses), batch, micro_batches=micro_batches)
    total, expected = dense(net, batch, losses)
    assert report.loss == pytest.approx(total, rel=1e-12)
    assert_equal(net, gradients, expected)


def test_a_loss_of_the_whole_batch_sees_all_of_it():
    net, batch = case()
    _, gradients = engine_gradients(net, Loss("own", centred, whole_batch=True), batch, micro_batches=1)
    assert_equal(net, gradients, dense(net, batch, centred)[1])


@pytest.mark.parametrize("base_loss", [cosine, centred])
def test_a_member_loss_of_ones_own_sees_all_rows_too(base_loss):
    net, batch = case()
    base_loss.whole_batch = base_loss is centred
    _, gradients = engine_gradients(net, mcl(k=2, base_loss=base_loss), batch, micro_batches=1)

    def chosen(outputs, y):
        found = base_loss(outputs, y)
        order = found.detach().masked_fill(batch.sample_weights == 0, torch.inf).argsort(0).argsort(0)
        return found * (order < 2)

    assert_equal(net, gradients, dense(net, batch, chosen)[1])


def test_rows_are_left_out_where_the_loss_says_that_it_masks():
    """And only there: what the network is given tells."""
    seen = []

    class Counting(nn.Linear):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    def rows(loss):
        torch.manual_seed(0)
        _, batch = case()
        net = mheads.TreeNet(lambda: nn.Sequential(Counting(5, 3)), M).double()
        seen.clear()
        engine_gradients(net, loss, batch, micro_batches=1)
        return max(seen)

    def squares(outputs, y):
        return (outputs - y).square().sum(-1)

    assert rows(mheads.losses.independent(base_loss="mse")) < B
    assert rows(Loss("own", squares, masks=True)) < B
    assert rows(Loss("own", squares)) == B
    assert rows(mheads.losses.independent(base_loss=squares)) == B
    squares.masks = True
    assert rows(mheads.losses.independent(base_loss=squares)) < B


def with_bagging(loss, **options):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)).astype(np.float32), rng.normal(size=(60, 3)).astype(np.float32)
    return mheads.fit(
        mheads.TreeNet(mlp, 3), loss, train=(x, y), test=(x, y), iterations=4, batch_size=20, lr=0.01,
        sampling="bagging", **options,
    )  # fmt: skip


def test_a_loss_that_promises_to_mask_and_does_not_is_refused_before_training():
    with pytest.raises(UserError, match=r"loss 'own' promises masks=True, .* leave masks out"):
        with_bagging(Loss("own", negative_correlation, masks=True))

    def masked(outputs, y, sample_weights, ties):
        weights = ones_or(sample_weights, outputs[..., 0])
        there = (weights > 0)[..., None]
        mean = (outputs * there).sum(0) / there.sum(0).clamp_min(1)
        losses = (outputs - y).square().sum(-1) - LAMBDA * ((outputs - mean) * there).square().sum(-1)
        return LossValue((weights * losses).sum(), weights, losses)

    assert np.isfinite(with_bagging(Loss("own", masked, masks=True)).result.oracle)


@pytest.mark.parametrize(
    "loss", [Loss("own", cosine), mheads.losses.independent(base_loss=cosine)], ids=["loss", "base_loss"]
)
def test_a_loss_with_a_norm_trains_with_bagging(loss):
    assert np.isfinite(with_bagging(loss).result.oracle)


def test_a_member_loss_of_whole_batches_needs_no_option():
    def over_batch(outputs, y):
        return (outputs - outputs.mean(1, keepdim=True) - y).square().sum(-1)

    with pytest.raises(
        UserError, match=r"base_loss = .*over_batch.* looks at the whole batch .*: function.whole_batch = True$"
    ):
        with_bagging(mcl(k=1, base_loss=over_batch))
    over_batch.whole_batch = True
    assert np.isfinite(with_bagging(mcl(k=1, base_loss=over_batch)).result.oracle)
    with pytest.raises(UserError, match=r"over_batch.* cut into 2 parts: use micro_batches=1 \(it is 2\)$"):
        with_bagging(mcl(k=1, base_loss=over_batch), micro_batches=2)
