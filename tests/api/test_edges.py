"""What users give at the edges: other layouts and names of targets, tensors that numpy does not have, no numbers."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import mheads
from mheads import losses

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 4)).astype("f4"), np.arange(60) % 3
PATHS = RNG.normal(size=(60, 5, 2)).astype("f4")
QUICK = {"iterations": 5, "batch_size": 16}


def layers(outputs=3):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def net(outputs=3):
    return mheads.TreeNet(partial(layers, outputs), members=2)


def fit(*args, outputs=3, **how):
    return mheads.fit(net(outputs), *args, **{"train": (X, Y)} | QUICK | how)


def test_a_run_takes_targets_of_its_own_shape_alone():
    run = fit(outputs=10, train=(X, PATHS))
    distances = np.square(run.predict(X).numpy() - PATHS).reshape(2, 60, 10).sum(2)  # [M, N]
    assert run.evaluate(X, PATHS).distortion == pytest.approx(distances.min(0).mean(), rel=1e-5)
    assert run.evaluate(X, PATHS.reshape(60, 10)) == run.evaluate(X, PATHS)
    with pytest.raises(mheads.UserError, match=r"shape \[60, 2, 5\], but the network learns \[60, 5, 2\]"):
        run.evaluate(X, PATHS.transpose(0, 2, 1))
    flat = fit(outputs=10, train=(X, PATHS.reshape(60, 10)))
    with pytest.raises(mheads.UserError, match=r"shape \[60, 5, 2\], but the network learns \[60, 10\]"):
        flat.evaluate(X, PATHS)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ((np.array(["cat", "dog", "fox"])[Y],), (np.array(["ape", "bee", "cow"])[Y],), "classes .*cat.* there, .*ape"),
        ((Y, ["a", "b", "c"]), (Y, ["a", "b", "d"]), "classes .*'c'.* there, .*'d'"),
        ((PATHS.reshape(60, 10),), (PATHS,), r"the shape of targets \(\) there, \(5, 2\) now"),
    ],
)
def test_a_run_is_not_resumed_with_other_names_for_the_same_numbers(tmp_path, before, after, message):
    outputs = 10 if before[0].ndim > 1 else 3

    def train(y, classes=None, iterations=5):
        named = {} if classes is None else {"classes": classes}
        return fit(outputs=outputs, train=(X, y), test=(X, y), folder=tmp_path / "run", iterations=iterations, **named)

    train(*before)
    with pytest.raises(mheads.UserError, match=message):
        train(*after, iterations=9)
    assert train(*before, iterations=9).summary["iterations"] == 9


def test_a_run_that_learned_its_examples_is_measured_on_them_whatever_their_labels():
    images = RNG.random((60, 1, 4, 4)).astype("f4")
    tree = mheads.TreeNet(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 16)), members=2)
    given = {"train": (images, Y), "test": (images, Y), "problem": "examples", "normalize": "mean_image"}
    run = mheads.fit(tree, **given, **QUICK)
    for labels in (Y, np.array(["a", "b"] * 30)):
        assert run.evaluate(images, labels).single == pytest.approx(run.result.single, rel=1e-5)


def test_a_loss_of_ones_own_with_the_name_of_ours_stays_ones_own(tmp_path):
    def scored(outputs, y):
        return losses.cross_entropies(outputs, y) ** 2

    run = fit(scored, folder=tmp_path / "run")
    assert run.config.loss.name == "__main__:scored" and not run.config.loss.has_scores
    loaded = mheads.load(tmp_path / "run", partial(layers, 3))
    assert torch.equal(loaded.predict(X), run.predict(X))


def test_members_of_a_mixture_density_have_no_samples_of_their_own():
    class Density(nn.Module):
        gives_score = True

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            out = self.layer(x)
            return {"answer": (out[:, :1], out[:, 1:2]), "score": out[:, 2]}

    tree = mheads.TreeNet(Density, members=2)
    numbers = {"train": (X, X[:, :1]), "sampling": "bagging"}
    with pytest.raises(mheads.UserError, match="sampling is bagging, but with mixture_density all members learn from"):
        mheads.fit(tree, "mixture_density", **numbers, **QUICK)


def masked(shape, value):
    return np.ma.masked_array(np.full(shape, value), mask=np.arange(np.prod(shape)).reshape(shape) < 7)


SHARED = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit(sampling=masked((2, 60), 1.0), test=(X, Y)), "sample weights: 7 of 120 values .* are masked"),
        (lambda: fit(teacher=masked((60, 3), 1 / 3), test=(X, Y)), "answers: 7 of 180 values .* are masked"),
        (lambda: fit("mcl", train=(X.astype("f8") * 1e300, Y)), r"values as large as 3\.\d*e\+300, and .* float32"),
        (lambda: fit(train=(X, Y > 0), problem="multilabel"), r"y\[:, None\] for a single yes or no"),
        (lambda: mheads.evaluate(fit(), (X, Y), classes=["q"]), "leave classes, problem and batch_size out"),
        (lambda: mheads.TreeNet(lambda: SHARED, members=2, split="0"), "must build a network at each call"),
        (lambda: net().member("a"), "member 'a' of 2: they are counted"),
        (lambda: net().member(1.0), "member 1.0 of 2: they are counted"),
        (lambda: losses.relaxed(epsilon="a"), "loss.epsilon is a part of an example, from 0 to 1, not 'a'"),
        (lambda: losses.annealed(temperature="1"), "temperatures are above 0: loss.temperature is '1'"),
        (lambda: losses.annealed(floor=float("nan")), "temperatures are above 0: .* loss.floor nan"),
        (lambda: losses.evolving(until="a"), "loss.until is a part of the iterations, .* not 'a'"),
        (lambda: losses.mcl(ce_weight=None), "loss.ce_weight must be a finite number: None"),
        (lambda: losses.mcl(ce_weight=float("nan")), "loss.ce_weight must be a finite number: nan"),
        (lambda: losses.scored(score_weight=float("inf")), "loss.score_weight must be a finite number: inf"),
        (lambda: losses.confident(beta="b"), "loss.beta must be a finite number: 'b'"),
        (lambda: losses.mcl().with_scores("a"), "loss.scores must be a finite number: 'a'"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(mheads.UserError, match=message):
        call()


def test_members_that_share_more_than_a_trunk_are_told_from_a_parameter_on_both_sides_of_a_split():
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    with pytest.raises(mheads.UserError, match="on both sides of a split share a parameter"):
        mheads.TreeNet(tied, members=2, split="0")


def stack(items):
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


# bfloat16 holds these numbers exactly, so that all runs are the same.
NUMBERS, LABELS = torch.tensor(X).bfloat16(), torch.tensor(Y)


@pytest.mark.parametrize(
    "train",
    [
        (NUMBERS, LABELS),
        (NUMBERS.float().to_sparse(), LABELS),
        ([*NUMBERS], Y),
        [(x, int(y)) for x, y in zip(NUMBERS, Y, strict=True)],
        Subset(TensorDataset(NUMBERS, LABELS), range(60)),
        DataLoader(TensorDataset(NUMBERS.float().requires_grad_(), LABELS), batch_size=8, collate_fn=stack),
        DataLoader(TensorDataset(NUMBERS, LABELS), batch_size=8, collate_fn=stack),
    ],
)
def test_tensors_that_numpy_does_not_have_are_examples(train):
    test = (NUMBERS.float().numpy(), Y)
    run, plain = fit(train=train, test=test), fit(train=test, test=test)
    assert torch.equal(run.predict(test[0]), plain.predict(test[0]))
    assert torch.equal(run.predict([*NUMBERS]), plain.predict(test[0]))
