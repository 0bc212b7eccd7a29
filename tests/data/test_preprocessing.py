"""Preprocess: values, memory layout, statistics, storage."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mheads import data
from mheads.data import Preprocess

sides = st.integers(1, 5)


@given(sides, sides, sides, sides, st.sampled_from([torch.uint8, torch.float32, torch.float64]))
def test_images_always_get_the_same_strides(b, c, h, w, dtype):
    raw = torch.zeros((b, h, w, c) if dtype == torch.uint8 else (b, c, h, w), dtype=dtype)
    for out_dtype in (torch.float32, torch.float64, torch.bfloat16):
        out = Preprocess(torch.zeros(c, h, w), None, 1.0)(raw, out_dtype)
        assert out.shape == (b, c, h, w)
        assert out.stride() == (h * w * c, 1, w * c, c)
        assert out.dtype == out_dtype


def test_a_grey_image_gets_the_same_strides_from_a_view_with_others():
    """Slices and expanded tensors come with strides that torch calls contiguous just as well."""
    raw = torch.zeros(64, 1, 8, 8).as_strided((64, 1, 8, 8), (64, 1, 8, 1))
    assert Preprocess()(raw).stride() == (64, 1, 8, 1)
    assert Preprocess()(torch.zeros(64, 1, 8, 8)).stride() == (64, 1, 8, 1)


def test_values_are_scaled_then_centred_then_divided():
    raw = torch.randint(0, 256, (4, 5, 6, 3), dtype=torch.uint8)
    mean, std = torch.rand(3, 5, 6), torch.rand(3, 1, 1) + 0.5
    expected = (raw.permute(0, 3, 1, 2).double() / 255 - mean) / std
    before = raw.clone()
    torch.testing.assert_close(Preprocess(mean, std, 1 / 255)(raw, torch.float64), expected)
    torch.testing.assert_close(Preprocess(mean, std, 1 / 255)(raw), expected.float())
    assert torch.equal(raw, before)


def test_vectors_come_contiguous_and_leave_the_input_unchanged():
    raw = torch.rand(6, 4).T
    out = Preprocess(torch.arange(6.0), None, 1.0)(raw)
    assert out.is_contiguous()
    torch.testing.assert_close(out, raw - torch.arange(6.0))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("scale", [1.0, 1 / 255])
def test_the_mean_image_and_the_channel_statistics_are_those_of_numpy(dtype, scale):
    x = np.random.default_rng(0).integers(0, 256, (1203, 3, 4, 5)).astype(dtype)  # more than one chunk
    y = np.zeros(len(x), int)
    exact = x.astype(np.float64) * scale
    image = data.from_arrays((x, y), None, normalize="mean_image", scale=scale).preprocess
    np.testing.assert_array_equal(image.mean.numpy(), exact.mean(axis=0).astype(np.float32))
    assert image.std is None
    channel = data.from_arrays((x, y), None, normalize="mean_std", scale=scale).preprocess
    np.testing.assert_allclose(channel.mean.numpy(), exact.mean((0, 2, 3))[:, None, None], rtol=1e-6)
    np.testing.assert_allclose(channel.std.numpy(), exact.std((0, 2, 3))[:, None, None], rtol=1e-6)


def test_a_constant_feature_becomes_zero():
    x = np.ones((5, 2), np.float32) * [3, 0] + [[0, i] for i in range(5)]
    loaded = data.from_arrays((x, np.zeros(5, int)), None, normalize="mean_std", scale=0.5)
    out = loaded.preprocess(loaded.train.read(np.arange(5), None))
    assert torch.equal(out[:, 0], torch.zeros(5))
    torch.testing.assert_close(out[:, 1].std(correction=0), torch.tensor(1.0))


@pytest.mark.parametrize("constant", [0.1, 0.998, 1 / 3])
@pytest.mark.parametrize("shape", [(1203, 3), (101, 3, 4, 5)], ids=["features", "channels"])
def test_a_constant_whose_sum_is_rounded_becomes_zero_too(constant, shape):
    x = np.random.default_rng(0).normal(size=shape)
    x[:, 1] = constant
    loaded = data.from_arrays((x, np.zeros(len(x), int)), None, normalize="mean_std")
    made, others = loaded.preprocess, (0, *range(2, len(shape)))
    assert made.mean.flatten()[1] == constant
    assert made.std.flatten()[1] == 1
    np.testing.assert_allclose(made.std.flatten()[[0, 2]], x.std(others)[[0, 2]], rtol=1e-12)
    out = made(torch.from_numpy(x * 1.001))  # a little off, as a later example may be
    torch.testing.assert_close(out[:, 1], torch.full_like(out[:, 1], constant * 0.001))


def test_a_channel_whose_pixels_are_each_constant_is_not():
    x = np.tile([0.25, 0.75], (5, 1, 1, 1))
    made = data.from_arrays((x, np.zeros(5, int)), None, normalize="mean_std").preprocess
    assert (made.mean.item(), made.std.item()) == (0.5, 0.25)


def test_a_preprocess_read_back_from_its_tensors_gives_the_same_bits(tmp_path):
    from safetensors.torch import load_file, save_file

    x = np.random.default_rng(0).integers(0, 256, (20, 3, 4, 4), dtype=np.uint8)
    made = data.from_arrays((x, np.zeros(20, int)), None, normalize="mean_image", scale=1 / 255).preprocess
    save_file(made.tensors(), tmp_path / "preprocess.safetensors")
    again = Preprocess.from_tensors(load_file(tmp_path / "preprocess.safetensors"), made.scale)
    raw = torch.from_numpy(x.transpose(0, 2, 3, 1).copy())
    assert torch.equal(made(raw), again(raw))
    assert Preprocess().tensors() == {}


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize(
    ("pad", "mirror", "padding"), [(0, True, "zeros"), (2, False, "zeros"), (2, True, "zeros"), (2, True, "reflect")]
)
def test_the_mean_image_is_moved_and_mirrored_with_the_example(dtype, pad, mirror, padding):
    """As Caffe: subtract, then crop and mirror; by one image at a time in numpy."""
    from mheads.data.augmentation import uniforms
    from mheads.data.batches import BatchStream

    x = np.random.default_rng(0).integers(0, 256, (20, 3, 5, 7)).astype(dtype)
    keys = {"normalize": "mean_image", "scale": 0.5, "pad": pad, "padding": padding, "mirror": mirror}
    loaded = data.from_arrays((x, np.zeros(20, int)), None, **keys)
    rows, seeds = np.arange(40) % 20, np.arange(40)
    mean = (x.astype(np.float64) / 2).mean(axis=0)
    expected = []
    for row, seed in zip(rows, seeds, strict=True):
        down, right, flip = uniforms(np.array([seed]), 3)[:, 0]
        top, left = int(down * (2 * pad + 1)), int(right * (2 * pad + 1))
        how = "constant" if padding == "zeros" else padding
        padded = np.pad(x[row] / 2 - mean, ((0, 0), (pad, pad), (pad, pad)), how)
        centred = padded[:, top : top + 5, left : left + 7]
        expected.append(centred[:, :, ::-1] if mirror and flip < 0.5 else centred)
    raw, places = loaded.train.read(rows, seeds), loaded.train.places(seeds)
    got = loaded.preprocess((raw, places))
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert got.stride() == (105, 1, 21, 3)
    plain = loaded.preprocess(loaded.train.read(rows, None))  # evaluation: the middle
    np.testing.assert_allclose(plain, x[rows] / 2 - mean, atol=1e-4)
    stream = BatchStream(loaded, 0, 8, 1, None)
    batch = stream.batch(0)
    inputs = batch.network_inputs(torch.float32)
    assert torch.equal(batch.cut(3, 6).network_inputs(torch.float32), inputs[3:6])
    stream.close()


def test_a_training_batch_without_a_mean_image_is_examples_alone():
    from mheads.data.batches import BatchStream

    x = np.zeros((4, 1, 5, 5), np.uint8)
    loaded = data.from_arrays((x, np.zeros(4, int)), None, normalize="mean_std", mirror=True)
    stream = BatchStream(loaded, 0, 4, 1, None)
    assert isinstance(stream.batch(0).inputs, torch.Tensor)
    stream.close()


@pytest.mark.parametrize("normalize", ["mean_std", "mean_image"])
def test_double_precision_is_standardised_before_it_is_rounded(normalize, tmp_path):
    from safetensors.torch import load_file, save_file

    small = np.random.default_rng(0).normal(size=(50, 3))
    loaded = data.from_arrays((small + 1e9, np.zeros(50, int)), None, normalize=normalize)
    raw = loaded.train.read(np.arange(50), None)
    expected = small - small.mean(axis=0)
    if normalize == "mean_std":
        expected = expected / small.std(axis=0)
    got = loaded.preprocess(raw)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got, expected, atol=1e-5)
    save_file(loaded.preprocess.tensors(), tmp_path / "p.safetensors")
    again = Preprocess.from_tensors(load_file(tmp_path / "p.safetensors"), loaded.preprocess.scale)
    assert torch.equal(again(raw), got)
