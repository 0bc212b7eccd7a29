"""What the log says of the members' learning, against a few lines of numpy."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.one_step import engine_gradients
from torch import nn

import mheads
from mheads import TreeNet, losses
from mheads.data.batches import Batch
from mheads.data.preprocessing import Preprocess
from mheads.engine.diagnostics import Diagnostics, clip_scale, entropy, gradient_norms
from mheads.engine.engine_options import EngineOptions
from mheads.engine.step_results import StepReport
from mheads.engine.threads import ThreadsEngine
from mheads.losses import Loss, LossValue
from mheads.runs.metrics_log import History


def batch_of(rows, sample_weights=None):
    x, y = torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.int64)
    return Batch(x, y, Preprocess(), sample_weights=sample_weights)


def report_of(assignment, own=None):
    assignment = torch.tensor(assignment, dtype=torch.float32)
    return StepReport(1.5, torch.ones_like(assignment) if own is None else torch.tensor(own), assignment)


def test_a_line_says_who_won_and_how_much_each_learned_from():
    found = Diagnostics(3)
    found.add(report_of([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]]), batch_of(4), 0.5)
    found.add(report_of([[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0.0]]), batch_of(4), 0.5)
    assert found.winners() == [6 / 8, 1 / 8, 1 / 8]
    line = found.line(2, 0.1, [1.0, 0.123456, 0])
    assert line["wins"] == line["share"] == [0.75, 0.125, 0.125]
    assert line["entropy"] == round(-(0.75 * np.log2(0.75) + 2 * 0.125 * np.log2(0.125)), 4)
    assert line["effective_batch"] == [3.0, 0.5, 0.5]
    assert line["gradient_norm"] == [1.0, 0.1235, 0.0]
    assert (line["loss"], line["iteration"], line["images_per_second"]) == (1.5, 2, 8.0)
    assert found.winners() == [0, 0, 0]  # a new window


def test_a_mixture_counts_as_won_by_whoever_learns_most_and_its_losers_add_to_the_effective_batch():
    found = Diagnostics(2)
    found.add(report_of([[1.1, 1.1, 0.1], [0.1, 0.1, 1.1]]), batch_of(3), 1.0)
    line = found.line(1, 0.1, [0, 0])
    assert line["wins"] == [0.6667, 0.3333]
    assert line["share"] == [round(2.3 / 3.6, 4), round(1.3 / 3.6, 4)]
    a = np.array([[1.1, 1.1, 0.1], [0.1, 0.1, 1.1]])
    np.testing.assert_allclose(line["effective_batch"], a.sum(1) ** 2 / (a**2).sum(1), atol=0.06)


def test_losses_are_those_of_the_examples_that_a_member_may_learn_from():
    found = Diagnostics(2)
    sample_weights = torch.tensor([[2.0, 0, 0], [1, 1, 1]])
    found.add(report_of(sample_weights.tolist(), [[3.0, 9, 9], [1, 2, 3]]), batch_of(3, sample_weights), 1.0)
    assert found.line(1, 0.1, [0, 0])["member_losses"] == [3.0, 2.0]


def test_a_win_is_not_a_matter_of_what_an_example_weighs():
    """Priors are scaled to mean 1: a member that may learn from much has the lowest weight everywhere."""
    found = Diagnostics(3)
    sample_weights = torch.tensor([[1.0, 1, 1, 1], [0, 0, 2, 2], [1.3, 1.7, 0.7, 0]])
    learned = torch.tensor([[1.1, 0.1, 1.1, 1.1], [0.1, 0.1, 1.1, 0.1], [1.1, 1.1, 0.1, 0.1]])  # k=2 and ce_weight 0.1
    found.add(report_of((sample_weights * learned).tolist()), batch_of(4, sample_weights), 1.0)
    assert found.line(1, 0.1, [0, 0, 0])["wins"] == [0.75, 0.25, 0.5]
    found.add(report_of(sample_weights.tolist()), batch_of(4, sample_weights), 1.0)  # all learn from all that they may
    assert found.line(2, 0.1, [0, 0, 0])["wins"] == [1.0, 0.5, 0.75]
    assert found.find_idle(1) == []


def test_wins_are_of_rows_where_examples_have_several():
    found = Diagnostics(2)
    batch = batch_of(5)
    regions = Batch(torch.zeros(2, 2), batch.targets, Preprocess(), counts=torch.tensor([2, 3]))
    assert (len(regions), regions.num_rows) == (2, 5)
    found.add(report_of([[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]), regions, 0.5)
    again = Diagnostics(2)
    again.load(found.arrays(), found.state())  # as from a checkpoint
    line = found.line(1, 0.1, [0, 0])
    assert (line["wins"], line["images_per_second"]) == ([0.6, 0.4], 4.0)
    assert again.line(1, 0.1, [0, 0]) == line
    old = found.state() | {"window": [3.0, 1, 2, 0.5]}
    again.load(found.arrays(), old)  # of an older version
    assert again.line(1, 0.1, [0, 0])["images_per_second"] == 4.0


def test_entropy_is_that_of_the_wins():
    assert entropy([1.0, 0, 0]) == 0
    assert entropy([0.25] * 4) == 2


@pytest.mark.parametrize("tree", [2, {"trunk": 2}])
def test_norms_are_those_of_each_stage(tree):
    def network():
        return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))

    def named():
        net = nn.Sequential()
        for name, layer in zip(("trunk", "act", "head"), network(), strict=True):
            net.add_module(name, layer)
        return net

    x, y = torch.randn(12, 2), torch.randint(3, (12,))
    batch = Batch(x, y, Preprocess(), ties=torch.rand(2, 12))
    net = TreeNet(named, tree=tree)
    engine = ThreadsEngine(net, EngineOptions(2, 2))
    engine.step(0, batch, losses.mcl(k=1))
    found = gradient_norms(engine)
    engine.close()
    _, gradients = engine_gradients(net, losses.mcl(k=1), batch, micro_batches=2)
    assert found.keys() == gradients.keys()
    for stage, parts in gradients.items():
        expected = np.sqrt(sum((g.double().numpy() ** 2).sum() for g in parts))
        assert found[stage].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("most", "expected"), [(100.0, 1.0), (13.0, 1.0), (6.5, 0.5), (1.3, 0.1)])
def test_gradients_are_scaled_only_where_their_norm_is_above_the_limit(most, expected):
    """The norms of three stages are 3, 4 and 12: together 13."""
    gradients = {"trunk": [torch.tensor([1.0, 2.0]), torch.tensor([[-2.0]])], "0": [torch.tensor([4.0])]}
    gradients["1"] = [torch.tensor([0.0, -12.0])]

    def update(each):
        for stage, found in gradients.items():
            each(stage, found)

    net = SimpleNamespace(tree=SimpleNamespace(nodes=gradients))
    engine = SimpleNamespace(
        update=update, gather=lambda found: found, agree=lambda decide: decide(), net=net, stacks={}
    )
    assert clip_scale(engine, most, lambda stage: 1.0) == pytest.approx(expected, rel=1e-12)
    halved = clip_scale(engine, most, {"trunk": 0.5, "0": 1.0, "1": 1.0}.get)
    assert halved == pytest.approx(min(1.0, most / np.sqrt(1.5**2 + 4**2 + 12**2)), rel=1e-12)


def greedy(outputs, y):
    """The first member wins everything until its weights make the others better, which never happens."""
    own = losses.cross_entropies(outputs, y)
    assignment = torch.zeros_like(own)
    assignment[0] = 1
    return LossValue((assignment * own).sum(), assignment, own.detach())


def test_members_that_win_nothing_are_named_once_with_what_helps(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32), np.arange(64) % 3

    def network():
        return nn.Sequential(nn.Linear(2, 3))

    loss, log = Loss("greedy", greedy), {"idle_after": 5, "every": 4}
    with pytest.warns(UserWarning, match="members 1, 2 have won no example in the last 5 iterations") as warned:
        net = TreeNet(network, members=3)
        mheads.fit(
            net, train=(x, y), loss=loss, test=(x, y), batch_size=16, iterations=12, folder=tmp_path / "run", log=log
        )
    told = [str(w.message) for w in warned if "won no example" in str(w.message)]
    assert len(told) == 1
    assert "mheads.losses.annealed(relative=True, temperature=0.5, floor=0.001)" in told[0]  # what Python takes
    assert "loss=" not in told[0]
    assert "normalize_targets" not in told[0]  # which is for numbers
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["learning"]["wins"] == [1, 0, 0]
    assert result["learning"]["effective_batch"] == [16, 0, 0]
    assert result["learning"]["gradient_norm"][1:] == [0, 0]
    assert result["learning"]["gradient_norm"][0] > 0


def test_the_fine_history_has_every_step_at_first_stays_small_and_loses_no_example():
    history = History(2, 3)
    rng, total = np.random.default_rng(0), np.zeros((2, 3))
    for i in range(1, 10_001):
        noted = rng.integers(50, 99, size=(2, 3))
        history.note(i, noted)
        total += noted
    np.testing.assert_array_equal(history.steps.sum(0) + history.lately, total)
    history.append(10_000, total, total)
    assert history.moments[:65].tolist() == [*range(1, 65), 66]
    assert history.moments[-1] == 10_000
    assert 256 < len(history.moments) <= 300
    assert (np.diff(history.moments, 2) >= 0)[:-1].all()
    np.testing.assert_array_equal(history.steps.sum(0), total)


def test_the_fine_history_waits_for_enough_examples_and_is_coarser_for_very_many_classes():
    small, large = History(2, 10), History(100, 1000)
    for i in range(1, 101):
        small.note(i, np.full((2, 10), 2))  # 5 steps give 20 examples of a class
        large.note(i, np.full((100, 1000), 1))
    assert small.moments.tolist() == [*range(5, 61, 5), *range(66, 97, 6)]
    assert large.moments.tolist() == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]


def test_the_fine_history_is_in_the_run_folder(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(640, 2)).astype(np.float32), np.arange(640) % 3
    net = TreeNet(lambda: nn.Sequential(nn.Linear(2, 3)), members=2)
    log = {"every": 50, "evaluate_every": 5}
    mheads.fit(
        net, train=(x, y), loss="mcl", test=(x, y), batch_size=32, iterations=8, folder=tmp_path / "run", log=log
    )
    with np.load(tmp_path / "run/assignments.npz") as file:
        assert file["moments"].tolist() == [2, 4, 5, 7, 8]
        np.testing.assert_array_equal(file["steps"].sum((1, 2)), [64, 64, 32, 64, 32])
        np.testing.assert_array_equal(file["steps"].sum(0), file["train"].sum(0))


@pytest.mark.parametrize(("every", "lines"), [(50, [7]), (3, [3, 6, 7])])
def test_the_last_iteration_has_a_line_so_that_no_step_is_left_out_of_the_log(every, lines):
    x, y = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32), np.arange(64) % 3
    net = TreeNet(lambda: nn.Sequential(nn.Linear(2, 3)), members=2)
    run = mheads.fit(net, train=(x, y), loss="mcl", batch_size=16, iterations=7, log={"every": every})
    assert [line["iteration"] for line in run.history.steps] == lines
    assert sum(run.history.steps[-1]["wins"]) == pytest.approx(1)
