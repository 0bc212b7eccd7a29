"""Several processes share the rows of a suite: each run is trained once, and what a dead process left is taken over."""

import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from helpers.commands import Running

from mheads.common.errors import UserError
from mheads.suites import reproduce, run_locks
from mheads.suites.run_locks import Claim, Claims

TINY = ["data.limit=60", "optim.iterations=4", "optim.batch_size=20", "log.every=1"]
SUITE = """rows:
  - {name: plain}
  - {name: tree, set: [split=conv1]}
  - {name: mcl, set: [loss=mcl, loss.k=1, 'init=<run:plain>']}
"""


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that goes when it is told, and machines by name."""

    class Clock:
        now, machine = 1000.0, "this one"

    monkeypatch.setattr(run_locks.time, "monotonic", lambda: Clock.now)
    monkeypatch.setattr(run_locks, "_machine", lambda: Clock.machine)
    return Clock


def test_a_run_is_claimed_once_and_given_back(tmp_path):
    run = tmp_path / "runs/plain-seed0"
    with Claims().take(run) as claim:
        assert Claims().take(run) is None and not claim.lost
        assert Claims().take(tmp_path / "runs/other") is not None
    assert not run.exists() and not claim.file.exists()
    with Claims().take(run) as again:
        assert isinstance(again, Claim)


def test_a_claim_of_a_killed_process_is_taken_over_at_once(tmp_path):
    code = "import sys, pathlib, time; from mheads.suites.run_locks import Claims; "
    code += "c = Claims().take(pathlib.Path(sys.argv[1])); print('has it', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "run"], **pipes) as child:
        assert child.stdout.readline() == b"has it\n"
        assert Claims().take(tmp_path / "run") is None
        child.send_signal(signal.SIGKILL)
    assert (tmp_path / ".run.claim").is_file()
    with Claims().take(tmp_path / "run") as claim:
        assert not claim.lost
    assert os.listdir(tmp_path) == []


def test_a_claim_of_another_machine_is_stale_when_nobody_has_touched_it(tmp_path, clock):
    clock.machine = "another"
    with Claims().take(tmp_path / "run") as others:
        clock.machine, looking = "this one", Claims()
        assert looking.take(tmp_path / "run") is None
        clock.now += run_locks.STALE - 1
        assert looking.take(tmp_path / "run") is None
        assert Claims().take(tmp_path / "run") is None  # one that has just come looks for as long
        os.utime(others.file, ns=(1, 1))  # whatever the time there
        clock.now += 2
        assert looking.take(tmp_path / "run") is None
        clock.now += run_locks.STALE
        with looking.take(tmp_path / "run") as claim:
            others.check()
            assert others.lost and not claim.lost
    assert os.listdir(tmp_path) == []  # the one that lost it has left the other's alone


def test_the_owner_touches_its_claim(tmp_path, monkeypatch):
    monkeypatch.setattr(run_locks, "BEAT", 0.001)
    touched = threading.Event()
    utime = os.utime
    monkeypatch.setattr(run_locks.os, "utime", lambda file: (utime(file), touched.set()))
    with Claims().take(tmp_path / "run"):
        assert touched.wait(60)


def test_a_new_claim_is_put_back_where_two_find_the_old_one_stale(tmp_path):
    with Claims().take(tmp_path / "run") as new:
        run_locks._remove(new.file, inode=-1)  # the stale one, which another process has replaced
        new.check()
        assert not new.lost and Claims().take(tmp_path / "run") is None
    assert os.listdir(tmp_path) == []


def test_processes_share_the_rows_and_each_run_is_trained_once(tmp_path, monkeypatch, mheads):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared.yaml").write_text(SUITE)
    given = ["reproduce", tmp_path / "shared.yaml", "--recipe", "digits", *TINY, "-f", tmp_path / "runs"]
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step |= {"SLURM_STEP_NODELIST": "here"}
    ranks = [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    done = [each.finish() for each in [Running(*given, "-o", tmp_path / "results", env=env) for env in ranks]]
    assert [each.code for each in done] == [0, 0], [each.err for each in done]
    trained = [name for each in done for name in re.findall(r"^\d/\d  (\S+)", each.out, re.MULTILINE)]
    assert sorted(trained) == ["mcl-seed0", "plain-seed0", "tree-seed0"]
    assert not [*tmp_path.rglob("*.claim*")]
    for each in done:  # every one of them ends with the whole table
        assert all(f" {row} " in each.out for row in ("plain", "tree", "mcl")) and "written to" in each.out
    assert "0 runs to train, 3 finished" in mheads(*given).out


def test_a_process_waits_for_what_others_train_and_one_that_lost_its_claim_stops(tmp_path, monkeypatch, mheads):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared.yaml").write_text(SUITE)
    given = ["reproduce", "shared.yaml", "--recipe", "digits", "--only", "plain", *TINY, "-f", "runs"]
    others = Claims().take(tmp_path / "runs/digits/plain-seed0")
    waits = []
    monkeypatch.setattr(
        reproduce.time, "sleep", lambda seconds: (waits.append(seconds), others.__exit__(None, None, None))
    )
    done = mheads(*given)
    assert done.code == 0 and waits == [0.1], done.err
    assert "waiting for other processes, which train plain-seed0" in done.out

    class Lost(Claim):
        def __init__(self, file):
            super().__init__(file)
            self.lost = True

    monkeypatch.setattr(run_locks, "Claim", Lost)
    done = mheads(*given, "--seed", 1)
    assert done.code == 2 and "another process took plain-seed1 over" in done.err
    assert not [*tmp_path.glob("runs/digits/plain-seed1/result.json")]
    with pytest.raises(UserError, match="could not save"):
        Claims().take(tmp_path / "shared.yaml/run")
