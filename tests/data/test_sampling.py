"""Orders and priors: functions of the seed, with the counts they promise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mheads.data import order, priors
from mheads.data.sampling import stream
from mheads.errors import UserError

LABELS = np.arange(600) % 10


def make(name, **options):
    return priors(name, **{"seed": 0, "members": 4, "labels": LABELS, "num_classes": 10, **options})


@given(st.integers(0, 2**40), st.integers(0, 50), st.integers(1, 60))
def test_an_order_is_a_permutation_fixed_by_seed_and_epoch(seed, epoch, n):
    first = order(seed, epoch, n)
    assert sorted(first) == list(range(n))
    np.testing.assert_array_equal(first, order(seed, epoch, n))


def test_epochs_and_seeds_give_other_orders():
    orders = [order(seed, epoch, 50) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(o) for o in orders}) == 4


@given(st.integers(1, 7), st.integers(0, 40), st.integers(0, 40))
def test_a_stream_is_the_orders_laid_end_to_end_from_any_position(n, start, length):
    whole = np.concatenate([order(3, epoch, n) for epoch in range(82)])
    rows, epochs = stream(3, n, start, start + length)
    np.testing.assert_array_equal(rows, whole[start : start + length])
    np.testing.assert_array_equal(epochs, np.arange(start, start + length) // n)


def test_changing_a_streamed_batch_does_not_change_later_ones():
    rows, _ = stream(0, 5, 0, 5)
    rows[:] = 0
    np.testing.assert_array_equal(stream(0, 5, 0, 5)[0], order(0, 0, 5))


def test_full_needs_no_weights():
    assert make("full") is None


def test_nothing_is_drawn_from_nothing():
    with pytest.raises(UserError, match="there are 0 examples to draw from"):
        stream(0, 0, 0, 1)


@pytest.mark.parametrize("name", ["bagging", "subset", "specialists"])
def test_priors_have_mean_one_and_depend_on_the_seed_alone(name):
    got = make(name)
    assert got.shape == (4, 600)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got.mean(axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(got, make(name))
    assert (got != make(name, seed=1)).any()
    assert len({row.tobytes() for row in got}) == 4


def test_bagging_counts_draws_with_replacement():
    got = make("bagging", labels=np.zeros(5000, int))
    assert (got == got.astype(int)).all()
    assert (got.sum(axis=1) == 5000).all()
    np.testing.assert_allclose((got > 0).mean(axis=1), 1 - 1 / np.e, atol=0.02)


def test_a_member_draws_the_same_however_many_members_there_are():
    for name in ("bagging", "subset"):
        np.testing.assert_array_equal(make(name, members=2), make(name, members=5)[:2])


@given(st.floats(0.01, 1))
def test_subset_takes_the_fraction_each_example_once(fraction):
    got = make("subset", fraction=fraction)
    assert ((got > 0).sum(axis=1) == max(1, round(fraction * 600))).all()
    assert all(len(np.unique(row[row > 0])) == 1 for row in got)


def test_random_specialists_share_out_all_classes_evenly():
    owned = make("specialists")[:, :10] > 0  # the first ten examples are one of each class
    assert owned.sum(axis=1).tolist() == [3, 3, 2, 2]
    assert (owned.sum(axis=0) == 1).all()
    np.testing.assert_array_equal(make("specialists", groups="random"), make("specialists"))


def test_specialists_by_hand_own_the_classes_they_were_given():
    got = make("specialists", members=2, groups=[[0, 1], [1, 2, 3]])
    np.testing.assert_array_equal(got[0] > 0, np.isin(LABELS, [0, 1]))
    np.testing.assert_array_equal(got[1] > 0, np.isin(LABELS, [1, 2, 3]))
    assert not got[:, LABELS == 9].any(), "a class that nobody owns teaches nobody"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("boosting", {}, "bagging"),
        ("subset", {"fraction": 0.0}, "fraction is 0.0"),
        ("subset", {"fraction": 1.1}, "fraction is 1.1"),
        ("bagging", {"groups": "random"}, "leave the groups out"),
        ("specialists", {"members": 11}, "at most 10 members"),
        ("specialists", {"groups": [[0], [1]]}, "2 groups of classes for 4 members"),
        ("specialists", {"groups": [[0], [1], [], [2]]}, "group 2 is empty"),
        ("specialists", {"groups": [[0], [1], [2], [10]]}, "group 3 names class 10"),
        ("specialists", {"groups": [[0], [1], [2], [9]], "labels": LABELS % 9}, "no training example"),
    ],
)
def test_wrong_priors_are_refused_with_the_reason(name, options, words):
    with pytest.raises(UserError, match=words):
        make(name, **options)
