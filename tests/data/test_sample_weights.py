"""Priors from a file or an array, and specialists of classes that another run confuses: training with them."""

import json
import signal

import numpy as np
import pytest
import user_networks
from helpers.commands import Running, assert_same_run, process, ranks, weights  # noqa: F401, Running: see conftest.py

import mheads as package
from mheads import data
from mheads.api import evaluate
from mheads.common.errors import UserError
from mheads.data import resampling

TINY = [
    "digits", "model=user_networks:with_dropout", "members=3", "split=conv", "data.limit=150", "optim.batch_size=32",
    "optim.iterations=12", "engine.micro_batches=4", "log.every=1", "log.checkpoint_every=4",
]  # fmt: skip


def of_file(path):
    return ["sampling.name=file", f"sampling.path={path}"]


def bagged():
    """The sample weights of sampling=bagging on the tiny data."""
    labels = data.load("digits", limit=150).train.targets
    return resampling.bagging()(resampling.Request(0, 3, labels, 10))


@pytest.fixture
def sample_weights(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, sample_weights=bagged() * 4)  # any scale
    return path


@pytest.fixture(scope="module")
def bagging(tmp_path_factory):
    """A run with sample weights that mheads draws itself."""
    run = tmp_path_factory.mktemp("bagging") / "run"
    assert process("train", *TINY, "sampling=bagging", "--run", run).code == 0
    return run


def test_sample_weights_from_a_file_give_the_bits_of_the_same_ones_drawn_here_even_after_a_kill(
    tmp_path, sample_weights, bagging, mheads
):
    run = tmp_path / "run"
    command = ["train", *TINY, *of_file(sample_weights), "--run", run]
    stop = (signal.SIGKILL, "os.rename", ".step-00000008")
    assert process(*command, stop=stop).code == -signal.SIGKILL
    assert mheads(*command).code == 0
    assert_same_run(run, bagging)


@pytest.mark.parametrize("placement", ["placement={trunk: 0}", "placement=default"])
def test_sample_weights_from_a_file_give_the_same_bits_on_ranks(tmp_path, sample_weights, bagging, placement):
    done = ranks(2, "train", *TINY, *of_file(sample_weights), placement, "--run", tmp_path / "run")
    assert [d.code for d in done] == [0, 0], done[0].err
    assert_same_run(tmp_path / "run", bagging)


def test_ranks_with_other_sample_weights_are_refused(tmp_path, sample_weights):
    np.savez(tmp_path / "other.npz", sample_weights=1 + bagged())
    each = {1: [f"sampling.path={tmp_path / 'other.npz'}"]}
    done = ranks(2, "train", *TINY, *of_file(sample_weights), "--run", tmp_path / "run", each=each)
    assert [d.code for d in done] == [2, 2]
    assert "rank 1 has another digest of the sample weights" in done[0].err
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_go_on_with_other_sample_weights(tmp_path, sample_weights, mheads):
    command = ["train", *TINY, *of_file(sample_weights), "--run", tmp_path / "run"]
    assert mheads(*command).code == 0
    before = weights(tmp_path / "run")
    np.savez_compressed(sample_weights, sample_weights=bagged())  # the same in another file
    assert "is finished" in mheads(*command).out
    np.savez(sample_weights, sample_weights=bagged() + 1)
    for more in ([], ["optim.iterations=20"]):
        done = mheads(*command, *more)
        assert done.code == 2
        assert f"the sample weights of {sample_weights}: " in done.err and " there, " in done.err
    assert weights(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["sampling.name=file"], ["sampling.name = file needs sampling.path, an .npz"]),
        (["sampling.path=mine.npz"], ["sampling.path is for sampling.name=file, but it is full"]),
        (["sampling.name=file", "sampling.path=none.npz"], ["none.npz does not exist"]),
        (["sampling.name=array"], ["sampling = array is only for fit in Python"]),
        (["sampling.name=clustered"], ["needs sampling.generalist, the folder of a finished run"]),
        (["sampling.name=clustered", "sampling.generalist=none"], ["none is not a run folder"]),
        (["sampling.name=bagging", "sampling.generalist=none"], ["sampling.generalist is for sampling.name=clustered"]),
        (["loss=score_averaged", "sampling={name: file, path: mine.npz}"], ["sampling is file", "score_averaged"]),
    ],
)
def test_sampling_that_lacks_something_is_refused_and_nothing_is_written(tmp_path, mheads, args, parts):
    done = mheads("train", *TINY, *args, "--run", tmp_path / "run")
    assert done.code == 2
    for part in parts:
        assert part in done.err
    assert not (tmp_path / "run").exists()


def test_fit_takes_an_array_of_sample_weights():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 8)).astype(np.float32), rng.integers(3, size=60)

    def fit(sampling, **options):
        net = package.TreeNet(user_networks.to_three, members=2)
        options = {"train": (x, y), "test": (x, y), **options}
        return package.fit(net, iterations=5, batch_size=20, sampling=sampling, **options)

    drawn = resampling.bagging()(resampling.Request(0, 2, y, 3))
    one, other = fit("bagging"), fit(drawn)
    assert all(a.equal(b) for a, b in zip(one.net.parameters(), other.net.parameters(), strict=True))
    assert other.config.sampling.name == "array"
    assert fit(drawn.tolist()).result == other.result
    with pytest.raises(UserError, match=r"\[2, 57\], but there are 2 members and 54 .* held out, or one of all"):
        fit(drawn[:, :57], test=None)
    with pytest.raises(UserError, match="member 1 has no example"):
        fit([[1] * 60, [0] * 60])


# Specialists of classes that a generalist confuses.

GENERALIST = ["digits", "members=2", "optim.iterations=10", "optim.batch_size=32", "data.limit=300"]


@pytest.fixture(scope="module")
def generalist(tmp_path_factory):
    run = tmp_path_factory.mktemp("generalist") / "run"
    assert process("train", *GENERALIST, "data.validation=100", "--run", run).code == 0
    return run


def expected_groups(run):
    """By scikit-learn and numpy, from the validation examples."""
    from sklearn.cluster import KMeans

    outputs, _ = evaluate.outputs_of(run, "validation")
    covariance = np.cov(outputs.double().softmax(-1).mean(0).numpy().T)
    label = KMeans(3, n_init=200, tol=0, random_state=0).fit(covariance).labels_
    return sorted(np.flatnonzero(label == k).tolist() for k in set(label))


def test_each_member_learns_the_classes_that_a_generalist_confuses(tmp_path, generalist, mheads):
    run = tmp_path / "run"
    args = [*TINY, "sampling.name=clustered", f"sampling.generalist={generalist}", "--run", run]
    done = mheads("train", *args)
    assert done.code == 0, done.err
    groups = expected_groups(generalist)
    assert sum(map(len, groups)) == 10 and max(map(len, groups)) > 1
    for m, group in enumerate(groups):
        assert f"member {m} learns {', '.join(map(str, group))}\n" in done.out
    by_hand = tmp_path / "by hand"
    groups_by_hand = f"sampling={{name: specialists, groups: {groups}}}"
    assert mheads("train", *TINY, groups_by_hand, "--run", by_hand).code == 0
    assert_same_run(run, by_hand)
    done = ranks(2, "train", *args[:-1], tmp_path / "ranks")
    assert [d.code for d in done] == [0, 0], done[0].err
    assert_same_run(tmp_path / "ranks", run)


def test_a_run_does_not_go_on_with_another_generalist(tmp_path, generalist, mheads):
    there = tmp_path / "there"
    assert mheads("train", *GENERALIST, "--run", there).code == 0
    command = ["train", *TINY, "sampling.name=clustered", f"sampling.generalist={there}", "--run", tmp_path / "run"]
    assert mheads(*command).code == 0
    assert "is finished" in mheads(*command).out
    assert mheads("train", *GENERALIST, "optim.iterations=11", "--run", there).code == 0
    done = mheads(*command)
    assert done.code == 2
    assert f"the weights of {there}: " in done.err


def test_a_run_that_is_no_generalist_is_refused(tmp_path, generalist, mheads):
    def refused(run, *args):
        done = mheads(
            "train", *TINY, "sampling.name=clustered", f"sampling.generalist={run}", *args, "-f", tmp_path / "new"
        )
        assert done.code == 2 and not (tmp_path / "new").exists()
        return done.err

    numbers = tmp_path / "numbers"
    assert mheads("train", "diabetes", "optim.iterations=1", "--run", numbers).code == 0
    assert "learned regression: give a run that tells classes apart" in refused(numbers)
    own = tmp_path / "own"
    assert mheads("train", "digits", "model=user_networks:normalised", "optim.iterations=1", "--run", own).code == 0
    assert "names code of its own, user_networks:normalised" in refused(own)
    assert "cannot share 10 classes" in refused(generalist, "members=11")
    pairs = tmp_path / "pairs.npz"
    x = np.zeros((20, 8, 8), np.uint8)
    np.savez(
        pairs, x_train=x, y_train=np.arange(20) % 10, x_test=x, y_test=np.arange(20) % 10, classes=list("abcdefghij")
    )
    args = ["data.name=npz", f"data.path={pairs}"]
    assert "other classes than those of npz" in refused(generalist, *args)
    arrays = tmp_path / "arrays"
    x = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    package.fit(
        package.TreeNet(user_networks.to_three, members=2), train=(x, np.arange(40) % 3), iterations=1, folder=arrays
    )
    assert "mheads.data.confusable" in refused(arrays)
    (generalist_copy := tmp_path / "copy").mkdir()
    for path in generalist.iterdir():
        if path.is_file() and path.name not in ("model.safetensors", "result.json"):
            (generalist_copy / path.name).write_bytes(path.read_bytes())
    assert "the run is not finished" in refused(generalist_copy)


def test_groups_of_a_run_are_in_its_identity(tmp_path, generalist, mheads):
    run = tmp_path / "run"
    assert mheads("train", *TINY, "sampling.name=clustered", f"sampling.generalist={generalist}", "-f", run).code == 0
    found = json.loads((run / "identity.json").read_text())["sampling"]
    assert found["the groups of classes"] == expected_groups(generalist)
