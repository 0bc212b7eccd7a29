"""Rows that share their pretraining: trained once, and the same bits as each row alone."""

import shutil
import signal

import pytest
from helpers.commands import assert_same_run, process

from mheads.runs.folder import RunFolder

ROWS = """metrics: [oracle]
rows:
  - {name: after_<n>_k<k>, each: {k: [1, 2], n: [3, 8]}, set: [loss=mcl, loss.k=<k>, pretrain=<n>]}
  - {name: bagged, set: [loss=mcl, loss.k=1, pretrain=8, sampling=bagging]}
  - {name: relaxed, set: [loss=relaxed, pretrain=8]}
"""
# With state of all kinds: momentum, dropout, evaluations and checkpoints on the way.
GIVEN = [
    "model=user_networks:with_dropout", "members=3", "split=conv", "data.limit=150", "optim.batch_size=32",
    "optim.iterations=10", "optim.lr=0.01", "log.every=1", "log.evaluate_every=4", "log.checkpoint_every=5",
]  # fmt: skip


@pytest.fixture
def reproduce(mheads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.yaml").write_text(ROWS)

    def run(*args):
        done = mheads("reproduce", "rows.yaml", "--recipe", "digits", *GIVEN, *args)
        assert done.code == 0, done.out + done.err
        shared = [line.split() for line in done.out.splitlines() if line.startswith("the first ")]
        return [(int(words[2]), words[words.index("of") + 1].rstrip(",")) for words in shared]

    return run


def test_a_dry_run_counts_shared_pretraining_once(mheads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.yaml").write_text(ROWS)
    done = mheads("reproduce", "rows.yaml", "--recipe", "digits", *GIVEN, "--dry-run")
    lines = [line.split() for line in done.out.splitlines() if "-seed0" in line]
    assert [(words[0], " ".join(words[1:-2])) for words in lines] == [
        ("after_3_k1-seed0", "13"), ("after_8_k1-seed0", "15 of 18"),
        ("after_3_k2-seed0", "10 of 13"), ("after_8_k2-seed0", "10 of 18"),
        ("bagged-seed0", "18"), ("relaxed-seed0", "18"),
    ]  # fmt: skip
    assert mheads("reproduce", "rows.yaml", "--recipe", "digits", *GIVEN, "--only", "after_3_k1").code == 0
    done = mheads("reproduce", "rows.yaml", "--recipe", "digits", *GIVEN, "--only", "after_8_k2", "--dry-run")
    assert "15 of 18" in done.out  # a finished run has its first 3


def test_shared_pretraining_is_trained_once_and_gives_each_row_the_bits_that_it_has_alone(reproduce, mheads, tmp_path):
    assert reproduce("--trials", 2) == [
        (iterations, f"{source}-seed{seed}")
        for seed in range(2)
        for iterations, source in ((3, "after_3_k1"), (3, "after_3_k1"), (8, "after_8_k1"))
    ]
    runs = tmp_path / "runs/reproduce/digits"
    assert len([*runs.iterdir()]) == 12
    for run in runs.glob("after_*"):
        seed, config = run.name[-1], RunFolder(run).read_config()
        mcl = ["loss=mcl", f"loss.k={config.loss.k}", f"pretrain={config.pretrain}"]
        assert mheads("train", "digits", *mcl, *GIVEN, f"seed={seed}", "-f", tmp_path / "alone" / run.name).code == 0
        assert_same_run(run, tmp_path / "alone" / run.name)


def test_pretraining_that_is_damaged_is_not_shared(reproduce, tmp_path):
    runs = tmp_path / "runs/reproduce/digits"
    reproduce("--only", "after_8_k1")
    shutil.copytree(runs, tmp_path / "kept")
    assert reproduce("--only", "after_8_k2") == [(8, "after_8_k1-seed0")]
    for damage in ("checkpoints/step-00000008/tensors.safetensors", "metrics.jsonl"):
        shutil.rmtree(runs)
        shutil.copytree(tmp_path / "kept", runs)
        before = (runs / "after_8_k1-seed0" / damage).read_bytes()
        (runs / "after_8_k1-seed0" / damage).write_bytes(before[:40] + b"x" + before[41:])
        assert reproduce("--only", "after_8_k2") == []
        assert (runs / "after_8_k2-seed0/result.json").is_file()


@pytest.mark.parametrize("moment", ["after_8_k2-seed0/config.yaml", "after_8_k2-seed0/checkpoints/step-00000008"])
def test_a_process_that_is_killed_while_it_takes_over_pretraining_loses_nothing(reproduce, mheads, tmp_path, moment):
    reproduce("--only", "after_8_k1")
    asked = ["reproduce", "rows.yaml", "--recipe", "digits", *GIVEN, "--only", "after_8_k2"]
    assert process(*asked, stop=(signal.SIGKILL, "os.rename", moment)).code == -signal.SIGKILL
    run = tmp_path / "runs/reproduce/digits/after_8_k2-seed0"
    assert run.exists() and not (run / "checkpoints/step-00000008").exists()
    reproduce("--only", "after_8_k2")
    mcl = ["loss=mcl", "loss.k=2", "pretrain=8"]
    assert mheads("train", "digits", *mcl, *GIVEN, "-f", tmp_path / "alone").code == 0
    assert_same_run(run, tmp_path / "alone")
