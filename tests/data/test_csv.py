"""CSV tables to train on: the last column is the target."""

import numpy as np
import pytest

from mheads.common.errors import UserError
from mheads.data import load
from mheads.data.catalog import DATASETS


def write(path, *rows):
    path.write_text("\n".join(rows) + "\n")
    return path


def rows_of(split):
    """Examples and targets, in an order of their own."""
    x = split.read(np.arange(len(split)), None).numpy()
    return sorted(zip(x.tolist(), np.asarray(split.targets).ravel().tolist(), strict=True))


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("header", [True, False])
def test_a_table_is_read_whatever_its_separator_with_or_without_a_header(tmp_path, separator, header):
    lines = [separator.join(line) for line in (["1", "2.5", "cat"], ["3", "-4", "dog"], ["5", "6", "cat"])]
    train = write(tmp_path / "train.csv", *([separator.join("abc")] if header else []), *lines)
    test = write(tmp_path / "test.csv", separator.join(["7", "8", "dog"]))
    data = load("csv", path=train, test_path=test)
    assert data.problem.name == "classification" and data.problem.classes == ("cat", "dog")
    assert rows_of(data.train) == [([1.0, 2.5], 0), ([3.0, -4.0], 1), ([5.0, 6.0], 0)]
    assert rows_of(data.test) == [([7.0, 8.0], 1)]
    assert DATASETS["csv"].example_shape(path=train) == (2,)


@pytest.mark.parametrize(
    ("targets", "problem", "read"),
    [
        (["0", "2", "1"], "classification", [0, 2, 1]),
        (["0", "2.0", "1"], "regression", [0.0, 2.0, 1.0]),
        (["0", "1" + 20 * "0", "1"], "regression", [0.0, float(np.float32(1e20)), 1.0]),  # no class number
        (["--1", "+2", "0"], "classification", [1, 0, 2]),  # no numbers: +2, --1, 0 in sorted order
        (["1e-3", "-2", "nine"], "classification", [0, 1, 2]),  # names, in sorted order: -2, 1e-3, nine
    ],
)
def test_the_last_column_decides_what_is_learned(tmp_path, targets, problem, read):
    train = write(tmp_path / "t.csv", *(f"{i},{target}" for i, target in enumerate(targets)))
    data = load("csv", path=train, test_path=train)
    assert data.problem.name == problem
    if problem == "classification" and "nine" in targets:
        assert data.problem.classes == ("-2", "1e-3", "nine")
        read = [1, 0, 2]
    assert rows_of(data.test) == [([float(i)], target) for i, target in enumerate(read)]


def test_a_class_that_only_the_test_table_has_is_an_error(tmp_path):
    train, test = write(tmp_path / "a.csv", "1,x", "2,y"), write(tmp_path / "b.csv", "3,w", "4,x")
    with pytest.raises(UserError, match=r"test: example 0 has the label 'w', which is none of the classes x, y"):
        load("csv", path=train, test_path=test)


def test_held_out_rows_of_a_sorted_table_are_a_fair_sample(tmp_path):
    path = write(tmp_path / "sorted.csv", *(f"{i},{i // 50}" for i in range(100)))
    data = load("csv", path=path, validation=40)
    counts = np.bincount(data.test.targets, minlength=2)
    assert counts.sum() == 40 and counts.min() >= 10
    again = load("csv", path=path, validation=40)
    np.testing.assert_array_equal(data.test.targets, again.test.targets)
    assert data.fingerprint == again.fingerprint


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["1,2,0", "3,red,1"], r"t.csv: line 2 has 'red', not a number; .* before the last column, the target"),
        (["1,2,0", "3,1"], r"t.csv: line 2 has 2 values, the first row 3"),
        (["a,b,c"], r"t.csv holds no rows of numbers"),
        (["1,2,0", "nan,1,1"], r"NaN"),
        (["1,2,0.5", "3,4,", "5,6,1.5"], r"t.csv: line 2 has no target in the last column"),
        (["1", "2"], r"t.csv has one column"),
    ],
)
def test_what_cannot_be_learned_from_names_its_line(tmp_path, rows, message):
    path = write(tmp_path / "t.csv", *rows)
    with pytest.raises(UserError, match=message):
        load("csv", path=path, test_path=path)


def test_a_table_alone_asks_for_a_test_set(tmp_path):
    with pytest.raises(UserError, match=r"give data.test_path, a table of test examples, or data.validation=n"):
        load("csv", path=write(tmp_path / "t.csv", "1,0", "2,1"))
