"""Stacked stages: those of stages side by side but for rounding, and the same bits for workers, ranks and kills."""

import re
import signal
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.commands import assert_same_run, process, ranks
from torch import nn

import mheads
from mheads import TreeNet, UserError, losses
from mheads.data.batches import Batch
from mheads.data.preprocessing import Preprocess
from mheads.engine.diagnostics import gradient_norms
from mheads.engine.engine_options import EngineOptions
from mheads.engine.stacked_layers import find_layers, run
from mheads.engine.stacked_stages import (
    MOST,
    PER_THREAD,
    StackedStage,
    repeat_for,
    siblings_to_stack,
    stack_threads,
)
from mheads.engine.threads import ThreadsEngine
from mheads.networks.dropout import Dropout
from mheads.optim.optim_section import OptimOptions
from mheads.optim.stage_updates import Optimizer
from mheads.runs.folder import RunFolder

TRAIN = ["diabetes", "members=5", "loss=mcl", "loss.k=2", "sampling=bagging",
         "optim.batch_size=40", "optim.iterations=9", "log.every=3", "log.checkpoint_every=3"]  # fmt: skip
APART = {"fc1": [1, {"fc2": 2}, 1]}  # members 0 and 3 are siblings, and the outputs of 1 and 2 are between theirs
LOSSES = {"independent": losses.independent(), "mcl": losses.mcl(k=2), "mean": losses.score_averaged()}


def network(norm=nn.LayerNorm) -> nn.Module:
    """Every kind of layer that is stacked."""
    return nn.Sequential(
        OrderedDict(
            fc1=nn.Linear(8, 16),
            relu=nn.ReLU(),
            fc2=nn.Linear(16, 16),
            norm=norm(16),
            gelu=nn.GELU(),
            drop=Dropout(0.2),
            fc3=nn.Linear(16, 3),
        )
    )


def examples(members: int, rows: int = 48) -> Batch:
    generator = torch.Generator().manual_seed(3)
    weights = torch.randint(0, 3, (members, rows), generator=generator).float()
    x, y = torch.randn(rows, 8, generator=generator), torch.randint(3, (rows,), generator=generator)
    ties = torch.rand(members, rows, generator=generator)
    return Batch(x, y, Preprocess(), sample_weights=weights, ties=ties)


def train(
    loss, *, stacked, split=None, workers=2, precision=torch.float32, name="adamw", dtype=torch.float32,
    norm=nn.LayerNorm,
):  # fmt: skip
    """Weights, optimizer state, outputs, losses and gradient norms of four members after three steps."""
    net = TreeNet(lambda: network(norm).to(dtype), members=4, split=split)
    groups = siblings_to_stack(net, 48, "always") if stacked else []
    options = EngineOptions(workers, 1, precision=precision, stacked=tuple(tuple(n.name for n in g) for g in groups))
    engine, batch = ThreadsEngine(net, options), examples(4)
    if loss.averaged:
        batch = replace(batch, sample_weights=None)
    optimizer = Optimizer(net, OptimOptions.model_validate({"name": name, "lr": 0.01}), engine.stacks)
    optimizer.set_rate(0.01)
    reports = []
    for step in range(3):
        reports.append(engine.step(step, batch, loss).loss)
        norms = gradient_norms(engine)
        engine.update(optimizer.update)
    ((outputs, _),) = engine.outputs([lambda: batch])
    tensors = {**net.state_dict(), **{f"optim {k}": t for k, t in optimizer.state().items()}}
    tensors |= {"outputs": outputs, "losses": torch.tensor(reports)} | {f"norm {k}": t for k, t in norms.items()}
    engine.close()
    return {key: tensor.clone() for key, tensor in tensors.items()}


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize("split", [None, "fc2", APART])
@pytest.mark.parametrize("loss", LOSSES)
def test_stacked_stages_learn_what_stages_side_by_side_learn(loss, split, norm):
    """By sample weights, a quarter of which is 0, where the loss takes them."""
    options = {"split": split, "dtype": torch.float64, "name": "sgd", "norm": norm}
    apart, stacked = (train(LOSSES[loss], stacked=s, **options) for s in (False, True))
    assert apart.keys() == stacked.keys()
    for key in apart:
        torch.testing.assert_close(stacked[key], apart[key], rtol=1e-8, atol=1e-10, msg=key)


def test_a_separable_loss_of_ones_own_gets_one_member_at_a_time_and_its_total_is_logged():
    def bounded(outputs, y, sample_weights, ties):
        assert len(outputs) == 1
        found = losses.cross_entropies(outputs, y)
        return losses.LossValue((found + outputs.square().sum(-1)).sum(), torch.ones_like(found), found)

    loss = losses.Loss("bounded", bounded, separable=True)
    apart, stacked = (train(loss, stacked=s, dtype=torch.float64, name="sgd") for s in (False, True))
    for key in apart:
        torch.testing.assert_close(stacked[key], apart[key], rtol=1e-8, atol=1e-10, msg=key)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", [None, "fc2"])
@pytest.mark.parametrize("loss", ["independent", "mcl"])
def test_no_bit_depends_on_the_number_of_workers(loss, split, precision, norm):
    options = {"stacked": True, "split": split, "precision": precision, "norm": norm}
    one, three = (train(LOSSES[loss], workers=n, **options) for n in (1, 3))
    assert all(torch.equal(one[key], three[key]) for key in one)


def test_in_bf16_products_are_rounded():
    exact, rounded = (train(LOSSES["mcl"], stacked=True, precision=p) for p in (torch.float32, torch.bfloat16))
    difference = (exact["outputs"] - rounded["outputs"]).abs().max()
    assert 1e-4 < difference < 0.3
    assert rounded["outputs"].dtype == torch.float32


def test_many_micro_batches_share_a_stack_on_many_threads():
    """functional_call puts tensors into a module while it runs: threads must not meet in one module."""
    net = TreeNet(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), members=3)
    names = tuple(leaf.name for leaf in net.tree.leaves)
    gradients = []
    for workers in (1, 4):
        engine = ThreadsEngine(net, EngineOptions(workers, 16, stacked=(names,)))
        for step in range(20):
            engine.step(step, examples(3), losses.mcl(k=1))
        gradients.append([g.clone() for g in engine.gradients[names[0]]])
        engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_closed_engine_gives_stages_tensors_of_their_own():
    net = TreeNet(network, members=3)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    names = tuple(leaf.name for leaf in net.tree.leaves)
    engine = ThreadsEngine(net, EngineOptions(1, 1, stacked=(names,)))
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    storages = {t.untyped_storage().data_ptr() for t in net.state_dict().values()}
    assert len(storages) < len(before)
    engine.close()
    assert len({t.untyped_storage().data_ptr() for t in net.state_dict().values()}) == len(before)


def test_the_rule_is_about_layers_and_sizes():
    def small():
        return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))

    def large():
        return nn.Sequential(nn.Linear(2000, 1000), nn.ReLU(), nn.Linear(1000, 1))

    def images():
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 1))

    def stack(factory, members, mode="auto"):
        return [len(group) for group in siblings_to_stack(TreeNet(factory, members=members), 256, mode)]

    assert stack(small, 16) == [16]
    assert stack(large, 4) == stack(images, 4) == stack(small, 1) == stack(small, 4, "never") == []
    assert stack(large, 4, "always") == stack(images, 4, "always") == [4]
    net = TreeNet(small, members=16)
    assert [stack_threads(net, [list(net.tree.nodes)], rows, 2) for rows in (8, 256, 2560)] == [1, 1, 2]
    assert stack_threads(net, [list(net.tree.nodes)], 2560, 16) == 16 * 2560 * 576 // PER_THREAD == 5
    sizes = stack(small, 2 * MOST + 1)
    assert sum(sizes) == 2 * MOST + 1
    assert max(sizes) - min(sizes) <= 1


def test_siblings_that_differ_are_not_stacked():
    net = TreeNet(network, members=3)
    net.freeze(["1"])
    with pytest.raises(UserError, match="the stages 0 and 1 differ"):
        siblings_to_stack(net, 48, "always")
    with pytest.raises(UserError, match="no two members are siblings"):
        siblings_to_stack(TreeNet(network, members=1), 48, "always")


def test_recurrent_layers_are_not_stacked():
    def factory():
        return nn.Sequential(OrderedDict(rows=nn.Unflatten(1, (4, 2)), gru=nn.GRU(2, 3)))

    with pytest.raises(UserError, match=r"0.gru is a recurrent layer.*use auto or never"):
        siblings_to_stack(TreeNet(factory, members=2), 48, "always")
    assert siblings_to_stack(TreeNet(factory, members=2), 48, "auto") == []


def test_siblings_whose_members_do_not_follow_one_another_are_not_stacked():
    def stack(tree, mode="always"):
        return [
            [leaf.members[0] for leaf in group] for group in siblings_to_stack(TreeNet(network, tree=tree), 48, mode)
        ]

    assert stack(APART) == stack(APART, "auto") == [[1, 2]]
    assert stack({"fc1": [2, {"fc2": 2}, 3]}) == [[0, 1], [2, 3], [4, 5, 6]]


FORMS = {
    "linear": lambda: nn.Linear(6, 4),
    "linear without bias": lambda: nn.Linear(6, 4, bias=False),
    "layer norm": lambda: nn.LayerNorm(6),
    "layer norm over two": lambda: nn.LayerNorm([5, 6]),
    "layer norm without weights": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "flatten": lambda: nn.Flatten(),
    "flatten some": lambda: nn.Flatten(1, 2),
    "gelu": lambda: nn.GELU("tanh"),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_layer_on_stacked_weights_is_that_of_each_stage_and_so_is_its_gradient(name):
    torch.manual_seed(2)
    stages = [nn.Sequential(FORMS[name]()).double() for _ in range(3)]
    for parameter in (p for stage in stages for p in stage.parameters()):
        nn.init.normal_(parameter)
    x = torch.randn(3, 7, 5, 6, dtype=torch.double, requires_grad=True)
    expected = torch.stack([stage(part) for stage, part in zip(stages, x, strict=True)])
    weights = torch.randn_like(expected)
    sources = [x, *(p for stage in stages for p in stage.parameters())]
    wanted = torch.autograd.grad((weights * expected).sum(), sources)
    layers = find_layers(stages[0])
    tensors = {n: torch.stack([s.get_parameter(n) for s in stages]) for n, _ in stages[0].named_parameters()}
    y = run(layers, tensors, x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad((weights * y).sum(), sources), wanted)


def test_stacked_embeddings_take_each_stage_s_rows_and_padding_learns_nothing():
    stages = [nn.Sequential(nn.Embedding(9, 4, padding_idx=2)) for _ in range(3)]
    tokens = torch.tensor([[0, 2, 8], [1, 1, 2]]).expand(3, 2, 3)
    tensors = {"0.weight": torch.stack([s[0].weight.detach() for s in stages]).requires_grad_()}
    y = run(find_layers(stages[0]), tensors, tokens)
    expected = torch.stack([stage(tokens[0]) for stage in stages])
    assert torch.equal(y, expected)
    (got,) = torch.autograd.grad(y.square().sum(), tensors["0.weight"])
    wanted = torch.autograd.grad(expected.square().sum(), [s[0].weight for s in stages])
    torch.testing.assert_close(got, torch.stack(wanted))
    assert not got[:, 2].any()
    assert got[:, 1].any()


def test_layers_that_do_something_else_have_no_form():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *args: None)
    odd = [
        Doubled(2, 2),
        hooked,
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        nn.Embedding(3, 2, max_norm=1),
    ]
    for layer in [*odd, nn.Conv2d(1, 1, 1), nn.SyncBatchNorm(2)]:
        assert find_layers(nn.Sequential(nn.Linear(2, 2), layer)) is None
    assert [path for path, _ in find_layers(nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2))))] == ["0", "1.0"]


@pytest.mark.parametrize("repeated", [nn.Tanh(), nn.Linear(6, 6)], ids=["activation", "weights"])
def test_a_layer_that_a_stage_has_twice_runs_twice(repeated):
    net = TreeNet(nn.Sequential(nn.Linear(5, 6), repeated, nn.Linear(6, 6), repeated, nn.Linear(6, 2)), members=3)
    for m in range(3):
        nn.init.normal_(net.member(m)[0].weight, generator=torch.Generator().manual_seed(m))
    x = torch.randn(4, 5)
    expected = torch.stack([net.member(m)(x) for m in range(3)])
    stack = StackedStage(list(net.tree.nodes), [net.stage(name) for name in net.tree.nodes])
    torch.testing.assert_close(stack(repeat_for(stack, x)), expected)


def test_a_run_from_before_there_were_stacks_resumes_without_and_keeps_its_bits(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert process("train", *TRAIN, "engine.stack=never", "--folder", whole).code == 0
    killed = process(
        "train", *TRAIN, "engine.stack=never", "--folder", cut, stop=(signal.SIGKILL, "os.rename", "step-00000006")
    )
    assert killed.code == -signal.SIGKILL
    folder = RunFolder(cut)
    text = folder.config.read_text()
    folder.write(folder.config, re.sub(r"  stack\w*: \w+\n|  cores: 2\n", "", text).encode())
    assert "stack" not in folder.config.read_text()
    assert process("train", *TRAIN, "--folder", cut).code == 0
    assert_same_run(cut, whole)
    assert RunFolder(cut).read_config().engine.stack == "never"
    assert RunFolder(cut).read_result()["engine"]["stacks"] == []


def test_a_killed_run_and_two_ranks_have_the_bits_of_one_run(tmp_path):
    assert process("train", *TRAIN, "--folder", tmp_path / "one").code == 0
    cut = ["train", *TRAIN, "--folder", tmp_path / "cut"]
    killed = process(*cut, "engine.workers=3", stop=(signal.SIGKILL, "os.rename", "step-00000006"))
    assert killed.code == -signal.SIGKILL
    assert process(*cut).code == 0
    assert_same_run(tmp_path / "cut", tmp_path / "one")
    done = ranks(2, "train", *TRAIN, "--folder", tmp_path / "two")
    assert [d.code for d in done] == [0, 0], done[0].err
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert process("eval", tmp_path / "one").code == 0
    kept = RunFolder(tmp_path / "one").read_result()["engine"]
    assert kept == {"micro_batches": 1, "cores": 2, "stacks": [5], "stack_threads": 1}


def test_a_placement_that_parts_a_stack_is_an_error(tmp_path):
    args = ["diabetes", "members=3", "optim.iterations=1", "placement={0: 0, 1: 1, 2: 0}"]
    done = ranks(2, "train", *args, "--folder", tmp_path / "run")
    assert [d.code for d in done] == [2, 2]
    assert "engine.stack=never" in " ".join(done[0].err.split())
    assert not (tmp_path / "run").exists()


def test_fit_stacks_and_the_result_predicts():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 8)).astype(np.float32), rng.integers(0, 3, 60)
    net = TreeNet(network, members=4)
    run = mheads.fit(net, losses.mcl(k=1), train=(x, y), test=(x, y), iterations=4, stack="always", show=False)
    outputs = run.predict(x)
    net.eval()
    alone = torch.stack([net.member(m)(torch.from_numpy(x)) for m in range(4)]).detach()
    torch.testing.assert_close(outputs, alone, rtol=1e-4, atol=1e-5)
