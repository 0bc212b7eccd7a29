"""What a newcomer does in Python: mistakes are told, and nothing goes wrong without a word."""

import copy
import pickle
import re

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
    first = fit(net, train=TABLE, test=TABLE, iterations=5, lr=0.1, folder=tmp_path / "first")
    said = first.predict(TABLE[0])
    fit(
        net, train=TABLE, test=TABLE, iterations=5, lr=0.1, folder=tmp_path / "first"
    )  # finished: the same weights again
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
        (Counting(), "for the same outputs: .*keeps state between calls.*changes over training use Loss"),
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


class Named(nn.Module):
    """Gives its logits by a name, or as what `give` makes of them."""

    def __init__(self, give):
        super().__init__()
        self.net, self.give = small(), give

    def forward(self, x):
        return self.give(self.net(x))


def test_models_whose_outputs_have_another_form_are_refused():
    named, other = Named(lambda z: {"logits": z}), Named(lambda z: {"scores": z})
    one, two = Named(lambda z: (z,)), Named(lambda z: [z, z])
    start = "all models must give outputs of one shape: "
    for models, words in (
        ([small(), named], "model 0 gives (60, 3), model 1 gives {'logits': (60, 3)} for 60 examples"),
        ([named, small()], "model 0 gives {'logits': (60, 3)}, model 1 gives (60, 3) for 60 examples"),
        ([named, other], "model 0 gives {'logits': (60, 3)}, model 1 gives {'scores': (60, 3)} for 60 examples"),
        ([one, two], "model 0 gives [(60, 3)], model 1 gives [(60, 3), (60, 3)] for 60 examples"),
    ):
        with pytest.raises(UserError, match=re.escape(start + words)):
            mheads.evaluate(models, TABLE)
    with pytest.raises(UserError, match=r"model 0 \(Named\) gives \{\}: each model must give logits"):
        mheads.evaluate([Named(lambda z: {})], TABLE)
    alone = mheads.evaluate(named.net, TABLE)
    assert mheads.evaluate([named, named], TABLE).members == [alone.single] * 2


@pytest.mark.parametrize("around", [lambda make: make(), lambda make: [small(), make()], TreeNet])
def test_outputs_that_are_complex_are_refused(around):
    models = around(lambda: Named(lambda z: torch.complex(z, z)))
    with pytest.raises(UserError, match=r"gives complex64, but outputs are real numbers: let it give their .real"):
        mheads.evaluate(models, TABLE)


def test_a_network_in_place_of_its_function_and_numbers_in_place_of_classes_are_told_what_to_do():
    def one_output():
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    class Squeezed(nn.Linear):
        def forward(self, x):
            return super().forward(x).squeeze(-1)

    x, numbers = torch.rand(40, 6), torch.rand(40, 1)
    with pytest.raises(UserError, match=r"given a network, so all members begin as copies .* TreeNet\(build, \.\.\.\)"):
        fit(TreeNet(one_output(), members=2), train=(x, numbers), iterations=2)
    advice = "no classes, give problem=regression"
    for grades in (torch.arange(40) % 6 + 3, torch.arange(40) % 6 - 3):
        with pytest.raises(UserError, match=advice) as caught:
            fit(TreeNet(one_output, members=2), train=(x, grades), iterations=2)
        assert "start at 1" not in str(caught.value)
        fit(TreeNet(one_output, members=2), train=(x, grades), problem="regression", iterations=2)
    with pytest.raises(UserError, match=r"outputs of shape \[B\]: give rows of one, \[B, 1\]"):
        fit(TreeNet(lambda: Squeezed(6, 1), members=2), train=(x, numbers), iterations=2)


def test_sequences_labels_from_one_and_single_examples_are_told_what_to_do():
    x, y = torch.randn(12, 3, 20), torch.arange(12) % 4

    def convolution():
        return nn.Sequential(nn.Conv1d(3, 8, 5), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4))

    with pytest.raises(UserError, match=r"taken as grey images.*sequences \[N, C, T\], begin with .*squeeze\(1\)"):
        fit(TreeNet(convolution, members=2), train=(x, y), test=(x, y), iterations=2)
    with pytest.raises(UserError, match="numbered from 0 to 3; no training example has class 0: do labels start at 1"):
        fit(TreeNet(small, members=2), train=(TABLE[0], TABLE[1] + 1), test=TABLE, iterations=2)
    with pytest.raises(UserError, match=r"classes=4, or .*, and classes are numbered from 0 to 3$"):
        fit(TreeNet(small, members=2), train=(x.flatten(1)[:, :4], y), iterations=2)
    with pytest.raises(UserError, match=r"outputs of shape \(3,\), but arrays has 1 class; a network gives"):
        fit(TreeNet(small, members=2), train=(x.flatten(1)[:, :4], y * 0), iterations=2)
    with pytest.warns(UserWarning, match="no training example has class 0: do labels start at 1"):
        wide_enough = TreeNet(lambda: nn.Sequential(nn.Linear(TABLE[0].shape[1], 4)), members=2)
        fit(wide_enough, train=(TABLE[0], TABLE[1] + 1), test=(TABLE[0], TABLE[1] + 1), iterations=2)
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


def test_a_run_reads_labels_that_are_the_integers_it_was_given_as_classes(tmp_path):
    x, y = TABLE[0], TABLE[1] % 3
    ten = 10 * (y + 1)
    plain = fit(TreeNet(small, members=2), train=(x, y), test=(x, y), iterations=3, lr=0.1)
    made = fit(TreeNet(small, members=2), train=(x, ten), test=(x, ten), classes=[10, 20, 30], iterations=3, lr=0.1,
               folder=tmp_path / "run")  # fmt: skip
    assert made.result.to_dict() == plain.result.to_dict()
    read = mheads.load(tmp_path / "run", small)
    assert read.evaluate(x, ten).to_dict() == plain.evaluate(x, y).to_dict()
    with pytest.raises(UserError, match="given: example 0 has the label 0, but the classes are 10, 20, 30"):
        read.evaluate(x, torch.zeros_like(y))


def test_a_run_refuses_examples_of_which_some_values_are_masked():
    run = fit(TreeNet(small, members=2), train=TABLE, test=TABLE, iterations=1)
    x = np.ma.masked_array(TABLE[0].numpy(), TABLE[0].numpy() > 2)
    count = int((TABLE[0] > 2).sum())
    for ask in (run.predict, run.answer, run.member(0), lambda x: run.evaluate(x, TABLE[1])):
        with pytest.raises(UserError, match=f"examples: {count} of 240 values of a masked array are masked"):
            ask(x)


# Numbers of numpy's, which come out of every computation.


@pytest.mark.parametrize(
    ("given", "iterations", "evaluations"),
    [
        ({"epochs": 1, "batch_size": np.int64(10)}, 6, 6),
        ({"epochs": np.int64(2), "batch_size": 10.0}, 12, 12),
        ({"epochs": np.float32(0.5), "batch_size": 10, "accumulate": np.int32(3)}, 1, 1),
        ({"iterations": np.int64(20), "batch_size": 10, "lr": np.float32(0.1), "seed": np.uint8(3)}, 20, 10),
    ],
)
def test_numbers_of_numpys_count_as_pythons_own(given, iterations, evaluations):
    run = fit(TreeNet(small, members=2), train=TABLE, test=TABLE, **given)
    assert run.summary["iterations"] == iterations
    assert len(run.history.evaluations) == evaluations
    assert type(run.config.optim.batch_size) is int and type(run.config.optim.lr) is float


def test_a_tree_may_be_given_in_numpys_numbers(tmp_path):
    net = TreeNet(small, members=np.int64(3), split="0")
    assert net.num_members == 3 and net.with_members(np.int64(1)).num_members == 4
    nested = TreeNet(small, tree={"0": [np.int64(2), 1]})
    run = fit(nested, train=TABLE, iterations=1, folder=tmp_path / "run")
    assert mheads.load(tmp_path / "run", small).net.num_members == 3
    assert run.member(np.int64(1))(TABLE[0]).shape == (60, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run: run.export("a.pt2", what=None), "what='None': an exported file gives one of answer, mean, scored"),
        (lambda run: mheads.evaluate(run.net, TABLE, batch_size=0), "batch_size=0: give how many examples"),
        (lambda run: fit(run.net, train=TABLE, init=run.folder, init_map=["a"]), r"init_map=\['a'\]: give a dict"),
        (lambda run: TreeNet(nn.Linear, members=2), r"factory Linear cannot be called without arguments .*lambda: Lin"),
        (lambda run: run.predict(object()), r"the examples are <object object .*>: give an array, a tensor, or a list"),
        (
            lambda run: fit(run.net, train=TABLE, problem="what"),
            "problem is 'what': input should be 'auto', .* or 'exam",
        ),
        (
            lambda run: TreeNet(small, members=3, split=2),
            'split = 2 may be meant otherwise: the layer 2 is split="2", in quotes',
        ),
    ],
)
def test_small_mistakes_are_told_without_a_traceback(call, words):
    run = fit(TreeNet(small, members=2), train=TABLE, iterations=1)
    with pytest.raises(UserError, match=words):
        call(run)


def test_models_elsewhere_that_give_one_number_are_told_how_regression_has_it():
    x, y = TABLE[0].numpy(), TABLE[0][:, 0].numpy()
    with pytest.raises(UserError, match=r"must give numbers \[B, 1\], as y.reshape\(len\(y\), -1\) .*, not \(60,\)"):
        mheads.evaluate(lambda x: x[:, 0], (x, y))
    assert mheads.evaluate(lambda x: x[:, :1], (x, y)).ensemble_mean == 0


def test_a_run_can_be_a_key_and_be_loaded_again(tmp_path):
    run = fit(TreeNet(small, members=2), train=TABLE, iterations=1, folder=tmp_path / "run")
    again = mheads.load(run, small)
    assert {run: 1, again: 2}[run] == 1 and run != again
    assert torch.equal(again.predict(TABLE[0]), run.predict(TABLE[0]))


def test_a_run_knows_its_folder_after_a_change_of_the_current_one(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir(), (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = fit(TreeNet(small, members=2), train=TABLE, iterations=1, folder="mine")
    monkeypatch.chdir(tmp_path / "there")
    assert str(tmp_path / "here" / "mine") in repr(run)
    assert mheads.load(run.folder, small).result == run.result


# Arrays as they come.


def test_arrays_that_run_backwards_or_in_the_other_byte_order_are_taken():
    x, y = TABLE[0].numpy(), TABLE[1].numpy()
    run = fit(TreeNet(small, members=2), train=(x[::-1], y[::-1]), test=(x, y[::-1]), iterations=2)
    plain = fit(TreeNet(small, members=2), train=(x[::-1].copy(), y[::-1].copy()), test=(x, y), iterations=2)
    expected = plain.predict(x)
    assert torch.equal(run.predict(x), expected)
    assert torch.equal(run.predict(x[::-1]), expected.flip(1))
    for dtype in (">f4", ">f8"):
        assert torch.equal(run.predict(x.astype(dtype)), expected)
    swapped = fit(TreeNet(small, members=2), train=(x[::-1], y[::-1].astype(">i8")), test=(x, y), iterations=2)
    assert torch.equal(swapped.predict(x), expected)


def test_numbers_that_float32_cannot_tell_apart_are_refused_as_targets():
    x = TABLE[0].numpy()
    times = 1.7e9 + 10.0 * np.arange(60)
    words = (
        r"numbers like 1700000000, learned in float32, which rounds them by up to 6\d where .* is 1\.7e\+02: subtract"
    )
    for y in (times, times[:, None], np.stack([np.arange(60.0), times], 1)):
        with pytest.raises(UserError, match=words):
            fit(TreeNet(lambda: small(1), members=2), train=(x, y))
    with pytest.raises(UserError, match=words):
        mheads.evaluate(lambda x: x[:, :1], (x, times))
    with pytest.raises(UserError, match=words):
        fit(TreeNet(lambda: small(1), members=2), train=(x, times.astype(np.int64)), problem="regression")
    run = fit(TreeNet(lambda: small(1), members=2), train=(x, (times - times.mean()) / times.std()), iterations=1)
    assert np.isfinite(run.result.ensemble_mean)


def test_what_is_held_out_can_be_measured_again_and_sample_weights_may_be_of_all(tmp_path):
    x, y = TABLE[0].numpy(), TABLE[1].numpy()
    sample_weights = np.random.default_rng(0).integers(0, 3, (2, 60)) + 0.5
    run = fit(TreeNet(small, members=2), train=(x, y), sampling=sample_weights, iterations=3, folder=tmp_path / "run")
    rows = mheads.load(tmp_path / "run", small).data.held_out_rows
    assert len(rows) == 6
    found = run.evaluate(x[rows], y[rows])
    assert found.ownership == run.result.ownership and found.nll == pytest.approx(run.result.nll, abs=1e-5)
    kept = np.setdiff1d(np.arange(60), rows)
    same = fit(TreeNet(small, members=2), train=(x, y), sampling=sample_weights[:, kept], iterations=3)
    assert torch.equal(same.predict(x), run.predict(x))
    last = fit(TreeNet(small, members=2), train=(x, y), validation=5, sampling=sample_weights, iterations=1)
    assert last.data.held_out_rows.tolist() == [55, 56, 57, 58, 59]


def test_a_network_may_learn_to_give_its_input_back():
    def back():
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))

    run = fit(TreeNet(back, members=2), train=TABLE, test=TABLE, problem="examples", iterations=2)
    outputs = run.predict(TABLE[0])
    expected = ((outputs - TABLE[0]) ** 2).mean((1, 2)).sqrt()
    np.testing.assert_allclose(run.result.members, expected, rtol=1e-5)


# Modes, precision and what is kept between calls.


def test_a_service_under_inference_mode_loads_answers_and_copies(tmp_path):
    run = fit(TreeNet(small, members=2), train=TABLE, iterations=1, folder=tmp_path / "run")
    expected = run.predict(TABLE[0])
    with torch.inference_mode():
        loaded = mheads.load(tmp_path / "run", small)
        assert torch.equal(loaded.predict(TABLE[0]), expected)
        for made in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
            assert torch.equal(made.predict(TABLE[0]), expected)
        built = TreeNet(small, members=2)
    fit(loaded.net, train=TABLE, iterations=1)
    with pytest.raises(UserError, match=r"built or copied under torch.inference_mode.*build it outside"):
        fit(built, train=TABLE, iterations=1)


def test_what_a_run_answers_can_be_learned_from_and_written_to():
    run = fit(TreeNet(small, members=2), train=TABLE, iterations=1)
    outputs = run.predict(TABLE[0])
    assert not outputs.requires_grad
    outputs += 1
    stacked = nn.Linear(3, 1)
    stacked(outputs).sum().backward()
    torch.testing.assert_close(stacked.weight.grad[0], outputs.sum((0, 1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_net_that_was_converted_is_loaded_in_its_precision(tmp_path, dtype):
    net = TreeNet(small, members=2).to(dtype)
    run = fit(net, train=TABLE, iterations=5, folder=tmp_path / "run")
    loaded = mheads.load(tmp_path / "run", small)
    assert loaded.net.dtype == dtype
    assert torch.equal(loaded.predict(TABLE[0]), run.predict(TABLE[0]))


def test_statistics_that_change_after_the_run_are_noticed():
    net = TreeNet(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), members=2)
    run = fit(net, train=TABLE, iterations=2)
    net.train()
    net(5 * TABLE[0] + 3)
    net.eval()
    with pytest.warns(UserWarning, match="weights of this net have changed since the run") as said:
        run.predict(TABLE[0])
    assert {warning.filename for warning in said} == {__file__}  # the user's line


class Shifted(nn.Linear):
    takes = "shift"

    def forward(self, x, shift):
        return super().forward(x) + shift


def test_side_inputs_of_another_shape_than_in_training_are_refused():
    shift = np.ones((60, 1), np.float32)
    net = TreeNet(lambda: nn.Sequential(Shifted(4, 8), nn.Linear(8, 3)), members=2)
    run = fit(net, train=(*TABLE, {"shift": shift}), test=(*TABLE, {"shift": shift}), iterations=1)
    assert run.predict(TABLE[0], {"shift": shift}).shape == (2, 60, 3)
    words = r"side input 'shift' has shape \[8\] for one example, but training had \[1\]"
    wide = {"shift": np.ones((60, 8))}
    for ask in (run.predict, lambda x, side: run.evaluate(x, TABLE[1], side), run.member(0)):
        with pytest.raises(UserError, match=words):
            ask(TABLE[0], wide)
    with pytest.raises(UserError, match=r"side inputs of training are shift \[1\], of the test set shift \[8\]"):
        fit(net, train=(*TABLE, {"shift": shift}), test=(*TABLE, wide), iterations=1)


def test_other_data_with_a_test_set_alone_and_longer_schedules_are_told_what_to_do(mheads, tmp_path):
    x, y = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32), np.arange(60) % 2
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    np.savez(tmp_path / "shift.npz", x_test=x, y_test=y)
    given = ["digits", "model=mlp", "model_args={features: 3, outputs: 2}", "data={name: npz, validation: 20}"]
    given += [f"data.path={tmp_path / 'mine.npz'}", "loss=annealed", "optim.batch_size=10", "-f", tmp_path / "run"]
    done = mheads("train", *given, "optim.iterations=4")
    assert done.code == 0, done.err
    done = mheads("eval", tmp_path / "run", f"data.path={tmp_path / 'shift.npz'}")
    assert done.code == 2 and "no array x_train, y_train" in done.err and "give --split test" in done.err
    assert mheads("eval", tmp_path / "run", f"data.path={tmp_path / 'shift.npz'}", "--split", "test").code == 0
    done = mheads("train", *given, "optim.iterations=8")
    assert done.code == 2 and f"init={tmp_path / 'run'} to start from its weights" in " ".join(done.err.split())
