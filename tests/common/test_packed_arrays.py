"""Files that a user hands in and that are not what they seem: they are refused before they cost time or memory."""

import io
import os
import struct
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from mheads.caffe import prototxt
from mheads.caffe import weights as blobs
from mheads.common import atomic_files, packed_arrays
from mheads.common.errors import SpecialFileError, UserError
from mheads.config import read as configs
from mheads.data import sample_weights
from mheads.data.detection import proposals
from mheads.data.readers import csv_table, hdf5, image_list, npz, unlabelled
from mheads.suites import results
from mheads.training.init_weights import read_weights


def header(shape, dtype="<f4"):
    """An .npy file that says it has this shape, and ends there."""
    content = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(content)) + content


def write_zip(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


LIST = {"root": None, "crop": None, "mirror": False, "grey": False, "need_test": False}
READERS = {
    "data.path of npz": npz.read_npz,
    "predict": lambda path: unlabelled.read_array(path, ["x"]),
    "sampling.path": sample_weights.read_sample_weights,
    "teacher.answers": sample_weights.read_answers,
    "proposals": lambda path: proposals.read_proposals(path, []),
}


@pytest.mark.parametrize("claimed", [(2**46,), (10**9, 10**9, 10**9), (-1,), (3, 4)])
@pytest.mark.parametrize("reader", READERS)
def test_a_header_that_claims_more_than_is_there_is_a_message(tmp_path, reader, claimed):
    names = ("x_train", "y_train", "x_test", "y_test", "x", "sample_weights", "answers")
    path = write_zip(tmp_path / "huge.npz", **dict.fromkeys(names, header(claimed)))
    with pytest.raises(UserError, match=r"huge\.npz.*(and 0 bytes are there|cannot be)"):
        READERS[reader](path)
    with pytest.raises(UserError, match=r"huge\.npy.*(and 0 bytes are there|cannot be)"):
        (tmp_path / "huge.npy").write_bytes(header(claimed))
        sample_weights.read_sample_weights(tmp_path / "huge.npy")


def test_a_zip_bomb_is_refused_before_it_is_unpacked_unless_the_limit_is_raised(tmp_path, monkeypatch):
    assert packed_arrays.most_of(5_800_000) == 10**9
    assert packed_arrays.most_of(10**8) >= 10**9  # up to a hundred times as large, if the machine holds that
    monkeypatch.setattr(packed_arrays, "ENOUGH", 10**7)
    path = write_zip(tmp_path / "bomb.npz", x=header((20 * 10**6,), "|u1") + bytes(20 * 10**6))
    assert path.stat().st_size < 10**5
    unpacked = []
    monkeypatch.setattr(np.lib.format, "read_array", lambda stream, **_: unpacked.append(stream))
    with pytest.raises(UserError, match=r"bomb\.npz has .* kB and would become 20 MB.*set MHEADS_MAX_UNPACKED=1"):
        unlabelled.read_array(path, ["x"])
    assert unpacked == []
    monkeypatch.setenv("MHEADS_MAX_UNPACKED", "0.02")
    unlabelled.read_array(path, ["x"])
    assert len(unpacked) == 1
    monkeypatch.setenv("MHEADS_MAX_UNPACKED", "plenty")
    with pytest.raises(UserError, match="MHEADS_MAX_UNPACKED=plenty: give how many GB"):
        unlabelled.read_array(path, ["x"])


def test_what_several_arrays_become_together_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_arrays, "ENOUGH", 10**5)
    path = tmp_path / "many.npz"
    np.savez_compressed(path, **{f"image{i}": np.zeros((1000, 4)) for i in range(5)})  # 32 kB each
    with packed_arrays.open_arrays(path) as file:
        assert [file[f"image{i}"].nbytes for i in range(3)] == [32000] * 3
        with pytest.raises(UserError, match="would become 128 kB"):
            file["image3"]
    np.savez(path, **{f"image{i}": np.zeros((1000, 4)) for i in range(5)})  # it is as large on the disk
    assert len(proposals.read_proposals(path, [])) == 0


def test_more_than_the_machine_holds_is_refused_though_it_is_on_the_disk(tmp_path, monkeypatch):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros(1000))
    monkeypatch.setattr(packed_arrays, "ENOUGH", 1000)
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 4096}.__getitem__)
    with pytest.raises(UserError, match=r"would become 8 kB in memory, of which at most 4\.1 kB"):
        sample_weights.read_sample_weights(path)


def test_arrays_in_hdf5_and_in_files_of_torch_count_as_well(tmp_path, monkeypatch):
    h5py = pytest.importorskip("h5py")
    for name, place in (("x.h5", "data"), ("w.caffemodel.h5", "data/conv1/0")):
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset(place, (10**7, 10**6), "f4", chunks=(1000, 1000), compression="gzip")
    with pytest.raises(UserError, match=r"x\.h5 has .* kB and would become 40 TB"):
        hdf5.read_hdf5(tmp_path / "x.h5", None, need_test=False)
    with pytest.raises(UserError, match=r"caffemodel\.h5 has .* kB and would become 40 TB"):
        blobs.read(tmp_path / "w.caffemodel.h5")
    monkeypatch.setattr(packed_arrays, "ENOUGH", 10**5)
    buffer = io.BytesIO()
    torch.save({"conv1.weight": torch.zeros(10**6)}, buffer)
    with zipfile.ZipFile(buffer) as stored, zipfile.ZipFile(tmp_path / "w.pt", "w", zipfile.ZIP_DEFLATED) as deflated:
        for name in stored.namelist():
            deflated.writestr(name, stored.read(name))
    with pytest.raises(UserError, match=r"w\.pt has .* kB and would become 4 MB"):
        read_weights(tmp_path / "w.pt")


def test_arrays_read_as_numpy_reads_them(tmp_path):
    arrays = {
        "a": np.arange(6, dtype=">i2").reshape(2, 3),
        "b": np.asfortranarray(np.random.default_rng(0).random((3, 4))),
        "c": np.array("text"),
        "d": np.zeros((0, 5), bool),
        "e.f": np.array([1 + 2j]),
    }
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    with packed_arrays.open_arrays(tmp_path / "x.npz") as found, np.load(tmp_path / "x.npz") as known:
        assert list(found) == list(known)
        for name in known:
            assert found[name].dtype == known[name].dtype
            assert found.header(name) == (known[name].shape, known[name].dtype)
            np.testing.assert_array_equal(found[name], known[name])
    np.save(tmp_path / "x.npy", arrays["b"])
    with packed_arrays.open_arrays(tmp_path / "x.npy") as found:
        np.testing.assert_array_equal(found[""], arrays["b"])


@pytest.mark.parametrize(
    ("name", "read"),
    [
        *((f"{reader}.npz", read) for reader, read in READERS.items()),
        ("rows.csv", csv_table.read_csv),
        ("list.txt", lambda path: image_list.read_list(path, None, resize=8, **LIST)),
        ("x.h5", lambda path: hdf5.read_hdf5(path, None, need_test=False)),
        ("p.mat", lambda path: proposals.read_proposals(path, [])),
        ("w.pt", read_weights),
        ("w.safetensors", read_weights),
        ("w.caffemodel", blobs.read),
        ("w.caffemodel.h5", blobs.read),
        ("net.prototxt", prototxt.read_net),
        ("config.yaml", configs.read),
        ("results.json", results.load),
    ],
)
def test_a_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path, name, read):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"{name}.*it is a named pipe, not a file"):
        read(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match=f"{name}.*it is a device, not a file"):
        read(tmp_path / name)


def test_pipes_among_the_files_of_a_folder_of_images_are_refused(mheads, tmp_path):
    for part, label in (("train", "a"), ("train", "b"), ("val", "a"), ("val", "b")):
        (tmp_path / part / label).mkdir(parents=True)
        for i in range(3):
            Image.new("L", (8, 8), i).save(tmp_path / part / label / f"{i}.png")
    os.mkfifo(tmp_path / "train/a/3.png")
    options = ["data=folder", f"data.path={tmp_path}", "data.resize=8", "data.grey=true", "--run", tmp_path / "run"]
    done = mheads("train", "digits", *options)
    assert done.code == 2
    assert "3.png cannot be read" in done.err
    assert "named pipe" in done.err


def test_a_pipe_in_a_run_folder_is_damage(tmp_path):
    os.mkfifo(tmp_path / "identity.json")
    with pytest.raises(SpecialFileError, match="named pipe"):
        atomic_files.digest(tmp_path / "identity.json")
    assert atomic_files.read_text(_written(tmp_path / "lines.txt", "a\r\nb")) == "a\nb"


def _written(path, content):
    path.write_text(content, newline="")
    return path
