"""Checkpoints that ranks write together: with real processes that are killed, or lack space, while they save."""

import errno
import json
import os
import shutil
import signal
from functools import partial

import pytest
import torch
from helpers.commands import TINY, assert_same_run, process, ranks, stop_at_iteration_8
from safetensors.torch import load_file

import mheads as package
from mheads.runs.shards import INDEX, TENSORS

TRAIN = ["train", "digits", *TINY]


def fault(where, error=None):
    """Ends this process, or raises the error, when half of a file is written whose path holds these texts."""
    from mheads.common import atomic_files

    write = atomic_files.write_new

    def fail(path, content):
        if all(text in str(path) for text in where):
            write(path, content[: len(content) // 2])
            if error is not None:
                raise OSError(error, os.strerror(error))
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content)

    atomic_files.write_new = fail


def checkpoints(run):
    return {path.name: sorted(file.name for file in path.iterdir()) for path in (run / "checkpoints").glob("step-*")}


def shards(count):
    return sorted(["state.json", INDEX, *(f"tensors-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count))])


def test_ranks_that_are_killed_while_they_save_go_on_in_any_number_with_the_same_bits(undisturbed, tmp_path):
    """On 5, 2 and 1: a rank dies in the middle of its shard, and the main rank before the rename."""
    run = tmp_path / "run"
    command = [*TRAIN, "timeout=10", "--run", run]
    lives = [
        (5, 2, {"before": {2: partial(fault, ["step-00000012", "tensors-00003"])}}, 6, shards(3)),
        (2, 0, {"stop": {0: (signal.SIGKILL, "os.rename", "step-00000018")}}, 12, shards(2)),
    ]
    for size, dies, disturbed, left, files in lives:
        done = ranks(size, *command, **disturbed)
        assert [one.code for one in done] == [-9 if rank == dies else 3 for rank in range(size)], done[0].err
        assert max(checkpoints(run)) == f"step-{left:08d}"
        assert checkpoints(run)[f"step-{left:08d}"] == files
    done = process(*command)
    assert done.code == 0, done.err
    assert "resuming at iteration 12" in done.out
    assert checkpoints(run)["step-00000024"] == ["state.json", TENSORS]
    assert_same_run(run, undisturbed)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run on two replicas of three ranks that was stopped after iteration 8."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    done = ranks(6, *TRAIN, "--run", run, before={1: stop_at_iteration_8})
    assert [one.code for one in done] == [143] * 6, done[0].err
    assert checkpoints(run) == dict.fromkeys(["step-00000006", "step-00000008"], shards(3))
    return run


@pytest.fixture
def run(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


def test_a_stage_that_several_ranks_share_is_written_once(stopped):
    folder = stopped / "checkpoints/step-00000008"
    held = [load_file(file) for file in sorted(folder.glob("tensors-*"))]
    names = [name for shard in held for name in shard]
    assert len(names) == len(set(names)) == len(json.loads((folder / INDEX).read_text())["weight_map"])
    stages = [{name.split(".")[1] for name in shard if not name.startswith("progress/")} for shard in held]
    assert stages == [{"trunk", "conv/0"}, {"conv/1"}, {"conv/2"}]
    assert {name.partition("/")[0] for name in held[1]} == {"model", "optim"}


def test_an_unfinished_run_with_shards_answers_as_one_with_a_single_file(mheads, run, tmp_path):
    single = tmp_path / "single"
    done = mheads(*TRAIN, "optim.iterations=8", "--run", single)
    assert done.code == 0, done.err
    with pytest.warns(UserWarning, match="iteration 8 of 24|evaluation at iteration 8"):
        net = package.load(run, trust=True).net
    expected = package.load(single, trust=True).net.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in net.state_dict().items())
    for command in (["eval", run, "--trust"], ["export", run, "--trust", "-o", tmp_path / "run.pt2"]):
        done = mheads(*command)
        assert done.code == 0, done.err
        assert "is not finished: iteration 8 of 24" in done.out


def test_a_damaged_shard_is_named_and_ranks_go_back_to_the_checkpoint_before(undisturbed, run):
    shard = run / "checkpoints/step-00000008/tensors-00002-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    done = ranks(3, *TRAIN, "--run", run)
    assert [one.code for one in done] == [0] * 3, done[0].err
    assert "step-00000008 is damaged (the checksum of tensors-00002-of-00003.safetensors" in done[0].out
    assert "resuming at iteration 6" in done[0].out
    assert_same_run(run, undisturbed)


def test_a_rank_without_space_ends_all_and_what_was_saved_stays(run):
    done = ranks(3, *TRAIN, "--run", run, before={1: partial(fault, ["step-00000012", "tensors-00002"], errno.ENOSPC)})
    assert any("step-00000012: no space left on the disk. What was saved before is whole" in one.err for one in done)
    assert all(one.code in (2, 3) and "Traceback" not in one.err for one in done)
    assert max(checkpoints(run)) == "step-00000008"


def test_ranks_that_do_not_see_one_folder_bring_all_to_the_main_rank(undisturbed, run, tmp_path):
    """Also from shards, which the main rank then reads alone."""
    elsewhere = {1: ["--run", tmp_path / "elsewhere"]}
    done = ranks(2, *TRAIN, each={0: ["--run", run], **elsewhere})
    assert [one.code for one in done] == [0, 0], done[0].err + done[1].err
    assert checkpoints(run) == {f"step-000000{step}": ["state.json", TENSORS] for step in (18, 24)}
    assert not (tmp_path / "elsewhere").exists()
    assert_same_run(run, undisturbed)


def test_a_replica_that_does_not_see_the_folder_is_handed_its_stages(undisturbed, run, tmp_path):
    """Its ranks write nothing, since those of the first replica hold the same, but all of them have to resume."""
    each = {rank: ["--run", run if rank < 3 else tmp_path / "elsewhere"] for rank in range(6)}
    done = ranks(6, *TRAIN, each=each)
    assert [one.code for one in done] == [0] * 6, [one.err for one in done]
    assert not (tmp_path / "elsewhere").exists()
    assert_same_run(run, undisturbed)


def test_weights_that_are_not_finite_end_all_ranks_before_they_are_saved(run):
    done = ranks(3, *TRAIN, "--run", run, before={2: spoil_at_iteration_12})
    assert [one.code for one in done] == [2] * 3, [one.err for one in done]
    assert "weights became infinite or NaN at iteration 12, in member 2; the checkpoint of iteration 8" in done[0].err
    assert done[1].err == done[2].err == ""
    assert max(checkpoints(run)) == "step-00000008"


def spoil_at_iteration_12():
    from mheads.optim.stage_updates import Optimizer

    update, count = Optimizer.update, iter(range(100))

    def spoil(self, stage, gradients):
        update(self, stage, gradients)
        if stage == "conv/2" and next(count) == 3:
            self.parameters[stage][0].data.fill_(float("inf"))

    Optimizer.update = spoil
