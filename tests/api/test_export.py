"""One file for anywhere: .pt2 and .onnx give the run's own answers, without mheads."""

import importlib.util
import json
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
import user_networks
from helpers.commands import process
from torch import nn

import mheads
from mheads import UserError
from mheads.common.nested_values import leaves

X = np.random.default_rng(0).integers(0, 256, (80, 2, 6, 6)).astype(np.uint8)
Y = np.arange(80) % 3
QUICK = {"iterations": 3, "batch_size": 20, "lr": 0.05}
ONNX = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs the extra onnx: onnx, onnxscript and onnxruntime",
)
SUFFIXES = [".pt2", pytest.param(".onnx", marks=ONNX)]


def pictures():
    """Batch normalisation, dropout and two convolutions: what differs between training and asking."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(2, 4, 3),
            norm=nn.BatchNorm2d(4),
            relu=nn.ReLU(),
            drop=nn.Dropout(0.5),
            conv2=nn.Conv2d(4, 5, 2, padding=1),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            out=nn.Linear(5, 3),
        )
    )


@pytest.fixture(scope="module")
def tree():
    """Pixels, a tree of two levels, and a mean image with a margin: all that preprocessing can be."""
    net = mheads.TreeNet(pictures, tree={"conv": [{"conv2": 2}, 1]})
    return mheads.fit(net, train=(X, Y), test=(X, Y), normalize="mean_image", pad=1, **QUICK)


@pytest.fixture(scope="module")
def numbers():
    """Floats far from zero in float64, two numbers to learn."""
    x = np.random.default_rng(1).normal(size=(60, 3)) + 1e8
    y = np.stack([x[:, 0] - 1e8, x[:, 1] - x[:, 2]], 1).astype(np.float32)
    net = mheads.TreeNet(user_networks.numbers, members=3)
    run = mheads.fit(net, train=(x, y), test=(x, y), normalize="mean_std", **QUICK)
    return run, x


def answers(path, x):
    """What a file gives; of several outputs a list."""
    if path.suffix == ".pt2":
        found = [
            part.detach().double().numpy() for part in leaves(torch.export.load(path).module()(torch.from_numpy(x)))
        ]
    else:
        import onnxruntime

        found = onnxruntime.InferenceSession(path).run(None, {"examples": x})
    return found if len(found) > 1 else found[0]


def off(found, expected):
    """How far answers are from those expected, as a part of the largest of these."""
    expected = np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.fixture(scope="module", params=SUFFIXES)
def exported(request, tree, tmp_path_factory):
    """The tree in files, by what they give; nothing else is in their folder."""
    folder = tmp_path_factory.mktemp("exported")
    found = {
        what: tree.export(folder / f"{what.replace(':', '')}{request.param}", what, examples=X)
        for what in ("mean", "members", "member:2", "hypotheses")
    }
    assert sorted(folder.iterdir()) == sorted(found.values())
    return found


def test_a_tree_on_pixels_gives_the_runs_answers(tree, exported):
    outputs = tree.predict(X).double()
    expected = {"mean": outputs.softmax(-1).mean(0), "members": outputs, "member:2": outputs[2]}
    for what, want in expected.items():
        assert off(answers(exported[what], X), want) <= 1e-5
    for rows in (1, 3, 79):
        assert off(answers(exported["mean"], X[:rows]), expected["mean"][:rows]) <= 1e-5
    values, probabilities = answers(exported["hypotheses"], X)
    assert off(values, outputs.softmax(-1)) <= 1e-5
    assert probabilities.shape == (3, 80) and off(probabilities, np.full((3, 80), 1 / 3)) <= 1e-6


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_numbers_are_averaged_and_taken_in_the_precision_of_training(numbers, tmp_path, suffix):
    run, x = numbers
    assert off(answers(run.export(tmp_path / f"mean{suffix}"), x), run.predict(x).double().mean(0)) <= 1e-5
    assert off(answers(run.export(tmp_path / f"all{suffix}", "members"), x), run.predict(x)) <= 1e-5


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_one_member_with_scores_gives_its_answer(tmp_path, suffix):
    net = mheads.TreeNet(mheads.with_scores(user_networks.numbers), members=1)
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    run = mheads.fit(net, mheads.losses.scored(), train=(x, x[:, :2]), test=(x, x[:, :2]), **QUICK)
    assert off(answers(run.export(tmp_path / f"one{suffix}"), x), run.answer(x)) <= 1e-5


class Centred(nn.Module):
    def forward(self, x):
        return x - 1e6


@pytest.mark.parametrize(
    ("dtype", "what", "suffix"),
    [
        (torch.float64, "members", ".pt2"),
        pytest.param(torch.float64, "mean", ".onnx", marks=ONNX),
        (torch.bfloat16, "mean", ".pt2"),
        (torch.float16, "mean", ".pt2"),
        pytest.param(torch.float16, "members", ".onnx", marks=ONNX),
    ],
)
def test_networks_of_other_precision_are_exported_in_it(tmp_path, dtype, what, suffix):
    """In double precision examples are not rounded before the network sees them; in half precision little is."""
    x = np.random.default_rng(0).normal(size=(60, 5)) + 1e6 * (dtype == torch.float64)
    layers = [Centred()] if dtype == torch.float64 else []
    net = mheads.TreeNet(lambda: nn.Sequential(*layers, nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype), 2)
    run = mheads.fit(net, train=(x, Y[:60]), test=(x, Y[:60]), **QUICK)
    path = run.export(tmp_path / f"a{suffix}", what, examples=x)
    outputs = run.predict(x).double()
    given = x if dtype == torch.float64 else x.astype(np.float32)
    most = 1e-9 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    assert off(answers(path, given), outputs.softmax(-1).mean(0) if what == "mean" else outputs) <= most


def test_a_process_without_mheads_gives_our_outputs(tree, exported, tmp_path):
    if exported["members"].suffix != ".pt2":
        pytest.skip("the ONNX file is run by onnxruntime, which knows no mheads either")
    np.save(tmp_path / "x.npy", X)
    script = """
import sys
sys.modules["mheads"] = None  # whatever imports it fails
import json, numpy, torch
facts = {"mheads.json": ""}
program = torch.export.load(sys.argv[1], extra_files=facts).module()
x = torch.from_numpy(numpy.load("x.npy"))
found = [program(x[:rows]).detach().numpy() for rows in (1, 2, 5, 80)]
numpy.savez("found.npz", *found)
print(facts["mheads.json"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, exported["members"]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "what": "members",
        "input": ["uint8", 2, 6, 6],
        "problem": {"name": "classification", "classes": ["0", "1", "2"]},
        "range": [X.min(), X.max()],
    }
    expected = tree.predict(X)
    with np.load(tmp_path / "found.npz") as found:
        for name, rows in zip(found, (1, 2, 5, 80), strict=True):
            assert off(found[name], expected[:, :rows]) <= 1e-5


def test_the_shared_layers_are_computed_once(exported):
    path = exported["members"]
    if path.suffix == ".pt2":
        called = [str(node.target) for node in torch.export.load(path).graph.nodes]
    else:
        import onnx

        called = [node.op_type for node in onnx.load(path).graph.node]
    assert sum(name in ("aten.conv2d.default", "Conv") for name in called) == 3  # conv; conv2 of two members, of one
    assert sum(name in ("aten.linear.default", "Gemm") for name in called) == 3


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_command_exports_a_run_by_its_own_test_set(mheads, tmp_path, suffix):
    import mheads as package

    overrides = ["split=conv1", "members=2", "optim.iterations=3", "data.limit=120", "data.normalize=mean_std"]
    assert mheads("train", "digits", *overrides, "-f", tmp_path / "run").code == 0
    done = mheads("export", tmp_path / "run", "-o", tmp_path / f"digits{suffix}")
    assert done.code == 0, done.err
    assert "within" in done.out
    from mheads.data.readers.digits_images import read_digits

    x = package.load(tmp_path / "run")
    raw = read_digits()[1].read(np.arange(9), None).permute(0, 3, 1, 2).numpy().copy()
    assert off(answers(tmp_path / f"digits{suffix}", raw), x.predict(raw).double().softmax(-1).mean(0)) <= 1e-5


def test_a_full_disk_is_told(mheads, tmp_path):
    assert (
        mheads("train", "digits", "members=2", "optim.iterations=3", "data.limit=120", "-f", tmp_path / "run").code == 0
    )
    done = process("export", tmp_path / "run", "-o", tmp_path / "digits.pt2", max_file_bytes=50_000)
    assert done.code == 2 and "error:" in done.err and "Traceback" not in done.err
    assert not (tmp_path / "digits.pt2").exists()


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def with_layer(layer):
    def network():
        return nn.Sequential(nn.Flatten(), nn.Linear(72, 4), layer(), nn.Linear(4, 3))

    return network


def fitted(network):
    net = mheads.TreeNet(network, members=2)
    return mheads.fit(net, train=(X, Y), test=(X, Y), **QUICK)


@pytest.mark.parametrize(
    ("path", "what", "words"),
    [
        ("a.pth", "mean", r"a\.pth: the suffix says what is written, \.pt2 \(torch\.export\) or \.onnx"),
        (".", "mean", r"is a folder: give the name of a file in it, such as .*ensemble\.pt2"),
        ("gone/a.pt2", "mean", r"cannot write .*a\.pt2: there is no folder"),
        (
            "a.pt2",
            "median",
            "what='median': an exported file gives one of answer, mean, scored, members, hypotheses, member:N",
        ),
        ("a.pt2", "member:3", "there are 3 members, counted from 0 to 2"),
        ("a.pt2", "member:-1", "what='member:-1': an exported file gives one of"),
    ],
)
def test_what_cannot_be_meant_is_refused(tree, tmp_path, path, what, words):
    with pytest.raises(UserError, match=words):
        tree.export(tmp_path / path, what)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_gives_other_answers_is_not_kept(tree, tmp_path, monkeypatch):
    (tmp_path / "a.pt2").write_text("what was there")
    monkeypatch.setattr("mheads.api.export.TOLERANCE", 0.0)
    with pytest.raises(
        UserError, match=r"was not written: the outputs of the exported network differ from the run's by "
    ):
        tree.export(tmp_path / "a.pt2", "members", X)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.pt2", "what was there")]


def test_onnx_without_its_packages_is_refused(tree, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name))
    with pytest.raises(UserError, match=r"needs .*onnxruntime: pip install 'mheads\[onnx\]'"):
        tree.export(tmp_path / "a.onnx")


def test_what_cannot_be_run_again_is_refused(tree, tmp_path, monkeypatch):
    def fails(x):
        raise RuntimeError("no such batch")

    monkeypatch.setattr("mheads.api.export._write_pt2", lambda program, path, facts: path.write_text("half") and fails)
    with pytest.raises(UserError, match="does not run for every batch size: no such batch"):
        tree.export(tmp_path / "a.pt2")
    assert list(tmp_path.iterdir()) == []


@ONNX
def test_what_onnxruntime_does_not_know_is_refused(tmp_path):
    net = mheads.TreeNet(lambda: nn.Sequential(nn.Conv2d(2, 2, 6), nn.Flatten(), nn.Linear(2, 3)), members=2).double()
    run = mheads.fit(net, train=(X, Y), test=(X, Y), **QUICK)
    with pytest.raises(UserError, match=r"the network cannot be written as ONNX: .*Conv.*; \.pt2 may hold it"):
        run.export(tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []


def test_networks_that_no_exporter_can_follow_are_refused(tmp_path, capfd):
    run = fitted(with_layer(Branching))
    with pytest.raises(UserError, match=r"torch\.export cannot trace the network for every batch size"):
        run.export(tmp_path / "a.pt2")
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")  # torch shows the graph so far


def test_side_inputs_are_refused(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    side = {"shift": np.ones((40, 5), np.float32)}
    y = np.zeros((40, 2), np.float32)
    net = mheads.TreeNet(user_networks.shifted, members=2)
    run = mheads.fit(net, train=(x, y, side), test=(x, y, side), **QUICK)
    with pytest.raises(UserError, match="a Shift takes side inputs, and an exported file takes examples alone"):
        run.export(tmp_path / "a.pt2")
