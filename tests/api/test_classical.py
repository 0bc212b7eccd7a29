"""Classical MCL: rounds of ordinary runs, compared with plain numpy, and with rounds that were killed."""

import json
import signal

import numpy as np
import pytest
import torch
import user_networks
from helpers.commands import Running, assert_same_run, process, weights  # noqa: F401, Running: see conftest.py
from safetensors.torch import load_file

from mheads import load
from mheads.api import classical_mcl, evaluate
from mheads.cli.printing.rounds import rounds_table
from mheads.common.progress import Silent
from mheads.config import read as configs

TINY = [
    "digits", "model=user_networks:with_dropout", "members=3", "split=conv", "data.limit=150", "optim.batch_size=32",
    "optim.iterations=8", "engine.micro_batches=4", "log.every=1", "log.checkpoint_every=3",
]  # fmt: skip
ROUNDS = ["--rounds", "3", "--tolerance", "0"]


def owners(folder, number):
    with np.load(folder / f"round{number}.npz") as file:
        assert (file["sample_weights"].sum(0) == 1).all()  # one member for each example
        return file["sample_weights"].argmax(0)


def figures(folder):
    """What classical.json holds but times."""
    found = json.loads((folder / "classical.json").read_text())
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in found["rounds"]]


def assert_same_rounds(folder, other, rounds=3):
    for number in range(rounds):
        assert_same_run(folder / f"round{number}", other / f"round{number}")
    for number in range(rounds + 1):
        assert (folder / f"round{number}.npz").read_bytes() == (other / f"round{number}.npz").read_bytes()
    assert figures(folder) == figures(other)


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    """Three rounds, left in peace, and what the command said."""
    folder = tmp_path_factory.mktemp("rounds") / "rounds"
    done = process("classical", *TINY, *ROUNDS, "--folder", folder)
    assert done.code == 0, done.err
    return folder, done.out


def test_every_example_goes_to_the_member_with_the_lowest_loss(rounds):
    folder, _ = rounds
    assert figures(folder)[0]["changed"] > 0
    for number, entry in enumerate(figures(folder)):
        outputs, labels = evaluate.outputs_of(load(folder / f"round{number}", user_networks.with_dropout), "train")
        logits, y = outputs.double().numpy(), labels.numpy()
        losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, y[None, :, None], 2)[..., 0]
        before, after = owners(folder, number), owners(folder, number + 1)
        np.testing.assert_array_equal(after, losses.argmin(0))
        assert entry["objective"] == pytest.approx(losses.min(0).sum(), rel=1e-5)
        assert entry["changed"] == (before != after).sum()
        assert entry["examples"] == np.bincount(before, minlength=3).tolist()
        result = json.loads((folder / f"round{number}/result.json").read_text())
        assert all(entry[key] == result[key] for key in ("members", "ensemble_mean", "oracle", "iterations"))


def test_the_first_round_trains_on_clusters_of_the_inputs(rounds):
    from sklearn.cluster import KMeans
    from sklearn.datasets import load_digits

    from mheads import data

    inputs = data.load("digits", limit=150, normalize="mean_image", scale=1.0).train.read(np.arange(150), None)
    assert load_digits().data.max() == inputs.max()
    reference = KMeans(3, n_init=50, random_state=1).fit(inputs.reshape(150, -1).numpy().astype(float))
    ours = owners(rounds[0], 0)
    centres = np.stack([inputs.reshape(150, -1).numpy()[ours == m].mean(0) for m in range(3)])
    inertia = ((inputs.reshape(150, -1).numpy() - centres[ours]) ** 2).sum()
    assert inertia == pytest.approx(reference.inertia_, rel=0.01)


def test_rounds_start_from_the_weights_of_the_one_before_in_another_order(rounds):
    read = [configs.read(rounds[0] / f"round{n}/config.yaml") for n in range(3)]
    assert [c.init for c in read] == ["random", *(str(rounds[0] / f"round{n}") for n in range(2))]
    assert len({c.seed for c in read}) == 3
    assert [c.sampling.name for c in read] == ["file"] * 3
    one, two = (load_file(rounds[0] / f"round{n}/model.safetensors") for n in range(2))
    moved = [(one[name] - two[name]).norm() / one[name].norm() for name in one if name.endswith("weight")]
    assert 0 < max(moved) < 0.5  # other first weights would be as far away as they are long


def test_the_command_shows_a_table_of_its_rounds(rounds):
    _, out = rounds
    lines = [line.split() for line in out.splitlines()]
    for entry in figures(rounds[0]):
        assert [
            str(entry["round"]), *(f"{a:.1f}" for a in entry["members"]), f"{entry['ensemble_mean']:.2f}",
            f"{entry['oracle']:.2f}", f"{entry['top_m']:.2f}", *(f"{n / 1.5:.0f}" for n in entry["examples"]),
            f"{entry['objective']:.4g}", str(entry["changed"]),
        ] in lines  # fmt: skip
    assert "clustering 150 inputs by k-means" in out


KILLS = {
    "before the first examples are shared out": (signal.SIGKILL, "os.rename", ".round0.npz"),
    "inside the first round": (signal.SIGKILL, "os.rename", "round0/checkpoints/.step-00000006"),
    "between two rounds": (signal.SIGKILL, "os.rename", ".round1.npz"),
    "before the round is written down": (signal.SIGTERM, "os.rename", ".classical.json"),
    "inside the second round": (signal.SIGTERM, "open", "round1/checkpoints/.step-00000003.new/state.json"),
}


def test_rounds_that_are_killed_at_each_point_in_turn_give_the_same_bits(tmp_path, rounds, mheads):
    folder = tmp_path / "rounds"
    command = ["classical", *TINY, *ROUNDS, "--folder", folder]
    for name, stop in KILLS.items():
        done = process(*command, stop=stop)
        assert done.code == (-signal.SIGKILL if stop[0] == signal.SIGKILL else 143), f"{name}: {done.out}{done.err}"
        if stop[0] == signal.SIGTERM:
            assert "stopped by SIGTERM; saved. The same command resumes from here." in done.err
    done = mheads(*command)
    assert done.code == 0, done.err
    # The runs are the same but for the folders that their configs name.
    assert_same_rounds(folder, rounds[0])


def test_more_rounds_go_on_and_fewer_change_nothing(tmp_path, rounds, mheads):
    folder = tmp_path / "rounds"
    command = ["classical", *TINY, "--tolerance", "0", "--folder", folder]
    assert mheads(*command, "--rounds", "1").code == 0
    assert len(figures(folder)) == 1
    assert mheads(*command, "--rounds", "3").code == 0
    assert_same_rounds(folder, rounds[0])
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    for number in ("3", "2"):
        done = mheads(*command, "--rounds", number)
        assert done.code == 0 and f"round {int(number) - 1}: objective" in done.out
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_rounds_end_when_few_examples_change(tmp_path, rounds):
    changed = figures(rounds[0])[0]["changed"]
    found = configs.load(TINY[0], TINY[1:])
    summary = classical_mcl.train_rounds(found, tmp_path / "rounds", lambda label: Silent(), 3, (changed + 1) / 150)
    assert len(summary["rounds"]) == 1
    assert classical_mcl.is_stable({"changed": 0, "examples": [150]}, 0)
    assert not classical_mcl.is_stable({"changed": 1, "examples": [1000]}, 0.001)


def test_numbers_are_learned_in_rounds_too(tmp_path, mheads):
    folder = tmp_path / "rounds"
    done = mheads("classical", "diabetes", "optim.iterations=20", "--rounds", 3, "--folder", folder)
    assert done.code == 0, done.err
    objectives = [entry["objective"] for entry in figures(folder)]
    assert objectives == sorted(objectives, reverse=True)
    outputs, targets = evaluate.outputs_of(folder / "round2", "train")
    errors = ((outputs - targets) ** 2).mean(-1)
    assert objectives[-1] == pytest.approx(errors.min(0).values.sum().item(), rel=1e-5)
    np.testing.assert_array_equal(owners(folder, 3), errors.argmin(0))


@pytest.mark.parametrize("least", [1, 3, 10])
def test_a_member_left_with_few_examples_takes_the_hardest_of_others(least):
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(4, 40, generator=generator)
    losses[2] += 1  # wins nothing
    losses[3, :38] += 1  # wins two at most
    found = classical_mcl.share_out(losses, torch.rand(4, 40, generator=generator), least)
    counts = found.bincount(minlength=4)
    assert counts.min() >= least and counts.sum() == 40
    if least < 10:
        nearest = losses.argmin(0)
        taken = found != nearest
        assert counts[2] == least
        left = losses.min(0).values[~taken & (found < 2)]
        assert losses.min(0).values[taken].min() > left.max()  # nothing harder was left


def test_equal_losses_are_ordered_by_a_random_key():
    ties = torch.rand(3, 300, generator=torch.Generator().manual_seed(0))
    found = classical_mcl.share_out(torch.ones(3, 300), ties, 1)
    assert torch.equal(found, ties.argmin(0))


def test_rounds_of_another_config_are_refused_and_nothing_changes(rounds, mheads):
    folder, _ = rounds
    before = weights(folder / "round0")
    for args, part in {
        ("optim.iterations=9",): "optim.iterations: 8 in the folder, 9 now",
        ("seed=1",): "seed: 0 in the folder, 1 now",
    }.items():
        done = mheads("classical", *TINY, *args, *ROUNDS, "--folder", folder)
        assert done.code == 2 and part in done.err
    assert weights(folder / "round0") == before


def test_looking_at_rounds_removes_nothing(tmp_path, mheads):
    command = ["classical", *TINY, "--rounds", "1", "--folder", tmp_path / "rounds"]
    done = mheads(*command, "optim.lr=1e9", "seed=1")
    assert done.code == 2
    assert classical_mcl.read_rounds(tmp_path / "rounds", configs.load(TINY[0], TINY[1:])) == []
    assert (tmp_path / "rounds/round0.npz").is_file()


def test_rounds_whose_measures_are_not_finite_are_shown():
    entry = {"round": 0, "problem": "multilabel", "members": [None, 50.0], "ensemble_mean": None, "oracle": None,
             "examples": [3, 4], "objective": None, "changed": 2}  # fmt: skip
    shown = rounds_table({"rounds": [entry]})
    assert [str(next(iter(column.cells))) for column in shown.columns[1:4]] == [
        "not finite 50.0",
        "not finite",
        "not finite",
    ]


def test_a_first_round_that_failed_leaves_nothing_in_the_way(tmp_path, mheads):
    command = ["classical", *TINY, "--rounds", "1", "--folder", tmp_path / "rounds"]
    done = mheads(*command, "optim.lr=1e9", "seed=1")
    assert done.code == 2 and "lower optim.lr" in done.err
    assert mheads(*command).code == 0
    assert mheads(*command[:-1], tmp_path / "straight").code == 0
    assert_same_rounds(tmp_path / "rounds", tmp_path / "straight", 1)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["loss=mcl"], "loss.name = mcl: in classical MCL each member trains by itself"),
        (["sampling=bagging"], "leave sampling.name at full"),
        (["pretrain=5"], "start from a trained run with init=RUN"),
        (["members=1"], "members = 1: there is nothing to choose from"),
        (["data.limit=2"], "2 training examples for 3 members"),
        (["model=user_networks:to_three"], "to_three"),
    ],
)
def test_what_has_no_meaning_in_rounds_is_refused_and_nothing_is_written(tmp_path, mheads, args, part):
    tiny = [arg for arg in TINY if arg.split("=")[0] not in ("split", *(a.split("=")[0] for a in args))]
    done = mheads("classical", *tiny, *args, "--folder", tmp_path / "rounds")
    assert done.code == 2 and part in done.err, done.err
    assert not (tmp_path / "rounds").exists()


def test_a_folder_of_something_else_is_refused(tmp_path, rounds, mheads):
    for folder in (tmp_path, rounds[0] / "round0"):
        (folder / "mine.txt").write_text("precious")
        done = mheads("classical", *TINY, "--folder", folder)
        assert done.code == 2 and "is not empty and has no classical.json" in done.err
        (folder / "mine.txt").unlink()
    # A figure that was altered is damage as well.
    for content in ("{", (rounds[0] / "classical.json").read_text().replace('"objective": ', '"objective": 1', 1)):
        (tmp_path / "classical.json").write_text(content)
        done = mheads("classical", *TINY, "--folder", tmp_path)
        assert done.code == 2 and "classical.json is damaged" in done.err
