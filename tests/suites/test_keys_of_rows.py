"""Keys that rows and the command set together: which counts, and which would do nothing."""

import json

import pytest

TINY = ["data.limit=60", "optim.iterations=4", "optim.batch_size=20", "log.every=1"]


@pytest.fixture
def reproduce(mheads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(rows, *args):
        (tmp_path / "rows.yaml").write_text(f"metrics: [single, oracle]\nrows:\n{rows}")
        return mheads("reproduce", "rows.yaml", "--recipe", "digits", *TINY, *args)

    return run


def configs(folder):
    from mheads.runs.folder import RunFolder

    return {run.name.removesuffix("-seed0"): RunFolder(run).read_config() for run in folder.glob("runs/*/*/*-seed0")}


def test_a_loss_for_all_rows_keeps_the_options_that_rows_give(reproduce, tmp_path):
    rows = "  - {name: k<k>, each: {k: [1, 3]}, set: [loss.k=<k>]}\n"
    assert reproduce(rows, "loss=mcl", "loss.ce_weight=2").code == 0
    found = configs(tmp_path)
    assert {name: config.loss.options for name, config in found.items()} == {
        f"k{k}": {"k": k, "ce_weight": 2.0, "normalize": "batch"} for k in (1, 3)
    }


def test_an_optimizer_for_all_rows_keeps_their_learning_rates(reproduce, tmp_path):
    rows = "  - {name: lr<x>, each: {x: [0.001, 0.1]}, set: [optim.lr=<x>]}\n"
    assert reproduce(rows, "optim=adamw").code == 0
    found = configs(tmp_path)
    assert {name: (config.optim.name, config.optim.lr) for name, config in found.items()} == {
        "lr0.001": ("adamw", 0.001), "lr0.1": ("adamw", 0.1),
    }  # fmt: skip
    (first, second) = (json.loads((run / "result.json").read_text()) for run in tmp_path.glob("runs/*/*/*-seed0"))
    assert first["members"] != second["members"]


def test_a_key_of_a_row_that_would_do_nothing_is_refused_as_in_training(reproduce, mheads):
    done = reproduce("  - {name: k3, set: [loss.k=3]}\n")
    assert done.code == 2 and "row 'k3': loss.k is an option of mcl, confident, scored" in done.err
    assert mheads("train", "digits", "loss.k=3").code == 2


def test_null_in_each_is_no_split(reproduce, tmp_path):
    assert reproduce("  - {name: at_<s>, each: {s: [null, conv1]}, set: [split=<s>]}\n").code == 0
    assert {name: config.split for name, config in configs(tmp_path).items()} == {"at_null": None, "at_conv1": "conv1"}


def test_a_page_of_runs_with_further_keys_is_made_with_these_keys(reproduce, mheads, tmp_path):
    assert reproduce("  - {name: plain}\n", "-f", "mine").code == 0
    shown = ["report", "--suite", "rows.yaml", "--recipe", "digits", "-f"]
    done = mheads(*shown, "elsewhere", *TINY)
    assert done.code == 2 and "train them, mheads reproduce rows.yaml" in done.err and "-f elsewhere" in done.err
    assert "holds no run" in mheads(*shown, "mine").err  # of the recipe as it is
    assert mheads(*shown, "mine", *TINY).code == 0
    assert (tmp_path / "mine/rows-digits.html").is_file()
    assert "give run folders, or --suite" in mheads(*shown, "mine", "mine/digits/plain-seed0").err


def test_a_picture_whose_name_has_spaces_is_shown(reproduce, mheads, tmp_path):
    assert reproduce("  - {name: plain}\n").code == 0
    (tmp_path / "rows.yaml").rename(tmp_path / "my süß rows.yaml")
    assert mheads("reproduce", "my süß rows.yaml", "--recipe", "digits", *TINY).code == 0
    assert "](my%20s%C3%BC%C3%9F%20rows-digits.png)" in (tmp_path / "results/README.md").read_text()
