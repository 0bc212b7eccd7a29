"""Orders and sample weights: functions of the seed, with the counts they promise."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mheads.common.errors import UserError
from mheads.config import read as configs
from mheads.data import clusters, confusable, deal, from_arrays, order, read_sample_weights
from mheads.data.resampling import SAMPLINGS, Request, multiply_weights, stream

LABELS = np.arange(600) % 10


def make(name, **options):
    own = {key: options.pop(key) for key in list(options) if key in ("fraction",)}
    request = Request(**{"seed": 0, "members": 4, "labels": LABELS, "num_classes": 10, **options})
    if SAMPLINGS[name].by_class and request.groups is None:
        request = replace(request, groups=deal(request.seed, request.members, 10))
    return SAMPLINGS[name].make(**own)(request)


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


@pytest.mark.parametrize("name", ["bagging", "subset", "specialists"])
def test_sample_weights_have_mean_one_and_depend_on_the_seed_alone(name):
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
@example(1.0)
def test_subset_takes_the_fraction_each_example_once(fraction):
    got = make("subset", fraction=fraction)
    assert ((got > 0).sum(axis=1) == max(1, round(fraction * 600))).all()
    assert all(len(np.unique(row[row > 0])) == 1 for row in got)


def test_a_config_takes_fractions_above_0_and_up_to_1():
    for fraction in ("0", "1.01", "-0.5"):
        with pytest.raises(UserError, match=rf"sampling\.fraction = {fraction}: input should be"):
            configs.load("digits", ["sampling=subset", f"sampling.fraction={fraction}"])
    assert configs.load("digits", ["sampling=subset", "sampling.fraction=1"]).sampling.fraction == 1


def test_a_tiny_fraction_is_one_example_for_each_member():
    chosen = make("subset", members=3, fraction=0.0001)
    assert (chosen > 0).sum(1).tolist() == [1, 1, 1]
    assert chosen.max(1).tolist() == [600, 600, 600]


@pytest.mark.parametrize("bagged", [False, True])
def test_weights_of_examples_multiply_the_sample_weights_which_have_mean_one_again(bagged):
    weights = np.random.default_rng(0).random(40).astype(np.float32)
    sample_weights = make("bagging", members=3, labels=np.zeros(40, int)) if bagged else None
    found = multiply_weights(sample_weights, weights, 3)
    for m in range(3):
        own = weights * (1 if sample_weights is None else sample_weights[m])
        np.testing.assert_allclose(found[m], own / own.mean(), rtol=1e-5)
    assert multiply_weights(sample_weights, None, 3) is sample_weights


def test_a_member_whose_examples_all_have_weight_zero_is_named():
    sample_weights = np.array([[2, 2, 0, 0], [0, 0, 2, 2]], np.float32)
    with pytest.raises(UserError, match="member 1 would learn from examples of weight 0 only"):
        multiply_weights(sample_weights, np.array([1, 1, 0, 0], np.float32), 2)


def test_random_specialists_share_out_all_classes_evenly():
    owned = make("specialists")[:, :10] > 0  # the first ten examples are one of each class
    assert owned.sum(axis=1).tolist() == [3, 3, 2, 2]
    assert (owned.sum(axis=0) == 1).all()


def test_specialists_by_hand_own_the_classes_they_were_given():
    got = make("specialists", members=2, groups=[[0, 1], [1, 2, 3]])
    np.testing.assert_array_equal(got[0] > 0, np.isin(LABELS, [0, 1]))
    np.testing.assert_array_equal(got[1] > 0, np.isin(LABELS, [1, 2, 3]))
    assert not got[:, LABELS == 9].any(), "a class that nobody owns teaches nobody"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("specialists", {"members": 11}, "at most 10 members"),
        ("specialists", {"groups": [[0], [1], [], [2]]}, "group 2 is empty"),
        ("specialists", {"groups": [[0], [1], [2], [10]]}, "group 3 names class 10"),
        ("specialists", {"groups": [[0], [1], [2], [9]], "labels": LABELS % 9}, "no training example"),
    ],
)
def test_wrong_sample_weights_are_refused_with_the_reason(name, options, words):
    with pytest.raises(UserError, match=words):
        make(name, **options)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 99))
def test_classes_are_dealt_to_specialists_as_evenly_as_they_go(members, classes, seed):
    if members > classes:
        with pytest.raises(UserError, match=f"at most {classes} members"):
            deal(seed, members, classes)
        return
    dealt = deal(seed, members, classes)
    assert sorted(c for group in dealt for c in group) == list(range(classes))
    sizes = [len(group) for group in dealt]
    assert len(sizes) == members and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("scale", [1, 3.7, 1.7e308, 1e-300, True])
def test_sample_weights_of_ones_own_are_scaled_to_mean_one(scale):
    weights = np.random.default_rng(0).random((4, 600)) * (LABELS != 3)
    weights = weights > 0.5 if scale is True else weights * scale
    got = make("array", weights=weights)
    assert got.dtype == np.float32
    weights = weights / weights.max()
    np.testing.assert_allclose(got, weights / weights.mean(axis=1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a[:3], r"\[3, 600\], but there are 4 members and 600 training examples"),
        (lambda a: a[:, :599], r"\[4, 599\], .* give an array \[4, 600\], without examples that are held out"),
        (lambda a: a[0], r"shape \[600\]"),
        (lambda a: a - 2 * (np.arange(600) == 7), r"member 0 on example 7 is -1.0 \(4 such values\)"),
        (lambda a: np.where(np.arange(4)[:, None] == 2, np.nan, a), "member 2 on example 0 is nan"),
        (lambda a: a * np.inf, "is inf"),
        (lambda a: a * (np.arange(4)[:, None] != 1), "member 1 has no example"),
        (lambda a: a.astype(str), "not numbers"),
        (lambda a: [[1], [1, 2]], "not numbers"),
    ],
)
def test_sample_weights_that_cannot_be_used_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        make("file", weights=change(np.ones((4, 600))), where="mine.npz")


def test_a_file_of_sample_weights_is_read_from_npz_and_npy(tmp_path):
    weights = np.random.default_rng(0).random((2, 5))
    np.savez(tmp_path / "a.npz", sample_weights=weights, other=0)
    np.save(tmp_path / "b.npy", weights)
    np.savez(tmp_path / "old.npz", priors=weights)
    for name in ("a.npz", "b.npy", "old.npz"):
        np.testing.assert_array_equal(read_sample_weights(tmp_path / name), weights)


def test_a_file_without_sample_weights_is_refused(tmp_path):
    np.savez(tmp_path / "key.npz", weights=np.ones(3))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "text.npz").write_text("weights")
    (tmp_path / "empty.npy").touch()
    for name, message in {
        "key.npz": r"has no array sample_weights \(it has weights\); save it with",
        "objects.npy": "cannot be read",
        "text.npz": "cannot be read",
        "empty.npy": "cannot be read",
        "none.npz": "does not exist",
        "": "cannot be read",  # a folder
    }.items():
        with pytest.raises(UserError, match=message):
            read_sample_weights(tmp_path / name)


def test_classes_that_are_predicted_together_go_to_one_member():
    """Of 9 classes, scattered, each answer is shared among the three of a family."""
    rng = np.random.default_rng(0)
    families = np.array([[4, 0, 7], [1, 8, 3], [2, 6, 5]])
    scores = np.zeros((300, 9))
    for row in scores:
        row[families[rng.integers(3)]] = rng.dirichlet([5, 5, 5])
    wanted = [[0, 4, 7], [1, 3, 8], [2, 5, 6]]
    for seed in range(5):
        assert confusable(scores, 3, seed) == wanted
    assert confusable(scores, 9) == [[c] for c in range(9)]
    assert confusable(scores, 1) == [list(range(9))]


def test_groups_of_classes_are_the_best_of_all_partitions_of_the_covariance():
    scores = np.random.default_rng(0).dirichlet([0.3] * 7, size=40)
    columns = np.cov(scores.T)
    partitions = [np.array((0, *rest)) for rest in itertools.product(range(3), repeat=6)]

    def within(label):
        return sum(((columns[label == k] - columns[label == k].mean(0)) ** 2).sum() for k in set(label))

    best = min((label for label in partitions if len(set(label)) == 3), key=within)
    assert confusable(scores, 3) == sorted(np.flatnonzero(best == k).tolist() for k in range(3))


@pytest.mark.parametrize(
    ("scores", "members", "message"),
    [
        (np.eye(3), 4, "4 members cannot share 3 classes"),
        (np.full((5, 3), 1 / 3), 2, "only 1 groups of classes apart, for 2 members"),
        (np.ones(3), 2, r"shape \[3\]"),
        (np.full((5, 3), np.nan), 2, "finite"),
    ],
)
def test_scores_that_give_no_groups_are_refused(scores, members, message):
    with pytest.raises(UserError, match=message):
        confusable(scores, members)


def blobs(dtype=np.float32):
    """90 points around three centres, and the centre of each."""
    rng = np.random.default_rng(0)
    owner = rng.permutation(np.arange(90) % 3)
    return (rng.normal(size=(3, 6))[owner] * 50 + rng.normal(size=(90, 6))).astype(dtype), owner


@pytest.mark.parametrize("large", [10**9, 0], ids=["at once", "in mini-batches"])
def test_inputs_are_clustered_as_the_network_sees_them(monkeypatch, large):
    monkeypatch.setattr(clusters, "LARGE", large)
    monkeypatch.setattr(clusters, "ROWS", 20)
    x, owner = blobs()
    x = np.concatenate([x, np.random.default_rng(1).normal(size=(90, 1)).astype(np.float32) * 1e4], axis=1)
    data = from_arrays((x, owner), None, hold_out=None, normalize="mean_std")  # the last feature says nothing
    found = clusters.input_distances(data.train, data.preprocess, 3, 0)
    nearest = found.argmin(0).numpy()
    assert len({(a, b) for a, b in zip(nearest, owner, strict=True)}) == 3  # one to one
    inputs = (x - x.mean(0)) / x.std(0)
    centres = np.stack([inputs[nearest == m].mean(0) for m in range(3)])
    exact = np.linalg.norm(inputs - centres[:, None], axis=2)
    np.testing.assert_allclose(found, exact, atol=1e-3 if large else 1)
    assert torch.equal(found, clusters.input_distances(data.train, data.preprocess, 3, 0))
