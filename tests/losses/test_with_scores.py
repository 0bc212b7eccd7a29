"""Scores beside any loss, temperatures relative to the loss at the start, and members as a mixture density network."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import mheads
from mheads import TreeNet, UserError, fit, losses, with_scores
from mheads.common.progress import Silent
from mheads.config import read as configs
from mheads.engine.stacked_stages import siblings_to_stack
from mheads.networks.mlp import mlp
from mheads.problems import densities
from mheads.runs.folder import RunFolder
from mheads.training.loop import train_config

M, B, C = 3, 8, 4
KIN = [losses.mcl(k=1), losses.relaxed(epsilon=0.2), losses.evolving().at(3, 12, M), losses.annealed(temperature=0.5)]


def scored_outputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    answer = torch.randn(M, B, C, generator=generator, dtype=torch.float64, requires_grad=True)
    score = (3 * torch.randn(M, B, generator=generator, dtype=torch.float64)).requires_grad_()
    weights = torch.randint(3, (M, B), generator=generator).double()
    return {"answer": answer, "score": score}, torch.randint(C, (B,), generator=generator), weights


@pytest.mark.parametrize("loss", KIN, ids=lambda loss: loss.name)
def test_scores_learn_who_does_best_and_leave_the_answers_alone(loss):
    outputs, y, weights = scored_outputs()
    plain, value = loss(outputs["answer"], y, weights), loss.with_scores(0.7)(outputs, y, weights)
    z, s, w = outputs["answer"].detach().numpy(), outputs["score"].detach().numpy(), weights.numpy()
    ce = np.log(np.exp(z).sum(-1)) - z[:, np.arange(B), y.numpy()]
    won = np.arange(M)[:, None] == np.where(w > 0, ce, np.inf).argmin(0)
    p = 1 / (1 + np.exp(-s))
    bce = -np.where(won & (w > 0), np.log(p), np.log(1 - p))
    assert value.total.item() == pytest.approx(plain.total.item() + 0.7 * (w * bce).sum(), rel=1e-12)
    assert torch.equal(value.assignment, plain.assignment)
    answer, score = torch.autograd.grad(value.total, list(outputs.values()))
    (alone,) = torch.autograd.grad(plain.total, [outputs["answer"]])
    torch.testing.assert_close(answer, alone)
    np.testing.assert_allclose(score, 0.7 * w * (p - (won & (w > 0))), rtol=1e-9)


def test_a_loss_with_scores_keeps_them_over_training_and_promises_less():
    loss = losses.evolving().with_scores(0.5)
    assert loss.at(11, 12, M).score_weight == 0.5 and loss.at(11, 12, M).winners is None
    assert losses.mcl(k=1).winners == 1 and losses.mcl(k=1).with_scores().winners is None
    assert losses.independent().separable and not losses.independent().with_scores().separable
    with pytest.raises(UserError, match="scored teaches scores by itself"):
        losses.scored().with_scores()
    with pytest.raises(UserError, match="must not be negative"):
        losses.mcl().with_scores(-1)
    with pytest.raises(UserError, match="loss relaxed needs a network that gives a score"):
        losses.relaxed().with_scores()(torch.zeros(M, B, C), torch.zeros(B, dtype=torch.long))


def test_any_loss_of_a_config_takes_scores_and_the_answer_is_weighted_by_them(tmp_path):
    keys = ["members=2", "optim.iterations=6", "data.limit=80", "loss=annealed", "loss.scores=0.5"]
    run = tmp_path / "run"
    result = train_config(configs.load("digits", keys), RunFolder(run), Silent())
    assert result["ensemble_scored"] > 0
    loaded = mheads.load(run)
    assert loaded.config.loss.scores == 0.5 and loaded.outputs(np.zeros((3, 1, 8, 8), np.uint8))[1].shape == (2, 3)


# Temperatures relative to the loss at the start.


def test_relative_temperatures_are_multiplied_by_the_loss_of_outputs_of_zero():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)).astype(np.float32), (7 * rng.normal(size=(60, 2))).astype(np.float32)
    weights = []
    for unit, relative in ((np.mean(np.square(y, dtype=np.float64)), False), (1, True)):
        loss = losses.annealed(temperature=0.5 * unit, floor=0.02 * unit, relative=relative)
        net = TreeNet(lambda: nn.Linear(3, 2), members=3, seed=1)
        fit(net, loss, train=(x, y), test=(x, y), iterations=10, lr=0.01)
        weights.append(torch.cat([p.flatten() for p in net.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)
    net = TreeNet(lambda: nn.Linear(3, 2), members=3, seed=1)
    fit(net, losses.annealed(temperature=0.5, floor=0.02), train=(x, y), test=(x, y), iterations=10, lr=0.01)
    assert not torch.allclose(torch.cat([p.flatten() for p in net.parameters()]), weights[0], rtol=1e-4)


def test_relative_temperatures_need_a_start_and_a_loss_above_zero():
    with pytest.raises(UserError, match=r"loss.in_units_of\(number\)"):
        losses.annealed(relative=True).at(0, 10, 2)
    outputs, y = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
    with pytest.raises(UserError, match=r"annealed with relative=True needs the .*in_units_of\(number\)\(outputs, y\)"):
        losses.annealed(relative=True)(outputs, y)
    scaled = losses.annealed(temperature=2, relative=True).in_units_of(3)(outputs, y).total
    assert (
        scaled == losses.annealed(temperature=6)(outputs, y).total != losses.annealed(temperature=2)(outputs, y).total
    )
    assert losses.annealed(temperature=2, relative=True).in_units_of(3).options["temperature"] == 6
    x = np.ones((20, 3), np.float32)
    with pytest.raises(UserError, match="outputs of 0 have the loss 0"):
        net = TreeNet(lambda: nn.Linear(3, 1), members=2)
        fit(net, losses.annealed(relative=True), train=(x, 0 * x[:, :1]), problem="regression", iterations=2)


# A mixture density network.


def mixture(seed=0, values=2):
    generator = torch.Generator().manual_seed(seed)
    mean, s = (torch.randn(M, B, values, generator=generator, dtype=torch.float64).requires_grad_() for _ in "ms")
    score = (2 * torch.randn(M, B, generator=generator, dtype=torch.float64)).requires_grad_()
    return mean, s, score, torch.randn(B, values, generator=generator, dtype=torch.float64)


def parts_in_numpy(mean, s, score, y):
    mean, s, score, y = (t.detach().numpy() for t in (mean, s, score, y))
    pi = 1 / (1 + np.exp(-score))
    return pi / pi.sum(0) * stats.norm.pdf(y, mean, np.exp(s / 2)).prod(-1)


def test_the_members_of_a_mixture_density_are_its_components():
    mean, s, score, y = mixture()
    outputs = {"answer": (mean, s), "score": score}
    value = losses.mixture_density()(outputs, y)
    parts = parts_in_numpy(mean, s, score, y)
    assert value.total.item() == pytest.approx(-np.log(parts.sum(0)).sum(), rel=1e-12)
    np.testing.assert_allclose(value.assignment, parts / parts.sum(0), rtol=1e-10)
    single = stats.norm.logpdf(y.numpy(), mean.detach().numpy(), np.exp(s.detach().numpy() / 2)).sum(-1)
    np.testing.assert_allclose(value.losses, -single, rtol=1e-10)

    def total(mean, s, score):
        return losses.mixture_density()({"answer": (mean, s), "score": score}, y).total

    assert torch.autograd.gradcheck(total, (mean, s, score))
    weights = torch.rand(M, B, dtype=torch.float64)
    weighted = losses.mixture_density()(outputs, y, weights)
    assert weighted.total.item() == pytest.approx(-(np.log(parts.sum(0)) * weights.numpy().mean(0)).sum(), rel=1e-12)
    equal = losses.mixture_density()((mean, s), y)
    assert equal.total.item() == pytest.approx(-np.log(np.exp(single).mean(0)).sum(), rel=1e-12)
    with pytest.raises(UserError, match="mixture_density: the network gives outputs of shape"):
        losses.mixture_density()(mean, y)


class Pair(nn.Module):
    def forward(self, x):
        return x.chunk(2, -1)


def test_a_mixture_density_learns_two_answers():
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (400, 1)).astype(np.float32)
    y = np.where(rng.random((400, 1)) < 0.25, 1, -1).astype(np.float32) * (0.5 + x)

    def network():
        return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2), Pair())

    net = TreeNet(with_scores(network), members=2, split="0", seed=0)
    run = fit(net, losses.mixture_density(), train=(x, y), test=(x, y), iterations=300, lr=0.03, optimizer="adam")
    assert run.result.oracle < 0.4 < run.result.ensemble_scored
    outputs, weights = run.outputs(x[:50])
    upper = outputs[:, :, 0].mean(1).argmax()
    assert weights[upper].mean().item() == pytest.approx(0.25, abs=0.1)


@pytest.mark.parametrize("loss", [losses.mixture_density(), losses.mcl(base_loss="gaussian_nll").with_scores()])
def test_members_with_variances_and_scores_run_as_one_stack(loss):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)).astype(np.float32), rng.normal(size=(60, 1)).astype(np.float32)
    outputs = []
    for stack in ("auto", "never"):
        net = TreeNet(with_scores(lambda: mlp(3, hidden=(8,), variance=True)), members=3, split="fc1", seed=0)
        assert siblings_to_stack(net, 20, stack) == ([net.tree.leaves] if stack == "auto" else [])
        run = fit(net, loss, train=(x, y), test=(x, y), iterations=20, batch_size=20, stack=stack, seed=0)
        outputs.append([*run.outputs(x), torch.tensor(run.result.nll)])
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# Voronoi cells.


def test_the_voronoi_density_gives_every_cell_its_probability():
    rng = np.random.default_rng(1)
    mean, s = torch.tensor(rng.normal(size=(4, 1, 1))), torch.tensor(rng.normal(size=(4, 1, 1)))
    pi = np.array([0.1, 0.2, 0.3, 0.4])
    grid = torch.linspace(-30, 30, 600_001, dtype=torch.float64)[:, None]
    many = [t.expand(4, len(grid), 1) for t in (mean, s)]
    log_weights = torch.tensor(pi).log()[:, None].expand(4, len(grid))
    density = densities.voronoi_log_density(*many, log_weights, grid).exp().numpy()
    nearest = np.abs(mean.numpy()[:, 0] - grid.numpy()[:, 0]).argmin(0)
    mass = [density[nearest == m].sum() * 1e-4 for m in range(4)]
    np.testing.assert_allclose(mass, pi, atol=2e-4)
    at = 310_000  # by hand, in the middle of a cell
    m, centres = nearest[at], np.sort(mean.numpy().ravel())
    place = np.searchsorted(centres, mean[m].item())
    borders = np.concatenate([[-np.inf], (centres[1:] + centres[:-1]) / 2, [np.inf]])
    kernel = stats.norm(mean[m].item(), np.exp(s[m].item() / 2))
    volume = kernel.cdf(borders[place + 1]) - kernel.cdf(borders[place])
    assert density[at] == pytest.approx(pi[m] * kernel.pdf(grid[at].item()) / volume, rel=1e-9)


def test_hypotheses_at_one_place_share_a_cell_and_tiny_cells_are_finite():
    mean = torch.tensor([1.0, 1.0, 1.0 + 1e-12], dtype=torch.float64)[:, None, None]
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()[:, None]
    y, zero = torch.tensor([[0.5]], dtype=torch.float64), torch.zeros(3, 1, 1, dtype=torch.float64)
    expected = 0.5 * stats.norm.pdf(0.5, 1) / 0.5  # half of the kernel lies below the third
    assert densities.voronoi_log_density(mean, zero, weights, y).exp().item() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="targets have one"):
        densities.voronoi_log_density(torch.zeros(2, 1, 2), torch.zeros(2, 1, 2), weights[:2], torch.zeros(1, 2))


class HeadFirst(nn.Module):
    """Its layers are not called in the order in which they are made, and one is not called at all."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        self.head, self.body, self.unused = nn.Linear(4, 3), nn.Linear(2, 4), nn.Linear(4, 1)
        self.both = both

    def forward(self, x):
        h = self.body(x).relu()
        return (self.head(h), self.unused(h)) if self.both else self.head(h)


class Undecided(HeadFirst):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


def test_the_score_stands_beside_the_layer_that_gives_the_output():
    for network in (HeadFirst(), with_scores(HeadFirst)()):
        scored = with_scores(network)
        outputs = scored(torch.ones(5, 2))
        assert outputs["answer"].shape == (5, 3) and torch.equal(outputs["score"], torch.zeros(5))
        assert "head.score.weight" in scored.state_dict()
    assert "head.score.weight" in with_scores(Undecided, layer="head")().state_dict()
    assert "unused.score.weight" in with_scores(Undecided)().state_dict()  # nothing tells that it is not called
    with pytest.raises(UserError, match="HeadFirst gives several values, and a score goes beside one answer"):
        with_scores(HeadFirst(both=True))
    with pytest.raises(UserError, match="layer = 'tail' is to give the answer of HeadFirst, and is no layer of it"):
        with_scores(HeadFirst, layer="tail")()


def test_what_no_loss_teaches_is_said(recwarn):
    x, y = torch.randn(20, 2).numpy(), np.arange(20) % 3

    def warnings_of(network, loss):
        recwarn.clear()
        fit(TreeNet(network, members=2), loss, train=(x, y), test=(x, y), iterations=1, batch_size=10)
        return " ".join(str(one.message) for one in recwarn)

    def own(outputs, targets):
        return nn.functional.cross_entropy(outputs[0].transpose(1, 2), targets.expand(2, -1), reduction="none")

    both = lambda: HeadFirst(both=True)  # noqa: E731
    assert "gives 2 values, but loss mcl uses only the first, the answer" in warnings_of(both, losses.mcl())
    assert "gives 2 values" not in warnings_of(both, losses.mcl(base_loss=own))
    assert "gives scores, but loss mcl does not train them" in warnings_of(with_scores(HeadFirst), losses.mcl())
    assert "gives scores" not in warnings_of(with_scores(HeadFirst), losses.mcl().with_scores())
    assert "gives scores" not in warnings_of(with_scores(HeadFirst), losses.scored())
