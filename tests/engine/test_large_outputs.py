"""Members with large outputs give their losses to the loss of the ensemble: nothing else changes."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.commands import assert_same_run, process, ranks
from helpers.one_step import engine_gradients
from torch import nn

from mheads import losses
from mheads.data import Preprocess
from mheads.data.batches import Batch
from mheads.engine import large_outputs, training_step
from mheads.engine.large_outputs import LARGE, count_given
from mheads.trees.treenet import TreeNet

LOSSES = {
    "mcl": losses.mcl(),
    "mcl k=2": losses.mcl(k=2),
    "mixture": losses.mcl(ce_weight=0.5),
    "relaxed": losses.relaxed(),
    "annealed": losses.annealed().at(3, 10, 3),
    "evolving": losses.evolving().at(2, 10, 3),
    "wins": losses.mcl(normalize="wins"),
}


def network():
    """Scores [B, 3, 40, 40] for the classes of pixels: 4,800 numbers."""
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))


def pixel_losses(outputs, y):
    """[M, B, 3, H, W], [B, H, W] -> [M, B]"""
    scores = outputs.log_softmax(2)
    return -scores.gather(2, y.expand(len(outputs), *y.shape).unsqueeze(2)).mean((2, 3, 4))


def make_batch(members, sample_weights=None, rows=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 2, 40, 40, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (rows, 40, 40), generator=generator)
    ties = torch.rand(members, rows, generator=generator)
    return Batch(x, y, Preprocess(), sample_weights=sample_weights, ties=ties)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_plain_autograd_and_no_outputs_are_joined(name, weighted, monkeypatch):
    loss = replace(LOSSES[name], base_loss=pixel_losses)
    net = TreeNet(network, split="0", members=3).double()
    weights = torch.tensor([[2.0, 0, 1, 1, 0, 0, 1, 1], [1] * 8, [0, 0, 1, 0, 1, 2, 1, 1]]).double()
    batch = make_batch(3, weights if weighted else None)
    joined = []
    join = training_step.join_members
    monkeypatch.setattr(training_step, "join_members", lambda parts: joined.append(join(parts)) or joined[-1])
    parts = 1 if loss.whole_batch else 2
    report, got = engine_gradients(net, loss, batch, micro_batches=parts, workers=2)
    assert {tuple(value.losses.shape) for value in joined} == {(3, 8 // parts)}
    net.train()
    value = loss(net(batch.inputs), batch.targets, batch.sample_weights, batch.ties)
    (value.total / 8).backward()
    assert report.loss == pytest.approx(value.mean.item(), rel=1e-12)
    torch.testing.assert_close(report.assignment, value.assignment, rtol=1e-12, atol=0)
    for stage, gradients in got.items():
        for gradient, parameter in zip(gradients, net.stages[stage].parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-12)


def test_outputs_go_where_they_are_small_or_the_loss_needs_more_of_them():
    assert [count_given(losses.mcl(), n) for n in (10, LARGE - 1, LARGE)] == [10, LARGE - 1, 1]
    for loss in (losses.score_averaged(), losses.confident(), losses.independent(), losses.mcl().with_scores()):
        assert count_given(loss, LARGE) == LARGE, loss.name


def _set_large(numbers):
    large_outputs.LARGE = numbers


ARGS = [
    "digits", "model=user_networks:with_dropout", "members=4", "data.limit=150", "optim.batch_size=16", "loss=mcl",
    "optim.iterations=5", "engine.micro_batches=2", "split=conv", "sampling=bagging", "log.every=2",
]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "placement", "stack"),
    [
        (2, "default", "never"),
        (2, "default", "auto"),
        (3, "{trunk: 2, conv/0: 1, conv/1: 0, conv/2: 0, conv/3: 1}", "never"),  # rank 2 holds no member
    ],
)
def test_ranks_that_send_losses_have_the_bits_of_one_process(size, placement, stack, tmp_path):
    every = partial(_set_large, 1)
    args = [*ARGS, f"engine.stack={stack}"]
    assert process("train", *args, "--run", tmp_path / "one", before=every).code == 0
    before = dict.fromkeys(range(size), every)
    done = ranks(size, "train", *args, f"placement={placement}", "--run", tmp_path / "some", before=before)
    assert [d.code for d in done] == [0] * size, done[0].err
    assert_same_run(tmp_path / "some", tmp_path / "one")
