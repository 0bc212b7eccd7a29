"""The scale of inputs: what the default does, what a run remembers, and what is brought to it or refused."""

import numpy as np
import pytest
import torch

from mheads import data
from mheads.common.errors import UserError
from mheads.config import read as configs
from mheads.data import ValueRange
from mheads.data.value_range import measure_range

PIXELS = ValueRange("uint8", 0, 255)
UNIT = ValueRange("float", 0, 1)
WIDE = ValueRange("float", -3, 3)


def test_by_default_uint8_comes_to_the_network_from_zero_to_one_and_floats_as_they_are():
    x = np.arange(0, 240, 20, dtype=np.uint8).reshape(3, 1, 2, 2)
    y = np.arange(3)
    loaded = data.from_arrays((x, y), None)
    np.testing.assert_allclose(loaded.preprocess(loaded.train.read(y, None)), x / 255, rtol=1e-6)
    loaded = data.from_arrays((x.astype(np.float32), y), None)
    np.testing.assert_array_equal(loaded.preprocess(loaded.train.read(y, None)), x)
    loaded = data.from_arrays((x, y), None, scale=1)
    np.testing.assert_array_equal(loaded.preprocess(loaded.train.read(y, None)), x)
    assert data.load("digits").preprocess.scale == 1 / 16  # they go up to 16


def test_the_shipped_recipes_keep_their_scale_and_another_dataset_gets_the_default():
    of_the_paper = ("caffenet", "cifar10_quick", "digits", "nin_cifar100", "nin_ilsvrc")
    assert {configs.load(name).data.scale for name in of_the_paper} == {1.0}
    assert configs.load("digits", ["data.name=folder", "data.path=pictures"]).data.scale == "auto"
    assert configs.load("digits", ["data.scale=0.5", "data.name=folder", "data.path=pictures"]).data.scale == 0.5
    assert configs.load("digits", ["data.mirror=true"]).data.scale == 1.0
    assert configs.load("caffenet", ["data.path=elsewhere"]).data.scale == 1.0
    for wrong in ("data.scale=0", "data.scale=much"):
        with pytest.raises(UserError, match=r"data\.scale"):
            configs.load("digits", [wrong])


def test_the_range_of_the_training_examples_is_remembered():
    x = np.array([[0.25, 3], [-1, 2]], np.float32)
    assert data.from_arrays((x, np.arange(2)), None).seen == ValueRange("float", -1, 3)
    assert data.load("digits").seen == ValueRange("uint8", 0, 16)


@pytest.mark.parametrize(
    ("seen", "given", "words"),
    [
        (PIXELS, UNIT, "floats from 0 to 1.*uint8 from 0 to 255.*x \\* 255"),
        (PIXELS, ValueRange("float", -1, 1), "raw pixels"),
        (PIXELS, ValueRange("float", 0, 1000), "raw pixels"),
        (ValueRange("uint8", 0, 16), UNIT, "x \\* 16"),
        (WIDE, PIXELS, "uint8 from 0 to 255.*floats from -3 to 3"),
        (ValueRange("float", 0, 255), PIXELS, "floats from 0 to 255"),
    ],
    ids=str,
)
def test_what_cannot_be_brought_to_the_range_of_training_is_refused_with_both_ranges(seen, given, words):
    with pytest.raises(UserError, match=words):
        seen.check(given, "x")


@pytest.mark.parametrize(
    ("seen", "given"),
    [(UNIT, ValueRange("float", 0, 255)), (WIDE, ValueRange("float", -20, 1)), (ValueRange("float", 0, 255), UNIT)],
    ids=str,
)
def test_values_far_from_the_range_of_training_are_warned_of(seen, given):
    with pytest.warns(UserWarning, match="mean little") as said:
        seen.check(given, "x")
    assert len(said) == 1


@pytest.mark.parametrize(
    ("seen", "given"),
    [
        (PIXELS, PIXELS),
        (PIXELS, ValueRange("float", 0, 254.5)),
        (PIXELS, ValueRange("float", 0, 0)),  # a black image
        (UNIT, PIXELS),
        (UNIT, ValueRange("float", 0, 1.5)),
        (WIDE, ValueRange("float", 0, 4)),
    ],
    ids=str,
)
def test_what_can_be_what_training_saw_passes_without_a_word(seen, given, recwarn):
    seen.check(given, "x")
    assert not recwarn.list


def test_uint8_is_divided_for_a_run_of_floats_from_zero_to_one_only():
    raw = torch.randint(0, 256, (2, 4, 5, 3), dtype=torch.uint8)  # NHWC, as a split reads it
    assert torch.equal(UNIT.convert(raw), raw.permute(0, 3, 1, 2).float() / 255)
    assert PIXELS.convert(raw) is raw
    assert torch.equal(UNIT.convert(raw[:, 0, 0]), raw[:, 0, 0].float() / 255)


def test_bytes_that_are_only_0_and_1_are_warned_of_where_they_would_be_divided(recwarn):
    x, y = np.eye(4, dtype=np.uint8), np.arange(4) % 2
    with pytest.warns(UserWarning, match=r"arrays: training examples are uint8 from 0 to 1, .* by 255, .*data.scale=1"):
        assert data.from_arrays((x, y), None).preprocess.scale == 1 / 255
    with pytest.warns(UserWarning, match=r"x: uint8 from 0 to 1, but training saw floats .*astype\('float32'"):
        UNIT.check(measure_range(x, "x"), "x")
    recwarn.clear()
    for options in ({"scale": 1}, {"normalize": "mean_std"}):
        data.from_arrays((x, y), None, **options)
    data.from_arrays((x * 0, y), None)  # black images
    data.from_arrays((x * 2, y), None)
    UNIT.check(measure_range(x * 0, "x"), "x")
    PIXELS.check(measure_range(x, "x"), "x")  # nothing is divided by what training did not divide by
    assert not recwarn.list


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_named_with_the_split_the_count_and_the_first_row(value):
    x = np.random.default_rng(0).random((9, 4), np.float32)
    bad = x.copy()
    bad[[3, 7], 2] = value
    y = np.arange(9) % 3
    for train, test, where in (((bad, y), (x, y), "train"), ((x, y), (bad, y), "test")):
        with pytest.raises(
            UserError, match=f"{where} examples hold NaN or infinity: 2 of 9 rows do, the first is row 3"
        ):
            data.from_arrays(train, test)


def test_an_empty_split_has_a_range_too():
    assert measure_range(np.zeros((0, 3), np.float32), "x").kind == "float"
    assert measure_range(np.zeros((0, 3), np.uint8), "x").kind == "uint8"
