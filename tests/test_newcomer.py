"""What a newcomer does in Python: mistakes are told, and nothing goes wrong without a word."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import mheads
from mheads import TreeNet, UserError, fit

TABLE = (torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3)


def small(outputs=3):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def test_a_run_whose_net_was_trained_on_warns_and_can_be_brought_back(tmp_path, recwarn):
    net = TreeNet(small, members=2)
    first = fit(net, train=TABLE, test=TABLE, iterations=5, lr=0.1, run=tmp_path / "first")
    said = first.predict(TABLE[0])
    fit(net, train=TABLE, test=TABLE, iterations=5, lr=0.1, run=tmp_path / "first")  # finished: the same weights again
    first.predict(TABLE[0]), copy.deepcopy(first).predict(TABLE[0]), pickle.loads(pickle.dumps(first)).predict(TABLE[0])
    assert not [w for w in recwarn if "have changed since the run" in str(w.message)]
    second = fit(net, train=TABLE, test=TABLE, iterations=5, lr=0.1)
    for ask in (lambda: first.predict(TABLE[0]), lambda: first.evaluate(*TABLE), lambda: first.member(0)):
        with pytest.warns(
            UserWarning, match=r"weights of this net have changed since the run.*mheads.load\(run.folder"
        ):
            ask()
    assert torch.equal(mheads.load(first.folder, small).predict(TABLE[0]), said)
    assert not torch.equal(second.predict(TABLE[0]), said)


class WithParameters(nn.Module):
    def __init__(self, learns=True):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=learns)

    def forward(self, outputs, y):
        return mheads.losses.cross_entropies(outputs * self.scale, y)


class Counting:
    def __init__(self):
        self.calls, self.factor = 0, None

    def __call__(self, outputs, y):
        self.calls += 1
        return mheads.losses.cross_entropies(outputs, y) * (1 + self.calls / 20)


class SetUp(Counting):
    def __call__(self, outputs, y):
        if self.factor is None:
            self.factor = 2.0
        return mheads.losses.cross_entropies(outputs, y) * self.factor


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (WithParameters(), "has parameters of its own, which nothing would train"),
        (Counting(), "for the same again.*keeps something from call to call.*function of the iteration"),
        (lambda o, y: mheads.losses.cross_entropies(o, y) * torch.rand(()), "it draws random numbers"),
        (Counting, "loss 'Counting' is a class: call it"),
    ],
)
def test_losses_that_would_go_wrong_without_a_word_are_refused(loss, words):
    with pytest.raises(UserError, match=words):
        fit(TreeNet(small, members=2), loss, train=TABLE, test=TABLE, iterations=2)


@pytest.mark.parametrize("loss", [WithParameters(learns=False), SetUp()])
def test_losses_that_set_themselves_up_are_taken(loss):
    assert fit(TreeNet(small, members=2), loss, train=TABLE, test=TABLE, iterations=2).result.oracle >= 0


def test_probabilities_in_the_place_of_logits_are_told():
    def softmaxed():
        return nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1))

    with pytest.warns(UserWarning, match="softmaxed gives probabilities, and they are taken for logits"):
        fit(TreeNet(softmaxed, members=2), train=TABLE, test=TABLE, iterations=2)
    with pytest.warns(UserWarning, match="the models give probabilities.*the logarithm of the probabilities"):
        told = mheads.evaluate([softmaxed(), softmaxed()], TABLE)
    assert len(told.members) == 2  # measured all the same


def test_models_trained_elsewhere_may_differ_in_precision_and_give_arrays():
    one, other = small(), small().double()
    both = mheads.evaluate([one, other], TABLE)
    alone = [mheads.evaluate(model, TABLE).members[0] for model in (one, other)]
    assert both.members == pytest.approx(alone)
    assert mheads.evaluate([lambda x: (x[:, :3] * 0 + 1).numpy(), one], TABLE).members[0] == pytest.approx(100 / 3)


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([small(), small(5)], r"one shape: model 0 gives \(60, 3\), model 1 gives \(60, 5\) for 60 examples"),
        ([small(), nn.Linear(7, 3)], r"model 1 \(Linear\) fails on examples of shape \[60, 4\] with RuntimeError"),
        ([lambda x: (small()(x), 1)], r"model 0 \(<lambda>\) gives (.|\n)*each model must give logits as a tensor"),
    ],
)
def test_models_that_do_not_go_together_are_named(models, words):
    with pytest.raises(UserError, match=words):
        mheads.evaluate(models, TABLE)


def test_sequences_labels_from_one_and_single_examples_are_told_what_to_do():
    x, y = torch.randn(12, 3, 20), torch.arange(12) % 4

    def convolution():
        return nn.Sequential(nn.Conv1d(3, 8, 5), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4))

    with pytest.raises(UserError, match=r"taken as grey images.*sequences \[N, C, T\], begin with .*squeeze\(1\)"):
        fit(TreeNet(convolution, members=2), train=(x, y), test=(x, y), iterations=2)
    with pytest.raises(UserError, match="numbered from 0: is 3 the last one, or do labels start at 1"):
        fit(TreeNet(small, members=2), train=(TABLE[0], TABLE[1] + 1), test=TABLE, iterations=2)
    with pytest.raises(UserError, match=r"each of .*3 classes has one example, so none can be held out: give test="):
        fit(TreeNet(small, members=2), train=(TABLE[0][:3], TABLE[1][:3]), iterations=2)
    wide = np.zeros((10, 8, 10, 3), np.uint8)
    with pytest.raises(UserError, match=r"looks like \[N, H, W, C\]"):
        fit(TreeNet(lambda: nn.Sequential(nn.Flatten(), nn.Linear(240, 4)), members=2), train=(wide, y[:10]))


def test_tables_of_objects_are_taken_as_numbers_or_the_entry_is_named():
    x, y = TABLE[0].numpy(), TABLE[1].numpy()
    plain = fit(TreeNet(small, members=2), train=(x, y), test=(x, y), iterations=3)
    boxed = fit(TreeNet(small, members=2), train=(x.astype(object), y.astype(object)), test=(x, y), iterations=3)
    assert boxed.result.to_dict() == plain.result.to_dict()
    holes = x.astype(object)
    holes[7, 2] = None
    with pytest.raises(UserError, match=r"train examples are objects.*at \[7, 2\] there is None; encode"):
        fit(TreeNet(small, members=2), train=(holes, y), test=(x, y), iterations=3)


def test_a_number_of_classes_is_not_their_names():
    with pytest.raises(UserError, match=r"classes=3: give their names in order, such as \['cat', 'dog'\]"):
        fit(TreeNet(small, members=2), train=TABLE, test=TABLE, classes=3, iterations=3)
