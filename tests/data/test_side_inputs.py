"""Side inputs from the data, and examples with several rows of targets: by hand, through the engine, on ranks."""

import signal
from collections import OrderedDict

import numpy as np
import pytest
import torch
from helpers.commands import Running, assert_same_run, process, ranks, weights
from helpers.one_step import engine_gradients
from torch import nn
from torch.utils.data import DataLoader
from user_networks import Shift, detector, register_scenes, shifted

import mheads
from mheads import UserError, losses
from mheads.data.batches import Batch
from mheads.networks.dropout import Dropout, keyed_masks
from mheads.trees.treenet import TreeNet

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 6)).astype(np.float32)
SHIFT = RNG.normal(size=(120, 5))
Y = ((X.sum(1) + SHIFT.sum(1)) > 0).astype(np.int64)


def fit(train=None, **options):
    given = {"train": train or (X[:100], Y[:100], {"shift": SHIFT[:100]}), "iterations": 60, "lr": 0.1}
    given["test"] = (X[100:], Y[100:], {"shift": SHIFT[100:]})
    return mheads.fit(TreeNet(shifted, members=2, split="a"), **{**given, **options})


def test_a_run_learns_from_side_inputs_and_is_asked_with_them():
    run = fit()
    without = run.evaluate((X[100:], Y[100:], {"shift": -SHIFT[100:]}))
    assert run.result.ensemble_mean >= 75 and without.ensemble_mean <= 60
    outputs = run.predict(X[100:], side={"shift": SHIFT[100:]})
    right = (outputs.argmax(-1).numpy() == Y[100:]).mean(1)
    assert (100 * right).tolist() == pytest.approx(run.result.members)
    assert run.evaluate((X[100:], Y[100:], {"shift": SHIFT[100:]})).members == run.result.members
    side = {"shift": torch.from_numpy(SHIFT[100:]).float()}
    torch.testing.assert_close(run.member(1)(X[100:], side), outputs[1])
    torch.testing.assert_close(run.member(1)(X[100:], {"shift": SHIFT[100:]}), outputs[1])
    assert run.evaluate(X[100:], Y[100:], {"shift": SHIFT[100:]}).members == run.result.members
    both = mheads.evaluate([run.member(0), run.member(1)], (X[100:], Y[100:], {"shift": SHIFT[100:]}))
    assert both.members == run.result.members
    with pytest.raises(UserError, match=r"give evaluate\(x, y, side\)"):
        run.evaluate((X[100:], Y[100:]), side={"shift": SHIFT[100:]})
    assert mheads.evaluate(run.net, (X[100:], Y[100:], {"shift": SHIFT[100:]})).members == run.result.members


def test_datasets_and_loaders_give_them_too():
    items = [
        (x, int(y), {"shift": s}) for x, y, s in zip(X[:100], Y[:100], SHIFT[:100].astype(np.float32), strict=True)
    ]

    class Dataset:
        def __len__(self):
            return len(items)

        def __getitem__(self, row):
            return items[row]

    arrays = fit()
    for given in (items, Dataset(), DataLoader(items, batch_size=7), iter(items)):
        run = fit(given)
        assert run.data.fingerprint == arrays.data.fingerprint or not isinstance(given, list)
        for a, b in zip(run.net.parameters(), arrays.net.parameters(), strict=True):
            assert torch.equal(a, b)


def test_other_side_inputs_are_other_data():
    other = {"shift": SHIFT[:100] + 1}
    assert fit(iterations=1).data.fingerprint != fit((X[:100], Y[:100], other), iterations=1).data.fingerprint


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit((X[:100], Y[:100])), "training are none, of the test set shift"),
        (lambda: fit((X[:100], Y[:100]), test=None), "Shift takes the side input 'shift', which is not given"),
        (lambda: fit((X, Y, {"shift": SHIFT[:7]})), r"side input 'shift' has shape \[7, 5\] for 120 examples"),
        (lambda: fit((X, Y, {"shift": np.full((120, 5), np.nan)})), "'shift' holds NaN"),
        (lambda: fit((X, Y, {"shift": ["a"] * 120})), "'shift' has dtype"),
        (lambda: fit((X, Y, {"counts": SHIFT})), "that name is taken"),
        (
            lambda: fit([(X[0], 0, {"shift": SHIFT[0]}), (X[1], 1, {})]),
            "item 1 has the side inputs none, the first shift",
        ),
        (lambda: fit(iterations=1).predict(X), "takes the side input 'shift', which is not given"),
        (lambda: fit(iterations=1).evaluate(X, Y), "takes the side input 'shift'"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(UserError, match=message):
        call()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("side")
    arrays = {"x_train": X[:100], "y_train": Y[:100], "x_test": X[100:], "y_test": Y[100:]}
    side = {"side_shift_train": SHIFT[:100], "side_shift_test": SHIFT[100:]}
    np.savez(folder / "data.npz", **arrays, **side)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model: user_networks:shifted\nmembers: 3\nsplit: a\ndata: {{name: npz, path: {folder / 'data.npz'}}}\n"
        "loss: mcl\nsampling: bagging\noptim: {iterations: 12, batch_size: 20, lr: 0.1}\n"
        "engine: {micro_batches: 2, stack: never}\nlog: {every: 1, evaluate_every: 6, checkpoint_every: 4}\n"
    )
    one = folder / "one"
    done = process("train", recipe, "-f", one)
    assert done.code == 0, done.err
    return recipe, one


@pytest.mark.parametrize("placement", ["default", "{trunk: 1, a/0: 0, a/1: 2, a/2: 0}"])
def test_side_inputs_travel_to_ranks(recipe, tmp_path, placement):
    path, one = recipe
    done = ranks(3, "train", path, f"placement={placement}", "-f", tmp_path / "run")
    assert [found.code for found in done] == [0, 0, 0], done[0].err
    assert_same_run(tmp_path / "run", one)


def test_what_stages_with_side_inputs_cost_is_not_guessed(recipe, mheads):
    done = mheads("plan", recipe[0], "--ranks", 2)
    assert done.code == 2
    assert "has a Shift, which takes a side input" in done.err and "placement=default" in done.err


def test_a_run_with_side_inputs_is_killed_and_goes_on(recipe, tmp_path):
    path, one = recipe
    killed = process("train", path, "-f", tmp_path / "run", stop=(signal.SIGKILL, "os.rename", "step-00000008"))
    assert killed.code == -signal.SIGKILL
    assert process("train", path, "-f", tmp_path / "run").code == 0
    assert_same_run(tmp_path / "run", one)


# Examples with several rows: a batch of images, each with its own number of regions.


def regions_batch(members, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor([3, 1, 4, 2, 0, 5])
    rows = int(counts.sum())
    return Batch(
        torch.randn(6, 2, 8, 8, generator=generator, dtype=dtype),
        torch.randint(3, (rows,), generator=generator),
        lambda raw, dtype: raw.to(dtype),
        sample_weights=(torch.rand(members, rows, generator=generator) > 0.3).to(dtype),
        ties=torch.rand(members, rows, generator=generator),
        side={"where": torch.randint(6, (rows, 2), generator=generator)},
        counts=counts,
    )


def test_a_batch_is_cut_between_examples_with_all_their_rows():
    batch = regions_batch(2)
    assert (len(batch), batch.num_rows) == (6, 15)
    part = batch.cut(1, 4)
    assert part.counts.tolist() == [1, 4, 2]
    assert torch.equal(part.inputs, batch.inputs[1:4])
    assert torch.equal(part.targets, batch.targets[3:10])
    assert torch.equal(part.side["where"], batch.side["where"][3:10])
    assert torch.equal(part.sample_weights, batch.sample_weights[:, 3:10])
    assert torch.equal(part.cut(1, 2).targets, batch.targets[4:8])
    assert batch.cut(4, 5).num_rows == 0


@pytest.mark.parametrize("split", [None, "conv", "hidden", {"conv": [{"hidden": 2}, 1]}], ids=str)
@pytest.mark.parametrize("loss", [losses.independent(), losses.mcl(k=1)], ids=lambda loss: loss.name)
def test_gradients_of_regions_are_those_of_autograd(split, loss):
    net = TreeNet(detector, members=3, split=split, seed=1).double()
    for module in net.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
    batch = regions_batch(3)
    report, found = engine_gradients(net, loss, batch, micro_batches=4)
    value = loss(net(batch.inputs, batch.side_inputs()), batch.targets, batch.sample_weights, batch.ties)
    (value.total / 15).backward()
    assert report.loss == pytest.approx(value.total.item() / 15, rel=1e-12)
    torch.testing.assert_close(report.losses * (batch.sample_weights > 0), value.losses * (batch.sample_weights > 0))
    for name, stage in net.stages.items():
        for got, parameter in zip(found[name], stage.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad, rtol=1e-10, atol=1e-12)


def test_dropout_after_regions_has_their_rows_and_the_same_bits_for_any_workers():
    net = TreeNet(detector, members=3, split="conv", seed=1)
    batch = regions_batch(3, torch.float32)
    reports = [engine_gradients(net, losses.mcl(k=1), batch, workers=workers) for workers in (1, 2, 4)]
    for report, found in reports[1:]:
        assert report.loss == reports[0][0].loss
        for name in found:
            assert all(torch.equal(a, b) for a, b in zip(found[name], reports[0][1][name], strict=True))


def test_a_layer_that_makes_several_rows_of_an_example_keeps_its_masks_when_some_are_computed():
    drop = Dropout(0.5).train()
    x = torch.ones(6, 4, 5)  # four rows of each of six examples
    with keyed_masks(("key",), 6):
        whole = drop(x.flatten(0, 1))
    rows = torch.tensor([1, 4])
    with keyed_masks(("key",), 6, rows):
        some = drop(x[rows].flatten(0, 1))
    assert torch.equal(whole.unflatten(0, (6, 4))[rows].flatten(0, 1), some)
    with keyed_masks(("key",), 6, rows), pytest.raises(UserError, match="dropout meets 7 rows where 2 examples of 6"):
        drop(torch.ones(7, 5))


def test_a_layer_may_ask_for_several_side_inputs():
    class Both(Shift):
        takes = ("shift", "scale")

        def forward(self, x, shift, scale):
            return x * scale + shift

    net = TreeNet(lambda: nn.Sequential(OrderedDict(a=nn.Linear(2, 2), both=Both())), members=1)
    side = {"shift": torch.ones(3, 2), "scale": torch.full((3, 2), 2.0)}
    x = torch.randn(3, 2)
    torch.testing.assert_close(net(x, side)[0], net.member(0).a(x) * 2 + 1)


SCENES = [
    "digits", "model=user_networks:detector", "data={name: scenes}", "members=3", "split=conv", "loss=mcl",
    "pretrain=2", "sampling=bagging", "optim={iterations: 8, batch_size: 6, accumulate: 2, lr: 0.1}",
    "engine={micro_batches: 2, stack: never}", "log={every: 1, evaluate_every: 4, checkpoint_every: 4}",
]  # fmt: skip


def test_images_with_regions_train_and_resume_and_spread_over_ranks_with_the_same_bits(tmp_path):
    """The seam that a detector needs, from the command to the folder, with a dataset of one's own."""
    one = tmp_path / "one"
    done = Running("train", *SCENES, "engine.workers=1", "-f", one, before=register_scenes).finish()
    assert done.code == 0, done.err
    stop = (signal.SIGKILL, "os.rename", "step-00000008")
    killed = Running("train", *SCENES, "-f", tmp_path / "killed", stop=stop, before=register_scenes).finish()
    assert killed.code == -signal.SIGKILL
    assert Running("train", *SCENES, "-f", tmp_path / "killed", before=register_scenes).finish().code == 0
    assert_same_run(tmp_path / "killed", one)
    for name, size, options in (
        ("three", 3, ["placement={trunk: 1, conv/0: 0, conv/1: 2, conv/2: 1}"]),
        ("default", 3, []),
        ("replicas", 2, ["placement={trunk: 0, conv/0: 0, conv/1: 0, conv/2: 0}"]),
    ):
        before = dict.fromkeys(range(size), register_scenes)
        done = ranks(size, "train", *SCENES, *options, "-f", tmp_path / name, before=before)
        assert [found.code for found in done] == [0] * size, (name, done[0].err)
        assert_same_run(tmp_path / name, one)
    assert len(weights(one)) > 1000
