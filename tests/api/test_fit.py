"""mheads from Python: fit, evaluate, load, and the example."""

import inspect
import re
import runpy
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import user_networks
from sklearn.datasets import load_digits
from torch import nn

import mheads
from mheads import UserError, data
from mheads.api import fit_keywords
from mheads.config import read as configs
from mheads.training.log_and_checkpoint import Recorder

X, Y = load_digits(return_X_y=True)
X = X.reshape(-1, 1, 8, 8).astype(np.float32) / 16
TRAIN, TEST = (X[:400], Y[:400]), (X[400:600], Y[400:600])
QUICK = {"train": TRAIN, "test": TEST, "lr": 0.05, "batch_size": 40}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    net = mheads.TreeNet(user_networks.Plain, members=3, split="first")
    run = tmp_path_factory.mktemp("trained") / "run"
    return mheads.fit(net, mheads.losses.mcl(k=1), iterations=30, folder=run, **QUICK)


def test_fit_trains_a_network_of_ones_own(trained):
    assert len(trained.result.members) == 3
    assert trained.result.oracle > 50
    assert trained.result.oracle >= max(trained.result.members)
    assert trained.summary["parameters"] == trained.net.num_parameters()
    assert trained.folder.joinpath("model.safetensors").exists()


def test_what_fit_reports_is_what_its_net_gives(trained):
    again = mheads.evaluate(trained.net, TEST)
    assert again.to_dict()["members"] == trained.result.to_dict()["members"]
    outputs = trained.predict(TEST[0]).numpy()
    assert outputs.shape == (3, 200, 10)
    assert 100 * np.mean((outputs.argmax(-1) == TEST[1]).any(0)) == pytest.approx(trained.result.oracle)


def test_fit_shows_who_owns_what(trained):
    assert np.sum(trained.result.ownership) == 200
    assert trained.plot_ownership().axes


def test_the_same_call_on_the_same_folder_resumes_and_then_finds_it_finished(trained, tmp_path):
    def fit(iterations):
        net = mheads.TreeNet(user_networks.Plain, members=3, split="first")
        return mheads.fit(net, mheads.losses.mcl(k=1), iterations=iterations, folder=tmp_path / "run", **QUICK)

    def states(run):
        return run.net.state_dict().items()

    assert fit(12).summary["iterations"] == 12
    longer = fit(30)
    assert longer.summary["iterations"] == 30
    assert all(torch.equal(tensor, trained.net.state_dict()[name]) for name, tensor in states(longer))
    again = fit(30)  # its weights come from the folder: nothing is trained
    assert again.summary == longer.summary
    assert all(torch.equal(tensor, trained.net.state_dict()[name]) for name, tensor in states(again))


def test_another_call_on_the_same_folder_is_refused(trained):
    net = mheads.TreeNet(user_networks.Plain, members=3, split="first")
    with pytest.raises(mheads.UserError, match=r"loss.k: 1 in the folder, 2 now"):
        mheads.fit(net, mheads.losses.mcl(k=2), iterations=30, folder=trained.folder, **QUICK)


def test_a_run_is_loaded_by_the_factory_it_names(trained):
    loaded = mheads.load(trained.folder, trust=True)
    assert loaded.config.model == "user_networks:Plain"
    assert torch.equal(loaded.predict(TEST[0]), trained.predict(TEST[0]))
    assert loaded.result.oracle == trained.result.oracle


def test_a_run_of_a_local_factory_is_loaded_with_the_factory_given(tmp_path):
    def factory():
        return user_networks.Plain(hidden=8)

    run = mheads.fit(mheads.TreeNet(factory, members=2), iterations=2, folder=tmp_path / "run", **QUICK)
    with pytest.raises(mheads.UserError, match=r"mheads.load\(run, factory\)"):
        mheads.load(tmp_path / "run")
    loaded = mheads.load(tmp_path / "run", factory)
    assert torch.equal(loaded.predict(TEST[0]), run.predict(TEST[0]))
    with (
        pytest.warns(UserWarning, match="layer first"),
        pytest.raises(mheads.UserError, match="does not fit the network"),
    ):
        mheads.load(tmp_path / "run", user_networks.Plain)


def test_a_loss_of_ones_own_can_be_fitted(tmp_path):
    def function(outputs, y, sample_weights, ties):
        losses = mheads.losses.cross_entropies(outputs, y)
        return mheads.losses.LossValue(losses.sum(), torch.ones_like(losses), losses.detach())

    own = mheads.losses.Loss("mine", function, options={"anything": 1})
    common = {"iterations": 3, **QUICK}
    one = mheads.fit(mheads.TreeNet(user_networks.Plain, members=2), own, folder=tmp_path / "run", **common)
    other = mheads.fit(mheads.TreeNet(user_networks.Plain, members=2), **common)
    for mine, theirs in zip(one.net.parameters(), other.net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_without_a_test_set_a_tenth_is_held_out():
    run = mheads.fit(mheads.TreeNet(user_networks.Plain, members=2), train=TRAIN, iterations=1)
    assert run.result.examples == 40


def plain_models(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Flatten(), nn.Linear(64, 10)) for _ in range(count)]


def test_models_trained_elsewhere_are_measured_as_numpy_does():
    models = plain_models(3)
    result = mheads.evaluate(models, TEST, batch_size=64)
    with torch.no_grad():
        logits = torch.stack([model(torch.from_numpy(TEST[0])) for model in models]).numpy().astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    right = logits.argmax(-1) == TEST[1]
    assert result.members == pytest.approx((100 * right.mean(1)).tolist())
    assert result.oracle == pytest.approx(100 * right.any(0).mean())
    assert result.ensemble_mean == pytest.approx(100 * np.mean(probabilities.mean(0).argmax(-1) == TEST[1]))
    assert result.nll["single"] == pytest.approx(-np.log(probabilities[:, np.arange(200), TEST[1]]).mean())


def test_evaluating_leaves_models_in_the_mode_they_were_in():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    first = mheads.evaluate([model], TEST)
    assert model.training
    assert model[1].training
    assert first == mheads.evaluate([model.eval()], TEST)  # no dropout in either


SHARED = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def fit_plain(*args, **options):
    return mheads.fit(mheads.TreeNet(user_networks.Plain, 2), *args, **{"train": TRAIN, "test": TEST, **options})


HINTS = {  # what users of other libraries try, and what it is here
    "sample_weight": "weights", "class_weight": "weights", "random_state": "seed", "n_jobs": "workers",
    "max_iter": "iterations", "learning_rate_init": "lr", "alpha": "weight_decay", "verbose": "show",
    "warm_start": "init", "validation_fraction": "validation", "X": "train=", "y": "train=", "eval_set": "test=",
    "early_stopping": "evaluate_every", "bootstrap": "sampling='bagging'",
    "n_estimators": r"TreeNet\(factory, members",  # scikit-learn, above
    "validation_data": "test=", "validation_split": "validation", "steps_per_epoch": "iterations", "clipnorm": "clip",
    "callbacks": "evaluate_every", "metrics": "run.result", "shuffle": "always drawn anew", "x": "train=",  # Keras
    "max_epochs": "epochs", "max_steps": "iterations", "gradient_clip_val": "clip", "accelerator": "device",
    "accumulate_grad_batches": "accumulate", "log_every_n_steps": "log={'every'", "default_root_dir": "folder",
    "check_val_every_n_epoch": "log={'evaluate_every'", "val_dataloaders": "test=", "train_dataloader": "train=",
    "datamodule": "train=", "ckpt_path": "init", "num_workers": "workers", "fp16": "precision",
    "deterministic": "same bits", "model": "TreeNet",  # Lightning
    "val": "test=", "preprocess": "normalize", "transform": "pad and mirror", "betas": "momentum", "eps": "delta",
    "scheduler": "schedule", "warmup_steps": "schedule={'warmup'", "learn_rate": "lr", "momentun": "momentum",
}  # fmt: skip


def test_keywords_of_other_libraries_are_answered_with_ours():
    ours = [*inspect.signature(mheads.fit).parameters]
    for word, hint in HINTS.items():
        with pytest.raises(UserError, match=f"fit has no keyword '{word}': .*{hint}") as refused:
            fit_plain(**{word: 1})
        said = str(refused.value).partition(": ")[2]
        if said.startswith("did you mean"):
            first = re.search(r"[a-z]\w+", said.removeprefix("did you mean "))[0]
            assert first in ours or "TreeNet" in said
    for aliases in (*fit_keywords.ALIASES.values(), *fit_keywords.ABSENT):
        assert not set(aliases.split()) & set(ours)  # no keyword of fit is refused
    for word in ("sample_weight", "n_jobs", "early_stopping", "preprocess", "val", "gradient_clip_val"):
        with pytest.raises(UserError, match=f"unknown key '{word}'; here it is "):
            configs.load("digits", [f"{word}=1"])


def test_paths_from_home_are_found_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    np.save(tmp_path / "weights.npy", np.ones((2, len(TRAIN[0]))))
    by_file = {"name": "file", "path": "~/weights.npy"}
    run = fit_plain(folder="~/run", iterations=2, sampling=by_file)
    assert (tmp_path / "run" / "result.json").exists()
    assert mheads.load("~/run", user_networks.Plain).result == run.result
    weights = run.net.state_dict()
    again = fit_plain(init="~/run", iterations=1, lr=1e-20)
    assert again.config.init == str(tmp_path / "run")
    for name, tensor in again.net.state_dict().items():
        torch.testing.assert_close(tensor, weights[name])
    with pytest.raises(UserError, match=str(tmp_path / "cifar")):
        data.load("cifar10", root="~/cifar")


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mheads.evaluate([], TEST), "at least one model"),
        (lambda: mheads.evaluate(plain_models(1), (TEST[0], TEST[1] + 5)), "label 14.*10 scores"),
        (lambda: mheads.evaluate([lambda x: x], TEST), "logits"),
        (lambda: mheads.fit(user_networks.Plain(), **QUICK), "TreeNet.*Plain"),
        (lambda: mheads.fit(mheads.TreeNet(user_networks.Plain, 2), lrr=0.1, **QUICK), "'lrr'.*mean lr"),
        (
            lambda: mheads.fit(mheads.TreeNet(user_networks.Plain, 2), mheads.losses.mcl(k=3), **QUICK),
            "k is 3.*2 members",
        ),
        (lambda: mheads.fit(mheads.TreeNet(user_networks.Plain, 2), device="tpu", **QUICK), "device = 'tpu'"),
        (lambda: mheads.fit(mheads.TreeNet(user_networks.Plain, 2), train=(X, Y[:-1])), "1797 examples.*1796"),
        (lambda: mheads.fit(mheads.TreeNet(user_networks.Plain, 2), train=(X[:, :, :7], Y)), "first.*shape"),
        (lambda: mheads.load("nowhere"), "nowhere is not a run folder"),
        (lambda: fit_plain(epochs=0), "epochs=0: give a number above 0"),
        (lambda: fit_plain(epochs="3"), "epochs='3'"),
        (lambda: fit_plain(epochs=float("nan")), "epochs=nan"),
        (lambda: fit_plain(epochs=1, iterations=1), "same thing twice"),
        (lambda: fit_plain(epochs=1, batch_size=0), "batch_size = 0"),
        (lambda: fit_plain(log=5), "log=5: give a dict"),
        (lambda: fit_plain(folder=5), "folder=5: give the path"),
        (lambda: fit_plain(schedule=int), "schedule=<class 'int'>: give a name"),
        (lambda: fit_plain(learning_rate=1), "no keyword 'learning_rate': did you mean lr"),
        (lambda: fit_plain(optimizer=torch.optim.Adam), "optimizer = .*Adam.*: give the name of one: sgd, adamw"),
        (
            lambda: fit_plain(optimizer="adamw", nesterov=True),
            "nesterov is an option of sgd, muon, and optimizer is adamw",
        ),
        (lambda: fit_plain(schedule={"name": "cosine", "every": 9}), "option of step, sigmoid, and schedule is cosine"),
        (
            lambda: fit_plain(sampling={"name": "bagging", "fraction": 0.5}),
            "and sampling is bagging: give sampling=sub",
        ),
        (lambda: fit_plain(num_epochs=1), "did you mean epochs"),
        (lambda: fit_plain(lr=-1), "fit: lr = -1"),
        (lambda: fit_plain(views=[{"weight": 0}]), "fit: views.0.weight = 0"),
        (lambda: fit_plain(views=[{"down": 99}]), r"views move the image.*: give views=\[\]"),
        (lambda: fit_plain(parameter_groups={"0": {"lr": 0}}), "fit: parameter_groups.0.lr = 0"),
        (lambda: fit_plain("mlc"), r"loss='mlc' is not a loss \(did you mean mcl\?\); there are independent, "),
        (
            lambda: fit_plain("mse"),
            r"loss=mse is a base loss.*mcl\(k=1, base_loss='mse'\); by default numbers have mse",
        ),
        (lambda: fit_plain(nn.MSELoss()), r"loss=MSELoss is a base loss.*independent\(base_loss='mse'\) or"),
        (lambda: fit_plain(nn.L1Loss), r"loss=L1Loss is a base loss.*independent\(base_loss='mae'\) or"),
        (lambda: fit_plain(nn.functional.smooth_l1_loss), r"loss=smooth_l1_loss .*\(base_loss='smooth_l1'\) or"),
        (lambda: fit_plain(nn.NLLLoss), "not NLLLoss: .*base_loss: cross_entropy, bce, mse, mae, smooth_l1"),
        (lambda: fit_plain(nn.NLLLoss()), "not NLLLoss: "),
        (lambda: fit_plain(7), "fit needs a loss over all members, not int: "),
        (lambda: fit_plain(mheads.losses.mcl), r"call it, mheads.losses.mcl\(\)"),
        (lambda: fit_plain(nn.CrossEntropyLoss()), r"give mheads.losses.independent\(base_loss='cross_entropy'\)"),
        (lambda: fit_plain(classes=["a"] * 10), "a name is there twice"),
        (lambda: torch.no_grad()(fit_plain)(), "no_grad.*call it outside"),
        (lambda: torch.autocast("cpu")(fit_plain)(), "autocast"),
        (lambda: mheads.TreeNet(lambda: nn.Sequential(nn.LazyLinear(3)), 2), "has no size yet"),
        (lambda: mheads.TreeNet(lambda: torch.jit.script(nn.Sequential(nn.Linear(6, 3))), 2), "scripted"),
        (lambda: mheads.TreeNet(lambda: SHARED, 2), "must build a network at each call"),
        (lambda: fit_plain(mheads.losses.mcl(ce_weight=-1)), "loss.ce_weight must not be negative: -1"),
        (
            lambda: mheads.fit(mheads.TreeNet(user_networks.twice_as_many, 2), **QUICK),
            "4 rows of outputs for 2 examples",
        ),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(mheads.UserError, match=message):
        call()


def test_predict_refuses_examples_of_another_shape(trained):
    with pytest.raises(mheads.UserError, match=r"\[1, 7, 8\].*\[1, 8, 8\]"):
        trained.predict(X[:2, :, :7])


def test_the_example_runs_and_shows_what_it_promises(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = runpy.run_path(str(Path(__file__).parents[2] / "examples/quickstart.py"), run_name="quickstart")
    shown = capsys.readouterr().out
    assert f"Oracle         {names['run'].result.oracle:.1f} %" in shown
    assert names["run"].result.oracle > 90
    assert names["elsewhere"].ensemble_mean > 70
    assert names["picture"].read_bytes().startswith(b"\x89PNG")


def test_tied_weights_and_infinite_masks_are_saved_and_loaded(tmp_path):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))

        def forward(self, x):
            return torch.where(torch.isinf(self.mask), x, x + self.mask)

    def factory():
        a, b = nn.Linear(6, 6), nn.Linear(6, 6)
        b.weight = a.weight
        return nn.Sequential(a, nn.Tanh(), b, nn.Linear(6, 3), Masked())

    x, y = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32), np.arange(60) % 3
    net = mheads.TreeNet(factory, members=2)
    run = mheads.fit(net, train=(x, y), test=(x, y), iterations=4, batch_size=20, folder=tmp_path / "run")
    loaded = mheads.load(tmp_path / "run", factory)
    assert loaded.net.member(0)[0].weight is loaded.net.member(0)[2].weight
    assert torch.equal(loaded.predict(x), run.predict(x))


def test_one_model_forked_into_members_that_would_stay_identical_is_refused(tmp_path, mheads):
    single = tmp_path / "single"
    assert mheads("train", "digits", "members=1", "optim.iterations=2", "--run", single).code == 0
    refused = mheads("train", "digits", "members=3", f"init={single}", "optim.iterations=2", "--run", tmp_path / "fork")
    assert refused.code == 2
    assert "identical for ever" in refused.err
    assert (
        mheads(
            "train",
            "digits",
            "members=3",
            f"init={single}",
            "loss=mcl",
            "optim.iterations=2",
            "--run",
            tmp_path / "fork",
        ).code
        == 0
    )


# The scale of inputs, and what a run brings with it.

PIXELS = (X * 255).round().astype(np.uint8)  # what a PNG holds of the digits


def quick(x, **options):
    options = {"iterations": 40, "lr": 0.05, "batch_size": 40, "test": (x[400:600], Y[400:600]), **options}
    return mheads.fit(mheads.TreeNet(user_networks.Plain, members=2), train=(x[:400], Y[:400]), **options)


@pytest.fixture(scope="module")
def on_pixels(tmp_path_factory):
    return quick(PIXELS, normalize="mean_image", folder=tmp_path_factory.mktemp("pixels") / "run")


def test_uint8_arrays_train_without_being_scaled_by_hand(on_pixels):
    assert on_pixels.result.ensemble_mean > 60  # a tenth by chance


def test_image_files_and_arrays_get_the_same_answers_from_a_run_of_floats(trained, tmp_path):
    from PIL import Image

    from mheads.api.predict import read_image

    Image.fromarray(PIXELS[3, 0]).save(tmp_path / "three.png")
    from_file = trained.predict(read_image(tmp_path / "three.png", trained, False)[None])
    assert torch.equal(from_file, trained.predict(PIXELS[3:4].astype(np.float32) / 255))
    assert torch.equal(from_file, trained.predict(PIXELS[3:4]))
    assert torch.equal(
        from_file, mheads.load(trained.folder, user_networks.Plain).predict(torch.from_numpy(PIXELS[3:4]))
    )
    torch.testing.assert_close(from_file, trained.predict(X[3:4]), atol=0.05, rtol=0.05)


def test_a_run_of_pixels_refuses_floats_that_are_none(on_pixels):
    asked = on_pixels.predict(PIXELS[:5])
    torch.testing.assert_close(on_pixels.predict(PIXELS[:5].astype(np.float32)), asked)
    torch.testing.assert_close(on_pixels.predict(PIXELS[:5, 0]), asked)  # [N, H, W], as fit takes them
    for call in (on_pixels.predict, on_pixels.member(0), lambda x: on_pixels.evaluate(x, Y[:5])):
        with pytest.raises(mheads.UserError, match=r"floats from 0 to 1, but training saw uint8 from 0 to 255"):
            call(torch.from_numpy(X[:5]))


def test_a_run_of_other_floats_refuses_pixels_and_warns_of_values_far_off():
    run = quick(X * 6 - 3, iterations=1)
    with pytest.raises(mheads.UserError, match="uint8 from 0 to 255, but training saw floats from -3 to 3"):
        run.predict(PIXELS[:5])
    with pytest.warns(UserWarning, match="floats from 0 to 255, but training saw floats from -3 to 3"):
        run.predict(PIXELS[:5].astype(np.float32))


def test_a_run_and_its_members_bring_their_preprocessing_and_the_net_alone_is_warned_of(on_pixels):
    test = (PIXELS[400:600], Y[400:600])
    assert on_pixels.evaluate(*test).members == on_pixels.result.members
    assert mheads.evaluate(on_pixels, test) == on_pixels.evaluate(test)
    members = [on_pixels.member(m) for m in range(2)]
    assert mheads.evaluate(members, test).members == on_pixels.result.members
    torch.testing.assert_close(members[1](torch.from_numpy(PIXELS[:7])), on_pixels.predict(PIXELS[:7])[1])
    with pytest.warns(
        UserWarning, match=r"preprocessed data \(scaled by 0\.0039.*mean image.*\), but these are raw: run\.evaluate"
    ):
        without = mheads.evaluate(on_pixels.net, test)
    assert without.members != on_pixels.result.members


def test_a_member_of_a_run_is_an_ordinary_module(on_pixels):
    import copy

    member = copy.deepcopy(on_pixels.member(0))
    x = torch.from_numpy(PIXELS[:3].astype(np.float32)).requires_grad_()
    member(x).sum().backward()
    assert x.grad.abs().sum() > 0
    assert list(member.state_dict()) == [f"network.{name}" for name in on_pixels.net.member(0).state_dict()]
    assert not member.training


def test_a_sequence_of_layers_or_a_function_is_one_model():
    [model] = plain_models(1)
    whole = mheads.evaluate([model], TEST)
    assert mheads.evaluate(model, TEST) == whole
    assert mheads.evaluate(lambda x: model(x), TEST) == whole
    assert len(mheads.evaluate(nn.ModuleList(plain_models(2)), TEST).members) == 2
    assert len(mheads.evaluate(iter(plain_models(2)), TEST).members) == 2


# What is held out, and what data may be.


def test_without_a_test_set_every_class_of_sorted_data_is_held_out(tmp_path):
    order = np.argsort(Y[:400], kind="stable")
    net = mheads.TreeNet(user_networks.Plain, members=2)
    run = mheads.fit(net, train=(X[order], Y[order]), iterations=1, seed=5, folder=tmp_path / "run")
    assert np.sum(run.result.ownership, axis=0).tolist() == [4] * 10
    assert run.data.held_out == "40 of 400 examples, stratified, seed 5"
    assert mheads.load(tmp_path / "run", user_networks.Plain).data.held_out == run.data.held_out


def test_what_is_held_out_is_shown(capsys):
    mheads.fit(mheads.TreeNet(user_networks.Plain, members=2), train=TRAIN, iterations=1, show=True)
    assert "holding out 40 of 400 examples, stratified, seed 0" in capsys.readouterr().err


def test_a_dataset_with_names_trains_to_the_same_bits_as_arrays():
    from torch.utils.data import DataLoader, TensorDataset

    class Named(torch.utils.data.Dataset):
        def __len__(self):
            return 400

        def __getitem__(self, row):
            return torch.from_numpy(X[row]), f"digit {Y[row]}"

    options = {"iterations": 5, "lr": 0.05, "batch_size": 40}
    run = mheads.fit(mheads.TreeNet(user_networks.Plain, 2), train=Named(), **options)
    arrays = mheads.fit(mheads.TreeNet(user_networks.Plain, 2), train=TRAIN, **options)
    for mine, theirs in zip(run.net.parameters(), arrays.net.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert run.data.problem.classes == tuple(f"digit {i}" for i in range(10))
    names = [f"digit {y}" for y in TEST[1]]
    loader = DataLoader(TensorDataset(*map(torch.from_numpy, TEST)), batch_size=7)
    found = run.evaluate(TEST[0], names)
    assert found == run.evaluate(loader) == mheads.evaluate(run.net, (TEST[0], names), classes=run.data.problem.classes)
    with pytest.raises(mheads.UserError, match="'digit ten'"):
        run.evaluate(TEST[0][:1], ["digit ten"])
    with pytest.raises(mheads.UserError, match=r"labels are names.*classes="):
        mheads.evaluate(run.net, (TEST[0], names))
    with pytest.raises(mheads.UserError, match="label 10, but the 10 classes"):
        run.evaluate(TEST[0][:1], [10])
    with pytest.raises(mheads.UserError, match=r"^given: labels are floats, such as 3.0, and name no classes.*astype"):
        run.evaluate(TEST[0][:1], np.array([3.0]))  # float64 [N], and not what becomes of it
    with pytest.raises(mheads.UserError, match=r"^given labels have dtype int64 and shape \[1, 1\]"):
        run.evaluate(TEST[0][:1], np.array([[3]]))


def test_weights_count_examples_as_often():
    """An example of weight 2 is as good as two of it: the gradient of whole batches says so."""
    options = {"lr": 0.5, "momentum": 0.0, "iterations": 3, "test": TEST}
    twice = np.r_[np.arange(40), np.arange(10)]
    weights = np.r_[np.full(10, 2.0), np.ones(30)]
    many = mheads.fit(mheads.TreeNet(user_networks.Plain, 2), train=(X[twice], Y[twice]), batch_size=50, **options)
    one = mheads.fit(
        mheads.TreeNet(user_networks.Plain, 2), train=(X[:40], Y[:40]), weights=weights, batch_size=40, **options
    )
    for mine, theirs in zip(one.net.parameters(), many.net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quick(X, weights=np.ones(400)[:-1]), r"\[399\] for 400"),
        (
            lambda: mheads.fit(
                mheads.TreeNet(user_networks.Plain, 2), mheads.losses.prob_averaged(), weights=np.ones(400), **QUICK
            ),
            "prob_averaged averages the members and cannot take weights",
        ),
        (
            lambda: mheads.fit(
                mheads.TreeNet(user_networks.Plain, 2, init="same"), weights=np.arange(400) + 1, **QUICK
            ),
            "identical for ever",
        ),
        (lambda: quick(np.where(X > 0.99, np.nan, X)), "train examples hold NaN or infinity: 396 of 400 rows"),
        (lambda: mheads.evaluate(plain_models(1), (TEST[0] * np.inf, TEST[1])), "NaN"),
        (lambda: mheads.evaluate(plain_models(1), (TEST[0][:0], TEST[1][:0])), "no examples"),
        (lambda: mheads.evaluate(plain_models(1), (TEST[0], TEST[1] - 1)), "label -1"),
        (lambda: mheads.evaluate(None, TEST), "a list of models that give logits, not None"),
        (lambda: mheads.evaluate(["a.pt"], TEST), "not 'a.pt'"),
    ],
)
def test_mistakes_in_the_data_are_named(call, message):
    with np.errstate(invalid="ignore"), pytest.raises(mheads.UserError, match=message):
        call()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([], r"are empty: give at least one, as an array of shape \[N, 1, 8, 8\]"),
        (X[:0], "are empty"),
        (X[0, 0], r"shape \[8\], but the run was trained on \[1, 8, 8\]"),
        (np.where(X[:9] > 0.99, np.nan, X[:9]), "NaN or infinity"),
        (X[:2].astype(int), "dtype int64"),
        (["a"], r"not an array.*\[N, 1, 8, 8\]"),
    ],
    ids=str,
)
def test_predict_says_what_is_wrong_with_its_examples(trained, x, message):
    with pytest.raises(mheads.UserError, match=message):
        trained.predict(x)


def test_a_dataset_with_random_transforms_resumes_to_the_same_bits(tmp_path):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, row):
            return torch.from_numpy(X[row]) + 0.1 * torch.rand(1, 8, 8), int(Y[row])

    def fit(iterations, run):
        net = mheads.TreeNet(user_networks.Plain, members=2, split="first")
        return mheads.fit(net, train=Noisy(), iterations=iterations, batch_size=20, folder=tmp_path / run)

    fit(3, "a")
    torch.rand(5)  # whatever else is drawn
    resumed, straight = fit(7, "a"), fit(7, "b")
    assert resumed.result == straight.result
    for mine, theirs in zip(resumed.net.parameters(), straight.net.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_keywords_and_their_defaults_are_those_of_the_config():
    """fit lists those of the config for type checkers, and shows them with their defaults."""
    import inspect

    from mheads.config.schema import Config

    config, parameters = Config(), inspect.signature(mheads.fit).parameters
    for section, names in (
        (config.optim, ["lr", "momentum", "nesterov", "caffe_momentum", "weight_decay", "batch_size", "accumulate"]),
        (config.data, ["normalize", "scale", "pad", "mirror", "validation"]),
        (config.engine, ["workers", "micro_batches"]),
        (config, ["pretrain", "device", "seed"]),
    ):
        for name in names:
            assert parameters[name].default == getattr(section, name), name
    assert parameters["optimizer"].default == config.optim.name
    assert parameters["schedule"].default == config.optim.schedule.name
    assert parameters["sampling"].default == config.sampling.name
    assert parameters["scale_rate"].default == config.loss.scale_rate
    listed = {*type(config.optim).model_fields, "optimizer", "epochs"} - {"name"}
    assert listed <= set(parameters)


def test_a_refused_call_has_not_changed_the_net():
    net = mheads.TreeNet(user_networks.Plain, members=2)
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(mheads.UserError, match="lr"):
        mheads.fit(net, "mcl", init=user_networks.Plain().state_dict(), **{**QUICK, "lr": "a"})
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_a_run_loaded_with_another_network_says_what_differs(trained):
    class Other(user_networks.Plain):
        def __init__(self):
            super().__init__()
            self.relu = nn.Tanh()

    with pytest.warns(UserWarning, match=r"was trained with:(.|\n)*layer relu: ReLU\(\) there, Tanh"):
        loaded = mheads.load(trained.folder, Other)
    assert not torch.equal(loaded.predict(TEST[0]), trained.predict(TEST[0]))  # which is why it is told


def test_trees_built_in_threads_have_the_weights_of_their_seed():
    import threading

    def build():
        found.append(mheads.TreeNet(user_networks.Plain, members=3).state_dict())

    found = []
    expected = mheads.TreeNet(user_networks.Plain, members=3).state_dict()
    threads = [threading.Thread(target=lambda: [build() for _ in range(10)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 30
    assert all(torch.equal(state[name], expected[name]) for state in found for name in expected)


@pytest.mark.parametrize(
    ("examples", "given"),
    [
        (TRAIN, "ndarray, ndarray"),
        ((mheads.losses.mcl(), *TRAIN), "Loss, ndarray, ndarray"),
        ((TRAIN,), "tuple"),
    ],
)
def test_examples_without_a_name_are_told_theirs(examples, given):
    with pytest.raises(mheads.UserError) as error:
        mheads.fit(mheads.TreeNet(user_networks.Plain, members=2), *examples)
    assert str(error.value) == (
        f"fit(net, {given}): after the net there may be a loss, and examples come by name: fit(net, loss, train=(x, y))"
    )
    assert [*inspect.signature(mheads.fit).parameters][:3] == ["net", "loss", "train"]


def test_ctrl_c_says_where_the_run_so_far_is(monkeypatch, tmp_path):
    log_step = Recorder.log_step

    def interrupt(recorder, *args):
        if recorder.state.step == 1:
            signal.raise_signal(signal.SIGINT)
        return log_step(recorder, *args)

    def train(folder):
        return mheads.fit(mheads.TreeNet(user_networks.Plain, members=2), iterations=9, folder=folder, **QUICK)

    monkeypatch.setattr(Recorder, "log_step", interrupt)
    with pytest.raises(mheads.Interrupted) as stop:
        train(None)
    assert str(stop.value) == "SIGINT after iteration 2: the run so far is the attribute run of this exception"
    assert stop.value.run.summary["iterations"] == 2
    with pytest.raises(mheads.Interrupted) as stop:
        train(tmp_path / "run")
    assert str(stop.value) == f"SIGINT after iteration 2: saved in {tmp_path / 'run'}; the same call resumes"
    monkeypatch.undo()
    assert train(tmp_path / "run").summary["iterations"] == 9


def test_ctrl_c_before_the_first_step_is_interrupted_without_a_run(monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("mheads.api.fit.train_config", interrupt)
    with pytest.raises(mheads.Interrupted) as stop:
        mheads.fit(mheads.TreeNet(user_networks.Plain, members=2), iterations=2, **QUICK)
    assert stop.value.run is None


def test_a_second_ctrl_c_does_not_wait_for_the_step_and_leaves_no_run(monkeypatch):
    def interrupt_twice(recorder, *args):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Recorder, "log_step", interrupt_twice)
    with pytest.raises(mheads.Interrupted, match="without waiting for the end of a step: nothing was saved") as stop:
        mheads.fit(mheads.TreeNet(user_networks.Plain, members=2), iterations=2, **QUICK)
    assert stop.value.run is None


def test_the_hint_at_more_outputs_leaves_open_what_the_factory_calls_them():
    net = mheads.TreeNet(lambda: mheads.networks.mlp(features=4, outputs=2), members=2)
    with pytest.raises(mheads.UserError) as error:
        mheads.fit(net, train=(np.zeros((6, 4), np.float32), np.arange(6) % 3))
    assert (
        "has 3 classes; a network gives one score per class (the factory's classes=3, or what the factory calls "
        in (str(error.value))
    )
