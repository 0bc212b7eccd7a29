"""The engine against plain autograd, and the traps of threads, strides, rows and dropout."""

import copy
import random
import threading
import time
import weakref
from collections import OrderedDict
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers.one_step import engine_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mheads import TreeNet, UserError, losses
from mheads.common.memory_layout import canonical
from mheads.common.number_ranges import cuts
from mheads.data.batches import Batch
from mheads.engine import row_backward
from mheads.engine.engine_options import EngineOptions
from mheads.engine.forward_pass import ForwardPass
from mheads.engine.gradient_sums import PairwiseSum
from mheads.engine.micro_batches import auto_micro_batches
from mheads.engine.rows import Rows
from mheads.engine.stages import StageFacts, Stages, threads_of
from mheads.engine.tape import AutogradTape, Context, RecomputingTape, SlicedTape
from mheads.engine.threads import ThreadsEngine, Workers
from mheads.engine.training_step import TrainingStep
from mheads.networks.dropout import Dropout, keyed_masks
from mheads.trees.splitting.cut_sequential import SequentialStage

LOSSES = {
    "independent": losses.independent(),
    "score": losses.score_averaged(),
    "prob": losses.prob_averaged(),
    "mcl k=1": losses.mcl(k=1),
    "mcl k=2": losses.mcl(k=2),
    "mcl + ce": losses.mcl(k=1, ce_weight=0.5),
}
TREES = {
    "single": 1,
    "independent": 3,
    "split": {"conv1": 3},
    "deep split": {"conv2": 3},
    "nested": {"conv1": [{"conv2": 2}, 1]},
    "forest": [{"conv1": 2}, 1],
}


def conv_net(channels: int = 2) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 4, 3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(4, 6, 3, padding=1),
            pool2=nn.MaxPool2d(2, ceil_mode=True),
            flatten=nn.Flatten(),
            fc=nn.Linear(54, 5),
        )
    )


def dropout_net() -> nn.Sequential:
    net = conv_net()
    return nn.Sequential(
        OrderedDict(
            conv1=net.conv1,
            drop1=nn.Dropout(0.3),
            conv2=net.conv2,
            pool2=net.pool2,
            drop2=nn.Dropout2d(0.4),
            flatten=nn.Flatten(),
            fc=net.fc,
        )
    )


def batch_of(
    rows: int, members: int, dtype=torch.float64, sample_weights=None, seed: int = 0, channels: int = 2
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randn(rows, channels, 6, 6, generator=generator, dtype=dtype),
        torch.randint(5, (rows,), generator=generator),
        lambda raw, dtype: canonical(raw.to(dtype)),
        sample_weights=sample_weights,
        ties=torch.rand(members, rows, generator=generator),
    )


def plain_gradients(net, loss, batch):
    """One big module, one backward."""
    net.train()
    dtype = next(net.parameters()).dtype
    value = loss(net(batch.inputs.to(dtype)), batch.targets, batch.sample_weights, batch.ties)
    (value.total / len(batch)).backward()
    grads = {name: [p.grad for p in stage.parameters()] for name, stage in net.stages.items()}
    net.zero_grad()
    return value, grads


def assert_same_gradients(got, expected, rtol=1e-9):
    for stage, gradients in expected.items():
        scale = max(g.abs().max().item() for g in gradients)
        for a, b in zip(got[stage], gradients, strict=True):
            torch.testing.assert_close(torch.zeros_like(b) if a is None else a, b, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_plain_autograd_on_one_big_module(name, tree):
    net = TreeNet(conv_net, tree=TREES[tree]).double()
    if name == "mcl k=2" and net.num_members < 2:
        pytest.skip("k=2 needs two members")
    batch = batch_of(22, net.num_members)
    report, got = engine_gradients(net, LOSSES[name], batch)
    value, expected = plain_gradients(net, LOSSES[name], batch)
    assert_same_gradients(got, expected)
    assert report.loss == pytest.approx(value.mean.item(), rel=1e-12)
    torch.testing.assert_close(report.losses, value.losses, rtol=1e-12, atol=0)
    assert torch.equal(report.assignment, value.assignment)


@pytest.mark.parametrize("tree", ["independent", "split", "nested", "forest"])
@pytest.mark.parametrize("name", ["independent", "score", "mcl k=1"])
def test_gradients_equal_plain_autograd_where_shared_stages_run_by_pieces(name, tree):
    """Of 23 rows, micro-batches have 12 and 11, and pieces 4 and 3."""
    net = TreeNet(conv_net, tree=TREES[tree]).double()
    runs = {name: [] for name in net.stages}
    for stage, rows in runs.items():
        layer = next(iter(net.stage(stage)))
        layer.register_forward_hook(lambda module, args, output, rows=rows: rows.append(len(output)))
    batch = batch_of(23, net.num_members)
    report, got = engine_gradients(net, LOSSES[name], batch, workers=1, micro_batches=2, pieces=3)
    for stage, rows in runs.items():
        if net.tree.nodes[stage].children:
            assert rows == [4, 4, 4, 4, 4, 3], stage
        else:
            assert {12, 11} <= set(rows), stage  # some rows again, where the loss chooses
    value, expected = plain_gradients(net, LOSSES[name], batch)
    assert_same_gradients(got, expected)
    assert report.loss == pytest.approx(value.mean.item(), rel=1e-12)
    assert torch.equal(report.assignment, value.assignment)


def test_a_batch_that_is_too_short_has_fewer_pieces():
    """Micro-batches of 3 and 2 rows: two pieces each, and none of them is empty."""
    net, rows = TreeNet(conv_net, tree=TREES["nested"]).double(), []
    next(iter(net.stage("trunk"))).register_forward_hook(lambda module, args, output: rows.append(len(output)))
    batch = batch_of(5, 3)
    _, got = engine_gradients(net, LOSSES["mcl k=1"], batch, workers=1, micro_batches=2, pieces=8)
    assert sorted(rows) == [1, 1, 1, 2]
    assert_same_gradients(got, plain_gradients(net, LOSSES["mcl k=1"], batch)[1])


@pytest.mark.parametrize("name", ["independent", "mcl k=1", "mcl k=2", "mcl + ce"])
@pytest.mark.parametrize("tree", ["independent", "split", "nested"])
def test_gradients_with_sample_weights_equal_plain_autograd_though_rows_are_left_out(name, tree):
    net = TreeNet(conv_net, tree=TREES[tree]).double()
    sample_weights = torch.zeros(3, 60, dtype=torch.float64)
    sample_weights[0, ::4] = 4
    sample_weights[1] = torch.tensor([0.25, 1.75]).repeat(30)
    sample_weights[2, :20] = 3  # nothing at all in some micro-batches
    batch = batch_of(60, 3, sample_weights=sample_weights)
    _, got = engine_gradients(net, LOSSES[name], batch)
    _, expected = plain_gradients(net, LOSSES[name], batch)
    assert_same_gradients(got, expected)


def test_rows_of_weight_zero_are_not_computed():
    net = TreeNet(conv_net, members=2).double()
    seen = []
    net.member(0).conv1.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    sample_weights = torch.ones(2, 64, dtype=torch.float64)
    sample_weights[0, 10:] = 0
    engine_gradients(net, losses.independent(), batch_of(64, 2, sample_weights=sample_weights), micro_batches=1)
    assert seen == [12]  # ten rows, padded to a multiple of four


@pytest.mark.parametrize("tree", ["split", "nested"])
@pytest.mark.parametrize("name", ["independent", "mcl k=1"])
def test_trunk_runs_once_per_micro_batch(name, tree):
    net = TreeNet(conv_net, tree=TREES[tree])
    calls = dict.fromkeys(net.stages, 0)
    lock = threading.Lock()

    def count(stage):
        def hook(module, args, output):
            with lock:
                calls[stage] += 1

        return hook

    shared = [node.name for node in net.tree.nodes.values() if node.children]
    for name_ in shared:
        next(iter(net.stage(name_))).register_forward_hook(count(name_))
    engine_gradients(net, LOSSES[name], batch_of(22, 3, torch.float32), micro_batches=4)
    assert calls == {stage: 4 if stage in shared else 0 for stage in net.stages}


@pytest.mark.parametrize("name", ["independent", "mcl k=1"])
def test_every_layer_runs_once_per_micro_batch_where_the_layers_are_known(name, monkeypatch):
    calls = []

    def counting(layer, x, owned):
        calls.append(layer)
        return row_backward.conv2d(layer, x, owned)

    monkeypatch.setitem(row_backward.STEPS, nn.Conv2d, counting)
    net = TreeNet(conv_net, members=3, split="conv1")
    engine_gradients(net, LOSSES[name], batch_of(22, 3, torch.float32), micro_batches=4)
    assert len(calls) == 4 * (1 + 3)
    assert calls.count(net.member(0).conv1) == 4


def test_float32_gradients_are_equal_bit_for_bit_for_any_number_of_workers():
    for tree in TREES.values():
        for name in ("independent", "mcl k=1"):
            results = []
            for workers in (1, 2, 3, 4):
                net = TreeNet(dropout_net, tree=tree)
                batch = batch_of(70, net.num_members, torch.float32)
                options = {"workers": workers, "micro_batches": 5, "pieces": 3}
                results.append(engine_gradients(net, LOSSES[name], batch, **options)[1])
            for other in results[1:]:
                for stage in results[0]:
                    assert all(torch.equal(a, b) for a, b in zip(results[0][stage], other[stage], strict=True))


@pytest.mark.parametrize("members", [2, 4, 5, 7])
def test_gradients_of_children_at_a_split_are_added_in_the_pairwise_tree(members, monkeypatch):
    """Bit for bit: of seven terms no other order gives these last digits."""
    terms, sums = {}, []
    hand_up, backward = TrainingStep.hand_up, TrainingStep.backward

    def from_child(step, i, node, d_input):
        terms[node.name] = d_input.clone()
        hand_up(step, i, node, d_input)

    def into(step, i, node, d_output, learn=None):
        sums.extend([d_output.clone()] if node.name == "trunk" else [])
        backward(step, i, node, d_output, learn)

    monkeypatch.setattr(TrainingStep, "hand_up", from_child)
    monkeypatch.setattr(TrainingStep, "backward", into)
    net = TreeNet(conv_net, tree={"conv1": members})
    engine_gradients(net, LOSSES["independent"], batch_of(21, members, torch.float32), micro_batches=1)
    level = [terms[child] for child in net.tree.nodes["trunk"].children]
    while len(level) > 1:
        level = [sum(level[i + 1 : i + 2], level[i]) for i in range(0, len(level), 2)]
    assert torch.equal(sums[0], level[0])


def in_any_order(start, rng):
    """Runs tasks one after the other in a random order: `start(spawn)` spawns the first ones."""
    tasks = []
    start(lambda priority, function, *args, wide=False: tasks.append(partial(function, *args)))
    while tasks:
        tasks.pop(rng.randrange(len(tasks)))()


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("name", ["independent", "mcl k=2"])
@pytest.mark.parametrize(
    ("tree", "dtype"), [({"conv1": 4}, torch.float32), ({"conv1": [{"conv2": 3}, 1]}, torch.float64)], ids=str
)
def test_no_bit_depends_on_the_order_in_which_tasks_are_done(name, tree, dtype, pieces):
    net = TreeNet(dropout_net, tree=tree).to(dtype)
    batch = batch_of(50, 4, dtype)
    report, expected = engine_gradients(net, LOSSES[name], batch, micro_batches=5, pieces=pieces)
    engine = ThreadsEngine(net, EngineOptions(2, 1))
    ((outputs, _),) = engine.outputs([lambda: batch])
    engine.close()
    options = EngineOptions(1, 5, pieces=pieces)
    stages = Stages(net, options)
    for seed in range(8):
        net.train()
        gradients, found = stages.gradients(), []

        def start(spawn, gradients=gradients, found=found):
            found.append(TrainingStep(stages, LOSSES[name], batch, 5, 0, spawn, gradients, options))
            found[0].start()

        in_any_order(start, random.Random(seed))
        step = found[0].results.report()
        assert step.loss == report.loss
        assert torch.equal(step.losses, report.losses)
        assert torch.equal(step.assignment, report.assignment)
        for stage in expected:
            assert all(torch.equal(a, b) for a, b in zip(gradients[stage], expected[stage], strict=True))
        net.eval()
        found.clear()

        def evaluate(spawn, found=found):
            found.append(ForwardPass(stages, lambda: batch, 0, spawn, torch.device("cpu")))
            found[0].start()

        in_any_order(evaluate, random.Random(seed))
        assert torch.equal(found[0].outputs, outputs)


class SometimesScaled(nn.Module):
    """Uses its weight for positive inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return x * self.scale if x.mean() > 0 else x


def test_what_no_gradient_reaches_in_a_step_has_none_of_the_step_before():
    net = TreeNet(lambda: nn.Sequential(nn.Flatten(), SometimesScaled(), nn.Linear(5, 2)), members=2)
    engine = ThreadsEngine(net, EngineOptions(1, 2))
    found = []
    for step, sign in enumerate((1, -1, 1)):
        batch = Batch(sign * torch.ones(8, 5), torch.zeros(8, dtype=torch.long), lambda raw, dtype: raw)
        engine.step(step, batch, losses.independent())
        engine.update(lambda stage, gradients: found.append(gradients[0].abs().sum().item()))
    engine.close()
    assert all(size > 0 for size in (*found[:2], *found[4:]))
    assert found[2:4] == [0, 0]


def test_steps_after_an_evaluation_drop_again():
    net = TreeNet(dropout_net, members=2)
    batch = batch_of(32, 2, torch.float32)
    _, expected = engine_gradients(net, losses.independent(), batch, step=1)
    engine = ThreadsEngine(net, EngineOptions(2, 3))
    engine.step(0, batch, losses.independent())
    list(engine.outputs([lambda: batch]))
    engine.step(1, batch, losses.independent())
    found = {}
    engine.update(lambda stage, gradients: found.update({stage: [g.clone() for g in gradients]}))
    engine.close()
    assert all(torch.equal(a, b) for stage in found for a, b in zip(found[stage], expected[stage], strict=True))


def test_workers_use_one_intra_op_thread_and_leave_the_main_thread_alone():
    before = torch.get_num_threads()
    workers = Workers(2)
    seen = []
    for i in range(8):
        workers.spawn((i,), lambda: seen.append(torch.get_num_threads()))
    workers.wait()
    workers.close()
    assert seen == [1] * 8
    assert torch.get_num_threads() == before


def test_threads_set_by_others_later_do_not_reach_the_workers():
    before = torch.get_num_threads()
    workers = Workers(2)
    try:
        torch.set_num_threads(before + 1)  # before the workers' first operation
        seen = []
        for i in range(8):
            workers.spawn((i,), lambda: seen.append((torch.ones(8).sum().item(), torch.get_num_threads())))
        workers.wait()
        assert seen == [(8.0, 1)] * 8
        other = []
        thread = threading.Thread(target=lambda: other.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert other == [before + 1]
    finally:
        workers.close()
        torch.set_num_threads(before)


def test_wide_tasks_run_on_the_thread_that_waits_and_their_errors_end_the_wait():
    before, here = torch.get_num_threads(), threading.current_thread()
    workers = Workers(2)
    seen = []

    def note(left):
        seen.append((threading.current_thread() is here, torch.get_num_threads()))
        if left:
            workers.spawn((0,), note, left - 1, wide=left % 2 == 1)

    try:
        torch.set_num_threads(3)
        workers.spawn((0,), note, 6, wide=True)
        workers.wait()
        assert all(is_here for is_here, _ in seen[::2])  # the others may run on any thread
        assert [count for _, count in seen] == [1] * 7
        assert torch.get_num_threads() == 3
        workers.spawn((0,), (lambda: 1 / 0), wide=True)
        workers.spawn((1,), note, 0, wide=True)  # dropped: it might depend on the one that fails
        with pytest.raises(ZeroDivisionError):
            workers.wait()
        assert len(seen) == 7 and torch.get_num_threads() == 3
        workers.spawn((0,), note, 0)
        workers.wait()
        assert len(seen) == 8
    finally:
        workers.close()
        torch.set_num_threads(before)


class Counts(nn.Identity):
    """Notes how many threads an operation has here, forward and backward."""

    seen: ClassVar[dict[str, set[int]]] = {}

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        self.seen.setdefault(self.name, set()).add(torch.get_num_threads())
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda d: self.seen[f"{self.name} back"].add(torch.get_num_threads()))
        return y


@pytest.mark.parametrize(
    ("tree", "trunk", "branch"), [({"norm": 3}, 2, 1), (1, 2, 2), (2, 1, 1)], ids=["trunk", "single", "independent"]
)
def test_a_stage_of_whole_batches_that_has_the_machine_to_itself_gets_two_threads(tree, trunk, branch):
    def network():
        above = OrderedDict(up=Counts("up"), conv=nn.Conv2d(2, 4, 3), norm=nn.BatchNorm2d(4))
        return nn.Sequential(OrderedDict(above, flatten=nn.Flatten(), fc=nn.Linear(64, 5), down=Counts("down")))

    Counts.seen = {f"{name}{way}": set() for name in ("up", "down") for way in ("", " back")}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        engine_gradients(
            TreeNet(network, tree=tree), losses.independent(), batch_of(16, 2, torch.float32), micro_batches=1
        )
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert Counts.seen["up"] == {trunk}
    assert Counts.seen["down"] == Counts.seen["down back"] == {branch}
    assert later == [3]


def test_steps_work_under_no_grad_of_the_main_thread_and_evaluation_keeps_no_graph():
    net = TreeNet(conv_net, members=2)
    with torch.no_grad():
        _, gradients = engine_gradients(net, losses.mcl(), batch_of(16, 2, torch.float32))
    assert all(g.abs().sum() > 0 for g in gradients["0"])
    engine = ThreadsEngine(net, EngineOptions(2, 1))
    batch = batch_of(16, 2, torch.float32)
    ((outputs, targets),) = engine.outputs([lambda: batch])
    engine.close()
    assert not outputs.requires_grad
    assert torch.equal(targets, batch.targets)


def test_strides_of_the_input_do_not_change_bits():
    def one_channel():
        return conv_net(1)

    results = []
    for strides in ((36, 36, 6, 1), (36, 1, 6, 1)):
        net = TreeNet(one_channel, members=1)
        batch = batch_of(16, 1, torch.float32, channels=1)
        x = torch.empty_strided(batch.inputs.shape, strides).copy_(batch.inputs)
        given = Batch(x, batch.targets, lambda raw, dtype: raw, ties=batch.ties)
        results.append(engine_gradients(net, losses.independent(), given)[1]["trunk"])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_row_counts_follow_from_sizes_alone():
    assert cuts(10, 3) == [(0, 4), (4, 7), (7, 10)]
    net = TreeNet(conv_net, members=1)
    assert auto_micro_batches(350, net) == auto_micro_batches(350, TreeNet(conv_net, members=8))
    assert [auto_micro_batches(b, net) for b in (8, 32, 64, 100, 128, 256, 350, 1000)] == [1, 1, 1, 1, 2, 4, 4, 16]


@given(st.integers(1, 500), st.integers(1, 40))
def test_cuts_cover_every_row_once(rows, parts):
    slices = cuts(rows, parts)
    assert [i for start, stop in slices for i in range(start, stop)] == list(range(rows))
    sizes = [stop - start for start, stop in slices]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # the larger ones first: where a batch is cut decides bits


@given(st.integers(1, 20), st.permutations(range(20)))
@settings(deadline=None)
def test_pairwise_sum_has_the_same_bits_in_any_order(n, order):
    terms = [torch.from_numpy(np.random.Philox(i).random_raw(5).astype(np.float32)) for i in range(n)]

    def total(indices):
        pairwise = PairwiseSum(n)
        for i in indices:
            total = pairwise.add(i, [terms[i].clone(), None])
        return total[range(n)]

    first = total(range(n))
    again = total([i for i in order if i < n])
    assert torch.equal(first[0], again[0])
    assert again[1] is None
    expected = [t.clone() for t in terms]  # level by level, neighbours first
    while len(expected) > 1:
        expected = [sum(expected[i + 1 : i + 2], expected[i]) for i in range(0, len(expected), 2)]
    assert torch.equal(first[0], expected[0])


def test_pairwise_sum_takes_a_missing_term_for_zero():
    pairwise = PairwiseSum(3)
    totals = [pairwise.add(i, [term]) for i, term in enumerate([None, torch.ones(2), None])]
    assert totals[:2] == [None, None]
    assert totals[2][range(3)][0].tolist() == [1, 1]


def test_dropout_masks_depend_on_the_key_and_not_on_the_neighbours():
    layer = Dropout(0.5)
    x = torch.ones(40, 6)
    with keyed_masks((0, "a"), 40):
        first, second = layer(x), layer(x)
    with keyed_masks((0, "a"), 40):
        again = layer(x)
    rows = torch.tensor([3, 17, 39])
    with keyed_masks((0, "a"), 40, rows):
        some = layer(x[rows])
    with keyed_masks((1, "a"), 40):
        other = layer(x)
    assert torch.equal(first, again)
    assert torch.equal(first[rows], some)
    assert not torch.equal(first, second)  # two layers, two masks
    assert not torch.equal(first, other)
    assert set(first.unique().tolist()) == {0.0, 2.0}


def test_dropout_differs_between_branches_and_steps_and_is_off_in_evaluation():
    net = TreeNet(dropout_net, members=2, init="same")
    batch = batch_of(32, 2, torch.float32)
    _, first = engine_gradients(net, losses.independent(), batch, step=0)
    _, again = engine_gradients(net, losses.independent(), batch, step=0)
    _, later = engine_gradients(net, losses.independent(), batch, step=1)
    assert torch.equal(first["0"][0], again["0"][0])
    assert not torch.equal(first["0"][0], first["1"][0])
    assert not torch.equal(first["0"][0], later["0"][0])
    engine = ThreadsEngine(net, EngineOptions(2, 1))
    (one, _), (two, _) = engine.outputs([lambda: batch, lambda: batch])
    engine.close()
    assert torch.equal(one, two)


def test_every_part_of_its_key_gives_dropout_another_mask():
    """Seed, step, micro-batch, stage and the number of the layer; each micro-batch has the same rows of ones."""

    def masks(seed, step):
        net = TreeNet(lambda: nn.Sequential(nn.Linear(30, 30), Dropout(), Dropout(), nn.Linear(30, 2)), tree={"0": 2})
        seen = {}

        def look(layer, key):
            layer.register_forward_hook(lambda m, args, y: seen.setdefault(key, []).append((y / args[0]).nan_to_num()))

        for stage in net.stages:
            for i, layer in enumerate(m for m in net.stage(stage).modules() if isinstance(m, Dropout)):
                look(layer, (stage, i))
        nn.init.ones_(net.stage("trunk")[0].bias)
        nn.init.zeros_(net.stage("trunk")[0].weight)
        x, y = torch.ones(12, 30), torch.zeros(12, dtype=torch.long)
        engine = ThreadsEngine(net, EngineOptions(1, 3, seed))  # one worker: micro-batches come in order
        engine.step(step, Batch(x, y, lambda raw, dtype: raw), losses.independent())
        engine.close()
        return [mask for found in seen.values() for mask in found]

    found = [*masks(0, 0), *masks(0, 1), *masks(1, 0)]
    assert len(found) == 3 * 2 * 2 * 3
    assert all(set(mask.unique().tolist()) <= {0.0, 2.0} for mask in found)
    # Of the second layer, only where the first dropped nothing.
    pairs = [(a, b) for i, a in enumerate(found) for b in found[:i]]
    assert not any(torch.equal(a, b) for a, b in pairs)


def test_channelwise_dropout_drops_whole_channels():
    with keyed_masks((0,), 8):
        y = Dropout(0.5, channelwise=True)(torch.ones(8, 16, 3, 3))
    per_channel = y.flatten(2)
    assert (per_channel == per_channel[..., :1]).all()
    assert 0 < (per_channel[..., 0] == 0).float().mean() < 1


def test_outside_an_engine_dropout_is_torchs_own():
    torch.manual_seed(0)
    ours = Dropout(0.5)(torch.ones(100))
    torch.manual_seed(0)
    assert torch.equal(ours, nn.functional.dropout(torch.ones(100), 0.5))
    assert torch.equal(Dropout(0.5).eval()(torch.ones(3)), torch.ones(3))


def norm_net() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(2, 4, 3, padding=1), norm=nn.BatchNorm2d(4), flatten=nn.Flatten(), fc=nn.Linear(144, 5)
        )
    )


def test_batch_statistics_need_the_whole_batch_and_are_then_exact():
    net = TreeNet(norm_net, members=2).double()
    assert auto_micro_batches(350, net) == 1
    with pytest.raises(UserError, match=r"0\.norm.*micro_batches=1"):
        ThreadsEngine(net, EngineOptions(1, 2))
    reference = TreeNet(norm_net, members=2).double()
    batch = batch_of(24, 2)
    _, got = engine_gradients(net, losses.mcl(), batch, micro_batches=1)
    _, expected = plain_gradients(reference, losses.mcl(), batch)
    assert_same_gradients(got, expected)
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(buffer, dict(reference.named_buffers())[name])


def two_norms() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(2, 4, 3, padding=1),
            norm1=nn.BatchNorm2d(4),
            conv2=nn.Conv2d(4, 4, 3, padding=1),
            norm2=nn.BatchNorm2d(4),
            flatten=nn.Flatten(),
            drop=nn.Dropout(0.0),
            fc=nn.Linear(144, 5),
        )
    )


@pytest.mark.parametrize("tree", [3, {"conv1": 3}, {"norm1": 3}])
@pytest.mark.parametrize("name", ["independent", "mcl k=2"])
def test_statistics_of_a_members_own_stage_are_those_of_the_rows_that_it_learns_from(tree, name):
    net, reference = (TreeNet(two_norms, tree=tree).double().train() for _ in range(2))
    sample_weights = torch.zeros(3, 26, dtype=torch.float64)
    sample_weights[0, ::2] = 2  # an odd number of rows, in each half too
    sample_weights[1] = 1
    sample_weights[2, [3, 5, 9, 14, 20, 25]] = 4
    batch = batch_of(26, 3, sample_weights=sample_weights)
    _, got = engine_gradients(net, LOSSES[name], batch, micro_batches=1, accumulate=2)
    for start, stop in cuts(26, 2):
        part = batch.cut(start, stop)
        given = {None: part.inputs}
        for node in reference.tree.nodes.values():
            stage, h = reference.stage(node.name), given[node.parent]
            seen = part.sample_weights[node.members[0]] > 0
            if node.children:
                given[node.name] = stage(h)
            else:
                given[node.name] = torch.zeros(len(part), 5, dtype=h.dtype).index_put((seen,), stage(h[seen]))
        outputs = torch.stack([given[leaf.name] for leaf in reference.tree.leaves])
        (LOSSES[name](outputs, part.targets, part.sample_weights, part.ties).total / 26).backward()
    assert_same_gradients(got, {n: [p.grad for p in s.parameters()] for n, s in reference.stages.items()}, rtol=1e-11)
    for buffer, expected in zip(net.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seen", [0, 1])
def test_a_member_with_fewer_than_two_rows_takes_the_statistics_of_the_batch(seen):
    net, reference = (TreeNet(two_norms, members=2).double().train() for _ in range(2))
    sample_weights = torch.ones(2, 12, dtype=torch.float64)
    sample_weights[1, seen:] = 0
    batch = batch_of(12, 2, sample_weights=sample_weights)
    _, got = engine_gradients(net, losses.independent(), batch, micro_batches=1)
    _, expected = plain_gradients(reference, losses.independent(), batch)
    assert_same_gradients(got, expected)


def test_running_statistics_are_updated_in_order_when_batches_accumulate():
    nets = [TreeNet(norm_net, members=2) for _ in range(2)]
    batch = batch_of(48, 2, torch.float32)
    for net, workers in zip(nets, (1, 4), strict=True):
        engine_gradients(net, losses.independent(), batch, micro_batches=1, workers=workers, accumulate=4)
    states = [net.state_dict() for net in nets]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert states[0]["stages.0.norm.num_batches_tracked"] == 4


def test_evaluation_does_not_touch_running_statistics():
    net = TreeNet(norm_net, members=1)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    batch = batch_of(8, 1, torch.float32)
    engine = ThreadsEngine(net, EngineOptions(2, 1))
    list(engine.outputs([lambda: batch]))
    engine.close()
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_frozen_layers_get_no_gradient_and_the_rest_is_unchanged():
    net = TreeNet(conv_net, members=2, split="conv1").double()
    for parameter in net.stage("trunk").parameters():
        parameter.requires_grad_(False)
    _, got = engine_gradients(net, losses.independent(), batch_of(20, 2))
    assert got["trunk"] == []
    assert len(got["conv1/0"]) == 4


@pytest.mark.parametrize("frozen", ["conv1/0", "conv1/0/conv2/0", "conv1/1"])
def test_gradients_go_through_a_frozen_stage_to_one_that_learns(frozen):
    net = TreeNet(conv_net, tree=TREES["nested"]).double()
    for parameter in net.stage(frozen).parameters():
        parameter.requires_grad_(False)
    batch = batch_of(20, 3)
    _, got = engine_gradients(net, losses.independent(), batch)
    _, expected = plain_gradients(net, losses.independent(), batch)
    assert got.pop(frozen) == []
    del expected[frozen]
    assert_same_gradients(got, expected)


def test_what_was_queued_when_a_task_failed_is_not_run():
    workers = Workers(1)
    queued, ran = threading.Event(), []

    def fail():
        queued.wait(60)
        raise ValueError("no")

    workers.spawn((0,), fail)
    for i in range(3):
        workers.spawn((1,), ran.append, i)
    queued.set()
    with pytest.raises(ValueError, match="no"):
        workers.wait()
    workers.spawn((0,), ran.append, "next")
    workers.wait()
    workers.close()
    assert ran == ["next"]


def test_an_evaluation_that_is_left_has_ended():
    engine = ThreadsEngine(TreeNet(conv_net, members=2), EngineOptions(2, 1))
    batch, begun, ended = batch_of(8, 2, torch.float32), [], []

    def read():
        begun.append(1)
        time.sleep(0.05)  # as a slow disk would
        ended.append(1)
        return batch

    found = engine.outputs([read] * 30)
    next(found)
    found.close()
    assert len(begun) == len(ended) < 30
    engine.close()


def test_error_in_a_task_reaches_the_caller_and_the_engine_lives_on():
    net = TreeNet(conv_net, members=2)
    engine = ThreadsEngine(net, EngineOptions(2, 2))
    bad = batch_of(16, 2, torch.float32)
    bad = Batch(bad.inputs[:, :1], bad.targets, bad.preprocess, ties=bad.ties)
    with pytest.raises(RuntimeError, match="channels"):
        engine.step(0, bad, losses.independent())
    good = batch_of(16, 2, torch.float32)
    assert np.isfinite(engine.step(0, good, losses.independent()).loss)
    engine.close()


def test_outputs_of_the_engine_equal_the_members():
    net = TreeNet(dropout_net, tree={"conv1": [{"conv2": 2}, 1]}).double()
    batches = [batch_of(rows, 3, seed=rows) for rows in (8, 8, 3)]
    engine = ThreadsEngine(net, EngineOptions(2, 2))
    found = list(engine.outputs([lambda b=b: b for b in batches]))
    engine.close()
    for (outputs, targets), batch in zip(found, batches, strict=True):
        assert torch.equal(targets, batch.targets)
        for m in range(3):
            torch.testing.assert_close(outputs[m], net.member(m)(batch.inputs), rtol=1e-12, atol=1e-12)


def test_evaluation_may_be_left_before_its_end_or_fail_and_the_engine_lives_on():
    net = TreeNet(conv_net, members=2)
    engine = ThreadsEngine(net, EngineOptions(2, 1))
    batch = batch_of(8, 2, torch.float32)

    def broken():
        raise ValueError("no such image")

    for _ in engine.outputs([lambda: batch] * 30):
        break
    with pytest.raises(ValueError, match="no such image"):
        list(engine.outputs([lambda: batch] * 3 + [broken] + [lambda: batch] * 9))
    assert len(list(engine.outputs([lambda: batch] * 30))) == 30
    engine.close()


def test_members_may_give_more_than_scores():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores, self.boxes = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x):
            return {"scores": self.scores(x), "boxes": self.boxes(x)}

    def both(outputs, y, sample_weights, ties):
        value = losses.independent()(outputs["scores"], y, sample_weights, ties)
        total = value.total + outputs["boxes"].square().sum()
        return losses.LossValue(total, value.assignment, value.losses)

    def factory():
        return nn.Sequential(OrderedDict(a=nn.Linear(6, 4), two=Two()))

    for separable in (True, False):
        net = TreeNet(factory, members=2, split="a").double()
        x, y = torch.randn(20, 6, dtype=torch.float64), torch.randint(3, (20,))
        loss = losses.Loss("both", both, separable=separable)
        _, got = engine_gradients(net, loss, Batch(x, y, lambda raw, dtype: raw.to(dtype)))
        value = loss(net(x), y)
        (value.total / 20).backward()
        assert_same_gradients(got, {n: [p.grad for p in s.parameters()] for n, s in net.stages.items()})


def test_rows_pad_to_multiples_and_come_back_in_place():
    mask = torch.zeros(40, dtype=torch.bool)
    mask[[3, 9, 30]] = True
    rows = Rows.where(mask)
    assert len(rows.index) == 4
    assert rows.count == 3
    x = torch.randn(40, 5)
    back = rows.put(rows.take(x))
    assert torch.equal(back[mask], x[mask])
    assert back[~mask].abs().sum() == 0
    assert rows.take_gradient(x)[3:].abs().sum() == 0
    assert Rows.where(torch.ones(40, dtype=torch.bool)) is None
    assert len(Rows.where(torch.zeros(40, dtype=torch.bool)).index) == 4


@pytest.mark.parametrize("kind", [SlicedTape, RecomputingTape])
def test_a_tape_frees_its_input_after_backward(kind):
    x = torch.randn(4, 2, 6, 6)
    kept = weakref.ref(x)
    tape = kind(
        StageFacts.of(TreeNet(conv_net, members=1).stage("trunk")), x, Context((0,), 4, {}, input_gradient=True)
    )
    del x
    assert kept() is not None
    d_input, gradients = tape.backward(torch.ones(4, 5))
    assert d_input.shape == (4, 2, 6, 6)
    assert len(gradients) == 6
    assert kept() is None


class Doubled(torch.autograd.Function):
    """Its part of the graph holds a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return 2 * x

    @staticmethod
    def backward(ctx, d_y):
        return 2 * d_y, None


def test_a_tape_frees_its_graph_after_backward():
    factor = nn.Module()
    kept = weakref.ref(factor)

    class Double(nn.Module):
        def forward(self, x):
            return Doubled.apply(x, kept())

    stage = SequentialStage(OrderedDict(fc=nn.Linear(3, 5), twice=Double()))
    tape = AutogradTape(StageFacts.of(stage), torch.randn(4, 3), Context((0,), 4, {}, input_gradient=True))
    del factor
    assert kept() is not None
    _, gradients = tape.backward(torch.ones(4, 5))
    assert torch.equal(gradients[1], torch.full((5,), 8.0))
    assert kept() is None


class OfTwo(nn.Module):
    """[B, 4] -> [B, 4] by weights that are a base plus what `join` makes of two parameters.

    The gradients of these are views of the base's, the second one of them not at its beginning.
    """

    def __init__(self, join, first=(2, 4), second=(2, 4)):
        super().__init__()
        self.base = nn.Parameter(torch.randn(4, 4))
        self.first, self.second = nn.Parameter(torch.randn(first)), nn.Parameter(torch.randn(second))
        self.join = join

    def forward(self, x):
        return x @ (self.base + self.join(self.first, self.second))


class Shift(nn.Module):
    """With a micro-batch of one row, the gradient of the shift is that of the input: one tensor."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, 4))

    def forward(self, x):
        return x + self.shift


class GradientOf(torch.autograd.Function):
    """x + p, with a fixed tensor's memory for the gradient of p."""

    @staticmethod
    def forward(ctx, x, p, fixed):
        ctx.fixed = fixed
        return x + p

    @staticmethod
    def backward(ctx, d):
        return d, ctx.fixed[:], None


class Custom(nn.Module):
    """A backward that gives a view of the layer's own weights, or of its buffer, for a gradient."""

    def __init__(self, of):
        super().__init__()
        self.p, self.weight = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.register_buffer("constant", torch.randn(4))
        self.of = of

    def forward(self, x):
        return GradientOf.apply(x, self.p, getattr(self, self.of).detach()) * self.weight


OVERLAPPING = {
    "one gradient for two": lambda: OfTwo(lambda a, b: a + b, (4, 4), (4, 4)),
    "no strides": lambda: OfTwo(lambda a, b: a * b.sum(), (4, 4), (3,)),
    "cat": lambda: OfTwo(lambda a, b: torch.cat([a, b])),
    "cat of columns": lambda: OfTwo(lambda a, b: torch.cat([a, b], 1), (4, 1), (4, 3)),
    "stack": lambda: OfTwo(lambda a, b: torch.stack([a, b], 1).flatten(0, 1)),
    "cat of one twice": lambda: OfTwo(lambda a, b: torch.cat([a, b, a]), (1, 4), (2, 4)),
    "a part": lambda: OfTwo(lambda a, b: nn.functional.pad(a, (0, 0, 1, 1)) + b, (2, 4), (4, 4)),
    "hstack of a transpose": lambda: OfTwo(lambda a, b: torch.hstack([a.t(), b]), (2, 4), (4, 2)),
    "the gradient of the input": Shift,
    "a parameter": lambda: Custom("weight"),
    "a buffer": lambda: Custom("constant"),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_gradients_that_share_memory_are_summed_apart(name):
    micro_batches = 5  # two pairs, the sum of both, and one left over

    def factory():
        return nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=OVERLAPPING[name](), c=nn.Tanh(), d=OVERLAPPING[name]()))

    net = TreeNet(factory, members=2, split="a").double()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.randint(4, (12,))
    batch = Batch(x, y, lambda raw, dtype: raw.to(dtype), ties=torch.rand(2, 12))
    for loss in (losses.independent(), losses.mcl(k=1)):
        _, got = engine_gradients(net, loss, batch, micro_batches=micro_batches)
        assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
        if name in ("a parameter", "a buffer"):  # the made-up gradient of p is not that of any function
            for layer in ("b", "d"):
                fixed = getattr(net.member(0).get_submodule(layer), net.member(0).get_submodule(layer).of)
                index = [n for n, _ in net.stage("a/0").named_parameters()].index(f"{layer}.p")
                torch.testing.assert_close(got["a/0"][index], micro_batches * fixed)
            continue
        _, expected = plain_gradients(net, loss, batch)
        assert_same_gradients(got, expected, rtol=1e-12)


def test_sparse_gradients_are_summed_as_others():
    def factory(sparse=True):
        return nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Flatten(), nn.Linear(20, 5))

    net, dense = (TreeNet(lambda s=s: factory(s), members=2, split="0").double() for s in (True, False))
    batch = Batch(torch.randint(9, (30, 5)), torch.randint(5, (30,)), lambda raw, dtype: raw)
    net.probe(batch.inputs[:2])
    _, got = engine_gradients(net, losses.independent(), batch)
    value = losses.independent()(dense(batch.inputs), batch.targets)
    (value.total / 30).backward()
    assert_same_gradients(got, {n: [p.grad for p in s.parameters()] for n, s in dense.stages.items()})


def test_layers_that_work_in_place_do_not_reach_their_siblings():
    def factory():
        return nn.Sequential(
            OrderedDict(a=nn.Linear(6, 6), drop=nn.Dropout(0.0), act=nn.LeakyReLU(0.1, inplace=True), b=nn.Linear(6, 3))
        )

    net = TreeNet(factory, members=3, split="a").double()
    x, y = torch.randn(20, 6, dtype=torch.float64), torch.randint(3, (20,))
    batch = Batch(x, y, lambda raw, dtype: raw.to(dtype), ties=torch.rand(3, 20))
    for loss in (losses.independent(), losses.mcl(k=1)):
        _, got = engine_gradients(net, loss, batch)
        _, expected = plain_gradients(net, loss, batch)
        assert_same_gradients(got, expected)
    for m in range(3):
        torch.testing.assert_close(net(x)[m], net.member(m)(x))


@pytest.mark.parametrize("name", ["independent", "mcl k=1"])
def test_side_inputs_are_cut_with_the_rows_and_stay_with_them(name):
    class Shift(nn.Module):
        takes = "shift"

        def forward(self, x, shift):
            return x + shift

    net = TreeNet(
        lambda: nn.Sequential(OrderedDict(a=nn.Linear(6, 5), s=Shift(), b=nn.Linear(5, 3))), members=4
    ).double()
    x, y, shift = (
        torch.randn(40, 6, dtype=torch.float64),
        torch.randint(3, (40,)),
        torch.randn(40, 5, dtype=torch.float64),
    )
    sample_weights = (torch.rand(4, 40) > 0.3).double()
    batch = Batch(x, y, lambda raw, dtype: raw.to(dtype), sample_weights, torch.rand(4, 40), {"shift": shift})
    _, got = engine_gradients(net, LOSSES[name], batch)
    value = LOSSES[name](net(x, {"shift": shift}), y, sample_weights, batch.ties)
    (value.total / 40).backward()
    assert_same_gradients(got, {n: [p.grad for p in s.parameters()] for n, s in net.stages.items()})


def test_a_learned_table_beside_the_rows_is_not_joined_by_pieces():
    """A trunk that gives rows and ten queries: two pieces would give branches twenty."""

    class Queries(nn.Module):
        takes = "shift"

        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(10, 5))

        def forward(self, x, shift):
            return x + shift, self.table

    class Attend(nn.Module):
        def forward(self, pair):
            return pair[0] @ pair[1].t()

    net = TreeNet(lambda: nn.Sequential(OrderedDict(a=Queries(), b=Attend(), c=nn.Linear(10, 3))), members=2, split="a")
    ThreadsEngine(net, EngineOptions(1, 2)).close()
    with pytest.raises(UserError, match=r"shared_micro_batches is 4, .* side inputs \(shift\)"):
        ThreadsEngine(net, EngineOptions(1, 2, pieces=2))


def test_pieces_carry_the_inputs_and_micro_batches_what_the_loss_needs(monkeypatch):
    """So an accelerator gets each example once."""
    sent = []

    def to(self, device):
        sent.append(0 if self.inputs is None else len(self.inputs))
        return self

    monkeypatch.setattr(Batch, "to", to)
    net = TreeNet(conv_net, tree=TREES["split"]).double()
    engine_gradients(net, LOSSES["mcl k=1"], batch_of(24, 3), workers=1, micro_batches=2, pieces=3)
    assert sorted(sent) == [0, 0] + [4] * 6


def test_sequences_of_vectors_train_too():
    def factory():
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))

    net = TreeNet(factory, members=2).double()
    x, y = torch.randn(20, 3, 4, dtype=torch.float64), torch.randint(3, (20,))
    batch = Batch(x, y, lambda raw, dtype: raw.to(dtype))
    _, got = engine_gradients(net, losses.independent(), batch)
    _, expected = plain_gradients(net, losses.independent(), batch)
    assert_same_gradients(got, expected)


def test_hooks_on_weights_and_blocks_are_heard():
    def factory():
        return nn.Sequential(OrderedDict(block=nn.Sequential(nn.Linear(4, 4), nn.ReLU()), out=nn.Linear(4, 3)))

    net = TreeNet(factory, members=1)
    net.member(0).out.weight.register_hook(lambda gradient: gradient * 0)
    calls = []
    net.member(0).block.register_forward_hook(lambda module, args, output: calls.append(1))
    batch = Batch(torch.randn(8, 4), torch.randint(3, (8,)), lambda raw, dtype: raw.to(dtype))
    _, got = engine_gradients(net, losses.independent(), batch, micro_batches=2)
    assert calls == [1, 1]
    assert got["trunk"][2].abs().sum() == 0


def test_threads_and_cuts_follow_the_cores_that_a_run_is_made_for():
    single, four = TreeNet(norm_net, members=1), TreeNet(norm_net, members=4)
    tree = TreeNet(norm_net, members=4, split="conv1")
    assert [set(threads_of(net, 2).values()) for net in (single, four)] == [{2}, {1}]
    assert [set(threads_of(net, 16).values()) for net in (single, four)] == [{16}, {4}]
    assert threads_of(tree, 2) == {"trunk": 2} | {name: 1 for name in tree.tree.nodes if name != "trunk"}
    assert set(list(threads_of(tree, 16).values())[1:]) == {4}
    assert set(threads_of(TreeNet(conv_net, members=1), 64).values()) == {1}

    plain, shared = TreeNet(conv_net, members=4), TreeNet(conv_net, members=4, split="conv1")
    assert [auto_micro_batches(350, net) for net in (plain, shared)] == [4, 4]
    assert [auto_micro_batches(350, net, 16) for net in (plain, shared)] == [4, 16]
    assert [auto_micro_batches(350, net, 64) for net in (plain, shared)] == [16, 16]  # of at least 16 rows
    assert auto_micro_batches(8, shared, 64) == 1
    assert auto_micro_batches(350, single, 64) == 1


@pytest.mark.parametrize("factory", [conv_net, norm_net])
def test_more_workers_and_threads_than_there_are_cores_give_the_same_bits(factory):
    net = TreeNet(factory, members=3, split="conv1")
    batch, found = batch_of(40, 3, torch.float32), []
    state = copy.deepcopy(net.state_dict())
    for workers in (1, 2, 16):
        net.load_state_dict(state)
        parts = auto_micro_batches(40, net, 16)
        engine = ThreadsEngine(net, EngineOptions(workers, parts, cores=16))
        engine.step(0, batch, losses.mcl(k=1))
        found.append([g.clone() for gradients in engine.gradients.values() for g in gradients])
        engine.close()
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
