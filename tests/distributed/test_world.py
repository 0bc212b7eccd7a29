"""How ranks meet, watch each other and leave: what goes wrong before, between and after the steps of training."""

import os
import re
import signal
import time
import uuid

import pytest
from commands import TINY, Running, start_ranks
from test_faults import when_logged

from mheads.distributed.watch import SILENT, Seen
from mheads.distributed.world import share_of_cores

TRAIN = ["train", "digits", *TINY]


@pytest.mark.parametrize(
    ("own", "all_here", "cores"),
    [
        ([0, 1, 2, 3], [[0, 1, 2, 3]], 4),
        ([0, 1, 2, 3], [[0, 1, 2, 3]] * 2, 2),
        ([0, 1], [[0, 1], [2, 3]], 2),  # bound by mpirun
        ([0, 1, 2], [[0, 1, 2]] * 3, 1),
        ([0, 1], [[0, 1]] * 3, 1),  # more ranks than cores
        ([0, 1, 2, 3], [[0, 1, 2, 3], [0, 1]], 3),
    ],
)
def test_a_rank_has_its_share_of_the_cores_that_it_may_use(own, all_here, cores):
    assert share_of_cores(own, all_here) == cores


def test_a_rank_is_lost_when_its_beat_stands_still_and_hangs_when_it_is_busy_without_progress():
    seen = Seen()
    start = seen.alive
    assert seen.judge(start + 9, 10) is None
    assert seen.judge(start + 11, 10) == SILENT, "also if it never gave one"
    seen.hear([1, 5, True], start + 11)
    seen.hear([2, 5, True], start + 22)
    assert seen.judge(start + 22, 10) == "has work and made no progress"
    seen.hear([3, 6, True], start + 22)
    assert seen.judge(start + 23, 10) is None
    seen.hear([4, 6, False], start + 40)
    assert seen.judge(start + 41, 10) is None, "who waits for others is innocent"


# Each of these runs in a rank before anything else.


def impatient():
    from mheads.distributed import world

    world.TIMEOUT = world.TIMEOUT_TO_START = 2.0


def dead_before_it_connects():
    import torch.distributed as dist

    def die(*args, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    dist.init_process_group = die


def dead_between_agreements():
    from mheads.distributed import build

    build.place = lambda *args: os.kill(os.getpid(), signal.SIGKILL)


def dead_while_bandwidth_is_measured():
    from mheads.distributed.world import World

    World.bandwidth = lambda self: os.kill(os.getpid(), signal.SIGKILL)


def broken_while_its_engine_starts():
    from mheads.distributed.world import World

    def fail(*args):
        raise ValueError("no courier today")

    World.open_courier = fail


def interrupted_while_it_starts():
    from mheads.distributed import build

    def interrupt(*args):
        raise KeyboardInterrupt

    build.place = interrupt


def dead_when_all_is_done():
    import torch.distributed as dist

    dist.destroy_process_group = lambda *args: os.kill(os.getpid(), signal.SIGKILL)


def no_such_network():
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"


def end(size, *args, before, seconds=25):
    running = start_ranks(size, *args, before=before)
    began = time.monotonic()
    done = [one.finish(60) for one in running]
    assert time.monotonic() - began < seconds, "it took too long"
    return done


def test_a_rank_that_dies_before_it_connects_is_named(tmp_path):
    before = {0: impatient, 1: impatient, 2: dead_before_it_connects}
    done = end(3, *TRAIN, "timeout=2", "--run", tmp_path / "run", before=before)
    assert [one.code for one in done] == [3, 3, -signal.SIGKILL], done[0].err
    for one in done[:2]:
        assert re.search(r"not connected to all others after 2 s: .*rank 2 \(|rank 2 has given no sign of", one.err)
        assert one.err.count("error: ") == 1


def test_an_interface_that_is_not_there_is_named_on_all_ranks(tmp_path):
    done = end(2, *TRAIN, "--run", tmp_path / "run", before={1: no_such_network})
    assert [one.code for one in done] == [3, 3]
    for one in done:
        assert "rank 1 cannot use the network (nowhere0): " in one.err


@pytest.mark.parametrize("death", [dead_between_agreements, dead_while_bandwidth_is_measured])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_dies_while_all_agree_ends_the_others_without_a_traceback(death, lost, tmp_path):
    before = {0: impatient, 1: impatient} | {lost: death}
    done = end(2, *TRAIN, "placement=auto", "timeout=2", "--run", tmp_path / "run", before=before)
    assert done[lost].code == -signal.SIGKILL
    other = done[1 - lost]
    assert other.code == 3, other.err
    assert re.search(rf"error: rank {lost} (has ended, or its connection|has given no sign of|cannot be)", other.err)
    assert "Traceback" not in other.err


@pytest.mark.parametrize("broken", [0, 1])
def test_an_exception_while_the_engine_starts_ends_all_with_its_words(broken, tmp_path):
    done = end(2, *TRAIN, "--run", tmp_path / "run", before={broken: broken_while_its_engine_starts})
    assert done[broken].code == 1
    assert "ValueError: no courier today" in done[broken].err
    assert done[1 - broken].code == 3
    assert f"rank {broken} gave up: no courier today" in done[1 - broken].err


def test_an_interrupted_rank_has_the_exit_code_of_one_process(tmp_path):
    done = end(2, *TRAIN, "--run", tmp_path / "run", before={1: interrupted_while_it_starts})
    assert [one.code for one in done] == [3, 130]
    assert "rank 1 gave up: KeyboardInterrupt" in done[0].err


@pytest.mark.parametrize("lost", [0, 1])
def test_what_becomes_of_a_rank_after_the_end_is_no_failure(lost, tmp_path):
    done = end(2, *TRAIN, "--run", tmp_path / "run", before={lost: dead_when_all_is_done})
    assert done[1 - lost].code == 0, done[1 - lost].err
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_ranks_that_are_all_stopped_for_longer_than_the_timeout_go_on(tmp_path):
    """Ctrl-Z, or a job that its queue suspends."""
    run = tmp_path / "run"
    running = start_ranks(3, *TRAIN, "optim.iterations=100000", "log.evaluate_every=0", "timeout=2", "--run", run)
    when_logged(run, 3)
    for signum in (signal.SIGSTOP, signal.SIGCONT):
        for one in running:
            os.kill(one.pid, signum)
        if signum == signal.SIGSTOP:
            time.sleep(3)  # that is the stop
    lines = (run / "metrics.jsonl").read_bytes().count(b"\n")
    when_logged(run, lines + 20)
    time.sleep(1)  # a beat or two
    os.kill(running[1].pid, signal.SIGTERM)
    done = [one.finish(30) for one in running]
    assert [one.code for one in done] == [143] * 3, "\n".join(one.err for one in done)


def soon():
    from mheads.distributed import world

    world.TIMEOUT_TO_START = 0.1


def test_a_rank_that_never_starts_is_given_up_after_the_timeout_of_the_recipe(tmp_path):
    environ = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "PMIX_NAMESPACE": uuid.uuid4().hex}
    running = [
        Running(
            *TRAIN,
            "timeout=4",
            "--folder",
            tmp_path / "run",
            before=soon,
            env={**environ, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank},
        )
        for rank in ("0", "2")
    ]
    first, second = (one.finish(40) for one in running)
    assert (first.code, second.code) == (2, 2)
    assert "rank 0 waited 4 s, but of 3 ranks these did not come: 1" in first.err
    assert "Traceback" not in first.err + second.err
    assert not (tmp_path / "run").exists()
