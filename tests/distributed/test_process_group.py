"""How ranks meet, agree and leave: what goes wrong before, between and after the steps of training."""

import itertools
import os
import pickle
import queue
import re
import signal
import threading

import numpy as np
import pytest
import torch.distributed as dist
from helpers.commands import TINY, ranks, start_ranks
from helpers.gloo_worlds import impatient

from mheads.common.errors import UserError
from mheads.distributed import lost_ranks
from mheads.distributed.lost_ranks import Watch
from mheads.distributed.process_group import World
from mheads.engine.threads import share_of_cores

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


HANGS, SILENT = "rank {} has work and made no progress for 0.5 s", "rank {} has given no sign of life for 0.5 s"
OTHERS = {  # of three ranks: those that give beats, those of them that are busy, and what all say in the end
    "one hangs": ({0, 1, 2}, {1}, HANGS.format(1)),
    "the main rank hangs": ({0, 1, 2}, {0}, HANGS.format(0)),
    "one never began": ({0, 1}, set(), SILENT.format(2)),
    "the main rank never began": ({1, 2}, set(), SILENT.format(0)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_who_is_silent_is_lost_who_is_busy_without_progress_hangs_and_who_waits_is_innocent(case, monkeypatch):
    monkeypatch.setattr(lost_ranks, "PATIENCE", 3600.0)
    there, busy, said = OTHERS[case]
    store, heard = dist.HashStore(), queue.SimpleQueue()
    watches = [Watch(store, rank, 3, 0.5) for rank in sorted(there)]
    for one in watches:
        one.tell(heard.put, busy=lambda one=one: one.rank in busy)
    assert [said in str(heard.get(timeout=60)) for _ in watches] == [True] * len(watches)
    for one in watches:
        one.end()


def test_who_is_busy_and_makes_progress_is_innocent(monkeypatch):
    """For three times the timeout, in beats of 50 ms."""
    monkeypatch.setattr(lost_ranks, "PATIENCE", 3600.0)
    store, counts, beaten = dist.HashStore(), itertools.count(), threading.Semaphore(0)

    def progress():
        beaten.release()
        return next(counts)

    watches = [Watch(store, rank, 2, 0.5) for rank in (0, 1)]
    watches[1].tell(progress=progress, busy=lambda: True)
    for _ in range(30):
        assert beaten.acquire(timeout=60)
    for one in watches:
        one.check()
        one.end()


def test_a_collective_that_breaks_off_late_in_a_run_names_the_rank_that_is_gone_and_not_the_one_that_noticed(
    monkeypatch,
):
    """Ranks 0 and 1 have run for longer than the timeout when the beat of rank 2 stops."""
    monkeypatch.setattr(lost_ranks, "PATIENCE", 3600.0)
    store, heard, beaten = dist.HashStore(), queue.SimpleQueue(), threading.Semaphore(0)
    watches = [Watch(store, rank, 3, 0.5) for rank in range(3)]
    for one in watches[:2]:
        one.tell(heard.put)
    watches[2].tell(progress=lambda: beaten.release() or 0)
    for _ in range(30):
        assert beaten.acquire(timeout=60)
    watches[2].end()
    watches[1].suspect(RuntimeError("Connection closed by peer"))
    assert ["rank 2 has ended" in str(heard.get(timeout=60)) for _ in range(2)] == [True, True]
    for one in watches:
        one.end()


@pytest.fixture
def watches(monkeypatch):
    """Watches of three ranks that share a store in this process; none of them ends it, though a fault was told."""
    monkeypatch.setattr(lost_ranks, "PATIENCE", 3600.0)
    store = dist.HashStore()
    made = [Watch(store, rank, 3, 60.0) for rank in range(3)]
    yield made
    for one in made:
        one.end()


def test_all_ranks_end_with_the_first_fault_that_was_written_down(watches):
    heard = queue.SimpleQueue()  # a watch may hear of it on its own thread
    watches[2].tell(fail=heard.put)
    watches[1].report(2, "rank 2 is gone")
    watches[2].report(1, "rank 1 has ended because of rank 2")
    watches[0].report(1, "rank 1 has ended because of rank 2")
    assert [(one.failure.rank, str(one.failure)) for one in watches] == [(2, "rank 2 is gone")] * 3
    assert str(heard.get(timeout=60)) == "rank 2 is gone"
    watches[0].tell(fail=heard.put)  # who asks later hears of it, too
    assert str(heard.get(timeout=60)) == "rank 2 is gone" and heard.empty()


def test_when_all_is_done_the_end_of_a_rank_is_no_failure(watches):
    watches[0].end()
    watches[0].suspect(RuntimeError("its connection is lost"))
    watches[0].fail(1, "its connection is lost")
    watches[0].check()
    assert watches[0].failure is None


def test_a_mistake_of_the_lead_is_that_of_all_and_its_decision_is_made_once(watches):
    store = dist.HashStore()
    worlds = [World.__new__(World) for _ in range(3)]
    for rank, world in enumerate(worlds):
        world.rank, world.size, world.is_main, world.store, world.watch = rank, 3, rank == 0, store, watches[rank]
        world._agreements = itertools.count()
    made = []

    def decide():
        made.append(len(made))
        if len(made) == 2:
            raise UserError("this cannot be")
        return made[-1]

    assert [world.share("what", decide) for world in worlds] == [0, 0, 0]
    for world in worlds:
        with pytest.raises(UserError, match="this cannot be"):
            world.share("what", decide)
    assert [world.share("what", decide) for world in worlds] == [2, 2, 2]
    for rank in (2, 1):
        store.set(f"facts/3/{rank}", pickle.dumps({"n": 3 if rank == 1 else 4}))
    with pytest.raises(UserError, match="rank 2 has another n: 4 there, 3 on rank 0"):
        worlds[0].compare("facts", {"n": 3})


# Each of these runs in a rank before anything else.


def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)


def dead_before_it_connects():
    import torch.distributed as dist

    dist.init_process_group = die


def dead_between_agreements():
    from mheads.training import experiment_on_ranks

    experiment_on_ranks.agree_on_placement = die


def dead_while_bandwidth_is_measured():
    from mheads.training import experiment_on_ranks

    experiment_on_ranks.measure_bandwidth = die


def dead_when_all_is_done():
    import torch.distributed as dist

    dist.destroy_process_group = die


def broken_while_its_engine_starts():
    from mheads.distributed import ranks_engine

    def fail(*args):
        raise ValueError("no mesh today")

    ranks_engine.make_groups = fail


def interrupted_while_it_starts():
    from mheads.training import experiment_on_ranks

    def interrupt(*args):
        raise KeyboardInterrupt

    experiment_on_ranks.agree_on_placement = interrupt


def no_such_network():
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"


def another_version():
    import mheads

    mheads.__version__ = "0.0.0"


GONE = r"error: rank {} (has ended, or its connection|has given no sign of|cannot be)"
NOT_CONNECTED = r"not connected to all others after 1.5 s: .*rank 2|rank 2 has given no sign of"
# Of each: further arguments, what happens on some ranks (arguments or a function), the exit codes, and what each says.
ENDS = {
    "another recipe": ([], {2: ["seed=7"]}, [2, 2, 2], ["rank 2 has another seed: 7 there, 0 on rank 0", "", ""]),
    "a teacher": (
        [],
        {1: ["teacher.answers=nowhere.npz"]},
        [2, 2],
        ["rank 1 has another teacher.answers: 'given' there, 'none' on rank 0", ""],
    ),
    "another version": ([], {1: another_version}, [2, 2], ["rank 1 has another mheads version: '0.0.0' there", ""]),
    "a mistake that all make": (["optim.lrr=1"], {}, [2, 2, 2], ["did you mean 'optim.lr'", "", ""]),
    "a mistake of one": (
        [], {1: ["optim.lrr=1"]}, [3, 2, 3],
        ["rank 1 gave up: .*'optim.lrr'", "rank 1 error: .*unknown key 'optim.lrr'", "rank 1 gave up: .*'optim.lrr'"],
    ),
    "a rank that is not running": (
        ["placement={trunk: 0, conv/0: 5}"], {}, [2, 2], ["placement needs ranks 0 to 5, but 2 are running", ""],
    ),
    "an interface that is not there": (
        [], {1: no_such_network}, [3, 3], ["rank 1 cannot use the network: "] * 2,
    ),
    "dead before it connects": (
        ["timeout=1.5"], {2: dead_before_it_connects}, [3, 3, -9], [NOT_CONNECTED, NOT_CONNECTED, ""],
    ),
    "rank 0 dies between agreements": (["timeout=1.5"], {0: dead_between_agreements}, [-9, 3], ["", GONE.format(0)]),
    "rank 1 dies between agreements": (["timeout=1.5"], {1: dead_between_agreements}, [3, -9], [GONE.format(1), ""]),
    "rank 0 dies while bandwidth is measured": (
        ["timeout=1.5", "placement=auto"], {0: dead_while_bandwidth_is_measured}, [-9, 3], ["", GONE.format(0)],
    ),
    "rank 1 dies while bandwidth is measured": (
        ["timeout=1.5", "placement=auto"], {1: dead_while_bandwidth_is_measured}, [3, -9], [GONE.format(1), ""],
    ),
    "rank 0 breaks while its engine starts": (
        [], {0: broken_while_its_engine_starts}, [1, 3], ["ValueError: no mesh", "rank 0 gave up: no mesh today"],
    ),
    "rank 1 breaks while its engine starts": (
        [], {1: broken_while_its_engine_starts}, [3, 1], ["rank 1 gave up: no mesh today", "ValueError: no mesh"],
    ),
    "an interrupt": ([], {1: interrupted_while_it_starts}, [3, 130], ["rank 1 gave up: KeyboardInterrupt", ""]),
    "a loss that is not finite": (["optim.lr=1e30"], {}, [2, 2, 2], ["the loss became (nan|inf)", "", ""]),
    # What becomes of a rank after the end is no failure.
    "rank 0 dies when all is done": ([], {0: dead_when_all_is_done}, [-9, 0], ["", ""]),
    "rank 1 dies when all is done": ([], {1: dead_when_all_is_done}, [0, -9], ["", ""]),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_all_ranks_end_with_a_code_and_one_message_that_names_the_cause(end, tmp_path):
    args, happens, codes, messages = ENDS[end]
    each = {rank: what for rank, what in happens.items() if isinstance(what, list)}
    before = {rank: what for rank, what in happens.items() if callable(what)}
    if "timeout=1.5" in args:
        before = dict.fromkeys(range(len(codes)), impatient) | before
    run = tmp_path / "run"
    running = start_ranks(len(codes), *TRAIN, *args, "--run", run, each=each, before=before)
    done = [one.finish(30) for one in running]
    assert [one.code for one in done] == codes, "\n".join(one.err for one in done)
    for one, message in zip(done, messages, strict=True):
        assert re.search(message, one.err) if message else one.err == ""
        assert ("Traceback" in one.err) == message.startswith("ValueError"), "only what is a fault of ours"
        assert one.err.count("error: ") <= 1
    assert run.exists() == (run / "model.safetensors").exists() == (0 in codes)


def test_other_data_on_a_rank_is_refused_with_both_checksums(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        x, y = np.random.default_rng(seed).random((40, 1, 8, 8), np.float32), np.arange(40) % 10
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    each = {rank: [f"data.path={tmp_path / name}.npz"] for rank, name in enumerate("ab")}
    done = ranks(2, *TRAIN, "data.name=npz", "--run", tmp_path / "run", each=each)
    assert [one.code for one in done] == [2, 2], done[0].err
    assert re.search(r"rank 1 has another data checksum: '\w+' there, '\w+' on rank 0", done[0].err)


def soon():
    from mheads.distributed import process_group

    process_group.TIMEOUT_TO_START = 0.1


def test_a_rank_that_never_starts_is_given_up_after_the_timeout_of_the_recipe(tmp_path):
    args = [*TRAIN, "timeout=1.5", "--folder", tmp_path / "run"]
    running = start_ranks(3, *args, before={0: soon, 2: soon}, only=[0, 2])
    first, second = (one.finish(40) for one in running)
    assert (first.code, second.code) == (2, 2)
    assert "rank 0 waited 1.5 s, but of 3 ranks these did not come: 1" in first.err
    assert "Traceback" not in first.err + second.err
    assert not (tmp_path / "run").exists()
