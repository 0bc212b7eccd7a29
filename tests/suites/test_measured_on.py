"""What runs are measured on: figures on other test sets, or other `--ood` and `--shifted` data, are not averaged."""

import json
import shutil

import numpy as np
import pytest

TINY = ["data.limit=60", "optim.iterations=3", "optim.batch_size=20", "log.every=1"]
OTHER = ["data.name=npz", "data.path=other.npz"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("metrics: [oracle, auroc_ensemble_mean]\nrows: [{name: plain}]\n")
    write_other(tmp_path, 0)
    return tmp_path


def write_other(folder, seed, name="other.npz"):
    x = np.random.default_rng(seed).integers(0, 17, (40, 1, 8, 8)).astype(np.uint8)
    np.savez(folder / name, x_test=x, y_test=np.arange(40) % 10)


def write_own(folder, first):
    x = np.random.default_rng(0).integers(0, 17, (90, 1, 8, 8)).astype(np.uint8)
    y = np.arange(90) % 10
    np.savez(folder / "own.npz", x_train=x, y_train=y, x_test=x[first:], y_test=y[first:])


@pytest.fixture
def command(mheads):
    def run(*further, option="--ood", keys=OTHER):
        given = [word for key in keys for word in (option, key)]
        return mheads("reproduce", "mine.yaml", "--recipe", "digits", *TINY, *given, *further)

    return run


def document(folder, name="mine-digits"):
    found = json.loads((folder / f"results/{name}.json").read_text())
    del found["checksum"]
    return found


def figures(folder):
    """What each seed has of the measures that other data give."""
    names = ("auroc_ensemble_mean", "nll_shifted_ensemble_mean")
    runs = document(folder)["runs"]["plain"]
    return {run["seed"]: run["result"][name] for run in runs for name in names if name in run["result"]}


@pytest.mark.parametrize("option", ["--ood", "--shifted"])
def test_figures_of_other_data_that_changed_are_measured_anew(command, here, option):
    assert command("--trials", 2, option=option).code == 0
    before = figures(here)
    assert command("--trials", 2, option=option).code == 0 and figures(here) == before
    write_other(here, 1)
    assert command("--trials", 2, option=option).code == 0
    after = figures(here)
    assert before.keys() == after.keys() == {0, 1} and after[0] != before[0] and after[1] != before[1]
    (here / "other.npz").unlink()
    assert command("--tables", option=option).code == 0 and figures(here) == after  # what was measured stands


def test_figures_from_before_digests_of_other_data_were_kept_stand(command, here):
    assert command().code == 0
    found = document(here)
    del found["runs"]["plain"][0]["ood_data"]
    found["runs"]["plain"][0]["result"]["auroc_ensemble_mean"] = 12.5
    (here / "results/mine-digits.json").write_text(json.dumps(found))
    write_other(here, 1)
    assert command().code == 0 and figures(here) == {0: 12.5}


@pytest.mark.parametrize("option", ["--ood", "--shifted"])
def test_trials_on_other_data_of_one_path_are_not_averaged(command, here, option):
    assert command(option=option).code == 0
    write_other(here, 1)
    done = command("--seed", 1, option=option)
    assert done.code == 2 and f"plain-seed1 has other data for {option} than seed 0 has in the results" in done.err
    assert not (here / "runs/reproduce/digits/plain-seed1").exists() and set(figures(here)) == {0}


def test_trials_on_other_data_of_another_path_are_not_averaged(command, here):
    assert command().code == 0
    write_other(here, 1, "another.npz")
    done = command("--seed", 1, keys=["data.name=npz", "data.path=another.npz"])
    assert done.code == 2 and "plain-seed1 has other data for --ood than seed 0 has in the results" in done.err
    shutil.copy(here / "other.npz", here / "another.npz")  # the same examples
    assert command("--seed", 1, keys=["data.name=npz", "data.path=another.npz"]).code == 0
    assert set(figures(here)) == {0, 1}


def test_trials_on_other_test_sets_are_not_averaged(mheads, here):
    given = ["mine.yaml", "--recipe", "digits", *TINY, "data.name=npz", "data.path=own.npz", "--validation", 20]
    write_own(here, 0)
    assert mheads("reproduce", *given, "--trials", 2).code == 0
    assert mheads("reproduce", *given, "--test").code == 0
    write_own(here, 30)
    done = mheads("reproduce", *given, "--test", "--seed", 1)
    assert done.code == 2 and "plain-seed1-validation20 has another test set than seed 0 has" in done.err
    assert mheads("reproduce", *given, "--test", "--trials", 2).code == 0  # both are measured anew
    runs = document(here, "mine-digits-validation20-test")["runs"]["plain"]
    assert [run["result"]["examples"] for run in runs] == [60, 60]


@pytest.mark.parametrize("kept", [True, False])
def test_merged_trials_name_the_other_data_in_their_command(mheads, command, here, kept):
    assert command("--seed", 1, "-o", "elsewhere").code == 0
    path = here / "elsewhere/mine-digits.json"
    found = json.loads(path.read_text())
    assert found["ood"] == OTHER
    if not kept:  # as an older version left it
        del found["checksum"], found["ood"]
        path.write_text(json.dumps(found))
    assert mheads("reproduce", "--merge", "elsewhere").code == 0
    merged = document(here)
    assert merged["ood"] == OTHER and set(figures(here)) == {1}
    words = " ".join(f"--ood {key}" for key in OTHER)
    assert merged["command"] == f"mheads reproduce mine.yaml --recipe digits --seed 1 {words} {' '.join(TINY)}"


def test_merged_trials_are_of_one_test_set(mheads, command, here):
    assert command("--seed", 1, "-o", "elsewhere").code == 0
    write_other(here, 1)
    assert command().code == 0
    shutil.rmtree(here / "runs")
    done = mheads("reproduce", "--merge", "elsewhere")
    assert done.code == 2 and "plain-seed1 has other data for --ood than seed 0 has in the results" in done.err
