"""`mheads predict` on files of examples, and the README's folder command from training to an answer."""

import networks
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import mheads as package

X, Y = load_digits(return_X_y=True)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """A run on 64 features from 0 to 16, given in float64 far from zero."""
    run = tmp_path_factory.mktemp("vectors") / "run"
    net = package.TreeNet(networks.Plain, members=2)
    return package.fit(net, train=(X[:300] + 1e8, Y[:300]), iterations=30, lr=0.05, normalize="mean_std", run=run)


def rows_of(out):
    """The Ensemble-Mean answers of the table."""
    return [line.split()[1] for line in out.splitlines() if line.split()[:1] and line.split()[0].isdigit()]


def test_predict_takes_npz_and_csv_and_answers_each_row(mheads, vectors, tmp_path):
    x = X[300:308] + 1e8
    expected = [str(a) for a in vectors.predict(x).double().softmax(-1).mean(0).argmax(-1).tolist()]
    assert np.mean(np.array(expected, int) == Y[300:308]) > 0.5
    np.savez(tmp_path / "x.npz", x=x, other=np.zeros(3))
    np.savez(tmp_path / "test.npz", x_test=x, y_test=Y[300:308])
    np.savez(tmp_path / "one.npz", anything=x)
    np.savetxt(tmp_path / "plain.csv", x, delimiter=",", fmt="%.17g")
    header = ";".join(f"pixel{i}" for i in range(64))
    np.savetxt(tmp_path / "header.csv", x, delimiter=";", fmt="%.17g", header=header, comments="")
    for name in ("x.npz", "test.npz", "one.npz", "plain.csv", "header.csv"):
        done = mheads("predict", "--trust", vectors.folder, tmp_path / name)
        assert done.code == 0, done.err
        assert rows_of(done.out) == expected, name
    assert "agree" in done.out
    assert "2 of 2" in done.out


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "", "holds no rows of numbers"),
        ("a.csv", "a,b\n", "holds no rows of numbers"),
        ("a.csv", "1,2\n3,4\n", "2 numbers per row.*examples of 64"),
        ("a.csv", "1,2\n3\n", "line 2 has 1 values, the first row 2"),
        ("a.csv", "1,2\n\n3,x\n", "line 3 has 'x'"),
        ("a.csv", ",".join(["nan"] * 64), "NaN or infinity"),
        ("a.npz", {"a": np.zeros(3), "b": np.zeros(3)}, "arrays a, b; call the one with the examples x"),
        ("a.npz", {"x": np.zeros((0, 64))}, "empty"),
        ("a.npz", {"x": np.zeros((2, 63))}, r"\(63,\).*\(64,\)"),
        ("a.npz", b"no zip", "cannot be read"),
        ("gone.npz", None, "there is no file"),
        ("gone.csv", None, "there is no file"),
        ("a.png", b"x", "not on images"),
    ],
)
def test_files_that_are_no_examples_are_refused(mheads, vectors, tmp_path, name, content, words):
    import re

    if isinstance(content, dict):
        np.savez(tmp_path / name, **content)
    elif content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    done = mheads("predict", "--trust", vectors.folder, tmp_path / name)
    assert done.code == 2
    assert re.search(words, done.err), done.err


def test_values_far_from_training_are_warned_of_on_the_command_line(mheads, vectors, tmp_path):
    np.savez(tmp_path / "x.npz", x=X[:2])
    done = mheads("predict", "--trust", vectors.folder, tmp_path / "x.npz")
    assert done.code == 0
    assert "the run was trained on floats from 1e+08 to 1e+08: answers so far from it mean little" in done.out


def test_the_folder_command_of_the_readme_trains_and_answers(mheads, tmp_path, monkeypatch):
    """Pictures with a bright half: an easy thing that stays at chance where pixels are not scaled."""
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for part, count in (("train", 20), ("val", 10)):
        for label, name in enumerate(("left", "right", "up", "down")):
            folder = tmp_path / "pictures" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 156, (12, 12, 3))
                turned = np.rot90(pixels, label)
                turned[:, :6] += 90
                Image.fromarray(np.rot90(turned, -label).astype(np.uint8)).save(folder / f"{i}.bmp")
    command = [
        "train",
        "digits",
        "model_args.channels=3",
        "data.name=folder",
        "data.path=pictures",
        "data.resize=8",
        "data.crop=8",
    ]
    done = mheads(*command, "model_args.classes=4", "optim.iterations=60", "optim.batch_size=40", "--run", "run")
    assert done.code == 0, done.err
    run = package.load("run")
    assert run.result.ensemble_mean > 80
    assert "up" in mheads("predict", "run", "pictures/val/up/0.bmp").out.splitlines()[0]


def test_outputs_of_any_split_are_those_that_eval_writes(mheads, tmp_path):
    run = tmp_path / "run"
    overrides = ["data.limit=120", "data.validation=40", "optim.iterations=5", "data.normalize=mean_std", "data.pad=1"]
    assert mheads("train", "digits", *overrides, "--run", run).code == 0
    for split in ("train", "validation", "test"):
        assert mheads("eval", run, "--split", split, "--outputs", tmp_path / f"{split}.npz").code == 0
        outputs, targets = package.outputs_of(run, split)
        with np.load(tmp_path / f"{split}.npz") as written:
            assert np.array_equal(written["outputs"], outputs.numpy())
            assert np.array_equal(written["labels"], targets.numpy())
    assert torch.equal(package.outputs_of(package.load(run))[0], package.outputs_of(run, "validation")[0])
    with pytest.raises(package.UserError, match="there are train, validation, test"):
        package.outputs_of(run, "training")
