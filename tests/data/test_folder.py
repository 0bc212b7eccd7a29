"""Image folders: what is read, which pixels, and what is refused."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mheads import data
from mheads.common.errors import UserError
from mheads.data.augmentation import uniforms
from mheads.data.readers.image_files import read_crop
from mheads.data.readers.image_list import read_list

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "imagenette_mini"
SIZES = [(40, 30), (30, 40), (32, 32), (64, 33)]


def picture(seed, size):
    """A smooth random image, so that decoders and filters differ little on it."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Two classes, six training and four validation images each, of several sizes, kinds and suffixes."""
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path / "cache"))
    for part, count in (("train", 6), ("val", 4)):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                suffix = (".png", ".JPEG", ".jpg")[i % 3]
                image = picture(10 * label + i, SIZES[i % 4])
                (image.convert("L") if i == 3 else image).save(folder / f"{i}{suffix}")
            (folder / "notes.txt").write_text("not an image")
        (tmp_path / part / ".thumbnails").mkdir()
    return tmp_path


def load(path, **options):
    return data.load("folder", path=path, **{"resize": 24, "crop": 16, **options})


def test_images_come_with_the_label_of_their_folder_at_one_size(path):
    loaded = load(path)
    assert loaded.problem.classes == ("cat", "dog")
    assert (len(loaded.train), len(loaded.test)) == (12, 8)
    assert loaded.train.shape == (3, 16, 16)
    for split in (loaded.train, loaded.test):
        assert [loaded.problem.classes[label] for label in split.targets] == [f.split("/")[0] for f in split.files]
    raw = loaded.train.read(np.arange(12), None)
    assert raw.shape == (12, 16, 16, 3)
    assert raw.dtype == torch.uint8
    assert loaded.preprocess(raw).shape == (12, 3, 16, 16)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_crop_is_the_one_of_the_whole_resized_image(tmp_path, size, suffix):
    file = tmp_path / f"x.{suffix}"
    picture(0, size).save(file)
    with Image.open(file) as image:
        ratio = 24 / min(size)
        whole = np.asarray(image.resize([round(side * ratio) for side in size], Image.Resampling.BILINEAR))
    height, width, _ = whole.shape
    for chance in ((0.5, 0.5), (0.0, 0.0), (0.999, 0.3), None):
        down, right = chance or (0.5, 0.5)
        y, x = int(down * (height - 15)), int(right * (width - 15))
        if chance is None:
            y, x = (height - 16) // 2, (width - 16) // 2
        got = read_crop(file, 24, 16, chance)
        np.testing.assert_allclose(got.astype(int), whole[y : y + 16, x : x + 16], atol=2)


def test_training_crops_depend_only_on_row_and_seed(path):
    train = load(path, mirror=True).train
    rows, seeds = np.arange(12).repeat(4), np.arange(48)
    together = train.read(rows, seeds)
    mixed = np.random.default_rng(0).permutation(48)
    assert torch.equal(train.read(rows[mixed], seeds[mixed]), together[mixed])
    first_row = {image.numpy().tobytes() for image in train.read(np.zeros(30, int), np.arange(30))}
    assert len(first_row) > 10


def test_the_test_split_is_read_without_chance(path):
    test = load(path, mirror=True).test
    rows = np.arange(8)
    assert torch.equal(test.read(rows, rows), test.read(rows, None))


def test_mirrored_images_are_those_of_the_plain_split_turned_round(path):
    rows, seeds = np.zeros(40, int), np.arange(40)
    plain = load(path).train.read(rows, seeds)
    maybe = load(path, mirror=True).train.read(rows, seeds)
    mirrored = [not torch.equal(a, b) for a, b in zip(plain, maybe, strict=True)]
    assert 8 < sum(mirrored) < 32
    for a, b, turned in zip(plain, maybe, mirrored, strict=True):
        assert torch.equal(a.flip(1) if turned else a, b)


def test_the_mean_image_is_that_of_the_whole_centre_squares(path):
    loaded = load(path, normalize="mean_image", scale=1)
    whole = load(path, crop=24).train.read(np.arange(12), None).numpy().astype(np.float64)
    np.testing.assert_allclose(loaded.preprocess.mean.permute(1, 2, 0), whole.mean(axis=0), rtol=1e-6)


def test_validation_images_are_a_mix_of_classes_and_need_no_val_folder(path):
    (path / "val").rename(path / "elsewhere")
    loaded = load(path, validation=5)
    assert (len(loaded.train), len(loaded.test)) == (7, 5)
    assert not set(loaded.train.files) & set(loaded.test.files)
    assert set(loaded.test.targets) == {0, 1}


def test_a_test_folder_serves_where_there_is_no_val(path):
    (path / "val").rename(path / "test")
    assert len(load(path).test) == 8


def test_the_fingerprint_follows_names(path):
    before = load(path).fingerprint
    assert load(path, resize=30).fingerprint == before
    (path / "train" / "cat" / "0.png").rename(path / "train" / "cat" / "9.png")
    assert load(path).fingerprint != before


def test_an_unreadable_image_is_named(path):
    bad = path / "val" / "dog" / "1.JPEG"
    whole = bad.read_bytes()
    for content in (whole[:200], whole[:-20], b"", b"no image"):
        bad.write_bytes(content)
        with pytest.raises(UserError, match=r"val/dog/1\.JPEG cannot be read as an image .*take it out$"):
            load(path)
    also = path / "val" / "cat" / "0.png"
    also.write_bytes(also.read_bytes()[:-60])
    with pytest.raises(UserError, match=r"val/cat/0\.png cannot be read .*\(2 such files\)"):
        load(path)


def test_an_image_that_is_damaged_after_it_was_looked_at_is_named_when_it_is_read(path):
    loaded = load(path)
    bad = path / "val" / "dog" / "1.JPEG"
    bad.write_bytes(bad.read_bytes()[:200])
    with pytest.raises(UserError, match=r"val/dog/1\.JPEG cannot be read"):
        loaded.test.read(np.arange(8), None)


def test_what_comes_after_the_end_of_an_image_and_hidden_files_do_no_harm(path):
    before = load(path)
    (path / "train" / "cat" / "._0.png").write_bytes(b"what a system leaves there")
    assert load(path).fingerprint == before.fingerprint
    first = path / "train" / "cat" / "1.JPEG"
    first.write_bytes(first.read_bytes() + bytes(1000))
    assert torch.equal(load(path).train.read(np.arange(12), None), before.train.read(np.arange(12), None))


def test_a_list_of_names_of_classes_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "train.txt").write_text("0.png 1\n1.png zero\n")
    with pytest.raises(UserError) as error:
        read_list(tmp_path / "train.txt", None, None, resize=8, crop=None, mirror=False, grey=False, need_test=False)
    assert str(error.value) == (
        f"{tmp_path / 'train.txt'}, line 2: '1.png zero' is not the name of an image and its class number: number the "
        "classes from 0 on, or use data.name=folder, where folders have their names"
    )


def test_wrong_folders_are_refused_with_the_place(path, tmp_path):
    with pytest.raises(UserError, match="nothing/train is not a folder"):
        load(tmp_path / "nothing")
    (tmp_path / "hollow" / "train").mkdir(parents=True)
    for name in ("cat", "dog"):
        (tmp_path / "hollow" / "train" / name).symlink_to(path / "train" / name)
        (tmp_path / "hollow" / "val" / name).mkdir(parents=True)
    with pytest.raises(UserError, match=r"hollow/val holds no image \(.jpg.* in its class folders"):
        load(tmp_path / "hollow")
    (path / "val" / "cow").mkdir()
    with pytest.raises(UserError, match=r"'cow'.*cat, dog"):
        load(path)
    (path / "val").rename(path / "elsewhere")
    with pytest.raises(UserError, match=r"neither a val nor a test.*data\.validation"):
        load(path)
    (path / "train" / "emu").mkdir()
    with pytest.raises(UserError, match="train/emu holds no image"):
        load(path)
    (tmp_path / "bare" / "train").mkdir(parents=True)
    with pytest.raises(UserError, match="bare/train has no class folders"):
        load(tmp_path / "bare")


@pytest.mark.parametrize(("options", "word"), [({"crop": 25}, "1 to 24"), ({"pad": 2}, "data.pad is 2")], ids=str)
def test_wrong_sizes_are_refused(path, options, word):
    with pytest.raises(UserError, match=word):
        load(path, **options)


def square(seed, side):
    """A random RGB image without smoothness: every pixel counts."""
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def test_the_mean_image_is_subtracted_at_the_place_of_the_crop_and_mirrored_with_it(tmp_path):
    """As Caffe: the whole image less the whole mean, then crop and mirror."""
    images = [square(i, 10) for i in range(6)]
    for part in ("train", "val"):
        folder = tmp_path / part / "a"
        folder.mkdir(parents=True)
        for i, image in enumerate(images):
            Image.fromarray(image).save(folder / f"{i}.png")
    loaded = data.load("folder", path=tmp_path, resize=10, crop=7, mirror=True, normalize="mean_image", scale=1)
    mean = np.mean(images, axis=0)
    order = [int(name.split("/")[1].split(".")[0]) for name in loaded.train.files]
    rows, seeds = np.arange(30) % 6, np.arange(30)
    got = loaded.preprocess((loaded.train.read(rows, seeds), loaded.train.places(seeds)))
    mirrored = 0
    for i in range(30):
        down, right, flip = uniforms(seeds[i : i + 1], 3)[:, 0]
        top, left = int(down * 4), int(right * 4)
        expected = (images[order[rows[i]]] - mean)[top : top + 7, left : left + 7]
        mirrored += flip < 0.5
        np.testing.assert_allclose(got[i].permute(1, 2, 0), expected[:, ::-1] if flip < 0.5 else expected, atol=1e-4)
    assert 5 < mirrored < 25
    centre = loaded.preprocess(loaded.test.read(np.arange(6), None))
    np.testing.assert_allclose(
        centre[0].permute(1, 2, 0), (images[order[0]] - mean)[1:8, 1:8], atol=1e-4
    )  # three pixels to spare: one before, two after


def test_the_places_on_images_of_any_form_lie_in_the_square_of_the_mean(path):
    train = load(path, mirror=True, normalize="mean_image").train
    places = train.places(np.arange(500))
    assert places[:, :2].min() == 0
    assert places[:, :2].max() == 8
    assert load(path).test.places(np.arange(3)) is None


@pytest.mark.parametrize("side", [97, 100, 103])
def test_a_reduced_jpeg_is_not_shifted(tmp_path, side):
    """Decoded at an eighth, its last pixel reaches beyond the image."""
    ramp = np.linspace(0, 255, side)
    pixels = np.stack([np.tile(ramp, (side, 1)), np.tile(ramp[:, None], (1, side)), np.full((side, side), 128)], 2)
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "x.jpg", quality=100, subsampling=0)
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "x.png")
    jpeg, png = (read_crop(tmp_path / f"x.{kind}", 12, 12).astype(int) for kind in ("jpg", "png"))
    assert np.abs(jpeg - png)[1:-1, 1:-1].max() <= 4  # a reduced pixel is 21 levels


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_keep_their_range(tmp_path, suffix):
    levels = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(levels).save(tmp_path / f"x.{suffix}")
    got = read_crop(tmp_path / f"x.{suffix}", 8, 8)
    assert np.abs(got[..., 0] - levels / 257).max() <= 0.5


def test_levels_of_no_known_range_are_refused(tmp_path):
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(tmp_path / "f.tif")
    Image.fromarray(np.full((8, 8), 10**6, np.int32)).save(tmp_path / "i.tif")
    Image.fromarray(np.full((8, 8), 200, np.int32)).save(tmp_path / "dark.tif")  # or bright, if these are bytes
    for name in ("f.tif", "i.tif", "dark.tif"):
        with pytest.raises(UserError, match=f"{name} cannot be read as an image.*8 or 16 bits"):
            read_crop(tmp_path / name, 8, 8)


def test_other_kinds_of_images_and_grey_folders_are_read(tmp_path):
    for part in ("train", "val"):
        for label, name in enumerate(("a", "b")):
            (tmp_path / part / name).mkdir(parents=True)
            for i, suffix in enumerate(("bmp", "webp", "tiff", "tif", "gif", "GIF", "png")):
                image = Image.fromarray(np.full((9, 9), 40 + 100 * label, np.uint8))
                (image.convert("RGB") if suffix == "png" else image).save(tmp_path / part / name / f"{i}.{suffix}")
    loaded = load(tmp_path, resize=9, crop=9, grey=True)
    assert (len(loaded.train), len(loaded.test)) == (14, 14)
    assert loaded.train.shape == (1, 9, 9)
    raw = loaded.train.read(np.arange(14), np.arange(14))
    assert raw.shape == (14, 9, 9, 1)
    assert np.abs(raw[:, 4, 4, 0].numpy() - (40.0 + 100 * loaded.train.targets)).max() <= 2
    assert load(tmp_path).train.read(np.arange(2), None).shape == (2, 16, 16, 3)
    with pytest.raises(UserError, match=r"data\.grey"):
        data.load("digits", grey=True)


def test_an_image_replaced_by_another_of_the_same_size_and_time_is_noticed(path, monkeypatch, tmp_path):
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path / "cache"))
    for name in ("new.png", "old.png"):
        Image.fromarray(square(len(name), 8)).save(path / "train" / "cat" / "0.png", compress_level=0)
        before = (path / "train" / "cat" / "0.png").stat()
        first = load(path).fingerprint
        Image.fromarray(square(77, 8)).save(path / "train" / "cat" / "0.png", compress_level=0)
        assert (path / "train" / "cat" / "0.png").stat().st_size == before.st_size
        os.utime(path / "train" / "cat" / "0.png", ns=(before.st_atime_ns, before.st_mtime_ns))
        assert load(path).fingerprint != first


def test_unchanged_images_are_not_read_again_for_the_fingerprint(path, monkeypatch, tmp_path):
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path / "cache"))
    first = load(path).fingerprint
    halves = load(path, validation=5).fingerprint
    read = []
    whole = hashlib.file_digest

    def digest(file, how):
        read.append(Path(f"/proc/self/fd/{file.fileno()}").readlink().name)
        return whole(file, how)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    assert load(path).fingerprint == first
    assert load(path, validation=5).fingerprint == halves
    assert read == []
    (path / "val" / "dog" / "0.png").write_bytes((path / "val" / "cat" / "0.png").read_bytes())
    read.clear()
    assert load(path).fingerprint != first
    assert read == ["0.png"]
    for damaged in (b"", b"[1]", b'{"cat/0.png": 3}'):
        for file in (tmp_path / "cache" / "contents").iterdir():
            file.write_bytes(damaged)
        assert load(path).fingerprint != first


def test_two_splits_of_one_folder_are_both_remembered(path, monkeypatch):
    whole = Path.read_bytes
    first = load(path, validation=5).fingerprint
    monkeypatch.setattr(Path, "read_bytes", lambda file: pytest.fail(f"{file} is read again") or whole(file))
    assert load(path, validation=5).fingerprint == first


def test_a_cache_that_cannot_be_written_only_costs_time(path, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MHEADS_DATA", str(tmp_path / "file"))
    assert load(path).fingerprint == load(path).fingerprint


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs real photos in ../shared/data")
def test_real_photos_are_read():
    loaded = load(SHARED, resize=64, crop=56, limit=50, normalize="mean_std", scale=1 / 255)
    assert len(loaded.problem.classes) == 10
    out = loaded.preprocess(loaded.train.read(np.arange(50), np.arange(50)))
    assert out.shape == (50, 3, 56, 56)
    assert abs(float(out.mean())) < 0.1
    assert abs(float(out.std()) - 1) < 0.1
