"""Image folders: what is read, which pixels, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mheads import data
from mheads.data.folder import read_crop
from mheads.errors import UserError

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "imagenette_mini"
SIZES = [(40, 30), (30, 40), (32, 32), (64, 33)]


def picture(seed, size):
    """A smooth random image, so that decoders and filters differ little on it."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def path(tmp_path):
    """Two classes, six training and four validation images each, of several sizes, kinds and suffixes."""
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
    assert loaded.classes == ("cat", "dog")
    assert (len(loaded.train), len(loaded.test)) == (12, 8)
    assert loaded.train.shape == (3, 16, 16)
    for split in (loaded.train, loaded.test):
        assert [loaded.classes[label] for label in split.labels] == [f.split("/")[0] for f in split.files]
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
    for down, right in ((0.5, 0.5), (0.0, 0.0), (0.999, 0.3)):
        y, x = int(down * (height - 15)), int(right * (width - 15))
        got = read_crop(file, 24, 16, down, right)
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


def test_the_mean_image_is_that_of_the_centre_crops(path):
    loaded = load(path, normalize="mean_image")
    crops = loaded.train.read(np.arange(12), None).numpy().astype(np.float64)
    np.testing.assert_allclose(loaded.preprocess.mean.permute(1, 2, 0), crops.mean(axis=0), rtol=1e-6)


def test_validation_images_are_a_mix_of_classes_and_need_no_val_folder(path):
    (path / "val").rename(path / "elsewhere")
    loaded = load(path, validation=5)
    assert (len(loaded.train), len(loaded.test)) == (7, 5)
    assert not set(loaded.train.files) & set(loaded.test.files)
    assert set(loaded.test.labels) == {0, 1}


def test_a_test_folder_serves_where_there_is_no_val(path):
    (path / "val").rename(path / "test")
    assert len(load(path).test) == 8


def test_the_fingerprint_follows_names_and_sizes(path):
    before = load(path).fingerprint
    assert load(path, resize=30).fingerprint == before
    (path / "train" / "cat" / "0.png").rename(path / "train" / "cat" / "9.png")
    assert load(path).fingerprint != before


def test_an_unreadable_image_is_named(path):
    bad = path / "val" / "dog" / "1.JPEG"
    bad.write_bytes(bad.read_bytes()[:200])
    loaded = load(path)
    with pytest.raises(UserError, match=r"val/dog/1\.JPEG cannot be read"):
        loaded.test.read(np.arange(8), None)


def test_wrong_folders_are_refused_with_the_place(path, tmp_path):
    with pytest.raises(UserError, match="nothing/train is not a folder"):
        load(tmp_path / "nothing")
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


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs real photos in ../shared/data")
def test_real_photos_are_read():
    loaded = load(SHARED, resize=64, crop=56, limit=50, normalize="mean_std", scale=1 / 255)
    assert len(loaded.classes) == 10
    out = loaded.preprocess(loaded.train.read(np.arange(50), np.arange(50)))
    assert out.shape == (50, 3, 56, 56)
    assert abs(float(out.mean())) < 0.1
    assert abs(float(out.std()) - 1) < 0.1
