"""Arrays: their checks, augmentation by row and seed, hold-out and fingerprints."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mheads import data
from mheads.common.errors import UserError
from mheads.data.augmentation import crop_and_mirror, uniforms


def numbered(n, shape=(3, 6, 6), dtype=np.uint8):
    """n examples with random content, labels 0, 1, 2, 0, ..."""
    x = np.random.default_rng(n).integers(1, 255, (n, *shape)).astype(dtype)
    return x, np.arange(n) % 3


def test_uint8_images_are_read_as_nhwc_and_float_images_as_nchw():
    x, y = numbered(5)
    rows = np.array([3, 1])
    raw = data.from_arrays((x, y), None).train.read(rows, None)
    assert raw.dtype == torch.uint8
    np.testing.assert_array_equal(raw.numpy(), x[rows].transpose(0, 2, 3, 1))
    raw = data.from_arrays((x.astype(np.float64), y), None).train.read(rows, None)
    assert raw.dtype == torch.float64
    np.testing.assert_array_equal(raw.numpy(), x[rows])


@pytest.mark.parametrize(("given_shape", "seen"), [((4, 7), (1, 4, 7)), ((2, 4, 7), (2, 4, 7)), ((9,), (9,))], ids=str)
def test_shape_is_that_of_one_example_as_the_network_sees_it(given_shape, seen):
    x, y = numbered(4, given_shape, np.float32)
    loaded = data.from_arrays((torch.from_numpy(x), torch.from_numpy(y)), (x, y))
    assert loaded.train.shape == loaded.test.shape == seen
    assert loaded.preprocess(loaded.train.read(np.arange(4), None)).shape == (4, *seen)
    assert loaded.problem.classes == ("0", "1", "2")
    assert loaded.train.targets.dtype == np.int64


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2**64 - 1)), min_size=1, max_size=9),
    st.integers(0, 3),
    st.booleans(),
)
def test_augmentation_depends_only_on_row_and_seed(draws, pad, mirror):
    train = data.from_arrays(numbered(7), None, pad=pad, mirror=mirror).train
    rows, seeds = np.array([d[0] for d in draws]), np.array([d[1] for d in draws], np.uint64)
    together = train.read(rows, seeds)
    alone = [train.read(rows[i : i + 1], seeds[i : i + 1])[0] for i in range(len(draws))]
    assert torch.equal(together, torch.stack(alone))


def reference_augment(image, seed, pad, mirror, padding="constant"):
    """One image, by numpy.pad and slices."""
    down, right, flip = uniforms(np.array([seed]), 3)[:, 0]
    y, x = int(down * (2 * pad + 1)), int(right * (2 * pad + 1))
    h, w, _ = image.shape
    moved = np.pad(image, ((pad, pad), (pad, pad), (0, 0)), padding)[y : y + h, x : x + w]
    return moved[:, ::-1] if mirror and flip < 0.5 else moved


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize(("padding", "mode"), [("zeros", "constant"), ("reflect", "reflect")])
def test_augmentation_is_a_crop_of_the_padded_image_mirrored_or_not(dtype, padding, mode):
    images = np.random.default_rng(0).integers(1, 255, (40, 5, 7, 2)).astype(dtype)
    got = crop_and_mirror(images.copy(), np.arange(40), pad=2, mirror=True, padding=padding)
    expected = [reference_augment(image, i, 2, True, mode) for i, image in enumerate(images)]
    np.testing.assert_array_equal(got, np.stack(expected))


def test_augmentation_uses_every_place_and_mirrors_half_of_the_time():
    down, right, flip = uniforms(np.arange(9000), 3)
    places = (down * 3).astype(int) * 3 + (right * 3).astype(int)
    assert np.bincount(places, minlength=9).min() > 850
    assert abs((flip < 0.5).mean() - 0.5) < 0.03


def test_reading_without_seeds_and_reading_the_test_split_is_never_augmented():
    x, y = numbered(6)
    loaded = data.from_arrays((x, y), (x, y), pad=2, mirror=True)
    rows = np.arange(6)
    plain = torch.from_numpy(x.transpose(0, 2, 3, 1).copy())
    assert torch.equal(loaded.train.read(rows, None), plain)
    assert torch.equal(loaded.test.read(rows, rows), plain)
    assert not torch.equal(loaded.train.read(rows, rows), plain)
    assert torch.equal(loaded.train.read(rows, None), plain), "augmenting must not change the stored images"


def test_validation_is_the_end_of_the_training_set_and_leaves_the_test_set_alone():
    x, y = numbered(10)
    loaded = data.from_arrays((x, y), (x * 0, y), validation=3, mirror=True, normalize="mean_image", scale=1)
    assert (len(loaded.train), len(loaded.test)) == (7, 3)
    rows = np.arange(3)
    np.testing.assert_array_equal(loaded.test.read(rows, rows).numpy(), x[7:].transpose(0, 2, 3, 1))
    np.testing.assert_allclose(loaded.preprocess.mean.numpy(), x[:7].mean(axis=0), rtol=1e-6)


def test_limit_keeps_the_first_of_both_splits():
    x, y = numbered(10)
    loaded = data.from_arrays((x, y), (x[::-1], y[::-1]), limit=4)
    np.testing.assert_array_equal(loaded.train.targets, y[:4])
    np.testing.assert_array_equal(loaded.test.targets, y[::-1][:4])


def test_without_a_test_set_the_test_split_is_empty():
    assert len(data.from_arrays(numbered(4), None).test) == 0


def test_fingerprint_changes_with_any_pixel_and_any_label_but_not_with_the_container():
    x, y = numbered(6)
    base = data.from_arrays((x, y), (x, y)).fingerprint
    pixel, label = x.copy(), y.copy()
    pixel[3, 0, 2, 2] += 1
    label[5] = 0
    assert data.from_arrays((torch.from_numpy(x), y.astype(np.int32)), (x, y)).fingerprint == base
    others = [
        data.from_arrays((x, y), (pixel, y)).fingerprint,
        data.from_arrays((x, label), (x, y)).fingerprint,
        data.from_arrays((x[:5], y[:5]), (x, y)).fingerprint,
    ]
    assert len({base, *others}) == 4


X, Y = numbered(6)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (X, Y[:4], ["6 examples", "[4]"]),
        (X, Y.astype(bool), ["bool", "y.astype(int)", "y[:, None]"]),
        (X.astype(np.int64), Y, ["int64", "uint8 or float32", "tokens"]),
        (X[:, 0, 0].astype(np.int16), Y, ["int16", "[6, 6]", "tokens, int64 [N, T]"]),
        (X[:, 0, 0].astype(np.int64) - 300, Y, ["row 0 holds the token -", "from 0 on"]),
        (X[..., None], Y, ["[6, 3, 6, 6, 1]", "[N, C, H, W]"]),
        (X.transpose(0, 2, 3, 1), Y, ["[N, H, W, C]", "transpose"]),
        ([X[0], X[1, :, :4]], Y[:2], ["several sizes"]),
        (X, Y - 1, ["example 0", "label -1", "0 to 1"]),
        (X[:0], Y[:0], ["no training examples"]),
        (np.array([None, X[0]], object), Y[:2], ["array of objects", "numpy.stack"]),
    ],
)
def test_wrong_arrays_are_refused_with_the_value_and_the_remedy(x, y, words):
    with pytest.raises(UserError) as error:
        data.from_arrays((x, y), None)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"validation": 6}, "0 to 5"),
        ({"validation": -1}, "-1"),
        ({"limit": 0}, "data.limit is 0"),
        ({"scale": 0.0}, "data.scale is 0.0"),
        ({"pad": -1}, "data.pad is -1"),
        ({"padding": "edge"}, "data.padding is 'edge'"),
        ({"pad": 9, "padding": "reflect"}, "can be reflected by less than"),
        ({"normalize": "std"}, "mean_image"),
        ({"normalize": "init"}, "give none, mean_image or mean_std"),
        ({"crop": 3}, "crop=3 is for data in files"),
        ({"padd": 3}, "there is no data key 'padd'; there are name, .* pad, "),
        ({"classes": ("a", "b")}, "label 2"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options, word):
    with pytest.raises(UserError, match=word):
        data.from_arrays((X, Y), (X, Y), **options)


def test_vectors_cannot_be_mirrored():
    with pytest.raises(UserError, match="an example is 108 numbers or tokens"):
        data.from_arrays((X.reshape(6, -1), Y), None, mirror=True)


def test_train_and_test_of_different_sizes_are_refused():
    with pytest.raises(UserError, match=r"\(3, 6, 6\).*\(3, 6, 4\)"):
        data.from_arrays((X, Y), (X[..., :4], Y))


def test_masked_values_are_refused_and_an_array_that_masks_none_is_taken():
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4) % 2
    holes = np.ma.masked_array(x, x > 9)  # the last row but its first value
    labels = np.ma.masked_array(y, [False, True, False, False])
    for examples, where in (
        ((holes, y), r"train examples: 2 of 12"),
        ((list(holes), y), r"train examples: 2 of 3"),
        ([(row, 0) for row in holes], r"train item 3: 2 of 3"),
        ((x, labels), r"train labels: 1 of 4"),
        (list(zip(x, labels, strict=True)), r"train item 1: its label: 1 of 1"),
        ((x, y, {"age": holes}), r"side input 'age': 2 of 12"),
    ):
        with pytest.raises(UserError, match=rf"{where} values of a masked array are masked; fill them, .* or leave"):
            data.from_arrays(examples, None)
    with pytest.raises(UserError, match=r"weights: 1 of 4 values of a masked array"):
        data.from_arrays((x, y), None, weights=labels)
    loaded = data.from_arrays((np.ma.masked_array(x), np.ma.masked_array(y)), None)
    np.testing.assert_array_equal(loaded.train.read(np.arange(4), None), x)
    assert loaded.train.targets.tolist() == [0, 1, 0, 1]
