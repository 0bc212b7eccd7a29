"""Checkpoints that several writers make together, here in one process: each its shard, the first the index."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mheads.common import atomic_files
from mheads.common.errors import UserError
from mheads.runs import shards
from mheads.runs.checkpoint import Checkpoints
from mheads.runs.shards import INDEX, Writers

IDENTITY = {
    "run": "mine",
    "data": "",
    "network": {"code": {}, "seed": 0, "init": "random"},
    "loss": {"code": {}, "name": "mcl"},
}
STATE = {"schedule": {"drops": 0, "total": 0.0, "count": 0, "previous": None}, "log": [], "seconds": 1.0}


class Board:
    """Notes between threads; whoever waits is told of a lost rank."""

    def __init__(self):
        self.notes, self.changed, self.lost = {}, threading.Condition(), None

    def post(self, key, text):
        with self.changed:
            self.notes[key] = text
            self.changed.notify_all()

    def take(self, key):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.notes or self.lost, timeout=30)
            if key not in self.notes:
                raise UserError(self.lost)
            return self.notes[key]


def writers_of(folder, ranks, keep=2):
    folder.mkdir(exist_ok=True)
    board, made = Board(), []
    for rank in ranks:
        made.append(Checkpoints(folder, keep))
        made[-1].identity, made[-1].writers = IDENTITY, Writers(ranks, rank, board, "launch")
    return made


@pytest.fixture
def together(tmp_path):
    """The checkpoints of ranks 0, 2 and 3: rank 1 has nothing that another does not write."""
    made = writers_of(tmp_path / "checkpoints", (0, 2, 3))
    yield made
    for one in made:
        one.close()


def held(rank, step):
    """What a rank holds: one has nothing."""
    return {} if rank == 2 else {f"model/{rank}": torch.full((2, 3), step + rank / 10), "same": torch.tensor(step)}


def save(together, *steps, **options):
    """The last rank begins first, and the main rank last."""
    for step in steps:
        for one in reversed(together):
            rank = one.writers.rank
            state = {**STATE, "rate": step / 100} if rank == 0 else None
            one.save(step, held(rank, step), state, **options)
    for one in together:
        one.wait()


def newest(folder):
    said = []
    found = Checkpoints(folder, run="mine").newest(said.append)
    if found is not None:
        for name, tensor in {**held(3, found.step), **held(0, found.step)}.items():
            assert torch.equal(found.tensors[name], tensor)
        assert found.state["rate"] == found.step / 100 and len(found.tensors) == 3
    return found and found.step, " ".join(said)


def test_each_writes_its_own_and_one_process_reads_all(together):
    save(together, 2, 4, 6)
    folder = together[0].folder
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000006"], "no leftover"
    path = together[0].path(6)
    names = [f"tensors-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(file.name for file in path.iterdir()) == sorted(["state.json", *names, INDEX])
    assert newest(folder) == (6, "")
    for rank, name in zip((0, 2, 3), names, strict=True):
        assert load_file(path / name).keys() == held(rank, 6).keys()
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    assert all(tensor in load_file(path / name) for tensor, name in weight_map.items())
    assert together[2].load(6, lambda name: name == "model/0").keys() == {"model/0"}, "from the shard of another"


def test_nothing_counts_until_the_last_shard_is_written(together, monkeypatch):
    save(together, 2)
    gate, write = threading.Event(), atomic_files.write_new

    def late(path, content):
        if path.name.startswith("tensors-00003"):
            gate.wait(30)
        write(path, content)

    monkeypatch.setattr(atomic_files, "write_new", late)
    for one in together:
        one.save(4, held(one.writers.rank, 4), None if one.writers.rank else {**STATE, "rate": 0.04})
    together[1].wait()
    together[0].check()  # not done, and no error
    assert together[0].steps() == [2] and newest(together[0].folder) == (2, "")
    gate.set()
    together[0].wait()
    assert newest(together[0].folder) == (4, "")


def test_one_that_is_there_is_left_alone_by_all_unless_it_is_written_again(together):
    save(together, 2)
    first = (together[0].path(2) / "state.json").stat().st_ino
    save(together, 2)
    assert (together[0].path(2) / "state.json").stat().st_ino == first
    save(together, 2, again=True)
    assert (together[0].path(2) / "state.json").stat().st_ino != first
    assert newest(together[0].folder) == (2, "")


def test_a_state_is_replaced_and_the_tensors_stay(together):
    save(together, 2)
    shard = together[0].path(2) / "tensors-00003-of-00003.safetensors"
    before = shard.stat().st_ino
    together[0].replace_state(2, {**STATE, "rate": 0.02, "seconds": 7.0})
    assert Checkpoints(together[0].folder).newest(pytest.fail).state["seconds"] == 7
    assert shard.stat().st_ino == before


def test_one_that_was_about_to_be_replaced_comes_back(together):
    save(together, 2)
    folder = together[0].folder
    together[0].path(2).rename(folder / ".replaced-00000002")  # and here the process was killed
    together[0].recover()
    assert newest(folder) == (2, "")
    (folder / ".replaced-00000002").mkdir()  # or here, when the new one was in its place
    together[0].recover()
    assert newest(folder) == (2, "")


def change(path, how):
    index = json.loads((path / INDEX).read_text())
    how(index)
    (path / INDEX).write_text(json.dumps(index))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


LAST = "tensors-00003-of-00003.safetensors"
DAMAGE = {
    "a flipped bit": (lambda path: flip(path / LAST), f"the checksum of {LAST} does not match"),
    "a truncated shard": (lambda path: os.truncate(path / LAST, 20), f"the checksum of {LAST} does not match"),
    "a missing shard": (lambda path: (path / LAST).unlink(), "No such file"),
    "a shard of another step": (
        lambda path: (path / LAST).write_bytes((path.with_name("step-00000002") / LAST).read_bytes()),
        f"the checksum of {LAST} does not match",
    ),
    "a shard that is a link": (lambda path: link(path / LAST), "symbolic links"),
    "a missing index": (lambda path: (path / INDEX).unlink(), "No such file"),
    "a tensor less": (
        lambda path: change(path, lambda index: index["weight_map"].pop("model/3")),
        "its checksum does not match",
    ),
    "a file outside": (
        lambda path: change(path, lambda index: index["weight_map"].update(x="../step-00000002/" + LAST)),
        "weight_map",
    ),
    "no index at all": (lambda path: (path / INDEX).write_text("[" * 100_000), "damaged"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named_and_the_one_before_is_taken(together, what):
    save(together, 2, 4)
    damage, reason = DAMAGE[what]
    damage(together[0].path(4))
    step, said = newest(together[0].folder)
    assert step == 2
    assert "step-00000004 is damaged" in said and reason in said
    assert "going back to the one before, iteration 2" in said
    assert list(together[0].damages()) == [together[0].path(4)]


def test_a_writer_without_space_fails_all_and_leaves_what_was_saved(together, monkeypatch):
    save(together, 2)
    write = atomic_files.write_new

    def full(path, content):
        if path.name == LAST:
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(atomic_files, "write_new", full)
    for one in together:
        one.save(4, held(one.writers.rank, 4), None if one.writers.rank else {**STATE, "rate": 0.04})
    together[1].wait()  # has written its own
    for one in (together[0], together[2]):
        with pytest.raises(UserError, match=r"could not save .*step-00000004: no space left on the disk"):
            one.wait()
    assert [path.name for path in together[0].folder.iterdir()] == ["step-00000002"]


def test_a_writer_that_cannot_make_the_folder_says_so_as_well(tmp_path, monkeypatch):
    board = Board()

    def full(path, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="No space"):
        Writers([0, 3], 3, board, "launch").write(tmp_path / "new", b"")
    assert board.notes == {"new/3": "28"}, "or the main rank waits for its shard"


def test_a_lost_writer_ends_the_wait_for_its_shard(together):
    save(together, 2)
    for one in together[:2]:
        one.save(4, held(one.writers.rank, 4), None if one.writers.rank else {**STATE, "rate": 0.04})
    board = together[0].writers.notes
    with board.changed:
        board.lost = "rank 3 has ended"
        board.changed.notify_all()
    with pytest.raises(UserError, match="rank 3 has ended"):
        together[0].wait()
    assert together[0].steps() == [2]
    together[0].drop_after(2)
    assert [path.name for path in together[0].folder.iterdir()] == ["step-00000002"]


def test_ranks_see_one_folder_or_not(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    launch = shards.begin_trial(here)
    shards.join_trial(here, launch, 1)
    shards.join_trial(here / "../here", launch, 2)  # the same by another name
    assert shards.end_trial(here, launch, [0, 1, 2])
    assert list(here.iterdir()) == []
    there.mkdir()
    for other in (there, tmp_path / "nowhere"):
        launch = shards.begin_trial(here)
        shards.join_trial(other, launch, 1)
        assert not shards.end_trial(here, launch, [0, 1])
        assert list(here.iterdir()) == list(there.iterdir()) == []
    assert not (tmp_path / "nowhere").exists()


def test_sixty_four_writers_make_one_index(tmp_path):
    together = writers_of(tmp_path / "checkpoints", range(64))
    save(together, 2)
    for one in together:
        one.close()
    index = json.loads((together[0].path(2) / INDEX).read_text())
    assert len(index["metadata"]["sha256"]) == 64
    assert len(Checkpoints(together[0].folder).newest(pytest.fail).tensors) == 63 + 1, "rank 2 has none"
