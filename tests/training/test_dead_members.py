"""Members that have stopped to answer are named while training goes on; those that answer are not."""

import re

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import mheads
from mheads import losses
from mheads.networks import NETWORKS
from mheads.training.dead_members import constant_members, idle_warning


def test_members_with_the_same_answer_to_everything_are_found():
    answers = torch.randn(4, 8, 3)
    answers[1] = answers[1, :1]  # one answer to everything
    answers[2] = 0.0
    answers[3] = 1000 + torch.rand(8, 3) * 1e-5  # which float32 rounds away
    assert constant_members(answers) == [1, 2, 3]
    answers[3, 5, 2] += 0.01
    assert constant_members(answers) == [1, 2]
    assert constant_members(torch.full((1, 6), 7.0)) == [0]  # one number each
    assert constant_members(torch.full((1, 6, 2, 5, 5), 7.0)) == [0]  # pixels
    assert constant_members(torch.full((1, 6, 2), torch.nan)) == []  # which has a message of its own
    assert constant_members(torch.zeros(2, 1, 3)) == []  # one example says nothing
    nearly = 0.5 + torch.tensor([[0.0, 0.01], [0.0, 0.1]])[..., None]
    assert constant_members(nearly, 0.02, relative=False) == [0]


def digits(count=300):
    data = load_digits()
    return (data.images[:count, None] / 16).astype(np.float32), data.target[:count]


@pytest.mark.parametrize("loss", [mheads.losses.independent(), mheads.losses.mcl(k=1)], ids=["independent", "mcl"])
def test_a_network_that_died_is_named_with_the_iteration(loss):
    with pytest.warns(UserWarning) as caught:
        mheads.fit(
            mheads.TreeNet(NETWORKS["digits"], 2), loss, train=digits(), test=digits(50), iterations=20, lr=30.0,
            log={"every": 5},
        )  # fmt: skip
    said = [str(one.message) for one in caught]
    assert len([text for text in said if text.startswith("iteration 5: members 0, 1 give the same answer")]) == 1
    assert all("lower lr" in text for text in said)  # in the words of fit


def test_numbers_that_no_longer_depend_on_the_input_are_named():
    x = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)

    class Dead(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 1)
            nn.init.constant_(self.a.bias, -1e3)  # no unit ever answers

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    with pytest.warns(UserWarning) as caught:
        mheads.fit(mheads.TreeNet(Dead, 1), mheads.losses.independent(), train=(x, x[:, :1]), iterations=2, lr=0.01)
    (said,) = caught  # once, though there are two iterations
    assert str(said.message).startswith("iteration 1: member 0 gives the same answer to every input")


class Biases(nn.Module):
    """Scores that hardly depend on the input."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(64, 10)
        nn.init.normal_(self.score.weight, std=1e-4)
        self.score.weight.requires_grad_(False)

    def forward(self, x):
        return self.score(x.flatten(1))


def train_biases(loss):
    x, y = digits(1000)
    options = {"train": (x, y), "test": (x, y), "iterations": 100, "lr": 0.5, "log": {"evaluate_every": 0}}
    with pytest.warns(UserWarning) as caught:
        run = mheads.fit(mheads.TreeNet(Biases, 4), loss, **options)
    return [str(one.message) for one in caught], run.result


def test_members_that_give_one_class_each_are_told_from_an_oracle():
    """Under MCL, members that have a bias alone learn to give one class each, as specialists may."""
    (said,), result = train_biases(mheads.losses.mcl(k=1))
    assert re.match(r"iteration 100: the Oracle is .* always give one class each have .*collapsed", said)
    assert "annealed" in said and "pretrain" not in said  # which saved fewer members: docs/hypotheses.md
    mixed = next(text for text in train_biases(mheads.losses.mcl(k=1, ce_weight=4))[0] if "collapsed" in text)
    assert "loss.ce_weight=4 makes steps up to 5 times as large" in mixed and "annealed" not in mixed
    most = 100 * np.sort(np.bincount(digits(1000)[1]))[-4:].sum() / 1000
    assert result.oracle <= result.oracle_chance == pytest.approx(most)


def test_a_network_that_learns_no_more_than_its_biases_is_named():
    said, _ = train_biases(mheads.losses.independent())
    assert said[0].startswith("iteration 100: members 0, 1, 2, 3 give the same answer to every input")


def test_members_that_learn_are_not_warned_of():
    x, y = digits(300)
    run = mheads.fit(
        mheads.TreeNet(NETWORKS["digits"], 4, split="conv1"), mheads.losses.mcl(k=1), train=(x, y), test=(x, y),
        iterations=120, lr=0.02, log={"every": 10},
    )  # fmt: skip
    assert run.result.oracle > run.result.oracle_chance


def test_what_helps_is_what_the_loss_has():
    by_loss = {name: idle_warning([0], 5, losses.LOSSES[name]().options) for name in ("mcl", "relaxed", "annealed")}
    assert ["loss=annealed" in told for told in by_loss.values()] == [True, True, False]
    assert "a higher loss.temperature" in by_loss["annealed"]
    assert "normalize_targets" not in by_loss["mcl"]
    assert "data.normalize_targets=true, loss=annealed" in idle_warning([0], 5, losses.mcl().options, far=True)


def test_fit_names_what_helps_in_the_words_of_python(capsys):
    x, log = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32), {"idle_after": 2, "every": 1}
    y = 100 + x[:, 0]  # so far away that the first member to come nearer wins everything
    net = mheads.TreeNet(lambda: nn.Sequential(nn.Linear(2, 1)), members=3)
    mheads.fit(net, "mcl", train=(x, y), test=(x, y), batch_size=100, iterations=20, lr=0.01, log=log, show=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "normalize_targets=True, mheads.losses.annealed(relative=True, temperature=0.5, floor=0.001)" in said
    assert "a batch of 100 holds each of the 64 training examples 1.56 times: with batch_size=64 it would" in said
    assert not re.search(r"\b(loss|data|optim)\.", said.replace("mheads.losses.", ""))
