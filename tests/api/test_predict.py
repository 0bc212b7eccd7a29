"""`mheads predict` on files of examples, and the README's folder command from training to an answer."""

import csv
import io
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import user_networks
from PIL import Image
from rich.console import Console
from sklearn.datasets import load_digits
from torch import nn

import mheads as package
from mheads.api import predict as predictions
from mheads.api.predict import _cell
from mheads.cli.printing.answers import answers
from mheads.networks import NETWORKS

X, Y = load_digits(return_X_y=True)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """A run on 64 features from 0 to 16, given in float64 far from zero."""
    run = tmp_path_factory.mktemp("vectors") / "run"
    net = package.TreeNet(user_networks.Plain, members=2)
    return package.fit(net, train=(X[:300] + 1e8, Y[:300]), iterations=30, lr=0.05, normalize="mean_std", folder=run)


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
        ("a.csv", "1,2\n3\n", "line 2 has 1 values, the first row 2; every row needs equally many"),
        ("a.csv", "1,2\n\n3,x\n", "line 3 has 'x'"),
        ("a.csv", ",".join(["nan"] * 64), "NaN or infinity"),
        ("a.csv", b"\xff\xfe1,2\n", "cannot be read as rows of numbers .*utf-8"),
        ("a.npz", {"a": np.zeros(3), "b": np.zeros(3)}, "arrays a, b; call the one with the examples x"),
        ("a.npz", {"x": np.zeros((0, 64))}, "empty"),
        ("a.npz", {"x": np.zeros((2, 63))}, r"\[63\].*\[64\]"),
        ("a.npz", b"no zip", "cannot be read"),
        ("gone.npz", None, "gone.npz does not exist"),
        ("gone.csv", None, "there is no file"),
        ("a.png", b"x", r"a\.png: .* examples of shape \(64,\), not on images; give \.npz or \.csv$"),
        ("a.txt", "1,2\n", r"a\.txt: .* not on images; give \.npz or \.csv$"),
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
    assert "training saw floats from 1e+08 to 1e+08: answers so far from it mean little" in done.out


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


# Many examples, to files.


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A run on digits, and 130 of them as images in folders: two batches."""
    folder = tmp_path_factory.mktemp("pictures")
    images = (X.reshape(-1, 8, 8) * 15).astype(np.uint8)
    net = package.TreeNet(user_networks.with_dropout, members=3, split="conv")
    data = {"train": (images[200:], Y[200:]), "classes": [f"digit {d}" for d in range(10)]}
    run = package.fit(net, iterations=30, lr=0.1, folder=folder / "run", **data)
    for i in range(130):
        place = folder / "images" / f"{i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[i]).save(place / f"{i:03}.png")
    (folder / "images" / "notes.txt").write_text("no image")
    order = [*range(0, 130, 2), *range(1, 130, 2)]  # folders by name, files by name
    return run, folder, images, order


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_folder_of_images_and_a_file_of_arrays_go_to_a_csv_file(mheads, pictures, tmp_path):
    run, folder, images, order = pictures
    np.savez(tmp_path / "x.npz", x=images[130:140])
    done = mheads("predict", "--trust", run.folder, folder / "images", tmp_path / "x.npz", "-o", tmp_path / "out.csv")
    assert done.code == 0, done.err
    assert "out.csv: 140 examples" in done.out
    lines = read(tmp_path / "out.csv")
    outputs = run.predict(images[[*order, *range(130, 140)]]).double()
    mean = outputs.softmax(-1).mean(0)
    assert [Path(line["file"]).name for line in lines] == [f"{i:03}.png" for i in order] + ["x.npz"] * 10
    assert [line["row"] for line in lines] == [""] * 130 + [str(i) for i in range(10)]
    for i, line in enumerate(lines):
        answer = mean[i].argmax()
        votes = outputs[:, i].argmax(-1)
        assert line["answer"] == f"digit {answer}"
        assert float(line["probability"]) == pytest.approx(mean[i, answer].item(), rel=1e-4)
        assert float(line["agreement"]) == pytest.approx((votes == answer).double().mean().item(), rel=1e-5)
        assert [line[f"member_{m}"] for m in range(3)] == [f"digit {vote}" for vote in votes]


def test_an_image_in_a_folder_that_cannot_be_read_is_left_out(mheads, pictures, tmp_path):
    run, _, images, _ = pictures
    for i in range(103):  # two batches
        Image.fromarray(images[i]).save(tmp_path / f"{i:03}.png")
    whole = (tmp_path / "050.png").read_bytes()
    (tmp_path / "050.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "101.png").write_text("no image")
    rows = [i for i in range(103) if i not in (50, 101)]
    expected = run.predict(images[rows]).numpy()
    command = ["predict", "--trust", run.folder, tmp_path]
    done = mheads(*command, "-o", tmp_path / "out.npz")
    assert done.code == 1
    assert "101 examples" in done.out
    assert all(f"left out: {tmp_path / name} cannot be read as an image" in done.out for name in ("050.png", "101.png"))
    with np.load(tmp_path / "out.npz") as found:
        np.testing.assert_allclose(found["outputs"], expected, rtol=1e-4, atol=1e-5)  # of batches of another size
        assert found["names"].tolist() == [str(tmp_path / f"{i:03}.png") for i in rows]
    assert mheads(*command, "-o", tmp_path / "out.csv").code == 1
    assert [Path(line["file"]).name for line in read(tmp_path / "out.csv")] == [f"{i:03}.png" for i in rows]
    shown = mheads(*command)
    assert shown.code == 1 and "101 images" in shown.out and "101.png " not in shown.out.replace("101.png cannot", "")
    named = mheads(*command, tmp_path / "101.png")
    assert named.code == 2 and "101.png cannot be read" in named.err
    for file in tmp_path.glob("0*.png"):
        file.unlink()
    (tmp_path / "100.png").unlink()
    (tmp_path / "102.png").unlink()
    none = mheads(*command, "-o", tmp_path / "none.csv")
    assert none.code == 2 and "none of 1 images can be read: " in none.err
    assert not (tmp_path / "none.csv").exists()


def test_names_that_a_spreadsheet_would_take_for_formulas_are_quoted(mheads, tmp_path, monkeypatch):
    classes = ["=cmd()", "+1+1", "@sum", "-2", "plain"]
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).integers(0, 255, (40, 8, 8), np.uint8)
    net = package.TreeNet(partial(NETWORKS["digits"], classes=5), members=1)
    run = package.fit(net, train=(x, np.arange(40) % 5), classes=classes, iterations=1, folder="run")
    Image.fromarray(x[0]).save("=a.png")
    Image.fromarray(x[0]).save("b=.png")
    assert mheads("predict", "run", "=a.png", "b=.png", "-o", "out.csv").code == 0
    lines = read(tmp_path / "out.csv")
    assert [line["file"] for line in lines] == ["'=a.png", "b=.png"]
    answer = classes[run.predict(x[:1]).softmax(-1).mean(0)[0].argmax()]
    assert lines[0]["answer"] == lines[0]["member_0"] == {"-2": "-2", "plain": "plain"}.get(answer, f"'{answer}")
    cells = {text: _cell(text) for text in (*classes, "-0.5", "-1e-05", "+3", "-inf", "nan", "\t=x", "")}
    assert [text for text, cell in cells.items() if cell != text] == ["=cmd()", "+1+1", "@sum", "\t=x"]
    assert all(cell in (text, f"'{text}") for text, cell in cells.items())


def test_outputs_of_many_images_go_to_an_npz_file(mheads, pictures, tmp_path, monkeypatch):
    run, folder, images, order = pictures
    decoded = []
    plain = predictions.ImageFiles.read
    monkeypatch.setattr(predictions.ImageFiles, "read", lambda s, r, d: decoded.append(len(r)) or plain(s, r, d))
    assert mheads("predict", "--trust", run.folder, folder / "images", "-o", tmp_path / "out.npz").code == 0
    assert sorted(decoded) == [30, 100]  # batch by batch, not all at once
    with np.load(tmp_path / "out.npz") as found:
        assert np.array_equal(found["outputs"], run.predict(images[order]).numpy())
        expected = torch.from_numpy(found["outputs"]).double().softmax(-1).mean(0)
        assert np.allclose(found["probabilities"], expected)
        assert found["names"].tolist() == [str(folder / "images" / f"{i % 2}" / f"{i:03}.png") for i in order]
        assert found["classes"].tolist() == [f"digit {d}" for d in range(10)]
    assert [p.name for p in tmp_path.iterdir()] == ["out.npz"]


def test_numbers_go_to_a_csv_file_too(mheads, tmp_path):
    x = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    net = package.TreeNet(user_networks.numbers, members=2)
    run = package.fit(net, train=(x, x[:, :2]), test=(x, x[:, :2]), iterations=2, folder=tmp_path / "run")
    np.savez(tmp_path / "x.npz", x=x)
    assert mheads("predict", "--trust", run.folder, tmp_path / "x.npz", "-o", tmp_path / "out.csv").code == 0
    lines = read(tmp_path / "out.csv")
    columns = ["mean_0", "mean_1", "member_0_0", "member_0_1", "member_1_0", "member_1_1"]
    assert list(lines[0]) == ["file", "row", *columns]
    outputs = run.predict(x).double()
    expected = torch.cat([outputs.mean(0), outputs[0], outputs[1]], 1).numpy()
    np.testing.assert_allclose([[float(line[c]) for c in columns] for line in lines], expected, rtol=1e-6)
    assert mheads("predict", "--trust", run.folder, tmp_path / "x.npz", "-o", tmp_path / "out.npz").code == 0
    with np.load(tmp_path / "out.npz") as found:
        assert sorted(found) == ["names", "outputs"]
        assert found["names"][3] == f"{tmp_path}/x.npz:3"


def test_members_trained_on_the_mean_of_their_scores_answer_with_it_wherever_they_are_asked(tmp_path):
    """Two members that are sure of opposite things cancel out in scores, and drown the third in probabilities."""

    def network():
        return nn.Sequential(nn.Linear(4, 3))

    x, small, large = (torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (60, 3, 3))
    net = package.TreeNet(network, members=3)
    with torch.no_grad():
        for m, weight in enumerate((small, 9 * large.flip(1), -9 * large.flip(1))):
            net.member(m)[0].weight.copy_(weight), net.member(m)[0].bias.zero_()
        scores = net(x).mean(0)
    y = scores.argmax(1)
    run = package.fit(net, "score_averaged", train=(x, y), test=(x, y), iterations=1, lr=1e-12, folder=tmp_path / "run")
    assert run.result.ensemble_mean == run.result.ensemble_mean_scores == 100
    assert run.result.nll["ensemble_mean"] == pytest.approx(nn.functional.cross_entropy(scores, y).item(), abs=1e-4)
    assert package.evaluate(net, (x, y)).ensemble_mean < 90  # of probabilities
    expected = scores.double().softmax(-1)
    for found in (run, package.load(tmp_path / "run", network)):
        torch.testing.assert_close(found.answer(x), expected, atol=1e-5, rtol=0)
    exported = torch.export.load(run.export(tmp_path / "mean.pt2", examples=x)).module()
    torch.testing.assert_close(exported(x).double(), expected, atol=1e-5, rtol=0)
    text = io.StringIO()
    Console(file=text, width=200).print(answers("x", run.predict(x).double(), run.data.problem))
    assert rows_of(text.getvalue()) == [str(c) for c in y.tolist()]


def test_several_labels_go_to_files_as_probabilities_by_their_names(mheads, tmp_path):
    x = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    y = np.stack([x[:, 0] > 0, x[:, 1] > 0], 1)
    net = package.TreeNet(user_networks.numbers, members=2)
    labels = {"classes": ["cat", "dog"], "problem": "multilabel"}
    run = package.fit(net, train=(x, y), test=(x, y), iterations=2, folder=tmp_path / "run", **labels)
    np.savez(tmp_path / "x.npz", x=x)
    for name in ("out.csv", "out.npz"):
        done = mheads("predict", "--trust", run.folder, tmp_path / "x.npz", "-o", tmp_path / name)
        assert done.code == 0, done.err
    lines = read(tmp_path / "out.csv")
    columns = [f"{who}_{label}" for who in ("mean", "member_0", "member_1") for label in ("cat", "dog")]
    assert list(lines[0]) == ["file", "row", *columns]
    p = run.predict(x).double().sigmoid()
    expected = torch.cat([p.mean(0), p[0], p[1]], 1).numpy()
    np.testing.assert_allclose([[float(line[c]) for c in columns] for line in lines], expected, rtol=1e-6)
    with np.load(tmp_path / "out.npz") as found:
        np.testing.assert_allclose(found["probabilities"], p.mean(0), rtol=1e-6)
        assert found["classes"].tolist() == ["cat", "dog"]


def test_many_images_are_a_line_each_in_the_terminal_and_very_many_are_cut(mheads, pictures):
    run, folder, _, _ = pictures
    few = mheads("predict", "--trust", run.folder, *sorted((folder / "images" / "0").iterdir())[:12]).out
    assert "12 images" in few
    assert sum(".png" in line and "of 3" in line for line in few.splitlines()) == 12
    assert "second" not in few  # the columns of one image's own table
    many = mheads("predict", "--trust", run.folder, folder / "images").out
    assert sum(".png" in line for line in many.splitlines()) == 100
    assert "these are 100 of 130: -o answers.csv, or .npz, writes all" in many


@pytest.mark.parametrize(
    ("files", "output", "words"),
    [
        (["images"], "out.txt", "out.txt: answers are written to .csv, and outputs to .npz"),
        (["images"], "gone/out.csv", "there is no folder"),
        (["x.npz"], "x.npz", "is also what is asked about"),
        (["empty"], "out.csv", "holds no image (.jpg"),
        (["images", "missing.png"], "out.csv", "there is no image"),
        (["images", "broken.png"], "out.csv", "broken.png cannot be read as an image"),
        (["images", "broken.png"], "out.npz", "broken.png cannot be read as an image"),
    ],
)
def test_what_cannot_be_asked_or_written_leaves_nothing(mheads, pictures, tmp_path, files, output, words):
    run, folder, images, _ = pictures
    (tmp_path / "images").symlink_to(folder / "images")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.png").write_bytes(b"no image")
    np.savez(tmp_path / "x.npz", x=images[:3])
    before = sorted(p.name for p in tmp_path.iterdir())
    done = mheads("predict", "--trust", run.folder, *(tmp_path / file for file in files), "-o", tmp_path / output)
    assert done.code == 2
    assert words in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == before
