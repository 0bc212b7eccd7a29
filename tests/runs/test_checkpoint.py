"""Checkpoints, manifests and run folders by themselves: what they hold, and what a process that ends between two
writes leaves."""

import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch

from mheads.common import atomic_files
from mheads.common.errors import DamageError, UserError
from mheads.config import read as configs
from mheads.runs.checkpoint import Checkpoints
from mheads.runs.folder import DataFacts, RunFolder
from mheads.runs.manifest import Manifest
from mheads.training.experiment import build_experiment

# Checkpoints.


IDENTITY = {
    "run": "mine",
    "data": "",
    "network": {"code": {}, "seed": 0, "init": "random"},
    "loss": {"code": {}, "name": "mcl"},
}


def state(rate, **more):
    """What a checkpoint holds beside tensors."""
    schedule = {"drops": 0, "total": 0.0, "count": 0, "previous": None}
    return {"rate": rate, "schedule": schedule, "log": [], "seconds": 1.0, **more}


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path / "checkpoints", keep=2)
    made.identity = IDENTITY
    yield made
    made.close()


def save(checkpoints, *steps, **options):
    """Each with its step as its weight and as the rate in its state."""
    for step in steps:
        checkpoints.save(step, {"w": torch.full((3,), float(step))}, state(step / 100), **options)
    checkpoints.wait()


def newest(checkpoints, *args):
    """The step of the newest that is whole, and what was said on the way."""
    said = []
    found = checkpoints.newest(said.append, *args)
    if found is not None:
        assert found.tensors["w"].tolist() == [found.step] * 3
        assert found.state["rate"] == found.state["step"] / 100 == found.step / 100
    return found and found.step, " ".join(said)


def test_the_newest_checkpoints_are_kept_and_found(checkpoints):
    assert newest(checkpoints) == (None, "")
    save(checkpoints, 2, 4, 10, 100)  # as numbers: 100 comes after 10
    assert checkpoints.steps() == [100, 10]
    assert newest(checkpoints) == (100, "")
    assert newest(checkpoints, 100) == (100, "")
    assert newest(checkpoints, 99) == (10, "")
    assert newest(checkpoints, 9) == (None, "")


def test_those_after_the_one_in_use_are_dropped_with_what_a_killed_process_left(checkpoints):
    save(checkpoints, 2, 4)
    (checkpoints.folder / ".step-00000006.new").mkdir()
    (checkpoints.folder / ".old-00000002").mkdir()
    checkpoints.drop_after(4)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-00000002", "step-00000004"]
    checkpoints.drop_after(3)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-00000002"]


def test_one_that_is_there_is_left_alone_unless_it_is_written_again(checkpoints):
    save(checkpoints, 2)
    for again, expected in ((False, None), (True, "new")):
        checkpoints.save(2, {"w": torch.full((3,), 2.0)}, state(0.02, said="new"), again=again)
        checkpoints.wait()
        found = checkpoints.newest(pytest.fail)
        assert found.state.get("said") == expected
    assert checkpoints.steps() == [2]


def test_tensors_may_change_as_soon_as_saving_has_begun(checkpoints):
    """What the writer still has to do must not look at them."""
    free = threading.Event()
    checkpoints._writer.submit(free.wait, 60)
    weight, tied = torch.full((3,), 7.0), torch.arange(6.0)
    try:
        checkpoints.save(7, {"w": weight, "whole": tied, "tail": tied[3:], "same": tied}, state(0.07))
        weight.zero_()
        tied.zero_()
    finally:
        free.set()
    checkpoints.wait()
    assert newest(checkpoints) == (7, "")
    found = checkpoints.newest(pytest.fail).tensors
    assert found["whole"].tolist() == found["same"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["tail"].tolist() == [3, 4, 5]


@pytest.mark.parametrize("call", ["save", "wait", "check"])
def test_a_save_that_failed_is_said_at_the_next_call(checkpoints, monkeypatch, call):
    def full(path, content):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(atomic_files, "write_new", full)
        checkpoints.save(2, {"w": torch.zeros(3)}, {})
        checkpoints._writer.submit(int).result()  # once the writer is done
    with pytest.raises(UserError, match="no space left on the disk"):
        checkpoints.save(3, {"w": torch.zeros(3)}, {}) if call == "save" else getattr(checkpoints, call)()
    assert checkpoints.steps() == []
    assert list(checkpoints.folder.iterdir()) == []


DAMAGE = {
    "a tensor": lambda path: flip(path / "tensors.safetensors"),
    "a number of its state": lambda path: change(path / "state.json", lambda found: found["state"].update(rate=0.05)),
    "its checksum": lambda path: change(path / "state.json", lambda found: found.update(sha256="0" * 64)),
    "a file that is gone": lambda path: (path / "tensors.safetensors").unlink(),
}


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change(path, how):
    found = json.loads(path.read_text())
    how(found)
    path.write_text(json.dumps(found))


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_is_taken(checkpoints, what):
    save(checkpoints, 2, 4)
    DAMAGE[what](checkpoints.path(4))
    step, said = newest(checkpoints)
    assert step == 2
    assert "step-00000004 is damaged" in said
    assert "going back to the one before, iteration 2" in said


def test_one_that_was_renamed_or_belongs_to_another_run_is_not_taken(checkpoints):
    save(checkpoints, 2, 4)
    shutil.copytree(checkpoints.path(4), checkpoints.path(6))
    assert newest(checkpoints)[0] == 4
    assert "it is that of iteration 4, renamed" in newest(checkpoints)[1]
    other = Checkpoints(checkpoints.folder, run="another")
    assert newest(other)[0] is None
    assert "it belongs to another run" in newest(other)[1]
    assert newest(Checkpoints(checkpoints.folder, run="mine"))[0] == 4


# Manifests.


@pytest.fixture
def written(tmp_path):
    """A folder with one file and its manifest."""
    manifest = Manifest(tmp_path)
    manifest.renew()
    manifest.expect(tmp_path / "file", b"first")
    (tmp_path / "file").write_bytes(b"first")
    return tmp_path / "file"


def test_a_manifest_knows_the_old_file_until_the_new_one_is_there(written):
    Manifest(written.parent).expect(written, b"second")  # and here the process is killed
    Manifest(written.parent).check(written)
    written.write_bytes(b"second")
    Manifest(written.parent).check(written)
    Manifest(written.parent).expect(written, b"third")
    Manifest(written.parent).check(written)
    written.write_bytes(b"first")  # what has been replaced is not known for ever
    with pytest.raises(DamageError, match="has another checksum"):
        Manifest(written.parent).check(written)


def test_a_damaged_file_does_not_become_good_when_it_is_about_to_be_replaced(written):
    written.write_bytes(b"damaged")
    Manifest(written.parent).expect(written, b"second")
    with pytest.raises(DamageError, match="has another checksum"):
        Manifest(written.parent).check(written)


def test_whoever_reads_sees_what_another_process_has_replaced_since(written):
    reader = Manifest(written.parent)
    reader.check(written)
    for content in (b"second", b"third", b"fourth"):
        Manifest(written.parent).expect(written, content)
        written.write_bytes(content)
    reader.check(written)
    written.write_bytes(b"second")
    with pytest.raises(DamageError, match="has another checksum"):
        reader.check(written)


def test_a_file_that_changes_in_place_is_not_listed_until_it_is_expected_again(written):
    Manifest(written.parent).forget(written)
    with pytest.raises(DamageError, match="is not listed"):
        Manifest(written.parent).check(written)
    Manifest(written.parent).expect(written, b"first")
    Manifest(written.parent).check(written)


def test_a_manifest_that_was_changed_is_damaged_though_it_can_be_read(written):
    path = written.parent / "manifest.json"
    change(path, lambda found: found["files"]["file"].append("0" * 64))
    with pytest.raises(DamageError, match="its checksum does not match"):
        Manifest(written.parent).check(written)


# Files.


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def half(file):
        file.write(b"ne")
        file.flush()
        assert path.read_bytes() == b"old"
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="no space left"):
        atomic_files.write_atomically(path, half)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    atomic_files.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_nothing_is_written_where_something_is_or_through_a_link(tmp_path):
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    (tmp_path / "nowhere").symlink_to(tmp_path / "new")
    for name in ("other", "link", "nowhere"):
        with pytest.raises(FileExistsError):
            atomic_files.write_new(tmp_path / name, b"mine")
    assert (tmp_path / "other").read_bytes() == b"other"
    assert not (tmp_path / "new").exists()


# Run folders.


@pytest.fixture(scope="module")
def built():
    return build_experiment(configs.load("digits", ["data.limit=30", "members=2", "optim.iterations=10"]))


@pytest.fixture
def begun(tmp_path, built):
    """A run folder in which training has begun."""
    folder = RunFolder(tmp_path / "run")
    assert prepare(folder, built) is False
    yield folder
    folder.release()


def prepare(folder, built, **changed):
    return folder.prepare(built.config, replace(DataFacts.of(built.data), **changed), built.identity(), pytest.fail)


def test_no_two_processes_train_in_one_folder(begun, built):
    with pytest.raises(UserError, match="another process is training in"):
        prepare(RunFolder(begun.path), built)
    begun.release()
    other = RunFolder(begun.path)
    assert prepare(other, built) is True
    other.release()


def test_a_run_does_not_go_on_with_other_data(begun, built):
    begun.release()
    with pytest.raises(UserError, match=f"trained on other data: checksum {built.data.fingerprint} there, other now"):
        prepare(RunFolder(begun.path), built, fingerprint="other")


def test_only_who_began_a_run_may_discard_it(begun, built):
    begun.release()
    other = RunFolder(begun.path)
    prepare(other, built)
    other.discard()
    other.release()
    assert RunFolder(begun.path).read_config() == built.config
    mine = RunFolder(begun.path.with_name("mine"))
    prepare(mine, built)
    mine.discard()
    mine.release()
    assert not mine.path.exists()


def test_facts_of_the_data_come_back(begun, built):
    facts = DataFacts.of(built.data)
    for given in (facts, replace(facts, preprocess=replace(facts.preprocess, bgr=True), side={"where": (2,)})):
        begun.write(begun.data, given.to_bytes())
        found = RunFolder(begun.path).read_data()
        assert found.preprocess.bgr == given.preprocess.bgr
        assert (found.shape, found.problem, found.fingerprint) == (given.shape, given.problem, given.fingerprint)
        assert (found.side, found.seen, found.held_out) == (given.side, given.seen, given.held_out)


def test_a_process_killed_before_any_write_leaves_the_old_file_or_the_new_one(begun, built, monkeypatch):
    """The config of more iterations is written in two steps, the manifest and the file; either may be the last."""
    new = configs.load("digits", ["data.limit=30", "members=2", "optim.iterations=20"])
    write, left = atomic_files.write_atomically, 0

    def killed(path, content):
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        write(path, content)

    monkeypatch.setattr(atomic_files, "write_atomically", killed)
    for writes in range(3):
        left = writes
        try:
            RunFolder(begun.path).write_config(new)
            assert writes == 2
        except KeyboardInterrupt:
            assert writes < 2
        assert RunFolder(begun.path).read_config() in (built.config, new)
    assert RunFolder(begun.path).read_config() == new


def test_weights_are_those_of_a_checkpoint_that_is_newer_than_the_result(begun, built):
    measures = built.data.problem.unknown(2).to_dict()
    found = {
        "problem": "classification",
        **measures,
        "split": "test",
        "iterations": 10,
        "parameters": 3,
        "seconds": 1.0,
    }
    begun.write_model({"w": torch.zeros(3)})
    begun.write_result(found)
    newest = begun.newest_weights(pytest.fail)
    assert (newest.iteration, newest.final, newest.tensors["w"].tolist()) == (10, True, [0, 0, 0])
    checkpoints = Checkpoints(begun.checkpoints, keep=9)
    checkpoints.identity = begun.read_identity()
    said = []
    for step, expected in ((10, (10, True, [0, 0, 0])), (12, (12, False, [12, 12, 12]))):
        checkpoints.save(step, {"model/w": torch.full((3,), float(step))}, state(0.1))
        checkpoints.wait()
        newest = begun.newest_weights(said.append)
        assert (newest.iteration, newest.final, newest.tensors["w"].tolist()) == expected
    checkpoints.close()
    assert "is not finished: iteration 12 of 10" in said[0]
