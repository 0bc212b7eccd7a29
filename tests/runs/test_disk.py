"""Disks that are full, read-only or damaged, and commands that are killed while they write."""

import errno
import json
import os
import platform
import runpy
import shutil
import signal
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.commands import HERE, process, ranks
from helpers.painted_scenes import keys, paint
from PIL import Image

from mheads.common import atomic_files
from mheads.common.errors import UserError
from mheads.data import file_digests
from mheads.data.detection import proposals
from mheads.data.detection.voc import Scene
from mheads.data.readers import cache as caches
from mheads.report.figures.video_frames import write_video

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
COMMANDS = {
    "out.npz": ("eval", "run", "--trust", "--outputs", "out.npz"),
    "out.csv": ("predict", "run", "x.npz", "--trust", "-o", "out.csv"),
    "out.pt2": ("export", "run", "--trust", "-o", "out.pt2"),
    "out.h5": ("export", "run", "--trust", "--what", "member:1", "-o", "out.h5"),
    "out.png": ("plot", "wins", "run", "-o", "out.png"),
    "out.html": ("report", "run", "-o", "out.html"),
}


@pytest.fixture
def here(tmp_path, monkeypatch, undisturbed):
    """A folder with a trained run, some examples, and a cache of its own."""
    shutil.copytree(undisturbed, tmp_path / "run")
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).integers(0, 16, (6, 8, 8)).astype(np.uint8))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path / "cache"))
    return tmp_path


def raising(error):
    def fail(*args, **options):
        raise error

    return fail


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# Outputs.


@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_that_finds_the_disk_full_leaves_the_old_one_and_nothing_beside_it(mheads, here, monkeypatch, name):
    output, before = here / name, names(here)
    output.write_bytes(b"old")
    with monkeypatch.context() as patched:
        patched.setattr(atomic_files, "flush", raising(FULL))  # when all is written and nothing is renamed
        done = mheads(*COMMANDS[name])
    assert done.code == 2 and "Traceback" not in done.err
    assert f"could not save {name}: no space left on the disk" in done.err and "same command again" in done.err
    assert output.read_bytes() == b"old" and names(here) == sorted([*before, name])


def test_kills_leave_one_hidden_file_at_most_and_the_next_command_removes_it(mheads, here):
    before = names(here)
    for _ in range(2):
        killed = process(*COMMANDS["out.png"], stop=(signal.SIGKILL, "os.rename", "out.png"))
        assert killed.code == -signal.SIGKILL, killed.err
        assert names(here) == sorted([*before, ".out.png.new"])
    assert mheads(*COMMANDS["out.png"]).code == 0
    assert names(here) == sorted([*before, "out.png"])


def test_a_file_that_another_library_writes_is_whole_or_absent_too(tmp_path):
    """As ffmpeg does, which is given a name."""
    output = tmp_path / "v.mp4"
    output.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic_files.replacing(output) as hidden:
        hidden.write_bytes(b"half")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["v.mp4"] and output.read_bytes() == b"old"
    with atomic_files.replacing(output) as hidden:
        hidden.write_bytes(b"new")
    assert names(tmp_path) == ["v.mp4"] and output.read_bytes() == b"new"


def test_an_ffmpeg_that_finds_the_disk_full_is_a_message(tmp_path, monkeypatch):
    """Something else stands in for it, which says so and ends."""
    (tmp_path / "ffmpeg").write_text("#!/bin/sh\nhead -c 9 > /dev/null; echo No space left on device >&2; exit 1\n")
    (tmp_path / "ffmpeg").chmod(0o755)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", SimpleNamespace(get_ffmpeg_exe=lambda: tmp_path / "ffmpeg"))
    (tmp_path / "v.mp4").write_bytes(b"old")
    frames = iter(np.zeros((40, 64, 64, 3), np.uint8))
    with pytest.raises(UserError, match=rf"could not save {tmp_path}/v.mp4: ffmpeg .*No space left.*same command"):
        write_video(tmp_path / "v.mp4", frames, 40, lambda count: None)
    assert names(tmp_path) == ["ffmpeg", "v.mp4"] and (tmp_path / "v.mp4").read_bytes() == b"old"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_cannot_be_written_is_refused_before_any_work(mheads, here, monkeypatch, name):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    monkeypatch.setattr("mheads.training.build_from_config.ThreadsEngine", raising(AssertionError("it worked")))
    done = mheads(*COMMANDS[name])
    assert done.code == 2 and "Traceback" not in done.err
    assert f"cannot write {name}: the folder . is not writable" in done.err


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EDQUOT, "free some space"), (errno.EROFS, "make the folder writable"), (errno.EIO, "set that right")],
)
def test_what_cannot_be_saved_says_why_and_what_to_do(tmp_path, monkeypatch, number, remedy):
    monkeypatch.setattr(atomic_files, "write_new", raising(OSError(number, os.strerror(number))))
    with pytest.raises(UserError, match=rf"could not save {tmp_path}/a: .*: {remedy} and give the same command again"):
        atomic_files.write_atomically(tmp_path / "a", b"")


# The cache.


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """Three images, and the names of those that are searched: as many boxes are found as the first pixel says."""
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path / "cache"))
    scenes, found = [], []
    for i in range(3):
        Image.new("RGB", (9, 9), (i + 2, 0, 0)).save(tmp_path / f"{i}.png")
        scenes.append(Scene(str(i), tmp_path / f"{i}.png", None))

    def search(scene):
        found.append(scene.name)
        with Image.open(scene.path) as image:
            return np.arange(4 * image.getpixel((0, 0))[0], dtype=np.int32).reshape(-1, 4)

    monkeypatch.setattr(proposals, "import_opencv", lambda: None)
    monkeypatch.setattr(proposals, "_search", search)

    def run():
        found.clear()
        return [boxes.tolist() for boxes in proposals.search(scenes, pytest.fail)], sorted(found)

    return run


DAMAGE = {
    "cut": lambda content: content[:100],
    "empty": lambda content: b"",
    "a box": lambda content: content[:130] + bytes([content[130] ^ 1]) + content[131:],
    "the header": lambda content: content.replace(b"<i4", b"<u2", 1),
    "no header at all": lambda content: content[:8] + b"\0" * 64 + content[72:],
    "longer": lambda content: content + b"\0",
}


@pytest.mark.filterwarnings("default:.*is damaged:UserWarning")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_proposals_are_searched_again(searched, tmp_path, damage):
    first, all_of_them = searched()
    assert all_of_them == ["0", "1", "2"] and [len(boxes) for boxes in first] == [2, 3, 4]
    assert searched() == (first, [])
    path = max((tmp_path / "cache/proposals").rglob("*.npy"), key=lambda path: path.stat().st_size)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.warns(UserWarning, match=rf"{path.name} is damaged.*\(1 such files\): searched again"):
        assert searched() == (first, ["2"])
    assert searched() == (first, [])


def test_what_killed_searches_left_is_removed_but_not_what_another_is_at(searched, tmp_path):
    folder = tmp_path / "cache/proposals/selective_search-500"
    left = folder.with_name(f".{folder.name}-{platform.node()}@abc.partial")
    left.mkdir(parents=True)
    (left / "half.npy").write_bytes(b"half")
    with caches.scratch(folder) as under_way:
        assert not left.exists()
        first, _ = searched()
        assert under_way.is_dir()
    assert len(names(folder)) == 3 and all(name.endswith(".npy") for name in names(folder))
    left.mkdir()
    assert searched() == (first, []) and names(folder.parent) == [folder.name]  # also where nothing is searched


@pytest.mark.parametrize("at", ["mkdir", "write_bytes", "replace"])
def test_a_full_disk_in_the_cache_is_a_message(searched, tmp_path, monkeypatch, at):
    with monkeypatch.context() as patched, pytest.raises(UserError) as refused:
        patched.setattr(f"pathlib.Path.{at}", raising(FULL))
        searched()
    assert f"cannot store selective_search-500 in {tmp_path}/cache/proposals" in str(refused.value)
    assert "No space left" in str(refused.value) and "free some space there, or set MHEADS_DATA" in str(refused.value)
    assert not list(tmp_path.rglob("*.partial"))
    assert searched()[1] == ["0", "1", "2"]


def test_a_rank_that_cannot_store_ends_all_and_is_named(tmp_path):
    cv2 = pytest.importorskip("cv2")
    if not hasattr(cv2, "ximgproc"):
        pytest.skip("OpenCV without its contributed modules")
    scenes = paint(tmp_path / "VOC", count=4, test=1)
    (tmp_path / "file").touch()
    places = {0: tmp_path / "cache", 1: tmp_path / "file"}  # where a folder is wanted
    before = {
        rank: partial(exec, f"import os; os.environ['MHEADS_DATA'] = {str(place)!r}", {})
        for rank, place in places.items()
    }
    more = {"data.regions.proposals": "selective_search"}
    done = ranks(2, "detect", "train", *keys(scenes, **more), "-f", tmp_path / "run", before=before)
    assert [one.code for one in done] == [3, 2], done[0].err + done[1].err
    assert f"rank 1 error: cannot store selective_search-500 in {tmp_path}/file/proposals" in done[1].err
    assert "Not a directory" in done[1].err and "set MHEADS_DATA to another folder" in done[1].err
    assert "rank 1" in done[0].err
    assert not any("Traceback" in one.err for one in done) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "damage", [lambda text, digest: text.replace(digest, "0" * 64), lambda text, digest: text[:-9]]
)
def test_a_remembered_digest_that_was_altered_is_not_believed(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path / "cache"))
    (tmp_path / "a").write_text("a")
    first = file_digests.digest_files(tmp_path, ["a"], 1)
    (path,) = (tmp_path / "cache/contents").iterdir()
    path.write_text(damage(path.read_text(), first[0]))
    assert file_digests.digest_files(tmp_path, ["a"], 1) == first
    monkeypatch.setattr(file_digests.hashlib, "file_digest", raising(AssertionError("read again")))
    assert file_digests.digest_files(tmp_path, ["a"], 1) == first


# Results.


@pytest.fixture
def made(tmp_path):
    """The results of a suite, as they are in the repository, with a checksum."""
    from mheads.suites import results

    path = tmp_path / "results/standard-cifar10_quick.json"
    path.parent.mkdir()
    results.save(results.load(HERE.parent / "results" / path.name), path)
    return path


@pytest.mark.parametrize("change", [("0.", "1."), ("seed", "sead"), ("}", "")], ids=["figure", "key", "cut"])
def test_results_that_were_altered_make_no_table(mheads, made, change):
    shutil.copy(made, made.with_name("whole.json"))
    made.write_text(made.read_text().replace(*change, 1))
    done = mheads("reproduce", "--tables", "-o", made.parent)
    assert done.code == 0, done.err
    assert f"left out: {made} is not a file of results" in done.out
    assert names(made.parent) == ["README.md", made.name, "whole.json", "whole.md", "whole.png"]
    made.with_name("whole.json").unlink()
    done = mheads("reproduce", "--tables", "-o", made.parent)
    assert done.code == 2 and "none of its .json files can be read as results" in done.err


def test_results_that_somebody_changed_are_read_without_their_checksum(made):
    from mheads.suites import results

    document = json.loads(made.read_text())
    document["about"] = "mine"
    made.write_text(json.dumps(document))
    with pytest.raises(
        UserError, match=r"was changed after it was written: its checksum .* if you changed it yourself, remove"
    ):
        results.load(made)
    del document["checksum"]
    made.write_text(json.dumps(document))
    assert results.load(made)["about"] == "mine"


def test_pages_stay_as_they_are_if_one_file_of_results_is_damaged(monkeypatch, capsys):
    from mheads.suites import results

    load = results.load
    monkeypatch.setattr(
        results, "load", lambda path: raising(UserError("bad"))() if "modern" in path.name else load(path)
    )
    tables = runpy.run_path(str(HERE.parent / "docs/tables.py"))
    monkeypatch.setattr(atomic_files, "write_new", raising(AssertionError("written")))
    with pytest.raises(SystemExit) as end:
        tables["main"]()
    assert end.value.code == 2 and capsys.readouterr().err == "error: bad\n"
