"""Rows that are the best of others on validation examples, and what is fitted on these."""

import json

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

import mheads as package
from mheads.suites import findings

SUITE = """# Which learning rate?
recipe: [sail]
metrics: [ensemble_mean, nll]
rows:
  - {name: tuned, best_of: [lr0.0001, lr0.01, lr0.1]}
  - {name: lr<lr>, each: {lr: [0.0001, 0.01, 0.1]}, set: [optim.lr=<lr>]}
recipes:
  sail:
    base: uci
    validation: 9
    set:
      - data.table=sail
      - data.fold=<seed>
      - "model_args={features: 2, hidden: [8]}"
      - loss=independent
      - optim.iterations=12
claims:
  - {say: it is, left: tuned.ensemble_mean, is: better, right: lr0.0001.ensemble_mean}
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    folder = tmp_path / "uci/sail"
    folder.mkdir(parents=True)
    x = rng.normal(size=(60, 2))
    np.savetxt(folder / "data.txt", np.c_[x, x.sum(1) + rng.normal(size=60)])
    np.savetxt(folder / "index_features.txt", [0, 1])
    np.savetxt(folder / "index_target.txt", [2])
    for fold in range(3):
        mixed = rng.permutation(60)
        np.savetxt(folder / f"index_train_{fold}.txt", mixed[15:])
        np.savetxt(folder / f"index_test_{fold}.txt", mixed[:15])
    (tmp_path / "mine.yaml").write_text(SUITE)
    return f"data.root={tmp_path / 'uci'}"


def test_each_seed_has_the_run_that_is_best_on_validation_examples_and_shows_it_on_the_test_set(
    mheads, suite, tmp_path
):
    done = mheads("reproduce", "mine.yaml", "--trials", "3", "--test", suite)
    assert done.code == 0, done.err
    document = json.loads((tmp_path / "results/mine-sail-validation9-test.json").read_text())
    folders = tmp_path / "runs/reproduce/sail"
    rates = ("0.0001", "0.01", "0.1")
    expected, chosen = {}, []
    for seed in range(3):
        results = {}
        for rate in rates:
            outputs, y = package.outputs_of(folders / f"lr{rate}-seed{seed}-validation9", "validation")
            assert len(y) == 9
            results[rate] = float((outputs.mean(0) - y).square().mean().sqrt())
        chosen.append(min(results, key=results.get))
        outputs, y = package.outputs_of(folders / f"lr{chosen[-1]}-seed{seed}-validation9", "test")
        expected[seed] = float((outputs.mean(0) - y).square().mean().sqrt())
    assert len(set(chosen)) > 1  # or the row would be one of the others
    assert findings.by_seed(document, "tuned", "ensemble_mean") == pytest.approx(expected, rel=1e-4)
    assert "tuned.ensemble_mean" in done.out and "3 seeds" in done.out

    document["runs"]["lr0.1"].pop()  # nothing is chosen where one is missing
    assert set(findings.by_seed(document, "tuned", "nll")) == {0, 1}


def test_kernels_are_chosen_on_the_validation_examples(mheads, suite, tmp_path):
    assert mheads("reproduce", "mine.yaml", "--only", "lr0.01", "--test", suite).code == 0
    document = json.loads((tmp_path / "results/mine-sail-validation9-test.json").read_text())
    (run,) = document["runs"]["lr0.01"]
    folder = tmp_path / "runs/reproduce/sail/lr0.01-seed0-validation9"

    def nll(split, scale):
        outputs, y = (tensor.double().numpy() for tensor in package.outputs_of(folder, split))
        logs = norm.logpdf(y[None, :, 0], outputs[..., 0], scale)
        return -np.mean(logsumexp(logs, axis=0) - np.log(len(outputs)))

    units = package.load(folder).data.problem.std_of_targets[0]
    y = package.outputs_of(folder, "validation")[1].double().numpy()
    grid = 10 ** np.linspace(-3, 1, 81) * y.std()
    best = min(grid, key=lambda scale: nll("validation", scale))
    assert run["result"]["kernel_scale"] * units == pytest.approx(best, rel=1e-4)
    assert run["result"]["nll"] == pytest.approx(nll("test", best), rel=1e-4)


def test_to_train_a_row_that_chooses_is_to_train_those_that_it_chooses_from(mheads, suite, tmp_path):
    done = mheads("reproduce", "mine.yaml", "--only", "tuned", "--dry-run", suite)
    assert done.code == 0 and all(f"lr{rate}-seed0-validation9" in done.out for rate in ("0.0001", "0.01", "0.1"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    validation: 9\n", "", "row 'tuned' chooses among rows by validation examples: give --validation N"),
        ("lr0.1]}", "lr0.2]}", "row 'tuned': best_of: there is no row 'lr0.2' (did you mean lr0.1?)"),
        ("lr0.1]}", "lr0.1], set: [members=2]}", "neither `set` nor `from` goes with it"),
        (
            "{name: tuned,",
            "{name: other, from: tuned}\n  - {name: tuned,",
            "it is the best of several runs; name one of",
        ),
    ],
)
def test_a_choice_that_cannot_be_made_is_an_error(mheads, suite, tmp_path, old, new, message):
    assert SUITE.count(old) == 1
    (tmp_path / "mine.yaml").write_text(SUITE.replace(old, new))
    done = mheads("reproduce", "mine.yaml", suite)
    assert done.code == 2 and message in done.err.replace("\n", " "), done.err
    assert not (tmp_path / "results").exists()
