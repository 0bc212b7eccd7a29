"""loss.normalize=wins: the loss of each member is the mean over what it won, of a batch that is not cut."""

import numpy as np
import pytest
import torch
from helpers.one_step import engine_gradients
from torch import nn

from mheads import TreeNet, UserError, fit, losses
from mheads.config import read as configs
from mheads.data.batches import Batch
from mheads.data.preprocessing import Preprocess
from mheads.losses.normalize import normalize_assignment
from mheads.training.build_from_config import count_micro_batches
from mheads.training.experiment import build_experiment

M, B = 3, 12


def made(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(M, B, 2, generator=generator, dtype=torch.float64), torch.zeros(B, 2, dtype=torch.float64)


@pytest.mark.parametrize("bagged", [False, True])
@pytest.mark.parametrize("name", ["mcl", "relaxed", "evolving", "annealed"])
def test_each_member_has_the_mean_over_its_wins(name, bagged):
    outputs, y = made()
    sample_weights = (
        torch.randint(1, 3, (M, B), generator=torch.Generator().manual_seed(1)).double() if bagged else None
    )
    ties = torch.rand(M, B)
    loss = losses.LOSSES[name](normalize="wins", base_loss="mse").at(19, 20, M)
    by_batch = losses.LOSSES[name](base_loss="mse").at(19, 20, M)(outputs, y, sample_weights, ties)
    value = loss(outputs, y, sample_weights, ties)
    torch.testing.assert_close(value.assignment, by_batch.assignment)  # who learns what is the same
    a, errors = by_batch.assignment.numpy(), (outputs.numpy() ** 2).mean(-1)
    means = [np.average(errors[m], weights=a[m]) for m in range(M)]
    assert value.mean.item() == pytest.approx(sum(means), rel=1e-12)


def test_the_mixture_and_the_scores_are_of_the_whole_batch():
    outputs, y = made(2)
    ties = torch.rand(M, B)
    won, every = losses.mcl(k=1, normalize="wins", base_loss="mse"), losses.independent(base_loss="mse")
    mixed = losses.mcl(k=1, ce_weight=0.3, normalize="wins", base_loss="mse")
    expected = won(outputs, y, ties=ties).total + 0.3 * every(outputs, y).total
    assert mixed(outputs, y, ties=ties).total.item() == pytest.approx(expected.item(), rel=1e-12)
    given = {"answer": outputs, "score": torch.randn(M, B, dtype=torch.float64)}
    scored = losses.scored(normalize="wins", base_loss="mse")(given, y, ties=ties).total
    by_batch = (
        losses.scored(base_loss="mse")(given, y, ties=ties).total
        - losses.mcl(k=1, base_loss="mse")(outputs, y, ties=ties).total
    )
    assert scored.item() == pytest.approx((won(outputs, y, ties=ties).total + by_batch).item(), rel=1e-12)


@pytest.mark.parametrize("name", ["mcl", "scored"])
@pytest.mark.parametrize("zeros", [False, True])
def test_what_all_members_learn_is_weighted_by_the_sample_weights(name, zeros):
    """sum of w (B a / sum of w a) l, and of what does not depend on wins, w times it: all by numpy."""
    outputs, y = made(4)
    sample_weights = torch.randint(0 if zeros else 1, 4, (M, B), generator=torch.Generator().manual_seed(5)).double()
    sample_weights[:, 0] = 0 if zeros else 1  # an example that nobody may learn from
    score = torch.randn(M, B, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    w, s, errors = sample_weights.numpy(), score.numpy(), (outputs.numpy() ** 2).mean(-1)
    won = (np.where(w > 0, errors, np.inf).argmin(0) == np.arange(M)[:, None]) * (w > 0)
    if name == "mcl":
        value = losses.mcl(k=1, ce_weight=0.3, normalize="wins", base_loss="mse")(outputs, y, sample_weights)
        every = 0.3 * errors
    else:
        given = {"answer": outputs, "score": score}
        value = losses.scored(k=1, score_weight=0.7, normalize="wins", base_loss="mse")(given, y, sample_weights)
        every = 0.7 * (np.logaddexp(0, s) - won * s)  # -a log sigmoid(s) - (1 - a) log sigmoid(-s)
    shares = w * won / (w * won).sum(1, keepdims=True)
    expected = (B * shares * errors + w * every).sum()
    assert value.total.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("tiny", [1e-37, 1e-39, 1e-45])
def test_a_member_that_wins_next_to_nothing_has_numbers(tiny):
    """As under annealed, where the weights of a poor member fall through all sizes."""
    assignment = torch.tensor([[tiny, tiny, 0], [1, 1, 1.0]])
    weights = normalize_assignment(assignment, "wins")
    torch.testing.assert_close(weights, torch.tensor([[1.5, 1.5, 0], [1, 1, 1.0]]))


def test_a_member_that_wins_nothing_learns_nothing():
    outputs, y = made(3)
    outputs[0] += 100
    outputs.requires_grad_()
    value = losses.mcl(k=1, normalize="wins", base_loss="mse")(outputs, y)
    (gradient,) = torch.autograd.grad(value.total, outputs)
    assert (gradient[0] == 0).all()
    assert torch.isfinite(gradient).all()
    assert (gradient[1:].abs().sum((1, 2)) > 0).all()


def layers():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.mark.parametrize("k", [1, 2])
def test_the_gradient_that_enters_a_trunk_is_scaled_for_each_member(k):
    net = TreeNet(layers, tree={"0": [{"2": 2}, 1]}, seed=3).double()
    x = torch.randn(23, 3, dtype=torch.float64)
    y, ties = torch.randn(23, 2, dtype=torch.float64), torch.rand(3, 23)
    loss = losses.mcl(k=k, normalize="wins", base_loss="mae")
    _, found = engine_gradients(net, loss, Batch(x, y, Preprocess(), None, ties), micro_batches=1)
    value = loss(net(x), y, None, ties)
    stages = [net.stage(stage) for stage in found]
    expected = torch.autograd.grad(value.total / 23, [p for stage in stages for p in stage.parameters()])
    for one, other in zip([g for gradients in found.values() for g in gradients], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_the_batch_is_not_cut():
    def config(*more):
        return configs.load("digits", ["loss=mcl", "loss.normalize=wins", "optim.batch_size=400", *more])

    built = build_experiment(config())
    assert count_micro_batches(built.config, built.net) == 1
    assert count_micro_batches(config("loss.normalize=batch"), built.net) > 1
    assert count_micro_batches(config("loss=independent"), built.net) > 1  # which has no such option
    for key in ("engine.micro_batches=2", "optim.accumulate=2"):
        with pytest.raises(UserError, match=r"whole batches.*cut into 2 parts: use "):
            build_experiment(config(key))


@pytest.mark.parametrize("name", ["mcl", "relaxed", "evolving", "annealed"])
def test_every_loss_trains_by_wins(name):
    """Also one that changes over training, whose form at an iteration needs the whole batch as much."""
    loss = losses.LOSSES[name](normalize="wins", base_loss="mse")
    assert loss.at(3, 10, 2).whole_batch
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    run = fit(TreeNet(layers, members=2), loss, train=(x, x[:, :2]), batch_size=20, iterations=3, micro_batches=1)
    assert run.result.examples


def test_a_loss_of_ones_own_may_need_the_whole_batch_too():
    def centred(outputs, y):
        found = (outputs - y).square().mean(-1)
        return found / found.detach().mean(1, keepdim=True)

    loss = losses.Loss("centred", centred, whole_batch=True)
    x = torch.randn(300, 3)
    options = {"train": (x, x[:, :2]), "batch_size": 200, "iterations": 2}
    with pytest.raises(UserError, match=r"centred looks at whole batches, .* use micro_batches=1 \(it is 2\)$"):
        fit(TreeNet(layers, members=2), loss, micro_batches=2, **options)
    assert fit(TreeNet(layers, members=2), loss, **options).result.examples


def test_other_words_are_refused():
    with pytest.raises(UserError, match=r"loss.normalize is batch or wins, not 'win'"):
        losses.mcl(normalize="win")
    with pytest.raises(UserError, match=r"loss\.normalize"):
        configs.load("digits", ["loss.normalize=win"])


def test_runs_from_before_the_option_are_resumed():
    """What a run keeps of its loss says nothing of an option that is at its default."""
    built = build_experiment(configs.load("digits", ["loss=mcl", "data.limit=20", "members=2"]))
    (values,) = [entry["values"] for entry in built.identity()["loss"]["code"].values()]
    assert values == {"k": "1", "ce_weight": "0.0"}
