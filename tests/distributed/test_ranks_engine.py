"""The ranks engine: the same bits for any number of ranks, placement and replicas."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from helpers.commands import assert_same_run, process, ranks
from safetensors.torch import load_file

import mheads
from mheads.common.errors import UserError

# Everything that carries state or chance: dropout, accumulation, bagging where the loss allows it.
COMMON = [
    "digits", "model=user_networks:with_dropout", "members=4", "data.limit=150", "optim.batch_size=16",
    "optim.accumulate=2", "optim.iterations=6", "optim.lr=0.02", "optim.weight_decay=0.001", "engine.micro_batches=2",
    "log.every=2", "log.evaluate_every=3", "log.checkpoint_every=4", "engine.stack=never",
]  # fmt: skip
NESTED = "split={conv: [{hidden: 2}, 2]}"
RECIPES = {  # the shape of the tree, and the arguments
    "independent": ("independent", ["sampling=bagging"]),
    "tree": ("tree", ["split=conv", "sampling=bagging"]),
    "nested tree": ("nested", [NESTED, "sampling=bagging"]),
    "score-averaged": ("tree", ["split=conv", "loss=score_averaged"]),
    "probability-averaged": ("nested", [NESTED, "loss=prob_averaged"]),
    "MCL k=1": ("tree", ["split=conv", "loss=mcl", "sampling=bagging"]),
    "MCL k=2": ("nested", [NESTED, "loss=mcl", "loss.k=2", "pretrain=2"]),
    "by pieces": ("nested", [NESTED, "loss=mcl", "engine.shared_micro_batches=6"]),
}
PLACEMENTS = {
    "explicit": {  # roots and their children spread in a way that no rule would choose
        "independent": "{0: 2, 1: 0, 2: 1, 3: 0}",
        "tree": "{trunk: 1, conv/0: 2, conv/1: 0, conv/2: 0, conv/3: 1}",
        "nested": "{trunk: 2, conv/0: 0, conv/0/hidden/0: 1, conv/0/hidden/1: 0, conv/1: 1, conv/2: 0}",
    },
    "replicas": {"independent": "{0: 0, 1: 0, 2: 0, 3: 0}", "tree": "{trunk: 0}", "nested": "{trunk: 0}"},
    "replicas of 2": {
        "independent": "{0: 0, 1: 0, 2: 0, 3: 1}",
        "tree": "{trunk: 0, conv/3: 1}",
        "nested": "{trunk: 0, conv/2: 1}",
    },
}
SPREAD = {
    "2 ranks": (2, "default"),
    "3 ranks": (3, "default"),
    "5 ranks": (5, "default"),
    "3 ranks, explicit": (3, "explicit"),
    "3 ranks, auto": (3, "auto"),
    "2 replicas": (2, "replicas"),
    "2 replicas of 2 ranks": (4, "replicas of 2"),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The run of each recipe in one process, made when it is first asked for."""
    made = {}

    def run(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("one") / "run"
            done = process("train", *COMMON, *RECIPES[name][1], "--run", made[name])
            assert done.code == 0, done.err
        return made[name]

    return run


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("name", RECIPES)
def test_ranks_give_the_bits_of_one_process(name, spread, one_process, tmp_path):
    (shape, recipe), (size, placement) = RECIPES[name], SPREAD[spread]
    placement = f"placement={PLACEMENTS.get(placement, {}).get(shape, placement)}"
    done = ranks(size, "train", *COMMON, *recipe, placement, "--run", tmp_path / "run")
    assert [d.code for d in done] == [0] * size, "\n".join(d.err for d in done)
    assert_same_run(tmp_path / "run", one_process(name))
    assert "Ensemble-Mean" in done[0].out
    assert all(d.out == "" for d in done[1:]), "only rank 0 speaks"


@pytest.mark.parametrize("tree", ["placement=default", "placement=auto", "placement={0: 0, 1: 0}", "split=norm"])
def test_running_statistics_have_no_replicas_and_so_the_bits_of_one_process(tmp_path, tree):
    """Batches that are accumulated update them one after the other: replicas would each see some of them."""
    args = ["digits", "model=user_networks:normalised", "members=2", "data.limit=60", "optim.batch_size=8"]
    args += ["optim.accumulate=2", "optim.iterations=3", "log.every=1", tree]
    assert process("train", *args, "--run", tmp_path / "one").code == 0
    done = ranks(4, "train", *args, "--run", tmp_path / "four")
    assert [d.code for d in done] == [0] * 4, done[0].err
    assert_same_run(tmp_path / "four", tmp_path / "one")


def test_stacked_members_are_on_one_rank_and_replicas_share_the_work(tmp_path):
    args = [*COMMON, *RECIPES["MCL k=1"][1], "engine.stack=auto"]
    assert process("train", *args, "--run", tmp_path / "one").code == 0
    done = ranks(3, "train", *args, "--run", tmp_path / "three")
    assert [d.code for d in done] == [0] * 3, done[0].err
    assert_same_run(tmp_path / "three", tmp_path / "one")


def test_shares_of_uneven_length_have_the_bits_of_one_process(tmp_path):
    """Six micro-batches on two ranks: the sums of the second are those of one, and of two."""
    args = [*COMMON, *RECIPES["MCL k=1"][1], "engine.micro_batches=3"]
    assert process("train", *args, "--run", tmp_path / "one").code == 0
    done = ranks(2, "train", *args, "--run", tmp_path / "two")
    assert [d.code for d in done] == [0, 0], done[0].err
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    "frozen", [["freeze=[trunk]", "placement=default"], ["freeze=[conv/1]", "placement={trunk: 0}"]], ids=str
)
def test_frozen_stages_have_the_bits_of_one_process(frozen, tmp_path):
    """A trunk that ranks share, and a member on two replicas, whose shares are sums of several subtrees."""
    args = [*COMMON, *RECIPES["MCL k=1"][1], "engine.micro_batches=3"]
    assert process("train", *args, *frozen, "--run", tmp_path / "one").code == 0
    done = ranks(2, "train", *args, *frozen, "--run", tmp_path / "two")
    assert [d.code for d in done] == [0, 0], done[0].err
    assert_same_run(tmp_path / "two", tmp_path / "one")


def test_ranks_take_part_in_what_calibration_examples_decide(tmp_path):
    args = ["diabetes", "loss=mcl", "data.calibration=20", "engine.stack=never", "optim.iterations=2"]
    assert process("train", *args, "--run", tmp_path / "one").code == 0
    done = ranks(2, "train", *args, "timeout=20", "--run", tmp_path / "two")
    assert [d.code for d in done] == [0, 0], done[0].err
    assert_same_run(tmp_path / "two", tmp_path / "one")


def test_fast_sums_train_the_same_but_for_rounding(one_process, tmp_path):
    args = [*RECIPES["MCL k=1"][1], "distributed.sums=fast", "optim.iterations=1", "log.evaluate_every=0"]
    assert process("train", *COMMON, *args, "--run", tmp_path / "one").code == 0
    done = ranks(4, "train", *COMMON, *args, "placement={trunk: 0, conv/3: 1}", "--run", tmp_path / "four")
    assert [d.code for d in done] == [0] * 4, done[0].err
    one, four = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "four"))
    for name, weight in one.items():
        torch.testing.assert_close(four[name], weight, rtol=1e-5, atol=1e-7)


def test_members_on_different_ranks_have_weights_of_their_own(tmp_path):
    """Defect 3 of MPI-Caffe: with a seed, every rank drew the same weights."""
    done = ranks(4, "train", *COMMON, "optim.iterations=1", "--run", tmp_path / "run")
    assert [d.code for d in done] == [0] * 4, done[0].err
    found = load_file(tmp_path / "run" / "model.safetensors")
    members = [found[f"stages.{m}.hidden.weight"] for m in range(4)]
    assert all(not torch.equal(members[a], members[b]) for a in range(4) for b in range(a))


def test_ranks_without_work_stay_and_the_bits_are_the_same(one_process, tmp_path):
    """Four stages on seven ranks; four micro-batches allow no replicas that would use them all."""
    done = ranks(7, "train", *COMMON, *RECIPES["independent"][1], "--run", tmp_path / "run")
    assert [d.code for d in done] == [0] * 7, done[0].err
    assert_same_run(tmp_path / "run", one_process("independent"))


def test_ranks_that_would_start_from_other_weights_are_refused(tmp_path):
    from safetensors.torch import save_file
    from user_networks import with_dropout

    for name in ("a", "b"):
        save_file(with_dropout().state_dict(), tmp_path / f"{name}.safetensors")
    each = {0: [f"init={tmp_path}/a.safetensors"], 1: [f"init={tmp_path}/b.safetensors"]}
    done = ranks(2, "train", *COMMON, "loss=mcl", "--folder", tmp_path / "run", each=each)
    assert [d.code for d in done] == [2, 2]
    assert "init" in done[0].err + done[1].err
    assert not (tmp_path / "run").exists()


def test_commands_other_than_train_answer_once(one_process):
    done = ranks(2, "eval", one_process("tree"), "--trust")
    assert [d.code for d in done] == [0, 0]
    assert "Ensemble-Mean" in done[0].out and done[1].out == ""


def test_fit_says_that_it_is_one_process(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    net = mheads.TreeNet(lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)), members=2)
    with pytest.raises(UserError, match="fit trains in one process, but env started 2"):
        mheads.fit(net, train=(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)))


@pytest.mark.parametrize("spread", ["3 ranks, explicit", "2 replicas of 2 ranks"])
def test_a_teacher_is_heard_alike_on_ranks(spread, tmp_path):
    answers = torch.softmax(torch.randn(150, 10, generator=torch.Generator().manual_seed(0)), -1)
    np.save(tmp_path / "answers.npy", answers.numpy())
    recipe = [*COMMON, "split=conv", "loss=mcl", "loss.k=2", f"teacher.answers={tmp_path / 'answers.npy'}"]
    done = process("train", *recipe, "-f", tmp_path / "one")
    assert done.code == 0, done.err
    size, placement = SPREAD[spread]
    there = ranks(size, "train", *recipe, f"placement={PLACEMENTS[placement]['tree']}", "-f", tmp_path / "several")
    assert [d.code for d in there] == [0] * size, "\n".join(d.err for d in there)
    assert_same_run(tmp_path / "several", tmp_path / "one")


KEPT = ExitStack()


def on_an_accelerator():
    """This process has a pretended one, whose tensors gloo cannot take."""
    from helpers.counterfeit_device import counterfeit_device

    KEPT.enter_context(counterfeit_device())


def test_ranks_with_accelerators_that_the_backend_does_not_know_talk_through_the_host(one_process, tmp_path):
    recipe = ["device=counterfeit", "placement={trunk: 0, conv/1: 1}"]
    args = [*COMMON, *RECIPES["score-averaged"][1], *recipe, "--run", tmp_path / "run"]
    done = ranks(5, "train", *args, before=dict.fromkeys(range(5), on_an_accelerator))  # the last has nothing to do
    assert [d.code for d in done] == [0] * 5, "\n".join(d.err for d in done)
    assert_same_run(tmp_path / "run", one_process("score-averaged"))
