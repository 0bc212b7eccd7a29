"""`mheads eval --temperature-from --ood --shifted`, and the same measures in the results of suites."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import mheads as package
from mheads.api.evaluate import FurtherExamples, evaluate_run
from mheads.common.progress import Silent
from mheads.config.read import load
from mheads.problems.uncertainty import (
    EnsembleOutputs,
    deep_ensemble_equivalent,
    fit_temperatures,
    measure_other_data,
    measure_scaled,
    measure_shifted,
)
from mheads.runs.folder import RunFolder
from mheads.suites import findings
from mheads.training.loop import train_config

QUICK = ["data.limit=120", "optim.iterations=12", "optim.batch_size=40"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run with validation examples, and an .npz file of noise with labels of other classes."""
    folder = tmp_path_factory.mktemp("uncertainty")
    train_config(load("digits", [*QUICK, "data.validation=40", "members=3"]), RunFolder(folder / "run"), Silent())
    noise = np.random.default_rng(0).integers(0, 17, (60, 1, 8, 8)).astype(np.uint8)
    np.savez(folder / "noise.npz", x_train=noise, y_train=np.arange(60) % 20, x_test=noise, y_test=np.arange(60) % 20)
    np.savez(folder / "shifted.npz", x_train=noise, y_train=np.arange(60) % 10, x_test=noise, y_test=np.arange(60) % 10)
    np.savez(
        folder / "large.npz",
        x_train=np.zeros((2, 9, 9), np.uint8),
        y_train=[0, 1],
        x_test=noise[:, 0, :1, :1].repeat(9, 1).repeat(9, 2),
        y_test=np.arange(60) % 2,
    )
    return folder


def test_other_data_need_not_take_the_augmentation_of_the_run(mheads, tmp_path):
    train_config(load("digits", [*QUICK, "members=2", "data.pad=1"]), RunFolder(tmp_path / "run"), Silent())
    for i, part in enumerate(("train/a", "train/b", "test/a", "test/b")):
        (tmp_path / "files" / part).mkdir(parents=True)
        image = np.random.default_rng(i).integers(0, 17, (8, 8)).astype(np.uint8)
        Image.fromarray(image).save(tmp_path / "files" / part / "one.png")
    given = ["data.name=folder", f"data.path={tmp_path / 'files'}", "data.resize=8", "data.crop=8"]
    done = mheads("eval", tmp_path / "run", *(word for pair in given for word in ("--ood", pair)))
    assert done.code == 2 and "shape (3, 8, 8), but" in done.err, done.err  # and not for what training did to images
    done = mheads("eval", tmp_path / "run", "--split", "test", "--temperature-from", "validation")
    assert done.code == 2 and "held no examples out (data.validation is 0)" in done.err
    assert "train a run with data.validation=N" in done.err and "--split validation" not in done.err


def test_a_run_is_measured_with_temperatures_and_against_other_data(mheads, place):
    other = ["data.name=npz", f"data.path={place / 'noise.npz'}"]
    shifted = ["data.name=npz", f"data.path={place / 'shifted.npz'}"]
    further = FurtherExamples("validation", other, shifted)
    result = evaluate_run(place / "run", None, Silent(), split="test", further=further)
    (outputs, y), (held_out, y_held_out) = (
        package.outputs_of(place / "run", split) for split in ("test", "validation")
    )
    with np.load(place / "noise.npz") as file:
        far = package.load(place / "run").predict(file["x_test"])
    expected = measure_scaled(EnsembleOutputs(outputs), y, EnsembleOutputs(held_out), y_held_out)
    expected |= measure_other_data(EnsembleOutputs(outputs), EnsembleOutputs(torch.as_tensor(far)))
    temperatures = fit_temperatures(EnsembleOutputs(held_out), y_held_out)
    labels = torch.arange(60) % 10  # of the shifted examples, which are the same noise
    expected |= measure_shifted(EnsembleOutputs(torch.as_tensor(far)), labels, temperatures)
    for key, value in expected.items():
        assert result[key] == pytest.approx(value, abs=1e-4 if "nll" in key or "brier" in key else 2e-3), key
    mean = torch.as_tensor(far).softmax(-1).mean(0)
    assert result["accuracy_shifted"]["ensemble_mean"] == pytest.approx(
        100 * float((mean.argmax(-1) == labels).double().mean()), abs=1e-3
    )
    scaled = (mean.double().log() / temperatures["ensemble_mean"][0]).log_softmax(-1)
    assert result["nll_shifted"]["ensemble_mean"] == pytest.approx(
        -float(scaled[torch.arange(60), labels].mean()), abs=1e-4
    )
    assert result["split"] == "test" and package.evaluate(lambda x: x, (outputs[0], y)).brier is not None

    options = [word for pair in other for word in ("--ood", pair)]
    options += [word for pair in shifted for word in ("--shifted", pair)]
    done = mheads("eval", place / "run", "--split", "test", "--temperature-from", "validation", *options)
    assert done.code == 0, done.err
    words = " ".join(done.out.split())
    assert f" temperature {result['temperature']['ensemble_mean']:.3f} " in words
    assert f" Brier score {result['brier']['ensemble_mean']:.4f} " in words
    assert f"{result['auroc']['ensemble_mean']:.2f} %" in done.out
    assert f" accuracy on shifted data {result['accuracy_shifted']['ensemble_mean']:.2f} % " in words


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--temperature-from", "validation"], "the run is measured on these examples"),
        (["--temperature-from", "test", "--split", "test"], "would look better than it is"),
        (["--temperature-from", "train", "--split", "test"], "the run has learned these examples"),
        (["data.limit=100", "--temperature-from", "test", "--split", "test"], "measured on these examples"),
        (["--temperature-from", "held_out"], "there are train, validation, test"),
        (["--ood", "loss.k=2"], "settings of a finished run cannot be changed; other data to evaluate on is given by"),
        (["--ood", "data.path=none.npz", "--ood", "data.name=npz"], "none.npz"),
        (["--ood", "data.limit=10"], "--ood data.limit=10: that is the run's own digits"),
        (["--shifted", "data.limit=10"], "--shifted data.limit=10: that is the run's own digits"),
        (["--shifted", "data.name=npz", "--shifted", "data.path={place}/noise.npz"], "give data with the same classes"),
        (
            ["--ood", "data.name=npz", "--ood", "data.path={place}/large.npz"],
            "shape (1, 9, 9), but {place}/run was tra",
        ),
        (["--outputs", "{place}/outputs.txt"], "outputs.txt: give a file that ends in .npz"),
    ],
)
def test_what_cannot_be_measured_is_an_error(mheads, place, given, message):
    done = mheads("eval", place / "run", *(word.format(place=place) for word in given))
    assert done.code == 2 and message.format(place=place) in done.err, done.out + done.err
    assert not (place / "outputs.txt").exists()


def test_temperatures_from_the_split_of_one_data_set_measure_that_of_another(mheads, place):
    """Which have the same name, and no example in common."""
    other = ["data.name=npz", f"data.path={place / 'shifted.npz'}"]
    done = mheads("eval", place / "run", *other, "--split", "test", "--temperature-from", "test")
    assert done.code == 0, done.err
    held_out, y_held_out = package.outputs_of(place / "run", "test")
    expected = fit_temperatures(EnsembleOutputs(held_out), y_held_out)["ensemble_mean"][0]
    assert f" temperature {expected:.3f} " in " ".join(done.out.split())


def test_suites_keep_the_measures_and_count_in_independent_members(mheads, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forest.yaml").write_text(
        "metrics: [ensemble_mean, dee, dee_scaled, auroc_ensemble_mean]\nindependent: four\n"
        f"ood: [data.name=npz, 'data.path={place / 'noise.npz'}']\n"
        "rows: [{name: four}, {name: tree, set: [split=conv1]},"
        " {name: one, from: four, metrics: {ensemble_mean: single}}]\n"
    )
    given = ["forest.yaml", "--recipe", "digits", "--validation", 40, *QUICK]
    assert mheads("reproduce", *given).code == 0
    done = mheads("reproduce", *given, "--test")
    assert done.code == 0, done.err
    (kept,) = (tmp_path / "results").glob("*-test.json")
    document = json.loads(kept.read_text())
    four, tree = (document["runs"][row][0] for row in ("four", "tree"))
    assert str(place) not in kept.read_text() and tree["ood"] == ["data.name=npz", "data.path=.../noise.npz"]
    for scaled in ("", "_scaled"):
        known = four["result"][f"nll_by_members{scaled}"]
        assert known[-1] == pytest.approx(four["result"][f"nll{scaled}_ensemble_mean"], abs=1e-5)
        expected = min(deep_ensemble_equivalent(tree["result"][f"nll{scaled}_ensemble_mean"], known), 4)
        equivalents = {row: findings.trials(document, row, f"dee{scaled}").mean for row in ("four", "tree", "one")}
        assert equivalents == pytest.approx({"four": 4, "tree": expected, "one": 1}, abs=0.01)
    assert "| DEE | DEE, scaled | AUROC |" in kept.with_suffix(".md").read_text()
    # On the validation examples themselves nothing is fitted, and other data are measured all the same.
    plain = json.loads((tmp_path / "results/forest-digits-validation40.json").read_text())["runs"]["tree"][0]["result"]
    assert "auroc_ensemble_mean" in plain and "temperature_ensemble_mean" not in plain
    # The command names other data than the file does, and says so when it is printed.
    shifted = ["--shifted", "data.name=npz", "--shifted", f"data.path={place / 'shifted.npz'}"]
    assert mheads("reproduce", *given, "--test", *shifted).code == 0
    again = json.loads(kept.read_text())
    assert "accuracy_shifted_ensemble_mean" in again["runs"]["tree"][0]["result"]
    assert "auroc_ensemble_mean" in again["runs"]["tree"][0]["result"]
    assert "--shifted data.name=npz --shifted data.path=.../shifted.npz" in again["command"]


@pytest.mark.parametrize(("value", "remark"), [(1000.0, "say nothing"), (0.001, "all right"), (2.5, "")])
def test_a_temperature_at_its_bound_is_remarked(place, value, remark):
    folder = RunFolder(place / "run")
    pair = {"single": value, "ensemble_mean": value}
    rows = dict(folder.read_data().problem.rows({**folder.read_result(), "temperature": pair}))
    assert ("its bound" in rows["temperature"]) is bool(remark) and remark in rows["temperature"]
