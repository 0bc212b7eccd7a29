"""Learning from a teacher: the loss, `teacher.answers`, `fit(teacher=...)` and `mheads distil`."""

import json
import signal
from functools import partial

import numpy as np
import pytest
import torch
from helpers.commands import assert_same_run, process, weights
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn

import mheads
from mheads.common.errors import UserError
from mheads.data.readers.digits_images import read_digits
from mheads.losses import independent, mcl, prob_averaged
from mheads.losses.distillation import losses, mix_in_teacher
from mheads.problems import cross_entropies

TINY = ["data.limit=150", "optim.batch_size=32", "optim.iterations=12", "log.every=1", "log.checkpoint_every=4"]


def probabilities(shape, seed=0, spread=3.0):
    return torch.softmax(spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed)), -1)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def by_hand(scores, labels, answers, weight, temperature):
    """The loss of every member on every example, from the formula."""
    found = np.zeros(scores.shape[:2])
    q = answers ** (1 / temperature)
    q = q / q.sum(-1, keepdims=True)
    for m, i in np.ndindex(found.shape):
        p = softmax(scores[m, i] / temperature)
        label = -np.log(softmax(scores[m, i])[labels[i]])
        found[m, i] = (1 - weight) * label + weight * temperature**2 * sum(q[i] * (np.log(q[i]) - np.log(p)))
    return found


@given(
    st.integers(0, 1000), st.integers(1, 4), st.integers(1, 5), st.integers(2, 6), st.floats(0.01, 1), st.floats(0.3, 9)
)
def test_the_loss_is_that_of_numpy(seed, members, rows, classes, weight, temperature):
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(members, rows, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (rows,), generator=generator)
    answers = probabilities((rows, classes), seed).double()
    found = losses(scores, (labels, answers), cross_entropies, weight, temperature)
    wanted = by_hand(scores.numpy(), labels.numpy(), answers.numpy(), weight, temperature)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_its_gradient_is_that_of_finite_differences(temperature):
    answers, labels = probabilities((3, 5)).double(), torch.tensor([0, 4, 2])
    base_loss = partial(losses, y=(labels, answers), base_loss=cross_entropies, weight=0.7, temperature=temperature)
    assert torch.autograd.gradcheck(base_loss, torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True))


def test_who_answers_as_the_teacher_has_nothing_left_to_learn_of_it():
    answers = probabilities((4, 5)).double()
    scores = answers.log()[None].clone().requires_grad_()
    found = losses(scores, (torch.zeros(4, dtype=torch.int64), answers), cross_entropies, 1.0, 3.0)
    found.sum().backward()
    assert found.abs().max() < 1e-12 and scores.grad.abs().max() < 1e-12


def test_answers_of_0_leave_loss_and_gradient_finite():
    answers = torch.eye(5)[:3]
    scores = (100 * torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))).requires_grad_()
    found = losses(scores, (torch.arange(3), answers), cross_entropies, 0.9, 2.0)
    found.sum().backward()
    assert found.isfinite().all() and scores.grad.isfinite().all()


def test_small_answers_are_no_nan_in_16_bits():
    answers = probabilities((20, 5), spread=8.0)
    assert 0 < answers.min() < 1e-8  # which 16 bits do not hold
    scores = torch.randn(2, 20, 5, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
    found = losses(scores, (torch.zeros(20, dtype=torch.int64), answers), cross_entropies, 0.9, 2.0)
    found.sum().backward()
    exact = losses(scores.detach().double(), (torch.zeros(20, dtype=torch.int64), answers), cross_entropies, 0.9, 2.0)
    assert scores.grad.isfinite().all()
    torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.02)


def test_answers_of_0_stay_0_at_any_temperature():
    answers = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    scores = torch.zeros(1, 1, 3, dtype=torch.float64, requires_grad=True)
    losses(scores, (torch.tensor([0]), answers), cross_entropies, 1.0, 20.0).sum().backward()
    torch.testing.assert_close(scores.grad[0, 0], 20 * torch.tensor([-1 / 6, -1 / 6, 1 / 3], dtype=torch.float64))


def test_mcl_gives_an_example_to_the_member_nearest_to_label_and_answer():
    answers = torch.tensor([[0.1, 0.9]])
    scores = torch.tensor([[[3.0, 0.0]], [[0.0, 2.0]]])
    found = mcl(k=1, base_loss=mix_in_teacher(cross_entropies, 1.0, 1.0))(scores, (torch.tensor([0]), answers))
    assert found.assignment[:, 0].tolist() == [0, 1]  # though member 0 has the label


# In Python.


def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12, dtype=torch.float64), nn.Tanh(),
                         nn.Linear(12, 10, dtype=torch.float64))  # fmt: skip


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float64)[:300], y[:300]


def test_fit_learns_from_a_teacher_as_a_plain_loop_does(digits):
    x, y = digits
    answers = probabilities((len(x), 10)).double()
    net = mheads.TreeNet(small, members=2, seed=3)
    plain = [small() for _ in range(2)]
    for m, one in enumerate(plain):
        one.load_state_dict(net.member(m).state_dict())
    options = {"weight": 0.6, "temperature": 3.0}
    mheads.fit(
        net, train=(x, y), test=(x[:20], y[:20]), teacher={"answers": answers.numpy(), **options}, iterations=4,
        batch_size=len(x), lr=0.1, momentum=0.0, show=False,
    )  # fmt: skip
    inputs, labels, kept = torch.from_numpy(x), torch.from_numpy(y), answers.float().double()
    for one in plain:
        for _ in range(4):
            one.zero_grad()
            z = one(inputs)
            q = torch.softmax(kept.log() / 3, -1)
            soft = 9 * (q * (q.log() - torch.log_softmax(z / 3, -1))).sum(-1)
            (0.4 * nn.functional.cross_entropy(z, labels) + 0.6 * soft.mean()).backward()
            with torch.no_grad():
                for p in one.parameters():
                    p -= 0.1 * p.grad
    for m, one in enumerate(plain):
        for name, tensor in net.member(m).state_dict().items():
            torch.testing.assert_close(tensor, one.state_dict()[name], rtol=0, atol=1e-12)


def test_answers_to_all_examples_are_cut_to_those_that_are_learned_from(digits):
    x, y = digits
    answers = probabilities((len(x), 10)).numpy()
    common = {"train": (x, y), "validation": 60, "iterations": 3, "show": False}
    nets = [mheads.TreeNet(small, members=1) for _ in range(2)]
    for net, given_ in zip(nets, (answers, answers[:240]), strict=True):
        mheads.fit(net, teacher=given_, **common)
    for one, other in zip(*(net.state_dict().values() for net in nets), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("teacher", "loss", "said"),
    [
        (np.ones((5, 10), np.float32) / 10, None, r"answers of shape \[5, 10\], but there are 300 .* \[300, 10\]"),
        (np.ones((300, 10), np.float32), None, r"probabilities: numbers of 0 or more whose sum is 1"),
        (np.ones((300, 10), np.int64), None, "the answers are not probabilities"),
        ({"weight": 0.5}, None, "has no answers"),
        ({"answers": np.ones((300, 10)) / 10, "weight": 0}, None, "greater than 0"),
        ({"answers": np.ones((300, 10)) / 10, "heat": 2}, None, "heat"),
        (np.ones((300, 10)) / 10, prob_averaged(), "prob_averaged has a fixed base loss"),
    ],
)
def test_what_is_no_teacher_is_refused(teacher, loss, said, digits):
    with pytest.raises(UserError, match=said):
        mheads.fit(mheads.TreeNet(small, members=2), loss, train=digits, test=digits, teacher=teacher, show=False)


@pytest.mark.parametrize("change", [lambda t: t.bfloat16(), lambda t: t.requires_grad_(), lambda t: t.half()])
def test_a_teacher_may_be_a_tensor_of_any_precision(change, digits):
    answers = change(probabilities((300, 10), spread=0.5))
    net = mheads.TreeNet(small, members=1)
    options = {"iterations": 2, "show": False}
    assert mheads.fit(net, train=digits, test=digits, teacher=answers, **options).result.members


def test_numbers_have_no_teacher(digits):
    x, y = digits
    net = mheads.TreeNet(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 1, dtype=torch.float64)), members=1)
    with pytest.raises(UserError, match=r"probabilities of classes, and .* regression"):
        mheads.fit(net, train=(x, y / 10), teacher=np.ones((300, 1)), show=False)


def test_a_run_does_not_go_on_with_other_answers(digits, tmp_path):
    one, other = (probabilities((300, 10), seed).numpy() for seed in (0, 1))

    def run(answers, iterations):
        net = mheads.TreeNet(small, members=1)
        options = {"train": digits, "test": digits, "folder": tmp_path / "run", "show": False}
        return mheads.fit(net, independent(), teacher=answers, iterations=iterations, **options)

    run(one, 3)
    with pytest.raises(UserError, match="the answers of teacher"):
        run(other, 5)
    assert run(one, 5).result.members


# On the command line.


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher") / "four"
    done = process("train", "digits", "loss=mcl", "loss.k=2", "split=conv1", "sampling=bagging", *TINY, "-f", path)
    assert done.code == 0, done.err
    return path


@pytest.fixture(scope="module")
def small_one(ensemble, tmp_path_factory):
    path = tmp_path_factory.mktemp("student") / "small"
    done = process("distil", ensemble, "engine.workers=1", "-f", path)
    assert done.code == 0, done.err
    return path, done.out


def test_distil_trains_one_network_on_what_the_ensemble_answers(ensemble, small_one):
    path, out = small_one
    config = mheads.load(path).config
    assert (config.members, config.split, config.loss.name, config.sampling.name) == (1, None, "independent", "full")
    assert config.optim == mheads.load(ensemble).config.optim and config.model == "digits"
    train, _, _ = read_digits()
    raw = train.read(np.arange(150), None)
    wanted = mheads.load(ensemble).answer(raw.permute(0, 3, 1, 2).numpy()).numpy()
    with np.load(path.with_name("small.npz")) as file:
        np.testing.assert_allclose(file["answers"], wanted, atol=1e-6)
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert [line[0] for line in lines if line[0] in ("four", "small")] == ["four", "small"]
    assert json.loads((path / "result.json").read_text())["parameters"] == 13_706


def test_a_killed_distillation_and_other_workers_give_the_same_bits(ensemble, small_one, tmp_path):
    path = tmp_path / "small"
    killed = process("distil", ensemble, "-f", path, stop=(signal.SIGKILL, "open", ".step-00000008.new/state.json"))
    assert killed.code == -signal.SIGKILL and not (path / "model.safetensors").exists()
    done = process("distil", ensemble, "engine.workers=3", "-f", path)
    assert done.code == 0, done.err
    assert "asking" in killed.out and "asking" not in done.out  # it is not asked again
    assert_same_run(path, small_one[0])


def test_a_finished_distillation_is_finished_and_is_evaluated_without_its_answers(ensemble, small_one, mheads):
    path, _ = small_one
    before = weights(path)
    done = mheads("distil", ensemble, "-f", path)
    assert done.code == 0 and "finished" in done.out and weights(path) == before
    file = path.with_name("small.npz")
    hidden = file.rename(file.with_name("elsewhere.npz"))
    try:
        done = mheads("eval", path)
        assert done.code == 0, done.err
    finally:
        hidden.rename(file)


def test_the_network_may_be_another_and_several(ensemble, mheads, tmp_path):
    given_ = ["model=user_networks:with_dropout", "members=2", "split=conv", "loss=mcl"]
    done = mheads("distil", ensemble, *given_, "teacher.weight=0.5", "-f", tmp_path / "two")
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "two/result.json").read_text())
    assert len(found["members"]) == 2


def test_folders_may_have_any_name_and_need_not_be_there(ensemble, mheads, tmp_path):
    folder = tmp_path / "not there yet" / "small #2: [x]"
    done = mheads("distil", ensemble, "-f", folder)
    assert done.code == 0, done.err
    assert folder.with_name(f"{folder.name}.npz").is_file() and "small #2: [x]" in done.out
    again = tmp_path / "elsewhere" / ensemble.name
    done = mheads("distil", ensemble, "optim.iterations=2", "-f", again)
    assert done.code == 0, done.err
    assert f"{ensemble.parent.name}/four" in done.out and "elsewhere/four" in done.out  # both, told apart


def test_answers_of_a_file_are_learned_by_a_recipe(mheads, tmp_path):
    np.save(tmp_path / "mine.npy", probabilities((150, 10)).numpy())
    runs = {}
    for name, options in {"plain": [], "taught": [f"teacher.answers={tmp_path / 'mine.npy'}"]}.items():
        done = mheads("train", "digits", "members=1", *TINY, *options, "-f", tmp_path / name)
        assert done.code == 0, done.err
        runs[name] = weights(tmp_path / name)
    assert runs["plain"] != runs["taught"]


def refused(done, *words):
    assert done.code == 2 and "Traceback" not in done.err, done.err
    for word in words:
        assert word in done.err, done.err


def test_what_cannot_be_distilled_is_refused_and_nothing_is_written(ensemble, small_one, mheads, tmp_path):
    path, _ = small_one
    there = tmp_path / "new"
    refused(mheads("distil", tmp_path / "nothing"), "nothing")
    refused(mheads("distil", ensemble, "teacher.answers=x.npz", "-f", there), "leave it out")
    refused(mheads("distil", ensemble, "loss=prob_averaged", "-f", there), "prob_averaged has a fixed base loss")
    refused(mheads("distil", ensemble, "data.name=diabetes", "-f", there), "regression")
    refused(mheads("distil", ensemble, "loss.k=2", "-f", there), "loss.k is an option of mcl")
    done = mheads("distil", ensemble, "optim.lr=-3", "-f", there)
    refused(done, f"{ensemble} with optim.lr=-3: optim.lr = -3: ")
    assert "config.yaml" not in done.err  # which is right
    refused(mheads("distil", ensemble, "data.limit=100", "-f", path), "answers to other examples", "--folder")
    refused(mheads("distil", path, "-f", path), "answers of another run", "--folder")
    done = mheads("distil", ensemble, "teacher.weight=0.5", "-f", path)
    refused(done, "teacher.weight", "0.9", "0.5", "give another run folder")
    assert "--force" not in done.err  # which distil does not have
    refused(mheads("distil", ensemble, "-f", ensemble), "holds a run that has no", "--folder")
    refused(mheads("train", "digits", "teacher.answers=x.npz", *TINY, "-f", there), "x.npz does not exist")
    refused(mheads("train", "digits", "teacher.answers=array", *TINY, "-f", there), "is only for fit in Python")
    refused(mheads("train", "digits", "teacher.weight=2", *TINY, "-f", there), "teacher.weight = 2")
    assert not there.exists() and not (tmp_path / "new.npz").exists()  # nor was anybody asked
    assert not ensemble.with_name("four.npz").exists()


def test_a_run_of_arrays_is_distilled_in_python(digits, mheads, tmp_path):
    import mheads as package

    x, y = digits
    net = package.TreeNet(small, members=2)
    run = package.fit(net, train=(x, y), iterations=2, folder=tmp_path / "run", show=False)
    refused(mheads("distil", tmp_path / "run", "--trust", "-f", tmp_path / "new"), "fit(net, train=(x, y), teacher=")
    student = package.fit(
        package.TreeNet(small, members=1), train=(x, y), teacher=run.answer(x), iterations=2, show=False
    )
    assert student.result.members
