"""Run folders that lose something: all of it while training goes on, their weights, a checkpoint, the disk's space."""

import errno
import shutil
import time

import pytest
from helpers.commands import assert_same_run

import mheads as package
from mheads.common import atomic_files
from mheads.common.errors import UserError
from mheads.common.progress import Silent
from mheads.config import read as configs
from mheads.runs.folder import RunFolder
from mheads.training.loop import train_config

TRAINED = [
    "data.limit=60", "optim.batch_size=20", "optim.iterations=6", "log.every=2", "log.checkpoint_every=2",
    "log.evaluate_every=3", "log.keep=3", "members=2", "engine.workers=1",
]  # fmt: skip


class At(Silent):
    """Does something after a step, and listens."""

    def __init__(self, step=0, act=None):
        self.at, self.act, self.said = step, act, []

    def step(self, step, *_):
        if step == self.at:
            self.act()

    def warn(self, message):
        self.said.append(message)


def train(run, watch=None, *more):
    return train_config(configs.load("digits", [*TRAINED, *more]), RunFolder(run), watch or At())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    train(run)
    return run


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


# The folder.


def remove(folder):
    """Removes a folder that somebody else may be writing to."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("step", [1, 5, 6])
def test_training_stops_when_its_folder_is_gone_and_the_same_command_begins_anew(whole, tmp_path, step):
    run = tmp_path / "run"
    with pytest.raises(UserError, match=f"the run folder {run} is gone"):
        train(run, At(step, lambda: remove(run)))
    assert not run.exists()
    train(run)
    assert_same_run(run, whole)


def test_a_folder_that_is_renamed_goes_on_under_its_new_name(whole, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    with pytest.raises(UserError, match=r"is gone.*give the same command with its new name"):
        train(run, At(5, lambda: run.rename(moved)))
    assert not run.exists()
    train(moved)
    assert_same_run(moved, whole)


def test_the_folder_of_another_training_in_the_same_place_is_left_alone(whole, tmp_path):
    run = tmp_path / "run"

    def replace():
        while step == 5 and not (run / "checkpoints/step-00000004").exists():
            time.sleep(0.01)  # the checkpoint is written beside the training, which would otherwise meet the new folder
        shutil.rmtree(run)
        shutil.copytree(whole, run)
        (run / ".lock").unlink()
        (run / ".lock").touch()

    for step in (1, 5):  # before and after the first checkpoint
        before = {path.relative_to(whole): path.read_bytes() for path in whole.rglob("*") if path.is_file()}
        with pytest.raises(UserError, match="is gone: it was removed, renamed or replaced"):
            train(run, At(step, replace))
        assert {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
        shutil.rmtree(run)


def test_a_folder_that_goes_while_a_checkpoint_is_written_is_not_made_anew(tmp_path, monkeypatch):
    run, write = tmp_path / "run", atomic_files.write_new

    def gone(path, content):
        if "step-00000002" in str(path) and run.exists():
            run.rename(tmp_path / "moved")
        write(path, content)

    monkeypatch.setattr(atomic_files, "write_new", gone)
    with pytest.raises(UserError, match="gone"):
        train(run)
    assert not run.exists()


# Its files.


@pytest.mark.parametrize("part", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("step", [4, 6])
def test_a_damaged_checkpoint_of_a_finished_run_is_noticed(mheads, run, part, step):
    path = run / f"checkpoints/step-{step:08d}"
    content = bytearray((path / part).read_bytes())
    content[len(content) // 2] ^= 1
    (path / part).write_bytes(content)
    for command in (["eval", run], ["train", "digits", *TRAINED, "--run", run]):
        done = mheads(*command)
        assert done.code == 0, done.err
        assert f"checkpoint {path} is damaged" in done.out
        assert "the run is whole without it" in done.out
    with pytest.warns(UserWarning, match="is damaged"):
        package.load(run)


def test_a_checkpoint_of_a_finished_run_that_lost_a_file_is_noticed(mheads, run):
    (run / "checkpoints/step-00000004/tensors.safetensors").unlink()
    assert "step-00000004 is damaged" in mheads("eval", run).out


@pytest.mark.parametrize("name", ["model.safetensors", "result.json"])
def test_weights_or_a_result_that_are_missing_are_named_and_made_anew(mheads, run, whole, name):
    (run / name).unlink()
    done = mheads("eval", run)
    assert done.code == 0
    assert f"{run / name} is missing, and this is the checkpoint of iteration 6 of 6" in done.out
    assert "the command that trained the run, given again, makes it anew" in done.out
    assert "not finished" not in done.out
    with pytest.raises(UserError, match=name):
        RunFolder(run).final_weights()
    train(run)
    assert_same_run(run, whole)
    assert "is missing" not in mheads("eval", run).out


def test_missing_weights_whose_last_checkpoint_is_damaged_are_still_named(mheads, run):
    (run / "model.safetensors").unlink()
    (run / "checkpoints/step-00000006/state.json").write_text("{}")
    done = mheads("eval", run)
    assert "step-00000006 is damaged" in done.out
    assert f"{run / 'model.safetensors'} is missing, and this is the checkpoint of iteration 4 of 6" in done.out


# The disk.


@pytest.mark.parametrize(("full_at", "said"), [(2, "Nothing was saved yet"), (4, "What was saved before is whole")])
def test_a_full_disk_says_whether_anything_was_saved(tmp_path, monkeypatch, full_at, said):
    write, run = atomic_files.write_new, tmp_path / "run"

    def full(path, content):
        if f"step-{full_at:08d}" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(atomic_files, "write_new", full)
    with pytest.raises(UserError, match=rf"no space left on the disk\. {said}: free some space"):
        train(run)
    assert run.exists() == (full_at == 4)


def test_a_full_disk_before_anything_is_written_says_that_nothing_was_saved(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic_files, "write_new", full)
    with pytest.raises(UserError, match=r"no space left on the disk\. Nothing was saved yet"):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()
