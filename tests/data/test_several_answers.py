"""UCI tables with their splits, and generated sets in which a question has several right answers."""

import numpy as np
import pytest

from mheads import data
from mheads.common.errors import UserError

RNG = np.random.default_rng(0)
ROWS = np.round(RNG.normal(size=(30, 4)) * [1, 10, 100, 5] + [0, 5, 0, 50], 3)


@pytest.fixture
def tables(tmp_path):
    """Two tables of 30 rows in the layout of the standard ones, with two splits; the target is column 1."""
    for name in ("brick", "sail"):
        folder = tmp_path / name
        folder.mkdir()
        np.savetxt(folder / "data.txt", ROWS, "%.3f")
        np.savetxt(folder / "index_features.txt", [0, 2, 3], "%d")
        np.savetxt(folder / "index_target.txt", [1], "%d")
        for fold in range(2):
            mixed = np.random.default_rng(fold).permutation(30)
            np.savetxt(folder / f"index_train_{fold}.txt", mixed[3:], "%d")
            np.savetxt(folder / f"index_test_{fold}.txt", mixed[:3], "%.6e")  # as numpy writes them unless it is told
    return tmp_path


@pytest.mark.parametrize("fold", [0, 1])
def test_a_table_has_the_rows_of_its_split(tables, fold):
    loaded = data.load("uci", root=tables, table="sail", fold=fold, normalize="mean_std", normalize_targets=True)
    mixed = np.random.default_rng(fold).permutation(30)
    train, test = ROWS[mixed[3:]], ROWS[mixed[:3]]
    np.testing.assert_allclose(loaded.test.read(np.arange(3), None), test[:, [0, 2, 3]], rtol=1e-6)
    np.testing.assert_allclose(loaded.test.targets, test[:, [1]], rtol=1e-6)  # in their own units
    learned = loaded.train.read_targets(np.arange(27), None).targets.numpy()
    np.testing.assert_allclose(learned, (train[:, [1]] - train[:, 1].mean()) / train[:, 1].std(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loaded.train.targets, learned, rtol=1e-6)
    np.testing.assert_allclose(loaded.preprocess.mean, train[:, [0, 2, 3]].mean(0), rtol=1e-4, atol=1e-5)
    assert loaded.problem.std_of_targets == pytest.approx((train[:, 1].std(),), rel=1e-5)
    assert data.DATASETS["uci"].example_shape(root=tables, table="sail") == (3,)


def test_examples_for_calibration_are_the_last_and_nothing_is_measured_on_them(tables):
    loaded = data.load("uci", root=tables, table="sail", calibration=5, validation=4, normalize="mean_std")
    mixed = np.random.default_rng(0).permutation(30)[3:]
    np.testing.assert_allclose(loaded.test.targets, ROWS[mixed[-4:]][:, [1]], rtol=1e-6)
    np.testing.assert_allclose(loaded.calibration.targets, ROWS[mixed[-9:-4]][:, [1]], rtol=1e-6)
    np.testing.assert_allclose(loaded.train.targets, ROWS[mixed[:-9]][:, [1]], rtol=1e-6)
    np.testing.assert_allclose(loaded.preprocess.mean, ROWS[mixed[:-9]][:, [0, 2, 3]].mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(loaded.rows, np.arange(18))


def test_mistakes_are_named(tables, tmp_path):
    for options, words in (
        ({"table": "ship"}, "data.table is ship, and .* has brick, sail: give one"),
        ({"table": None}, "data.table is None"),
        ({"table": "sail", "fold": 2}, "sail has 2 splits, 0 to 1, and data.fold is 2"),
        ({"table": "sail", "root": tmp_path / "no"}, "holds no tables: say with data.root"),
    ):
        with pytest.raises(UserError, match=words):
            data.load("uci", **{"root": tables, **options})
    (tables / "sail/index_test_0.txt").write_text("30\n")
    with pytest.raises(UserError, match=r"index_test_0.txt should hold whole numbers from 0 to 29"):
        data.load("uci", root=tables, table="sail")
    (tables / "brick/data.txt").write_text("1 2\nthree\n")
    with pytest.raises(UserError, match=r"data.txt cannot be read as rows of numbers"):
        data.load("uci", root=tables, table="brick")
    with pytest.raises(UserError, match=r"data.fold is 1, but 'digits' has one split"):
        data.load("digits", fold=1)


def test_one_of_two_roots():
    loaded = data.load("two_roots")
    x, y = loaded.train.read(np.arange(2000), None).numpy(), loaded.train.targets
    assert np.std(np.abs(y) - np.sqrt(x)) == pytest.approx(0.05, rel=0.1)
    assert (y[x > 0.1] > 0).mean() == pytest.approx(0.75, abs=0.03)


def test_three_futures_turn_as_the_input_says():
    loaded = data.load("three_futures")
    assert loaded.problem.shape == (12, 2)
    x, ways = loaded.train.read(np.arange(2000), None).numpy(), loaded.train.targets.reshape(-1, 12, 2)
    steps = np.diff(np.concatenate([np.zeros((2000, 1, 2)), ways], 1), axis=1)
    np.testing.assert_allclose(np.linalg.norm(steps, axis=-1).sum(1), x[:, 0], rtol=0.6)
    last = np.arctan2(ways[:, -1, 1], ways[:, -1, 0])
    straight, left = np.abs(last) < 0.4, last > 0.4
    assert straight.mean() == pytest.approx(0.4, abs=0.04)
    sure = x[:, 1] > 0.8  # whose left turns have a probability of 0.54 on average
    assert left[sure].mean() == pytest.approx(0.54, abs=0.06)


def test_masks_end_at_one_of_three_radii():
    loaded = data.load("ambiguous_masks")
    assert loaded.problem.name == "segmentation" and loaded.train.shape == (1, 16, 16)
    images, masks = loaded.train.read(np.arange(500), None).numpy()[..., 0], loaded.train.targets
    assert all(images[i][masks[i] == 1].mean() > images[i][masks[i] == 0].mean() for i in range(500))
    peak = images.astype(float).max((1, 2))
    border = np.array([images[i][masks[i] == 1].min() for i in range(500)]) / peak
    assert np.quantile(border, 0.15) < 0.4 and np.quantile(border, 0.85) > 0.6  # wide and narrow ones
