"""Members that say which examples are theirs: the loss, the heads, the one answer and where it stands."""

import csv
import json
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
import user_networks
from safetensors.torch import load_file
from torch import nn

import mheads as package
from mheads import TreeNet, UserError, fit, losses, with_scores
from mheads import networks as models
from mheads.common.nested_values import leaves
from mheads.common.progress import Silent
from mheads.config import read as configs
from mheads.problems import Classification, MultiLabel, Regression, Segmentation, SoftLabels
from mheads.report.shown_run import ShownRun
from mheads.runs.folder import RunFolder
from mheads.runs.read_run import Record
from mheads.training.loop import train_config
from mheads.trees import member_scores

M, B, C = 3, 6, 4


def outputs_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    answer = torch.randn(M, B, C, generator=generator, dtype=torch.float64)
    score = torch.randn(M, B, generator=generator, dtype=torch.float64) * 3
    return {"answer": answer, "score": score}, torch.randint(C, (B,), generator=generator)


def reference(answer, score, y, k, weight, w):
    """(total, wins) example by example."""
    total, won = 0.0, np.zeros(score.shape)
    for i in range(answer.shape[1]):
        ce = np.log(np.exp(answer[:, i]).sum(-1)) - answer[:, i, y[i]]
        able = [m for m in np.argsort(ce) if w[m, i] > 0]
        for m in range(len(answer)):
            won[m, i] = m in able[:k]
            p = 1 / (1 + np.exp(-score[m, i]))
            bce = -np.log(p) if won[m, i] else -np.log(1 - p)
            total += w[m, i] * (won[m, i] * ce[m] + weight * bce)
    return total, won * w


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("some_may_not", [False, True])
def test_total_wins_and_gradients_are_those_of_numpy(k, some_may_not):
    outputs, y = outputs_of(k)
    generator = torch.Generator().manual_seed(5)
    sample_weights = torch.randint(3, (M, B), generator=generator).double() if some_may_not else None
    w = np.ones((M, B)) if sample_weights is None else sample_weights.numpy()
    leaves = [t.requires_grad_() for t in outputs.values()]
    value = losses.scored(k=k, score_weight=0.7)(outputs, y, sample_weights)
    answer, score = (t.detach().numpy() for t in leaves)
    total, won = reference(answer, score, y.numpy(), k, 0.7, w)
    assert value.total.item() == pytest.approx(total, rel=1e-12)
    np.testing.assert_array_equal(value.assignment, won)
    gradients = torch.autograd.grad(value.total, leaves)
    for leaf, gradient in zip((0, 1), gradients, strict=True):
        size = gradient.numel()
        for at in range(0, size, 5):
            step = np.eye(1, size, at)[0].reshape(gradient.shape) * 1e-6
            moved = [(answer + s * step, score) if leaf == 0 else (answer, score + s * step) for s in (1, -1)]
            up, down = (reference(*one, y.numpy(), k, 0.7, w)[0] for one in moved)
            assert gradient.flatten()[at].item() == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-8)
        if some_may_not:
            assert (gradient[sample_weights == 0] == 0).all()


def test_weights_are_normalised_sigmoids_and_finite_for_scores_of_any_size():
    outputs, _ = outputs_of()
    p = 1 / (1 + np.exp(-outputs["score"].numpy()))
    np.testing.assert_allclose(member_scores.weights(outputs), p / p.sum(0), rtol=1e-12)
    extreme = {"answer": torch.zeros(2, 3, 4), "score": torch.tensor([[-1e30, 1e30, -2000.0], [-1e30, -1e30, -1000.0]])}
    found = member_scores.weights(extreme)
    torch.testing.assert_close(found, torch.tensor([[0.5, 1, 0], [0.5, 0, 1]], dtype=torch.float64))
    assert member_scores.weights(torch.zeros(2, 3, 4)) is None
    with pytest.raises(UserError, match=r"scores of shape \[2, 3, 4\], not one number for each example, \[2, 3\]"):
        member_scores.weights({"answer": torch.zeros(2, 3, 4), "score": torch.zeros(2, 3, 4)})


# The heads.


@pytest.mark.parametrize("name", sorted(models.NETWORKS))
def test_every_network_by_name_gets_a_head_and_keeps_its_names(name):
    with torch.device("meta"):
        factory = partial(models.NETWORKS[name], **({"features": 3} if name == "mlp" else {}))
        plain, scored = factory(), with_scores(factory)()
    shape = models.INPUT_SHAPES.get(name)
    added = set(scored.state_dict()) - set(plain.state_dict())
    assert set(plain.state_dict()) < set(scored.state_dict())
    assert len(added) == 2
    assert all(".score." in key for key in added)
    if shape is not None:
        x = torch.empty(2, *shape, device="meta", dtype=torch.int64 if name == "text" else torch.float32)
        found = scored.eval()(x)
        assert found["answer"].shape == plain.eval()(x).shape
        assert found["score"].shape == (2,)


class Nested(nn.Module):
    """Its last layer is deep inside, and a layer that it uses early is registered last."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
        self.top = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 4), nn.Flatten()))
        self.scale = nn.Hardtanh()

    def forward(self, x):
        return self.top(self.body(self.scale(x)) + 0)


class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 4)

    def forward(self, x):
        return self.out(x).log_softmax(-1)


class Halves(nn.Module):
    def forward(self, x):
        return x.chunk(2, -1)


class Own(nn.Module):
    gives_score = True

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 5)

    def forward(self, x):
        h = self.out(x)
        return {"answer": h[:, :4], "score": h[:, 4:]}


NUMBERS = (torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 4)


@pytest.mark.filterwarnings("ignore:.* gives scores, but loss")
@pytest.mark.parametrize("factory", [Nested, Own])
@pytest.mark.parametrize("loss", [losses.scored(), losses.mcl(k=1), losses.independent()])
def test_networks_of_a_users_own_train_with_a_score_by_any_loss(factory, loss):
    net = TreeNet(with_scores(factory), members=2)
    run = fit(net, loss, train=NUMBERS, test=NUMBERS, iterations=3, batch_size=20)
    assert run.result.ensemble_scored is not None
    drawn, plain = (TreeNet(f, members=2, seed=0).state_dict() for f in (with_scores(factory), factory))
    assert all(torch.equal(plain[key], drawn[key]) for key in plain)  # a head changes no weight beside it


def test_a_pair_of_numbers_and_a_score():
    x = NUMBERS[0]
    net = TreeNet(with_scores(lambda: nn.Sequential(nn.Linear(3, 4), Halves())), members=2)
    run = fit(
        net, losses.scored(base_loss="gaussian_nll"), train=(x, x[:, :2]), pretrain=2, iterations=3, batch_size=20
    )
    assert run.result.ensemble_scored < 10


def test_a_network_without_a_last_layer_is_told_how_to_give_a_score():
    for factory, words in (
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), "last layer of Sequential is a LayerNorm"),
        (lambda: nn.Sequential(nn.Flatten()), "Sequential has no last layer to put a score beside"),
    ):
        with pytest.raises(UserError, match=rf"{words}.*return .*\"answer\".*gives_score = True"):
            TreeNet(with_scores(factory), members=2)
    with pytest.raises(UserError, match=r"loss scored needs a network that gives a score.*with_scores\(factory\)"):
        fit(TreeNet(Nested, members=2), losses.scored(), train=NUMBERS, iterations=2)
    with pytest.raises(UserError, match=r"fails on .*dict.*gives_score = True"):
        fit(TreeNet(with_scores(Squeezed), members=2), losses.scored(), train=NUMBERS, iterations=2)


class Reversed(Own):
    def forward(self, x):
        h = self.out(x)
        return {"score": h[:, 4:], "answer": h[:, :4]}


@pytest.mark.parametrize("loss", [losses.scored(), losses.confident(), losses.prob_averaged()])
def test_a_score_before_the_answer_is_refused(loss):
    with pytest.raises(UserError, match=r'Reversed gives {"score": ..., "answer": ...}: put the answer first'):
        fit(TreeNet(Reversed, members=2), loss, train=NUMBERS, iterations=2)


# The one answer.


def weighted(values, weights):
    return (values * weights.reshape(*weights.shape, *[1] * (values.ndim - 2))).sum(0)


def softmax(z, axis):
    e = np.exp(z - z.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def measured(problem, answers, y, weights):
    metrics = problem.metrics(len(answers), scored=True)
    for rows in (slice(0, 2), slice(2, None)):
        metrics.update(torch.tensor(answers[:, rows]), torch.tensor(y[rows]), torch.tensor(weights[:, rows]))
    result = metrics.result()
    assert problem.result_type.from_dict(result.to_dict()).ensemble_scored == pytest.approx(
        result.ensemble_scored, rel=1e-4
    )
    assert "Ensemble-Scored" in result.headline()
    assert "Ensemble-Scored" in dict(problem.rows(result.to_dict()))
    return result


@pytest.fixture
def drawn():
    rng = np.random.default_rng(3)
    weights = rng.random((M, 9))
    return rng, weights / weights.sum(0)


def test_the_scored_answer_to_classes(drawn):
    rng, weights = drawn
    z, y = rng.normal(size=(M, 9, C)), rng.integers(C, size=9)
    p = weighted(softmax(z, -1), weights)
    for problem, targets in ((Classification(("a",) * C), y), (SoftLabels(("a",) * C), np.eye(C)[y])):
        result = measured(problem, z, targets, weights)
        assert result.ensemble_scored == pytest.approx(100 * (p.argmax(-1) == y).mean())
        assert result.nll["ensemble_scored"] == pytest.approx(-np.log(p[np.arange(9), y]).mean())
        assert result.top_k["ensemble_scored"][-1] == pytest.approx(
            100 * np.mean([y[i] in np.argsort(-p[i])[:M] for i in range(9)])
        )
        assert result.calibration_error["ensemble_scored"] > 0
        torch.testing.assert_close(problem.mean(torch.tensor(z), torch.tensor(weights)), torch.tensor(p))


def test_the_scored_answer_in_numbers(drawn):
    rng, weights = drawn
    z, y = rng.normal(size=(M, 9, 2)), rng.normal(size=(9, 2))
    result = measured(Regression(2), z, y, weights)
    errors = weighted(z, weights) - y
    assert result.ensemble_scored == pytest.approx(np.sqrt((errors**2).mean()))
    assert result.mae["ensemble_scored"] == pytest.approx(np.abs(errors).mean())
    plain = Regression(2).metrics(M)
    plain.update(torch.tensor(z), torch.tensor(y))
    expected = plain.result()
    assert expected.ensemble_scored is None
    assert "ensemble_scored" not in expected.to_dict()
    for name in ("members", "single", "ensemble_mean", "oracle", "spread", "spread_correlation"):
        assert getattr(result, name) == pytest.approx(getattr(expected, name))


def test_the_scored_answer_to_pixels_and_labels(drawn):
    rng, weights = drawn
    z, y = rng.normal(size=(M, 9, C, 2, 3)), rng.integers(C, size=(9, 2, 3))
    result = measured(Segmentation(("a",) * C, (2, 3)), z, y, weights)
    answer = weighted(softmax(z, 2), weights).argmax(1)
    assert result.pixel_accuracy["ensemble_scored"] == pytest.approx(100 * (answer == y).mean())
    z, y = rng.normal(size=(M, 9, C)), rng.integers(2, size=(9, C)).astype(float)
    result = measured(MultiLabel(("a",) * C), z, y, weights)
    said = weighted(1 / (1 + np.exp(-z)), weights) > 0.5
    expected = 2 * (said * y).sum() / (said.sum() + y.sum())
    assert result.f1_micro["ensemble_scored"] == pytest.approx(100 * expected)


# A run.

SMALL = [
    "model=user_networks:with_dropout", "members=3", "data.limit=150", "optim.batch_size=50", "optim.iterations=12",
    "optim.lr=0.05", "engine.micro_batches=2", "log.every=6", "log.evaluate_every=6",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    for name, loss in (("plain", "mcl"), ("scored", "scored")):
        train_config(configs.load("digits", [*SMALL, f"loss={loss}"]), RunFolder(folder / name), Silent())
    return folder


def test_the_scored_answer_stands_in_every_file(trained, mheads):
    run = trained / "scored"
    result = json.loads((run / "result.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line["result"] for line in lines if "result" in line]
    assert [e["ensemble_scored"] for e in evaluations][-1] == result["ensemble_scored"]
    assert "ensemble_scored" not in json.loads((trained / "plain/result.json").read_text())
    done = mheads("eval", run, "--trust", "--outputs", trained / "out.npz")
    assert done.code == 0, done.err
    assert "Ensemble-Scored" in done.out
    with np.load(trained / "out.npz") as file:
        z, y, weights = file["outputs"], file["labels"], file["weights"]
    answer = weighted(softmax(z.astype(float), -1), weights).argmax(-1)
    assert 100 * (answer == y).mean() == pytest.approx(result["ensemble_scored"], abs=1e-4)


def test_the_page_is_about_the_answer_that_it_begins_with(trained, mheads):
    """Confusions, hardest examples and reliability show the scored answer, and the plain mean beside it."""
    record = Record.read(trained / "scored")
    found = ShownRun(record, trust=True).evidence
    assert found.together == ["Ensemble-Scored", "Ensemble-Mean"]
    result, examples = record.result, record.result["examples"]
    right = [100 * np.trace(counts) / examples for counts in found.confusion]
    told = [result["ensemble_scored"], result["ensemble_mean"], *result["members"]]
    np.testing.assert_allclose(right, told, atol=1e-4)
    assert [answer.who for answer in found.hardest[0].answers][:3] == ["scored", "mean", "member 0"]
    bins = found.reliability["Ensemble-Scored"]
    mean = np.nansum(np.array(bins["accuracy"]) * bins["examples"]) / examples
    assert mean == pytest.approx(result["ensemble_scored"], abs=1e-4)
    done = mheads("report", trained / "scored", "--trust", "-o", trained / "scored.html")
    assert done.code == 0, done.err
    page = (trained / "scored.html").read_text()
    assert page.index(">Ensemble-Scored</option>") < page.index(">Ensemble-Mean</option>")
    assert "<title>Ensemble-Scored</title>" in page.partition('<section id="reliability"')[2]
    assert mheads("plot", "reliability", trained / "scored", "--trust", "-o", trained / "r.png").code == 0


def test_predict_and_export_give_the_answer_of_the_run_and_the_mean_beside_it(trained, mheads, tmp_path):
    x = np.random.default_rng(0).integers(0, 17, (12, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "x.npz", x=x)
    run = package.load(trained / "scored", user_networks.with_dropout)
    expected = run.answer(x[:, None])
    outputs, weights = run.outputs(x[:, None])
    torch.testing.assert_close(expected, weighted(outputs.double().softmax(-1), weights))
    shown = mheads("predict", trained / "scored", tmp_path / "x.npz", "--trust")
    assert "row Ensemble-Scored Ensemble-Mean agree" in " ".join(shown.out.split()), shown.err
    done = mheads("predict", trained / "scored", tmp_path / "x.npz", "--trust", "-o", tmp_path / "answers.csv")
    assert done.code == 0, done.err
    with (tmp_path / "answers.csv").open() as file:
        rows = list(csv.DictReader(file))
    mean = outputs.double().softmax(-1).mean(0)
    assert (expected - mean).abs().max() > 1e-3  # scores matter
    for prefix, p in (("", expected), ("mean_", mean)):
        assert [int(row[f"{prefix}answer"]) for row in rows] == p.argmax(-1).tolist()
        assert [float(row[f"{prefix}probability"]) for row in rows] == pytest.approx(p.amax(-1).tolist(), rel=1e-4)
    agree = (outputs.argmax(-1) == expected.argmax(-1)).double().mean(0)
    assert [float(row["agreement"]) for row in rows] == pytest.approx(agree.tolist(), rel=1e-4)
    assert mheads("predict", trained / "scored", tmp_path / "x.npz", "--trust", "-o", tmp_path / "a.npz").code == 0
    with np.load(tmp_path / "a.npz") as file:
        np.testing.assert_allclose(file["probabilities"], expected, rtol=1e-6)
        np.testing.assert_allclose(file["mean_probabilities"], mean, rtol=1e-6)
        np.testing.assert_allclose(file["weights"], weights)
    done = mheads("export", trained / "scored", "--trust", "-o", tmp_path / "answer.pt2")
    assert "answer.pt2: scored; the run itself gives the same within" in " ".join(done.out.split()), done.err
    wanted = {"answer": expected, "scored": expected, "mean": mean}
    wanted["hypotheses"] = [part.transpose(0, 1) for part in run.hypotheses(x[:, None])]
    for what, want in wanted.items():
        file = tmp_path / "answer.pt2" if what == "answer" else run.export(tmp_path / "other.pt2", what)
        found = torch.export.load(file).module()(torch.from_numpy(x[:, None]))
        for one, own in zip(leaves(found), leaves(want), strict=True):
            torch.testing.assert_close(one.double(), own, rtol=1e-4, atol=1e-6)
    plain = package.load(trained / "plain", user_networks.with_dropout)
    with pytest.raises(UserError, match=r"what='scored'.*has no scores"):
        plain.export(tmp_path / "no.pt2", "scored")


@pytest.mark.parametrize("given", ["run", "file"])
def test_scores_start_fresh_where_the_weights_have_none(trained, mheads, tmp_path, given):
    init = trained / "plain" if given == "run" else trained / "plain/model.safetensors"
    command = ["train", "digits", *SMALL, "loss=scored", f"init={init}", "optim.iterations=1", "optim.lr=1e-30"]
    done = mheads(*command, "--run", tmp_path / "run")
    assert done.code == 0, done.err
    before, after = load_file(trained / "plain/model.safetensors"), load_file(tmp_path / "run/model.safetensors")
    assert all(torch.equal(before[key], after[key]) for key in before)
    fresh = [after[key] for key in after if key not in before]
    assert len(fresh) == 6
    assert all(t.abs().max() < 1e-20 for t in fresh)


def test_surgery_and_members_keep_their_scores(trained):
    run = package.load(trained / "scored", user_networks.with_dropout)
    x = torch.rand(5, 1, 8, 8)
    kept = run.net.keep([0, 2]).eval()
    torch.testing.assert_close(kept(x)["score"], run.net(x)["score"][[0, 2]])
    assert run.member(1)(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))["score"].shape == (2,)


def test_a_tree_of_pixels_with_scores_learns_whose_images_are_whose():
    x = torch.rand(80, 2, 6, 5, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0.5).long() + (x[:, 1] > 0.5).long()

    def factory():
        layers = OrderedDict(
            first=nn.Conv2d(2, 6, 1), relu=nn.ReLU(), second=nn.Conv2d(6, 6, 1), out=nn.Conv2d(6, 3, 1)
        )
        return nn.Sequential(layers)

    net = TreeNet(with_scores(factory), tree={"first": [{"second": 2}, 1]})
    run = fit(net, losses.scored(), train=(x, y), test=(x, y), iterations=10, batch_size=40, problem="segmentation")
    assert 0 < run.result.ensemble_scored <= 100
    assert run.outputs(x)[1].shape == (3, 80)
