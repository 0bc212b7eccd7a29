"""Rows that are the best of others on validation examples, and what is fitted on these."""

import json
import runpy
from pathlib import Path

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


@pytest.mark.parametrize("by", ["ensemble_mean", "member_1"])
def test_runs_measured_before_a_row_chose_among_them_are_not_chosen_on_the_test_set(mheads, suite, tmp_path, by):
    rows = SUITE[: SUITE.index("claims:")]
    without = "".join(line for line in rows.splitlines(keepends=True) if "tuned" not in line)
    (tmp_path / "mine.yaml").write_text(without)
    command = ["reproduce", "mine.yaml", "--trials", "3", "--test", suite]
    assert mheads(*command).code == 0
    before = json.loads((tmp_path / "results/mine-sail-validation9-test.json").read_text())
    (tmp_path / "mine.yaml").write_text(rows.replace("lr0.1]}", f"lr0.1], by: {by}}}"))
    assert mheads(*command).code == 0
    document = json.loads((tmp_path / "results/mine-sail-validation9-test.json").read_text())
    expected = {}
    for seed in range(3):
        errors = {}
        for rate in ("0.0001", "0.01", "0.1"):
            folder = tmp_path / f"runs/reproduce/sail/lr{rate}-seed{seed}-validation9"
            errors[rate] = {}
            for split in ("validation", "test"):
                outputs, y = package.outputs_of(folder, split)
                answer = outputs[1] if by == "member_1" else outputs.mean(0)
                errors[rate][split] = float((answer - y).square().mean().sqrt())
        expected[seed] = min(errors.values(), key=lambda each: each["validation"])["test"]
    assert findings.by_seed(document, "tuned", by) == pytest.approx(expected, rel=1e-4)
    # Where the runs themselves are gone, nothing says which was best.
    assert findings.by_seed(document | {"runs": before["runs"]}, "tuned", by) == {}


@pytest.mark.parametrize("test", [True, False])
def test_nothing_is_chosen_where_no_row_has_the_figure(test):
    def run(seed, figure):
        return {"seed": seed, "result": {"nll": figure}, "validation": {"nll": figure}}

    runs = {"a": [run(0, None), run(1, None)], "b": [run(0, None), run(1, 2.0)]}
    rows = [{"name": "tuned", "run": "a", "best_of": ["a", "b"], "by": "nll"}]
    document = {"rows": rows, "runs": runs, "test": test, "members": 1}
    assert findings.by_seed(document, "tuned", "nll") == {1: 2.0} and findings.num_trials(document, "tuned") == 1


def test_a_choice_among_rows_that_take_different_time_has_no_cost(suite, tmp_path):
    from mheads.suites.compute import add_costs
    from mheads.suites.jobs import Options
    from mheads.suites.planner import Planner
    from mheads.suites.suite import read_suite

    rows = "  - {name: wide, set: ['model_args={features: 2, hidden: [16]}']}\n"
    rows += "  - {name: either, best_of: [lr0.1, wide]}\n"
    (tmp_path / "mine.yaml").write_text(SUITE.replace("recipes:\n", f"{rows}recipes:\n"))
    planner = Planner(Options("sail", validation=9, overrides=(suite,)))
    entries = [{"name": name, "run": "lr0.1"} for name in ("lr0.1", "tuned", "either")]
    add_costs({"rows": entries, "runs": {"lr0.1": []}}, planner, read_suite("mine.yaml"))
    one, tuned, either = (entry["cost"] for entry in entries)
    assert one == tuned and one["parameters"] > 0 and either == {}


def test_kernels_are_chosen_on_the_validation_examples(mheads, suite, tmp_path):
    assert mheads("reproduce", "mine.yaml", "--only", "lr0.01", "--test", suite).code == 0
    document = json.loads((tmp_path / "results/mine-sail-validation9-test.json").read_text())
    (run,) = document["runs"]["lr0.01"]
    folder = tmp_path / "runs/reproduce/sail/lr0.01-seed0-validation9"

    def nll(split, scale):
        outputs, y = (tensor.double().numpy() for tensor in package.outputs_of(folder, split))
        logs = norm.logpdf(y[None, :, 0], outputs[..., 0], scale)
        return -np.mean(logsumexp(logs, axis=0) - np.log(len(outputs)))

    y = package.outputs_of(folder, "validation")[1].double().numpy()
    grid = 10 ** np.linspace(-3, 1, 81) * y.std()
    best = min(grid, key=lambda scale: nll("validation", scale))
    assert run["result"]["kernel_scale"] == pytest.approx(best, rel=1e-4)
    assert run["result"]["nll"] == pytest.approx(nll("test", best), rel=1e-4)


def test_to_train_a_row_that_chooses_is_to_train_those_that_it_chooses_from(mheads, suite, tmp_path):
    done = mheads("reproduce", "mine.yaml", "--only", "tuned", "--dry-run", suite)
    assert done.code == 0 and all(f"lr{rate}-seed0-validation9" in done.out for rate in ("0.0001", "0.01", "0.1"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    validation: 9\n", "", "row 'tuned' chooses among rows by validation examples: give --validation N"),
        ("lr0.1]}", "lr0.2]}", "row 'tuned': best_of: there is no row 'lr0.2' (did you mean lr0.1?)"),
        ("lr0.1]}", "lr0.1], by: dee}", "row 'tuned': by = dee is not one number of a run by itself"),
        (
            "lr0.1]}",
            "lr0.1]}\n  - {name: twice, best_of: [lr0.1, tuned]}",
            "best_of: 'tuned' is the best of several runs itself; name these: lr0.0001, lr0.01, lr0.1",
        ),
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


def test_boosted_trees_are_chosen_on_the_same_examples(suite, tmp_path, monkeypatch):
    from sklearn.ensemble import HistGradientBoostingRegressor

    monkeypatch.setenv("MHEADS_DATA", str(tmp_path))
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/boosted_trees.py"), run_name="example")
    folder = tmp_path / "uci/sail"
    rows, train, test = (np.loadtxt(folder / name) for name in ("data.txt", "index_train_1.txt", "index_test_1.txt"))
    errors = []
    for options in example["OPTIONS"]:
        known, held_out, unseen = (rows[part.astype(int)].astype("f4") for part in (train[:-9], train[-9:], test))
        model = HistGradientBoostingRegressor(max_iter=8, early_stopping=False, **options).fit(
            known[:, :2], known[:, 2]
        )
        squares = [np.mean((model.predict(part[:, :2]) - part[:, 2]) ** 2) for part in (held_out, unseen)]
        errors.append(np.sqrt(squares))
    assert example["measure_split"]("sail", 1, 9, iterations=8) == pytest.approx(
        min(errors, key=lambda e: e[0])[1], rel=1e-4
    )


def test_every_row_of_the_tables_of_numbers_can_be_run():
    from mheads.suites.jobs import Options
    from mheads.suites.planner import Planner
    from mheads.suites.suite import read_suite
    from mheads.training.build_from_config import build_net

    suite = read_suite("tabular")
    sizes = {}
    for recipe in suite.own_recipes:
        held_out = suite.recipes[recipe].validation
        planner = Planner(Options(recipe, validation=held_out))
        for row in planner.expand(suite).rows:
            job = planner.job(suite, row.name, 2)
            assert (job.config.data.fold, job.config.data.validation) == (2, held_out)
            assert job.path.parts[-2] == f"tabular_{recipe}"
            if recipe == "boston":
                sizes[row.name] = build_net(job.config).num_parameters()
    # By hand: 13 inputs, layers of 64 (or 184), one output; what is shared counts once.
    hidden = [13 * 64 + 64, 64 * 64 + 64, 64 * 64 + 64, 65]
    wide = 13 * 184 + 184 + 2 * (184 * 184 + 184) + 185
    trees = {f"tree_fc{i}": sum(hidden[:i]) + 8 * sum(hidden[i:]) for i in (1, 2, 3)}
    expected = {"one": sum(hidden), "wide": wide, "eight": 8 * sum(hidden), **trees}
    expected["scaled"] = trees["tree_fc3"] + 8 * 13
    assert {row: sizes[row] for row in expected} == expected
    assert all(sizes[f"{row}_lr0.03"] == size for row, size in expected.items())
