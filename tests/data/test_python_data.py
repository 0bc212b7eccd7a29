"""What fit and evaluate take: datasets, loaders, lists of pairs, names for labels; and what is held out."""

import random
import tracemalloc
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from mheads import data
from mheads.common.errors import UserError
from mheads.data.assembly import draw_stratified

X = np.random.default_rng(0).integers(0, 256, (12, 3, 6, 5), dtype=np.uint8)
Y = np.arange(12) % 3
ROWS = np.arange(12)
CUT_SHORT = (lambda file: (Image.new("L", (40, 40), 3).save(file, "png"), file.getvalue()[:60])[1])(BytesIO())


class Rows(Dataset):
    """Items as `make` makes them of a row; counts how often each is asked for."""

    def __init__(self, make, count=12):
        self.make, self.count, self.asked = make, count, []

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        self.asked.append(row)
        return self.make(row)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(x, y) for x, y in zip(X, Y, strict=True)])


def picture(row):
    return Image.fromarray(X[row].transpose(1, 2, 0))


def joined(batch):
    return torch.stack([torch.from_numpy(x) for x, _ in batch]), torch.tensor([y for _, y in batch])


FORMS = {
    "tensors": lambda: Rows(lambda i: (torch.from_numpy(X[i]), torch.tensor(Y[i]))),
    "arrays": lambda: Rows(lambda i: (X[i], Y[i])),
    "pictures": lambda: Rows(lambda i: (picture(i), int(Y[i]))),
    "a tensor dataset": lambda: TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
    "a subset": lambda: Subset(Rows(lambda i: (X[11 - i], Y[11 - i])), range(11, -1, -1)),
    "a loader": lambda: DataLoader(Rows(lambda i: (X[i], Y[i])), batch_size=5, shuffle=True),
    "a loader of a part": lambda: DataLoader(
        Rows(lambda i: (X[i % 12], Y[i % 12]), 20), sampler=SubsetRandomSampler(range(12))
    ),
    "a loader that joins by itself": lambda: DataLoader(Rows(lambda i: (X[i], Y[i])), batch_size=5, collate_fn=joined),
    "a stream": Stream,
    "a loader of a stream": lambda: DataLoader(Stream(), batch_size=5),
    "a loader of single items": lambda: DataLoader(Stream(), batch_size=None),
    "a list of pairs": lambda: [(picture(i), Y[i]) for i in ROWS],
    "a generator": lambda: ((X[i], Y[i]) for i in ROWS),
    "two lists": lambda: [list(X), list(Y)],
    "pictures and labels": lambda: ([picture(i) for i in ROWS], Y),
    "lists of tensors": lambda: (list(torch.from_numpy(X)), list(torch.from_numpy(Y))),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_examples_as_arrays(form):
    loaded = data.from_arrays(FORMS[form](), (X, Y), normalize="mean_image", pad=1, mirror=True)
    arrays = data.from_arrays((X, Y), (X, Y), normalize="mean_image", pad=1, mirror=True)
    np.testing.assert_array_equal(loaded.train.targets, Y)
    assert loaded.train.shape == (3, 6, 5)
    for seeds in (None, ROWS + 7):
        assert torch.equal(loaded.train.read(ROWS, seeds), arrays.train.read(ROWS, seeds))
    assert torch.equal(loaded.train.places(ROWS), arrays.train.places(ROWS))
    assert torch.equal(loaded.preprocess.mean, arrays.preprocess.mean)
    assert loaded.seen == arrays.seen


def test_grey_pictures_have_one_channel_and_sixteen_bits_keep_their_range():
    levels = np.linspace(0, 65535, 30).astype(np.uint16).reshape(5, 6)
    loaded = data.from_arrays([(Image.fromarray(levels), 0), (Image.fromarray(levels[::-1].copy()), 1)], None)
    assert loaded.train.shape == (1, 5, 6)
    np.testing.assert_array_equal(loaded.train.read(np.array([0]), None)[0, ..., 0], np.round(levels / 257))


def test_a_dataset_is_gone_through_once_and_then_read_by_row():
    rows = Rows(lambda i: (X[i], Y[i]))
    loaded = data.from_arrays(rows, (X, Y))
    assert sorted(rows.asked) == [0, 0, *range(1, 12)]  # the first one twice: is it the same again?
    rows.asked.clear()
    loaded.train.read(np.array([7, 2]), None)
    assert rows.asked == [7, 2]


def noisy(row):
    level = torch.rand(1).item() + np.random.rand() + random.random()
    return np.full((2,), level, np.float32), row % 2


def test_random_transforms_follow_the_seed_and_leave_the_generators_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    loaded = data.from_arrays(Rows(noisy), None, hold_out=0)
    again = data.from_arrays(Rows(noisy), None, hold_out=0)
    assert loaded.fingerprint == again.fingerprint
    rows, seeds = np.array([1, 1, 4]), np.array([5, 6, 5])
    first = loaded.train.read(rows, seeds)
    assert torch.equal(first, again.train.read(rows[[2, 1, 0]], seeds[[2, 1, 0]])[[2, 1, 0]])
    assert not torch.equal(first[0], first[1])
    assert torch.equal(loaded.test.read(np.arange(1), np.array([3])), loaded.test.read(np.arange(1), None))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert before[2] == random.getstate()


def test_a_dataset_with_a_generator_of_its_own_is_refused():
    own = np.random.default_rng(0)
    with pytest.raises(UserError, match=r"item 0 differs each time.*list\(dataset\)"):
        data.from_arrays(Rows(lambda i: (own.random(3).astype(np.float32), 0)), None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Rows(lambda i: {"x": X[i], "y": 0}), "item 0 is a dict of 2; an item is a pair"),
        (Rows(lambda i: X[i]), "item 0 is a ndarray"),
        (Rows(lambda i: (X[i, :, : 6 - i % 2], 0)), r"item 1 is uint8 of shape \[3, 5, 5\], the first"),
        (Rows(lambda i: (X[i], [1, 2])), "item 0 has the label"),
        (Rows(lambda i: ("cat", 0)), "item 0 is str"),
        (Rows(lambda i: (X[i].astype(np.int64), 0)), "int64"),
        (Rows(None, 0), "empty"),
        ([], "no examples"),
        (DataLoader([], batch_size=2, collate_fn=list), "train: there are no examples"),
        (Rows(lambda i: (Image.open(BytesIO(CUT_SHORT)), 0)), "train item 0 cannot be read as an image"),
        ((X, Y, {1: X}), "side inputs are a dict; give a dict of arrays by name"),
        ((X, Y, {"mask": ["a"] * 12}), "side input 'mask' has dtype .*; give numbers"),
        ([(X[0], 0), (X[1, :, :4], 1), (X[2], 1)], "item 1"),
        (X, r"train: an array of shape \[12, 3, 6, 5\] .* the targets are missing: give \(x, y\)$"),
        ("x.npy", "train: not a str; give"),
        (7, "train: not a int; give"),
        (DataLoader(Rows(lambda i: (X[i], 0)), sampler=WeightedRandomSampler([1.0] * 12, 12)), "WeightedRandomSampler"),
        (DataLoader(Rows(lambda i: (X[i], 0)), batch_sampler=[[0, 1]]), "draws by a list"),
        ((X, np.eye(3)[Y]), r"y\.argmax\(1\)"),
        ((X, Y > 0), "bool"),
    ],
)
def test_what_is_no_data_is_refused_with_what_is(given, words):
    with pytest.raises(UserError, match=words):
        data.from_arrays(given, None)


def test_one_example_cannot_be_held_out():
    with pytest.raises(UserError, match="1 example is too few to hold some out; give a test set"):
        data.from_arrays((X[:1], Y[:1]), None, hold_out=0)


def test_a_loader_that_shuffles_and_joins_by_itself_gives_the_same_order_again():
    def load():
        return data.from_arrays(DataLoader(Rows(lambda i: (X[i], Y[i])), 5, shuffle=True, collate_fn=joined), None)

    first = load()
    torch.rand(3)
    assert load().fingerprint == first.fingerprint
    assert sorted(first.train.targets) == sorted(Y)


def test_a_batch_sampler_with_a_plain_sampler_inside_is_looked_into():
    inside = BatchSampler(SubsetRandomSampler([3, 1]), 2, drop_last=False)
    loaded = data.from_arrays(DataLoader(Rows(lambda i: (X[i], Y[i])), batch_sampler=inside), None)
    np.testing.assert_array_equal(loaded.train.targets, Y[[1, 3]])


# Names for labels.


@pytest.mark.parametrize("kind", [list, np.array, lambda names: np.array(names, dtype=object)])
def test_names_are_numbered_in_sorted_order_and_kept_as_class_names(kind):
    names = ["dog", "cat", "emu"]
    labels = [names[y] for y in Y]
    loaded = data.from_arrays((X, kind(labels)), (X[:2], kind(labels[:2])))
    assert loaded.problem.classes == ("cat", "dog", "emu")
    assert [loaded.problem.classes[label] for label in loaded.train.targets] == labels
    assert [loaded.problem.classes[label] for label in loaded.test.targets] == labels[:2]
    assert data.from_arrays((X, labels), None, classes=names).train.targets.tolist() == Y.tolist()


def test_names_that_training_does_not_know_are_refused():
    with pytest.raises(UserError, match=r"test: example 1 has the label 'cow'.*cat, dog"):
        data.from_arrays((X[:2], ["cat", "dog"]), (X[:2], ["cat", "cow"]))
    with pytest.raises(UserError, match="train labels are names, test labels are numbers"):
        data.from_arrays((X[:2], ["cat", "dog"]), (X[:2], [0, 1]))


@pytest.mark.parametrize(
    ("classes", "labels"),
    [([1, 2, 3, 4], [3, 1, 2, 3]), (range(1, 11), [10, 1]), (np.array([10, 20, 30]), [30, 10]), ([2, 0, 1], [0, 1, 2])],
    ids=str,
)
def test_classes_that_are_integers_name_the_labels(classes, labels):
    x, expected = X[: len(labels)], [list(classes).index(label) for label in labels]
    loaded = data.from_arrays((x, labels), (x, np.array(labels, np.uint8)), classes=classes)
    assert loaded.problem.classes == tuple(map(str, classes))
    assert loaded.train.targets.tolist() == loaded.test.targets.tolist() == expected
    assert data.from_arrays((x, list(map(str, labels))), None, classes=classes).train.targets.tolist() == expected


def test_classes_from_zero_on_and_names_in_text_leave_labels_as_they_are():
    for classes in ([0, 1, 2], ["7", "8", "9"], ["b", "a", "c"], [False, True, "else"]):
        problem = data.from_arrays((X, Y), None, classes=classes).problem
        assert problem.classes == tuple(map(str, classes))
        assert data.from_arrays((X, Y), None, classes=classes).train.targets.tolist() == Y.tolist()
        assert problem.to_dict() == {"name": "classification", "classes": list(map(str, classes))}


def test_labels_that_integer_classes_lack_are_refused():
    with pytest.raises(UserError, match=r"example 1 has the label 4, but the classes are 1, 2, 3 \(2 such.*text"):
        data.from_arrays((X[:3], [1, 4, 0]), None, classes=[1, 2, 3])
    masks = np.ones((12, 6, 5), int)
    with pytest.raises(UserError, match="classes 1, 2: classes of pixels are numbered from 0 on; number them so, or"):
        data.from_arrays((X, masks), None, classes=[1, 2])


def test_class_numbers_of_which_most_do_not_occur_are_asked_about(recwarn):
    with pytest.warns(UserWarning, match=r"only 3 of the class numbers 0 to 30 occur in training: .*y\.astype\(str\)"):
        data.from_arrays((X, 10 * (Y + 1)), None)
    recwarn.clear()
    data.from_arrays((X, 10 * (Y + 1)), None, problem="classification")
    data.from_arrays((X, 10 * (Y + 1)), None, classes=[10, 20, 30])
    data.from_arrays((X, 2 * Y), None)  # 3 of 5
    data.from_arrays((X[:6], [3, 0, 9, 12, 14, 20]), None)  # so few examples may lack classes by chance
    assert not recwarn.list


def test_a_text_in_the_place_of_classes_is_not_taken_apart():
    with pytest.raises(UserError, match=r"classes='abcd': give their names in order, such as \['cat', 'dog'\]"):
        data.from_arrays((X, Y), None, classes="abcd")


def test_an_npz_file_may_hold_names(tmp_path):
    labels = np.array(["b", "a", "c"])[Y]
    np.savez(tmp_path / "x.npz", x_train=X, y_train=labels, x_test=X[:3], y_test=labels[:3])
    loaded = data.load("npz", path=tmp_path / "x.npz")
    assert loaded.problem.classes == ("a", "b", "c")
    assert loaded.test.targets.tolist() == [1, 0, 2]


def test_an_npz_file_needs_no_test_set_if_examples_are_held_out(tmp_path):
    np.savez(tmp_path / "x.npz", x_train=X, y_train=Y, side_shift_train=np.ones((len(X), 2)))
    loaded = data.load("npz", path=tmp_path / "x.npz", validation=3)
    assert (len(loaded.train), len(loaded.test)) == (len(X) - 3, 3)
    with pytest.raises(UserError, match=r"no array x_test, y_test .* or give data.validation=N, which holds out"):
        data.load("npz", path=tmp_path / "x.npz")
    (tmp_path / "none.npz").write_bytes(b"not a file of arrays")
    with pytest.raises(
        UserError, match=r"none\.npz cannot be read as an \.npz file of plain arrays \(.*\); save it with"
    ):
        data.load("npz", path=tmp_path / "none.npz")
    (tmp_path / "table.csv").write_text("1,2\n")
    with pytest.raises(UserError, match=r"table\.csv cannot be read as an \.npz file .*; data.name=csv reads tables"):
        data.load("npz", path=tmp_path / "table.csv")


def test_a_file_to_test_on_needs_nothing_to_learn_from(mheads, tmp_path):
    x, y = np.random.default_rng(0).integers(0, 17, (40, 1, 8, 8)).astype(np.uint8), np.arange(40) % 10
    np.savez(tmp_path / "both.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    np.savez(tmp_path / "test.npz", x_test=x[:20], y_test=y[:20])
    path = f"data.path={tmp_path / 'both.npz'}"
    done = mheads("train", "digits", "optim.iterations=1", "data.name=npz", path, "-f", tmp_path / "run")
    assert done.code == 0, done.err
    one = mheads("eval", tmp_path / "run", "--outputs", tmp_path / "one.npz")
    other = mheads("eval", tmp_path / "run", f"data.path={tmp_path / 'test.npz'}", "--outputs", tmp_path / "other.npz")
    assert one.code == other.code == 0, other.err
    with np.load(tmp_path / "one.npz") as a, np.load(tmp_path / "other.npz") as b:
        np.testing.assert_array_equal(a["outputs"], b["outputs"])


# Held out.


def test_a_sorted_set_is_held_out_by_class_and_by_the_seed():
    labels = np.repeat([0, 1, 2, 3], [500, 300, 195, 5])
    out = draw_stratified(labels, 100, 0)
    assert np.bincount(labels[out], minlength=4).tolist() in ([50, 30, 20, 0], [50, 30, 19, 1])
    assert len(set(out)) == 100
    np.testing.assert_array_equal(out, draw_stratified(labels, 100, 0))
    assert (out != draw_stratified(labels, 100, 1)).any()


def test_a_class_of_one_example_stays_in_training():
    labels = np.array([0] * 9 + [1])
    assert all(9 not in draw_stratified(labels, 1, seed) for seed in range(30))
    with pytest.raises(UserError, match="none can be held out"):
        draw_stratified(np.arange(10), 1, 0)


def test_without_a_test_set_a_tenth_of_each_class_is_held_out():
    x, y = np.arange(400, dtype=np.float32).reshape(200, 2), np.repeat(np.arange(4), 50)
    loaded = data.from_arrays((x, y), None, hold_out=3)
    assert np.bincount(loaded.test.targets).tolist() == [5, 5, 5, 5]
    assert loaded.held_out == "20 of 200 examples, stratified, seed 3"
    both = torch.cat([split.read(np.arange(len(split)), None) for split in (loaded.train, loaded.test)])
    assert sorted(both[:, 0].tolist()) == x[:, 0].tolist()
    assert loaded.fingerprint != data.from_arrays((x, y), None, hold_out=4).fingerprint
    assert loaded.fingerprint != data.from_arrays((x + 1, y), None, hold_out=3).fingerprint


def test_the_last_of_a_sorted_set_are_refused_as_a_sample_of_it():
    x, y = np.zeros((90, 2), np.float32), np.repeat(np.arange(3), 30)
    with pytest.raises(UserError, match=r"sorted by class.*last 20 .*class 0, 1; shuffle"):
        data.from_arrays((x, y), None, validation=20)
    mixed = np.random.default_rng(0).permutation(y)
    assert len(data.from_arrays((x, mixed), None, validation=20).test) == 20


# Weights.


def test_weights_have_mean_one_over_what_is_trained_on():
    weights = np.arange(12)
    loaded = data.from_arrays((X, Y), None, weights=weights, validation=4)
    np.testing.assert_allclose(loaded.weights, np.arange(8) / 3.5)
    assert loaded.fingerprint != data.from_arrays((X, Y), None, validation=4).fingerprint
    held = data.from_arrays((X, Y), None, weights=weights, hold_out=0)
    kept = np.setdiff1d(ROWS, draw_stratified(Y, 1, 0))
    np.testing.assert_allclose(held.weights, kept / kept.mean(), rtol=1e-6)


def test_weights_and_sample_weights_are_multiplied_and_scaled_to_mean_one():
    sample_weights, weights = np.array([[2, 0, 1, 1]], np.float32), np.array([1, 5, 0, 3], np.float32)
    np.testing.assert_allclose(data.multiply_weights(sample_weights, weights, 1), [[1.6, 0, 0, 2.4]])
    np.testing.assert_allclose(data.multiply_weights(None, weights, 2), [weights / 2.25] * 2)
    assert data.multiply_weights(sample_weights, None, 1) is sample_weights
    with pytest.raises(UserError, match="member 0 would learn from examples of weight 0 only"):
        data.multiply_weights(sample_weights, np.array([0, 4, 0, 0], np.float32), 1)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (np.ones(11), r"\[11\] for 12"),
        ([-1] + [1] * 11, "weight 0 is -1"),
        ([0] * 12, "are 0"),
        (["a"] * 12, "numbers"),
    ],
)
def test_wrong_weights_are_refused(weights, words):
    with pytest.raises(UserError, match=words):
        data.from_arrays((X, Y), None, weights=weights)


# Memory.


def test_arrays_are_copied_once_at_most():
    images = np.zeros((400, 3, 32, 32), np.uint8)  # 1.2 MB, channels first: turned once
    vectors = np.zeros((400, 768), np.float32)  # as large, and used as it is
    labels = np.arange(400) % 2

    def taken(x):
        tracemalloc.start()
        loaded = data.from_arrays((x, labels), (x[:4], labels[:4]), hold_out=0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak / x.nbytes, loaded

    taken(vectors)  # imports
    assert taken(images)[0] < 1.15
    share, loaded = taken(vectors)
    assert share < 0.15
    assert loaded.train.targets is labels
