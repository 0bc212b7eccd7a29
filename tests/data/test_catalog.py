"""The datasets by name: digits, npz files, and the messages about wrong names and options."""

import numpy as np
import pytest

from mheads import data
from mheads.common.errors import UserError
from mheads.data.catalog import DATASETS


def test_digits_are_split_once_for_all_with_every_class_in_both():
    digits = data.load("digits")
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.train.shape == (1, 8, 8)
    assert digits.problem.classes == tuple("0123456789")
    assert np.bincount(digits.test.targets).min() >= 35
    images = digits.train.read(np.arange(1437), None)
    assert images.shape == (1437, 8, 8, 1)
    assert images.max() == 16
    # Written down so that results stay comparable between versions.
    assert digits.fingerprint == data.load("digits").fingerprint == "95ba5326c0ee8536"


def test_no_digit_is_in_both_splits():
    from sklearn.datasets import load_digits

    digits = data.load("digits")
    both = [split.read(np.arange(len(split)), None).numpy().reshape(-1, 64) for split in (digits.train, digits.test)]
    everything = load_digits().data.astype(np.uint8)
    assert sorted(map(bytes, np.concatenate(both))) == sorted(map(bytes, everything))


def arrays(**changes):
    rng = np.random.default_rng(0)
    made = {
        "x_train": rng.random((6, 1, 4, 4), np.float32),
        "y_train": np.arange(6) % 2,
        "x_test": rng.random((3, 1, 4, 4), np.float32),
        "y_test": np.array([0, 1, 1]),
    }
    made.update(changes)
    return {key: value for key, value in made.items() if value is not None}


def test_npz_arrays_are_read_as_they_are(tmp_path):
    saved = arrays(classes=np.array(["no", "yes"]))
    np.savez(tmp_path / "mine.npz", **saved)
    loaded = data.load("npz", path=tmp_path / "mine.npz")
    assert loaded.problem.classes == ("no", "yes")
    np.testing.assert_array_equal(loaded.test.read(np.arange(3), None).numpy(), saved["x_test"])
    np.testing.assert_array_equal(loaded.train.targets, saved["y_train"])


def test_npz_of_the_other_byte_order_is_read(tmp_path):
    np.savez(tmp_path / "mine.npz", **arrays(x_train=arrays()["x_train"].astype(">f4"), y_test=np.zeros(3, ">i4")))
    loaded = data.load("npz", path=tmp_path / "mine.npz")
    np.testing.assert_array_equal(loaded.train.read(np.arange(6), None).numpy(), arrays()["x_train"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y_test": None}, r"no array y_test \(it has x_train, y_train, x_test\)"),
        ({"y_train": np.arange(5)}, "6 examples but labels of shape"),
        ({"x_test": np.zeros((3, 1, 4, 4), np.int32)}, "test examples have dtype int32"),
        ({"y_test": np.array([0, 1, 2]), "classes": np.array(["a", "b"])}, "label 2"),
        ({"x_train": np.array([[1], [1, 2]], dtype=object)}, "without arrays of objects"),
    ],
    ids=["key", "lengths", "dtype", "labels", "objects"],
)
def test_a_wrong_npz_is_refused_with_the_array_and_the_reason(tmp_path, changes, words):
    np.savez(tmp_path / "mine.npz", **arrays(**changes))
    with pytest.raises(UserError, match=words):
        data.load("npz", path=tmp_path / "mine.npz")


def test_the_shape_of_an_example_needs_an_array(tmp_path):
    np.savez(tmp_path / "other.npz", y_train=np.zeros(3))
    with pytest.raises(UserError, match=r"other\.npz has no array x_train to take the shape of an example from"):
        DATASETS["npz"].example_shape(path=tmp_path / "other.npz")


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    file = tmp_path / "mine.npz"
    with pytest.raises(UserError, match=r"mine\.npz does not exist$"):
        data.load("npz", path=file)
    for content in (b"", b"hello", b"PK\x03\x04 cut off"):
        file.write_bytes(content)
        with pytest.raises(UserError, match="cannot be read"):
            data.load("npz", path=file)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(UserError, match=r"no array x_train, y_train, .* \(it has one without a name\)"):
        data.load("npz", path=tmp_path / "one.npy")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("imagenet", {}, "there are digits, diabetes, cifar10, cifar100, folder, voc, npz"),
        ("csv", {}, "dataset 'csv' reads your own files; say where they are with data.path"),
        ("folder", {}, "data.path"),
        ("npz", {}, "data.path"),
        ("digits", {"path": "x"}, "is not read from a path; give data.path=null, or use folder or voc or npz or csv"),
        ("digits", {"root": "x"}, "cifar10 or cifar100"),
        ("digits", {"crop": 4}, "data.pad"),
        ("npz", {"path": "x.npz", "grey": True}, "image folders"),
        ("folder", {"path": "x", "pad": 2}, "data.resize and data.crop; use these, and give data.pad=0"),
        ("digits", {"grey": True}, "give data.grey=false, or use folder or list"),
        ("npz", {"path": "x.npz", "fold": 2}, "data.fold is 2, but 'npz' has one split; give data.fold=0, or use uci"),
    ],
)
def test_wrong_names_and_options_say_what_is_right(name, options, words):
    with pytest.raises(UserError, match=words):
        data.load(name, **options)


def test_the_list_says_what_must_be_fetched_and_where_it_goes(monkeypatch, tmp_path):
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path))
    assert [name for name, entry in data.DATASETS.items() if entry.needs_get] == ["cifar10", "cifar100"]
    assert data.DATASETS["cifar10"].cached_at == tmp_path / "cifar10"
    assert not data.DATASETS["cifar10"].available
    (tmp_path / "cifar100").mkdir()
    assert not data.DATASETS["cifar100"].available
    for file in ("train.bin", "test.bin"):
        (tmp_path / "cifar100" / file).touch()
    assert data.DATASETS["cifar100"].available
    assert data.DATASETS["digits"].cached_at is None
    assert data.DATASETS["digits"].available
    assert all(entry.description for entry in data.DATASETS.values())
