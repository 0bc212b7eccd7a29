"""Runs that are killed, interrupted, damaged or given more iterations; all compared with one left in peace."""

import errno
import json
import os
import select
import shutil
import signal
import sys
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import user_networks
from helpers.commands import TINY, assert_same_run, log_lines, ownership, process, result, weights
from safetensors.torch import load_file

from mheads import load
from mheads.common import atomic_files
from mheads.common.console import Console
from mheads.common.errors import UserError
from mheads.common.progress import Silent
from mheads.config import read as configs
from mheads.config import schema
from mheads.runs import checkpoint
from mheads.runs.folder import RunFolder
from mheads.training.experiment import assemble_experiment, build_experiment
from mheads.training.loop import train
from mheads.training.train_state import TrainState

# Just before these file operations, in the order in which a run meets them.
KILL_POINTS = {
    "before there is a manifest": ("os.rename", ".manifest.json"),
    "when the manifest knows of a file that is not there": ("open", ".identity.json"),
    "before the folder has a config": ("open", ".config.yaml"),
    "while the first checkpoint is written": ("open", ".step-00000006.new/state.json"),
    "at an evaluation between checkpoints": ("open", ".assignments.npz"),
    "before a whole checkpoint gets its name": ("os.rename", ".step-00000012"),
    "while an old checkpoint is removed": ("os.rename", ".old-00000006"),
    "after the last step, before the model is there": ("os.rename", ".model.safetensors"),
    "before the result is there": ("os.rename", ".result.json"),
}


def steps_of(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_killed_run_and_the_same_command_give_the_same_bits(tmp_path, undisturbed, mheads, point):
    run = tmp_path / "run"
    command = ["train", "digits", *TINY, "--run", run]
    assert process(*command, stop=(signal.SIGKILL, *KILL_POINTS[point])).code == -signal.SIGKILL
    assert mheads(*command).code == 0
    assert_same_run(run, undisturbed)


def test_a_run_killed_at_each_point_in_turn_is_always_loadable_and_gives_the_same_bits(tmp_path, undisturbed, mheads):
    run = tmp_path / "run"
    command = ["train", "digits", *TINY, "--run", run]
    for name, (event, text) in KILL_POINTS.items():
        done = process(*command, stop=(signal.SIGKILL, event, text))
        assert done.code == -signal.SIGKILL, f"{name}: {done.out}{done.err}"
        assert not (run / "result.json").exists(), name
        said = []
        try:
            load(run, user_networks.with_dropout, warn=said.append)
        except UserError as error:
            assert not list(run.glob("checkpoints/step-*")), name
            assert "is not a run folder" in str(error) or "no checkpoint yet" in str(error)
        assert not any("is damaged" in text for text in said)
    assert mheads(*command).code == 0
    assert_same_run(run, undisturbed)
    assert steps_of(run) == ["step-00000018", "step-00000024"]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_the_same_command_goes_on_to_the_same_bits(tmp_path, undisturbed, mheads, signum, code):
    run = tmp_path / "run"
    command = ["train", "digits", *TINY, "--run", run]
    # The next checkpoint waits for this one, so the signal comes before step 12.
    done = process(*command, stop=(signum, "open", ".step-00000006.new/state.json"))
    assert done.code == code, done.err
    assert signum.name in done.err
    assert "same command" in done.err
    saved = int(steps_of(run)[-1].removeprefix("step-"))
    assert 6 <= saved <= 12
    assert [line["iteration"] for line in log_lines(run)][-1] == saved
    resumed = mheads(*command)
    assert resumed.code == 0
    assert f"resuming at iteration {saved} of 24" in resumed.out
    assert_same_run(run, undisturbed)


def with_two_interrupts_in_step_8():
    """Ctrl-C twice: the second one does not wait for the end of the step."""
    begin_step = TrainState.begin_step

    def interrupted(state):
        if state.step == 7:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return begin_step(state)

    TrainState.begin_step = interrupted


def test_a_second_ctrl_c_saves_nothing_and_says_so(tmp_path, undisturbed, mheads):
    run = tmp_path / "run"
    command = ["train", "digits", *TINY, "--run", run]
    done = process(*command, before=with_two_interrupts_in_step_8)
    assert done.code == 130
    assert done.err == (
        "interrupted: nothing was saved by it. The same command goes on from the newest checkpoint, if there is one.\n"
    )
    assert steps_of(run) == ["step-00000006"]
    assert "resuming at iteration 6 of 24" in mheads(*command).out
    assert_same_run(run, undisturbed)


def test_ctrl_c_before_the_first_step_says_that_nothing_was_saved(tmp_path):
    done = process("train", "digits", "--run", tmp_path / "run", stop=(signal.SIGINT, "open", "recipes/digits.yaml"))
    assert (done.code, done.out) == (130, "")
    assert done.err.startswith("interrupted: nothing was saved by it. The same command goes on")
    assert not (tmp_path / "run").exists()


def test_ctrl_c_in_a_command_that_does_not_train_says_no_more_than_that():
    done = process("config", "digits", stop=(signal.SIGINT, "open", "recipes/digits.yaml"))
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")


def in_a_terminal_that_closes():
    """Has output go to a terminal, a process of its own that ends at the first checkpoint."""
    ours, theirs = os.openpty()
    told, tell = os.pipe()
    terminal = os.fork()
    if terminal == 0:
        os.close(tell)
        while told not in (ready := select.select([ours, told], [], [])[0]):
            os.read(ready[0], 4096)
        os._exit(0)
    os.close(ours)
    for out in (1, 2):
        os.dup2(theirs, out)
    os.close(theirs)
    open_still = [tell]

    def watch(event, args):
        if open_still and event == "open" and ".step-00000006.new/state.json" in str(args[0]):
            os.close(open_still.pop())
            os.waitpid(terminal, 0)
            os.kill(os.getpid(), signal.SIGHUP)

    sys.addaudithook(watch)


def test_a_terminal_that_closes_loses_nothing(tmp_path, undisturbed, mheads):
    run = tmp_path / "run"
    command = ["train", "digits", *TINY, "--run", run]
    done = process(*command, before=in_a_terminal_that_closes)
    assert done.code == 129
    saved = int(steps_of(run)[-1].removeprefix("step-"))
    assert 6 <= saved <= 12
    assert mheads(*command).code == 0
    assert_same_run(run, undisturbed)


def into_a_pipe_that_closes():
    """Has output go to a pipe that nobody reads after the first checkpoint, as that of `| head -1`."""
    end, out = os.pipe()
    os.dup2(out, 1)
    still = [end]

    def watch(event, args):
        if still and event == "open" and ".step-00000006.new/state.json" in str(args[0]):
            os.close(still.pop())

    sys.addaudithook(watch)


def test_output_that_nobody_reads_stops_training_and_loses_nothing(tmp_path, undisturbed, mheads):
    run = tmp_path / "run"
    command = ["train", "digits", *TINY, "--run", run]
    done = process(*command, before=into_a_pipe_that_closes)
    assert done.code == 128 + signal.SIGPIPE
    assert done.err == "stopped by SIGPIPE; saved. The same command resumes from here.\n"
    saved = int(steps_of(run)[-1].removeprefix("step-"))
    assert 9 <= saved <= 17  # after an evaluation, of which it could not tell
    assert mheads(*command).code == 0
    assert_same_run(run, undisturbed)


def test_a_command_whose_output_nobody_reads_ends_as_others_do():
    for stderr in (False, True):
        end, out = os.pipe()
        os.close(end)
        with os.fdopen(out, "w") as file:
            console = Console(stderr=stderr)
            console.file = file
            with nullcontext() if stderr else pytest.raises(SystemExit) as stopped:
                console.print("something")
            console.print("more")  # goes nowhere
        assert stderr or stopped.value.code == 128 + signal.SIGPIPE


def ignoring_hangups():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_under_nohup_a_terminal_may_close(tmp_path, undisturbed):
    run = tmp_path / "run"
    stop = (signal.SIGHUP, "open", ".step-00000006.new/state.json")
    done = process("train", "digits", *TINY, "--run", run, before=ignoring_hangups, stop=stop)
    assert done.code == 0, done.err
    assert_same_run(run, undisturbed)


@pytest.mark.parametrize("workers", [2, 4])
def test_the_number_of_workers_changes_no_bit_with_tree_mcl_bagging_and_dropout(tmp_path, undisturbed, mheads, workers):
    run = tmp_path / "run"
    assert mheads("train", "digits", *TINY, f"engine.workers={workers}", "--run", run).code == 0
    assert_same_run(run, undisturbed)


def test_the_number_of_workers_changes_no_bit_of_processes_on_plain_digits(tmp_path):
    runs = {workers: tmp_path / str(workers) for workers in (1, 2, 4)}
    for workers, run in runs.items():
        short = ["optim.iterations=12", "log.evaluate_every=6", f"engine.workers={workers}", "data.limit=200"]
        done = process("train", "digits", *short, "--run", run)
        assert done.code == 0, done.err
    assert_same_run(runs[2], runs[1])
    assert_same_run(runs[4], runs[1])


@pytest.fixture
def copied(tmp_path, undisturbed):
    """A finished run that may be changed."""
    import shutil

    return shutil.copytree(undisturbed, tmp_path / "copied")


def test_a_finished_run_does_nothing_and_says_so(copied, mheads):
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.name != ".lock"}
    done = mheads("train", "digits", *TINY, "--run", copied)
    assert done.code == 0
    assert "is finished: nothing to do" in done.out
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.name != ".lock"} == before


def test_a_finished_run_needs_no_checkpoints_to_stay_finished(copied, mheads):
    import shutil

    shutil.rmtree(copied / "checkpoints")
    done = mheads("train", "digits", *TINY, "--run", copied)
    assert "nothing to do" in done.out


def test_more_iterations_go_on_from_the_end(copied, tmp_path, mheads):
    done = mheads("train", "digits", *TINY, "optim.iterations=30", "--run", copied)
    assert "resuming at iteration 24 of 30" in done.out
    assert mheads("train", "digits", *TINY, "optim.iterations=30", "--run", tmp_path / "long").code == 0
    assert weights(copied) == weights(tmp_path / "long")
    assert result(copied)["iterations"] == 30
    assert "optim.iterations" in mheads("train", "digits", *TINY, "--run", copied).err


def test_an_extended_run_killed_before_its_new_result_is_not_taken_for_finished(copied, mheads):
    command = ["train", "digits", *TINY, "optim.iterations=30", "--run", copied]
    old = weights(copied)
    assert process(*command, stop=(signal.SIGKILL, "os.rename", ".model.safetensors")).code == -signal.SIGKILL
    assert weights(copied) == old
    assert mheads(*command).code == 0
    assert weights(copied) != old
    assert result(copied)["iterations"] == 30


def test_log_and_ownership_are_cut_back_to_the_checkpoint(copied, undisturbed, mheads):
    """As if the process had died after logging iterations 19 to 24 and before saving them."""
    cut_back(copied, 18)
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 25, "loss": 1.0}\n{"itera')
    assert mheads("train", "digits", *TINY, "--run", copied).code == 0
    assert_same_run(copied, undisturbed)
    assert ownership(copied)["iterations"] == [8, 16, 24]


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def unfinish(run):
    for name in ("model.safetensors", "result.json"):
        (run / name).unlink()


def cut_back(run, step):
    """As if the process had died after this checkpoint and before the next."""
    unfinish(run)
    for name in steps_of(run):
        if int(name.removeprefix("step-")) > step:
            shutil.rmtree(run / "checkpoints" / name)


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(copied, undisturbed, mheads, file):
    unfinish(copied)
    damage(copied / "checkpoints/step-00000024" / file)
    done = mheads("train", "digits", *TINY, "--run", copied)
    assert done.code == 0
    assert "step-00000024 is damaged" in done.out
    assert "iteration 18" in done.out
    assert "resuming at iteration 18 of 24" in done.out
    assert_same_run(copied, undisturbed)


def test_when_all_checkpoints_are_damaged_training_starts_again_and_keeps_its_new_ones(copied, undisturbed, mheads):
    unfinish(copied)
    for path in (copied / "checkpoints").iterdir():
        (path / "tensors.safetensors").unlink()
    done = mheads("train", "digits", *TINY, "--run", copied)
    assert "going back to the start" in done.out
    assert_same_run(copied, undisturbed)
    assert steps_of(copied) == ["step-00000018", "step-00000024"]
    for limit in (24, 18):  # those of this training, which are whole
        assert checkpoint.Checkpoints(copied / "checkpoints").newest(pytest.fail, limit).step == limit


def test_a_loss_that_is_not_finite_names_iteration_and_members_and_keeps_the_good_checkpoint(tmp_path, mheads):
    run = tmp_path / "run"
    command = ["train", "digits", "data.limit=150", "optim.iterations=20", "log.checkpoint_every=1", "--run", run]
    done = mheads(*command, "optim.lr=1e30", "members=2")
    assert done.code == 2
    assert "at iteration 2, in members 0, 1" in done.err
    assert "checkpoint of iteration 1 stays" in done.err
    assert "optim.lr" in done.err
    assert not (run / "model.safetensors").exists()
    kept = checkpoint.Checkpoints(run / "checkpoints", 2).newest(pytest.fail)
    assert kept is not None
    assert kept.step == 1
    assert all(torch.isfinite(tensor).all() for tensor in kept.tensors.values())


def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    built = build_experiment(configs.load("digits", ["data.limit=150", "members=3", "optim.iterations=4"]))
    from mheads.optim.stage_updates import Optimizer

    update = Optimizer.update

    def spoil(self, stage, gradients):
        update(self, stage, gradients)
        if stage == "1":
            self.parameters[stage][0].data.view(-1)[0] = torch.inf

    monkeypatch.setattr(Optimizer, "update", spoil)
    options = built.config.model_copy(update={"log": schema.LogOptions(checkpoint_every=1)})
    spoiled = assemble_experiment(options, built.net, built.loss, built.data)
    with pytest.raises(UserError, match="iteration 1, in member 1; there was no checkpoint yet: nothing is kept"):
        train(spoiled, RunFolder(tmp_path / "run"), Silent())
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_a_message_and_the_checkpoint_before_stays(copied, undisturbed, mheads, monkeypatch):
    import shutil

    unfinish(copied)
    shutil.rmtree(copied / "checkpoints/step-00000024")

    write_new = atomic_files.write_new

    def full(path, content):
        if path.name == "tensors.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_new(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(atomic_files, "write_new", full)
        done = mheads("train", "digits", *TINY, "--run", copied)
    assert done.code == 2
    assert "no space left" in done.err
    assert "step-00000024" in done.err
    assert "same command" in done.err
    assert steps_of(copied) == ["step-00000018"]
    assert mheads("train", "digits", *TINY, "--run", copied).code == 0
    assert_same_run(copied, undisturbed)


def test_a_file_size_limit_at_the_log_or_a_checkpoint_is_a_message_too(tmp_path):
    run = tmp_path / "run"
    done = process("train", "digits", *TINY, "model=digits", "split=conv1", "--run", run, max_file_bytes=20000)
    assert done.code == 2, done.err
    assert "no space left" in done.err
    assert "Traceback" not in done.err
    assert not run.exists()  # it ended before its first checkpoint


def test_pretraining_is_the_independent_run_and_then_the_loss_takes_over(tmp_path, mheads):
    common = ["data.limit=150", "members=3", "optim.batch_size=32", "log.every=1", "log.checkpoint_every=4"]
    common += ["optim.lr=0.005"]
    assert mheads("train", "digits", *common, "optim.iterations=4", "--run", tmp_path / "plain").code == 0
    mixed = ["loss=mcl", "pretrain=4", "optim.iterations=4", "optim.schedule={name: multistep, at: [1], gamma: 0.5}"]
    assert mheads("train", "digits", *common, *mixed, "--run", tmp_path / "mixed").code == 0

    def model_at(run, step):
        tensors = load_file(tmp_path / run / f"checkpoints/step-{step:08d}/tensors.safetensors")
        return {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}

    plain, mixed_weights = model_at("plain", 4), model_at("mixed", 4)
    assert all(torch.equal(plain[name], mixed_weights[name]) for name in plain)
    lines = [line for line in log_lines(tmp_path / "mixed") if "loss" in line]
    assert [line["iteration"] for line in lines] == list(range(1, 9))
    assert [line["rate"] for line in lines] == [0.005] * 5 + [0.0025] * 3
    assert all(line["share"] == [0.3333] * 3 for line in lines[:4])
    assert all(line["share"] != [0.3333] * 3 for line in lines[4:])
    train_table = np.array(ownership(tmp_path / "mixed")["train"])
    assert train_table.sum() == 4 * 3 * 32 + 4 * 32  # each example to all members, then to one


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_loss_starts_without_the_momentum_of_pretraining(tmp_path, mheads, optimizer):
    """The first step of the loss is that of a new optimizer, by autograd, also where the run goes on just there."""
    args = ["members=3", "split=conv1", "loss=mcl", "pretrain=4", "optim.iterations=2", "optim.batch_size=32"]
    args += ["data.limit=150", f"optim.name={optimizer}", "optim.lr=0.005", "optim.weight_decay=0.01"]
    args += ["engine.micro_batches=1", "log.checkpoint_every=1", "log.keep=9", "log.evaluate_every=0"]
    command = ["train", "digits", *args, "--run", tmp_path / "run"]
    assert mheads(*command).code == 0

    def model_at(step):
        tensors = load_file(tmp_path / f"run/checkpoints/step-{step:08d}/tensors.safetensors")
        return {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}

    built = build_experiment(configs.load("digits", args))
    net, stream = built.net, built.stream()
    net.load_state_dict(model_at(4))
    batch = stream.read(4)
    stream.close()
    value = built.loss(net(batch.network_inputs(net.dtype)), batch.targets, batch.sample_weights, batch.ties)
    value.mean.backward()
    kind = partial(torch.optim.SGD, momentum=0.9) if optimizer == "sgd" else torch.optim.AdamW
    kind([{"params": [p], "weight_decay": 0.01 * (p.dim() > 1)} for p in net.parameters()], lr=0.005).step()
    found = model_at(5)
    for name, expected in net.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-7)

    finished = weights(tmp_path / "run")
    cut_back(tmp_path / "run", 4)
    assert "resuming at iteration 4 of 6" in mheads(*command).out
    assert weights(tmp_path / "run") == finished


SCHEDULES = {
    "a plateau in the middle of a window": "{name: plateau, window: 3, threshold: 0.9, gamma: 0.5}",
    "a rate that falls just there": "{name: multistep, at: [4], gamma: 0.1}",
    "a rate that falls at every step": "{name: exp, gamma: 0.7}",
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_where_it_was(tmp_path, mheads, name):
    """With Caffe's momentum, which has the rate inside."""
    args = ["members=2", "data.limit=100", "optim.batch_size=20", "optim.iterations=10", "optim.lr=0.01", "log.every=1"]
    args += [f"optim.schedule={SCHEDULES[name]}", "optim.caffe_momentum=true", "log.checkpoint_every=4", "log.keep=9"]
    run = tmp_path / "run"
    command = ["train", "digits", *args, "--run", run]
    assert mheads(*command).code == 0
    lines, finished = log_lines(run), weights(run)
    assert lines[-2]["rate"] < lines[0]["rate"]
    for step in (8, 4):
        cut_back(run, step)
        assert f"resuming at iteration {step} of 10" in mheads(*command).out
        assert weights(run) == finished
        assert log_lines(run) == lines


@pytest.mark.parametrize("loss", ["score_averaged", "prob_averaged"])
def test_averaged_losses_multiply_the_rate_by_the_members_unless_told_not_to(tmp_path, mheads, loss):
    common = ["data.limit=150", "members=3", "optim.iterations=2", "log.every=1", "optim.lr=0.005", f"loss.name={loss}"]
    assert mheads("train", "digits", *common, "--run", tmp_path / "a").code == 0
    assert mheads("train", "digits", *common, "loss.scale_rate=false", "--run", tmp_path / "b").code == 0
    assert mheads("train", "digits", *common, "optim.name=adamw", "--run", tmp_path / "c").code == 0
    assert log_lines(tmp_path / "a")[0]["rate"] == pytest.approx(0.015)
    assert log_lines(tmp_path / "b")[0]["rate"] == pytest.approx(0.005)
    assert log_lines(tmp_path / "c")[0]["rate"] == pytest.approx(0.005)  # no gradient changes the size of its step


def test_two_accumulated_batches_of_50_are_one_batch_of_100(tmp_path, mheads):
    common = ["data.limit=300", "members=2", "optim.iterations=3", "log.every=1", "optim.lr=0.005"]
    for name, more in {"one": ["optim.batch_size=100"], "two": ["optim.batch_size=50", "optim.accumulate=2"]}.items():
        assert mheads("train", "digits", *common, *more, "--run", tmp_path / name).code == 0
    one, two = ([line["loss"] for line in log_lines(tmp_path / name) if "loss" in line] for name in ("one", "two"))
    np.testing.assert_allclose(two, one, rtol=1e-5)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(first[name], second[name], rtol=1e-4, atol=1e-6) for name in first)


def test_every_file_of_a_run_is_plain_data(undisturbed):
    assert json.loads((undisturbed / "result.json").read_text())["parameters"] > 0
    with np.load(undisturbed / "assignments.npz", allow_pickle=False) as file:
        assert file["test"].shape == (3, 3, 10)
        assert file["test"].sum((1, 2)).tolist() == [150] * 3
    suffixes = {path.suffix for path in undisturbed.rglob("*") if path.is_file() and path.name != ".lock"}
    assert suffixes == {".json", ".jsonl", ".npz", ".safetensors", ".yaml"}


def test_a_cosine_schedule_cannot_be_made_longer_afterwards(tmp_path, mheads):
    run = tmp_path / "run"
    command = ["train", "digits", *TINY, "optim.schedule.name=cosine", "--run", run]
    assert mheads(*command).code == 0
    longer = mheads(*command, "optim.iterations=30")
    assert longer.code == 2
    assert "optim.iterations: 24 in the folder, 30 now" in longer.err


def test_logged_losses_are_of_the_examples_that_a_member_may_learn_from(tmp_path, mheads):
    run = tmp_path / "run"
    groups = "sampling={name: specialists, groups: [[0, 1], [2, 3, 4], [5, 6, 7], [8, 9]]}"
    command = ["train", "digits", "optim.iterations=60", "optim.schedule.name=constant", "log.every=60", groups]
    assert mheads(*command, "--run", run).code == 0
    line = log_lines(run)[0]
    # Each member tells two or three digits apart, and its loss ends far below that of a guess among ten.
    assert max(line["member_losses"]) < 1.2 < np.log(10)
