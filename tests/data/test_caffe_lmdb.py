"""LMDBs of Caffe's Datum messages, written here field by field, and the order of channels."""

import io

import numpy as np
import pytest
import torch
from helpers.commands import process
from PIL import Image

from mheads import data
from mheads.common.errors import UserError
from mheads.common.protobuf import field
from mheads.data.augmentation import uniforms

lmdb = pytest.importorskip("lmdb")
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (24, 3, 9, 11)).astype(np.uint8)


def datum(pixels, label, encoded=False):
    if encoded:
        out = io.BytesIO()
        Image.fromarray(pixels[::-1].transpose(1, 2, 0)).save(out, "PNG")  # of BGR, as Caffe would decode it again
        return field(4, out.getvalue()) + field(5, label) + field(7, 1)
    sides = b"".join(field(i, side) for i, side in enumerate(pixels.shape, 1))
    if pixels.dtype == np.uint8:
        return sides + field(4, pixels.tobytes()) + field(5, label)
    return sides + field(5, label) + field(6, pixels.astype("<f4").tobytes())


def write(path, datums):
    with lmdb.open(str(path), map_size=2**24) as opened, opened.begin(write=True) as transaction:
        for i, value in enumerate(datums):
            transaction.put(b"%08d" % i, value)
    return path


@pytest.fixture
def paths(tmp_path, monkeypatch):
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path / "cache"))
    train = write(tmp_path / "train", [datum(x, i % 4) for i, x in enumerate(PIXELS[:16])])
    test = write(tmp_path / "test", [datum(x, i % 4) for i, x in enumerate(PIXELS[16:])])
    return {"path": train, "test_path": test}


def rows_of(split):
    """The numbers of the keys, in the order of the split."""
    return np.array([int(key) for key in split.keys])


@pytest.mark.parametrize(("problem", "size"), [("regression", 1), ("examples", 3 * 9 * 11)])
def test_labels_may_be_numbers_to_learn_or_not_be_looked_at(problem, size, paths):
    found = data.load("lmdb", **paths, problem=problem)
    assert (found.problem.name, found.problem.num_values) == ("regression", size)
    assert found.train.read_targets(np.arange(3), None).targets.shape == (3, size)
    if problem == "regression":
        assert found.train.targets.ravel().tolist() == (rows_of(found.train) % 4).tolist()
        with pytest.raises(UserError, match="for multilabel give a number"):
            data.load("lmdb", **paths, problem="multilabel")


@pytest.mark.parametrize("channels", ["rgb", "bgr"])
def test_the_network_sees_what_is_stored(channels, paths):
    found = data.load("lmdb", **paths, channels=channels, scale=1.0)
    order = rows_of(found.train)
    assert sorted(order) == list(range(16)) and list(order) != list(range(16))
    assert found.train.targets.tolist() == (order % 4).tolist()
    raw = found.train.read(np.arange(16), None)
    rgb = PIXELS[order] if channels == "rgb" else PIXELS[order][:, ::-1]
    assert raw.permute(0, 3, 1, 2).numpy().tolist() == rgb.tolist()
    assert found.preprocess(raw).numpy().tolist() == PIXELS[order].astype(np.float32).tolist()
    assert len(found.test) == 8 and found.problem.groups == ("0", "1", "2", "3")


def test_a_mean_image_is_turned_with_the_channels(paths):
    stored = data.load("lmdb", **paths, scale=0.5, normalize="mean_image", crop=7, mirror=True)
    turned = data.load("lmdb", **paths, scale=0.5, normalize="mean_image", crop=7, mirror=True, channels="bgr")
    rows, seeds = np.array([3, 0, 3]), np.array([5, 6, 7])
    seen = [
        one.preprocess((one.train.read(rows, seeds), one.train.places(seeds))).numpy().tolist()
        for one in (stored, turned)
    ]
    assert seen[0] == seen[1]
    down, right, flip = uniforms(seeds, 3)
    whole = PIXELS[rows_of(stored.train)[rows]] * 0.5 - PIXELS[:16].mean(0) * 0.5
    for i in range(3):
        y, x = int(down[i] * 3), int(right[i] * 5)
        expected = whole[i][:, y : y + 7, x : x + 7]
        assert np.allclose(seen[0][i], expected[:, :, ::-1] if flip[i] < 0.5 else expected, atol=1e-4)
    centre = stored.train.read(rows[:1], None)[0].permute(2, 0, 1)
    assert centre.tolist() == PIXELS[rows_of(stored.train)[3]][:, 1:8, 2:9].tolist()


def test_encoded_images_and_floats(tmp_path, paths):
    encoded = write(tmp_path / "encoded", [datum(x, i % 4, encoded=True) for i, x in enumerate(PIXELS[:16])])
    found = data.load("lmdb", path=encoded, test_path=paths["test_path"], channels="bgr")
    plain = data.load("lmdb", **paths, channels="bgr")
    assert torch.equal(found.train.read(np.arange(16), None), plain.train.read(np.arange(16), None))
    assert found.fingerprint != plain.fingerprint
    floats = PIXELS[:16].astype(np.float32) / 7
    found = data.load("lmdb", path=write(tmp_path / "floats", [datum(x, 0) for x in floats]), validation=4)
    assert (len(found.train), len(found.test), found.seen.kind) == (12, 4, "float")
    assert found.train.read(np.arange(12), None).numpy().tolist() == floats[rows_of(found.train)].tolist()


def test_what_is_changed_is_noticed(tmp_path, paths):
    before = data.load("lmdb", **paths).fingerprint
    assert data.load("lmdb", **paths).fingerprint == before
    other = write(tmp_path / "other", [datum(x, (i + 1) % 4) for i, x in enumerate(PIXELS[:16])])
    assert data.load("lmdb", path=other, test_path=paths["test_path"]).fingerprint != before


BROKEN = {
    "is no Datum": b"\xff" * 30,
    "its sides are 0 x 0 x 0": field(5, 1),
    "cannot reshape": field(1, 3) + field(2, 4) + field(3, 5) + field(4, b"12345"),
    "cannot identify image": field(4, b"no image") + field(7, 1),
    "the label -1": datum(PIXELS[0], 2**64 - 1),
}


@pytest.mark.parametrize("said", BROKEN)
def test_what_is_no_datum_is_named(said, tmp_path, paths):
    path = write(tmp_path / "broken", [BROKEN[said]])
    with pytest.raises(UserError, match=f"(?s)'00000000'.*{said}|{said}"):
        data.load("lmdb", path=path, test_path=paths["test_path"])


def test_other_mistakes(tmp_path, paths):
    sizes = write(tmp_path / "sizes", [datum(PIXELS[0], 0), datum(PIXELS[1][:, :8], 3)])
    found = data.load("lmdb", path=sizes, test_path=paths["test_path"])
    with pytest.raises(UserError, match=r"'00000001' is 3 x 8 x 11 bytes, the first 3 x 9 x 11 bytes"):
        found.train.read(np.arange(2), None)
    grey = write(tmp_path / "grey", [datum(PIXELS[0][:1], 0), datum(PIXELS[1][:1], 1)])
    with pytest.raises(
        UserError, match=r"data\.channels is bgr, but examples have the shape .*; give data\.channels=rgb$"
    ):
        data.load("lmdb", path=grey, validation=1, channels="bgr")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/data.mdb").write_bytes(b"no database")
    for keys, said in (
        ({"path": tmp_path}, "is no LMDB: give the folder that holds its data.mdb"),
        ({"path": tmp_path / "torn"}, "cannot be read as an LMDB"),
        ({**paths, "crop": 10}, "data.crop is 10, but .* holds 9 x 11"),
        ({"path": write(tmp_path / "empty", [])}, "holds no example"),
    ):
        with pytest.raises(UserError, match=said):
            data.load("lmdb", **{"test_path": paths["test_path"], **keys})
    with pytest.raises(UserError, match=r"give data\.test_path"):
        data.load("lmdb", path=paths["path"])


def test_a_run_remembers_the_order_of_channels(tmp_path, paths, monkeypatch):
    import mheads

    monkeypatch.chdir(tmp_path)
    keys = [
        f"data.path={paths['path']}", f"data.test_path={paths['test_path']}", "data.name=lmdb", "optim.iterations=2",
        "optim.batch_size=4", "optim.lr=0.001", "model=user_networks:seen",
    ]  # fmt: skip
    for order in ("rgb", "bgr"):
        done = process("train", "digits", *keys, f"data.channels={order}", "-f", order)
        assert done.code == 0, done.err
    stored, turned = mheads.load("rgb", trust=True), mheads.load("bgr", trust=True)
    assert (stored.data.preprocess.bgr, turned.data.preprocess.bgr) == (False, True)
    assert all(torch.equal(a, b) for a, b in zip(stored.net.parameters(), turned.net.parameters(), strict=True))
    images = PIXELS[16:]
    expected = np.asarray(stored.answer(images))
    assert np.array_equal(np.asarray(turned.answer(images[:, ::-1].copy())), expected)
    assert not np.array_equal(np.asarray(turned.answer(images)), expected)
    program = torch.export.load(str(turned.export("turned.pt2"))).module()
    answers = program(torch.from_numpy(images[:, ::-1].copy())).numpy()
    assert np.allclose(answers, expected, atol=1e-5)
