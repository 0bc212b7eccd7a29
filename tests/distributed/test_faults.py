"""What happens when a rank is lost, hangs, or is asked to stop in training: with real processes and real signals."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.commands import (
    HERE,
    TINY,
    _context,
    assert_same_run,
    logged,
    process,
    ranks,
    start_ranks,
    stop_at_iteration_8,
    weights,
    when_logged,
)

TRAIN = ["train", "digits", *TINY]
# Long enough to be disturbed in the middle.
LONG = [*TRAIN, "optim.iterations=100000", "log.every=1", "log.evaluate_every=0"]


@pytest.mark.parametrize("lost", [0, 2])
def test_a_killed_rank_ends_the_others_with_its_name(lost, tmp_path):
    running = start_ranks(3, *LONG, "--run", tmp_path / "run")
    when_logged(tmp_path / "run", 3)
    os.kill(running[lost].pid, signal.SIGKILL)
    done = [one.finish(30) for one in running]
    assert done[lost].code == -signal.SIGKILL
    for rank in {0, 1, 2} - {lost}:
        assert done[rank].code == 3
        assert f"rank {lost} has ended, or its connection is lost; the same command goes on" in done[rank].err
        assert ("rank " + str(rank) in done[rank].err) == (rank != 0), "tagged where it is not the main rank"


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_rank_that_gives_no_sign_of_life_is_named_after_the_timeout(frozen, tmp_path):
    running = start_ranks(3, *LONG, "timeout=2", "--run", tmp_path / "run")
    when_logged(tmp_path / "run", 3)
    began = time.monotonic()
    os.kill(running[frozen].pid, signal.SIGSTOP)
    try:
        done = {rank: running[rank].finish(30) for rank in {0, 1, 2} - {frozen}}
    finally:
        os.kill(running[frozen].pid, signal.SIGKILL)
        running[frozen].finish()
    assert 2 <= time.monotonic() - began < 15
    for one in done.values():
        assert one.code == 3
        assert ("rank 0 cannot be reached" if frozen == 0 else "rank 1 has given no sign of life for 2 s") in one.err


def test_a_rank_that_hangs_is_named_and_those_that_wait_for_it_are_not(tmp_path):
    args = ["train", "digits", "model=user_networks:hangs", "members=3", "split=hidden", "data.limit=60", "timeout=2"]
    args += ["engine.stack=never"]
    done = ranks(3, *args, "--run", tmp_path / "run", before=dict.fromkeys(range(3), hang_on_1))
    for one in done:
        assert "rank 1 has work and made no progress for 2 s (timeout)" in one.err
        assert one.code == 3


def hang_on_1():
    from mheads.distributed import lost_ranks

    lost_ranks.PATIENCE = 1.0
    os.environ["HANGING_RANK"] = "1"


def test_slow_but_honest_steps_live(tmp_path):
    """A step takes several times the timeout; each of its tasks much less."""
    args = ["train", "digits", "model=user_networks:slow", "members=4", "split=hidden", "data.limit=40", "timeout=1"]
    args += [
        "optim.batch_size=40",
        "engine.micro_batches=16",
        "engine.workers=1",
        "optim.iterations=1",
        "engine.stack=never",
    ]
    began = time.monotonic()
    done = ranks(2, *args, "--run", tmp_path / "run")
    assert [one.code for one in done] == [0, 0], done[0].err + done[1].err
    assert time.monotonic() - began > 2.5


def test_a_lead_that_reads_a_checkpoint_for_long_is_not_given_up_and_accuses_nobody(undisturbed, tmp_path):
    command = [*TRAIN, "timeout=1", "--run", tmp_path / "run"]
    process(*command, stop=(signal.SIGKILL, "os.rename", "step-00000012"))
    done = ranks(2, *command, before={0: slow_checkpoints})
    assert [one.code for one in done] == [0, 0], done[0].err + done[1].err
    assert weights(tmp_path / "run") == weights(undisturbed)


def slow_checkpoints():
    from mheads.runs.checkpoint import Checkpoints

    newest = Checkpoints.newest

    def slowly(self, *args):
        time.sleep(2.5)  # what a large file on a slow disk takes
        return newest(self, *args)

    Checkpoints.newest = slowly


def when_stopped(pid):
    """A signal is not there at once: waits until all threads of the process stand still."""
    deadline = time.monotonic() + 60
    while any(
        stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        assert time.monotonic() < deadline, "it does not stop"
        time.sleep(0.01)


@pytest.mark.full
def test_ranks_that_are_all_stopped_for_longer_than_the_timeout_go_on(tmp_path):
    """Ctrl-Z, or a job that its queue suspends."""
    run = tmp_path / "run"
    running = start_ranks(3, *LONG, "timeout=2", "--run", run)
    when_logged(run, 3)
    for one in running:
        os.kill(one.pid, signal.SIGSTOP)
    for one in running:
        when_stopped(one.pid)
    lines = logged(run)
    time.sleep(6)  # three times the timeout
    for one in running:
        os.kill(one.pid, signal.SIGCONT)
    when_logged(run, lines + 50)  # several beats
    os.kill(running[1].pid, signal.SIGTERM)
    done = [one.finish(30) for one in running]
    assert [one.code for one in done] == [143] * 3, "\n".join(one.err for one in done)


@pytest.mark.parametrize(("asked", "then"), [(0, 5), (2, 1)])
def test_a_signal_to_one_rank_stops_all_at_one_step_and_any_number_of_ranks_goes_on(asked, then, undisturbed, tmp_path):
    run = tmp_path / "run"
    command = [*TRAIN, "--run", run]
    done = ranks(3, *command, before={asked: stop_at_iteration_8})
    assert [one.code for one in done] == [143] * 3, [one.err for one in done]
    assert "stopped by SIGTERM; saved" in done[0].err
    assert done[1].err == done[2].err == ""
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]
    assert not (run / "model.safetensors").exists()
    again = ranks(then, *command) if then > 1 else [process(*command)]
    assert [one.code for one in again] == [0] * then, again[0].err
    assert_same_run(run, undisturbed)


def test_ranks_without_work_resume_with_those_that_have_some(tmp_path):
    """All stages are on rank 0, and a batch of one micro-batch leaves nothing to share."""
    args = [*TRAIN, "placement={trunk: 0}", "engine.micro_batches=1"]
    assert process(*args, "--run", tmp_path / "one").code == 0
    command = [*args, "--run", tmp_path / "run"]
    assert [one.code for one in ranks(3, *command, before={2: stop_at_iteration_8})] == [143] * 3
    again = ranks(3, *command)
    assert [one.code for one in again] == [0] * 3, again[1].err
    assert "2 of 3 ranks have nothing to do: members are on 1 rank, in 1 replica; start 1 rank" in " ".join(
        again[0].out.split()
    )
    assert_same_run(tmp_path / "run", tmp_path / "one")


def test_ranks_that_stacked_members_leave_idle_are_reported(tmp_path):
    done = ranks(2, "train", "diabetes", "members=4", "optim.iterations=2", "--run", tmp_path / "run")
    assert [one.code for one in done] == [0] * 2, done[0].err
    said = " ".join(done[0].out.split())
    assert "1 of 2 ranks have nothing to do: small members run as one stage on one rank; engine.stack=never" in said


def test_a_run_begun_in_one_process_goes_on_with_ranks_and_is_finished_then(undisturbed, tmp_path):
    command = [*TRAIN, "--run", tmp_path / "run"]
    process(*command, stop=(signal.SIGKILL, "os.rename", "step-00000012"))
    for size, said in ((3, "resuming at iteration 6"), (2, "is finished: nothing to do")):
        done = ranks(size, *command)
        assert [one.code for one in done] == [0] * size, done[0].err
        assert said in done[0].out
        assert_same_run(tmp_path / "run", undisturbed)


def test_torchrun_restarts_after_each_rank_was_killed_and_ends_with_the_undisturbed_weights(undisturbed, tmp_path):
    """Its agent in a process of its own, which starts its workers as `commands` does: several starts take seconds."""
    run, killed = tmp_path / "run", tmp_path / "killed"
    killed.mkdir()
    agent = _context.Process(target=restarting, args=([*TRAIN, "--folder", str(run)], killed, tmp_path / "said"))
    agent.start()
    agent.join(200)
    agent.kill()
    assert agent.exitcode == 0, (tmp_path / "said").read_text()
    assert {path.name for path in killed.iterdir()} == {"0", "1"}
    assert weights(run) == weights(undisturbed)


def restarting(args, killed, said):
    into(said)
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    options = {"monitor_interval": 0.1, "start_method": "forkserver"}
    where = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(os.getpid())}
    config = LaunchConfig(1, 1, nproc_per_node=2, max_restarts=2, **options, **where)
    elastic_launch(config, train_and_die)(args, killed, said)


def into(file):
    """Has what this process says go to a file."""
    for out in (1, 2):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), out)


def train_and_die(args, killed, said):
    """Rank r kills itself at its 8th step of attempt r, and goes on from a checkpoint in the next."""
    into(said)
    from mheads.cli.main import main
    from mheads.distributed.ranks_engine import RanksEngine

    step, rank, attempt = RanksEngine.step, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    numbers, args_of_run = [], args

    def step_and_die(self, number, *args, **options):
        numbers.append(number)
        if len(numbers) == 8 and rank == attempt:
            checkpoint = Path(args_of_run[-1], "checkpoints", f"step-{6 * (int(attempt) + 1):08}")
            deadline = time.monotonic() + 60
            while not checkpoint.exists() and time.monotonic() < deadline:  # a thread of the main rank writes it
                time.sleep(0.01)
            (killed / rank).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, number, *args, **options)

    RanksEngine.step = step_and_die
    sys.path.insert(0, str(HERE))
    sys.argv = ["mheads", *args]
    with suppress(SystemExit):
        main()
    assert numbers[0] == 6 * int(attempt), "from the newest checkpoint"
