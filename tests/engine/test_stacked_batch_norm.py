"""BatchNorm in stacked stages: each member by statistics of its own, as torch takes them."""

import re
import signal
from collections import OrderedDict
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.commands import assert_same_run, process, ranks
from torch import nn

from mheads import TreeNet, UserError, losses
from mheads.data.batches import Batch
from mheads.data.preprocessing import Preprocess
from mheads.engine.engine_options import EngineOptions
from mheads.engine.stacked_layers import batch_norm
from mheads.engine.stacked_stages import siblings_to_stack
from mheads.engine.threads import ThreadsEngine
from mheads.networks.mlp import MeanAndLogVariance
from mheads.runs.folder import RunFolder

TRAIN = ["diabetes", "model=user_networks:normalised_rows", "model_args={}", "members=4", "loss=mcl",
         "optim.batch_size=40", "optim.iterations=9", "log.every=3", "log.checkpoint_every=3"]  # fmt: skip
LAYERS = {
    "1d": lambda: nn.BatchNorm1d(4),
    "2d": lambda: nn.BatchNorm2d(4),
    "of sequences": lambda: nn.BatchNorm1d(4, momentum=0.7, eps=0.1),
    "cumulative mean": lambda: nn.BatchNorm1d(4, momentum=None),
    "without weights": lambda: nn.BatchNorm1d(4, affine=False),
    "without running statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
}
SHAPES = {"2d": (4, 2, 3), "of sequences": (4, 5)}


@pytest.mark.parametrize("some", [False, True], ids=["all rows", "some rows"])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_gradients_and_statistics_are_those_of_each_layer_by_itself(name, some):
    """Two steps of training, then evaluation. Of some rows: as if a member had been given these alone."""
    generator = torch.Generator().manual_seed(1)
    alone = [LAYERS[name]().double() for _ in range(3)]
    for m, tensor in ((m, t) for m, layer in enumerate(alone) for t in layer.state_dict().values()):
        tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5 if tensor.dim() else torch.tensor(3 * m))
    rows = torch.rand(3, 9, generator=generator) > 0.4 if some else torch.ones(3, 9, dtype=torch.bool)
    layer, parameters = deepcopy(alone[0]), [p for one in alone for p in one.parameters()]
    state = {key: torch.stack([one.state_dict()[key] for one in alone]) for key in layer.state_dict()}
    learning = [state[key].requires_grad_() for key, _ in layer.named_parameters()]
    for _ in range(2):
        x = torch.randn(3, 9, *SHAPES.get(name, (4,)), dtype=torch.double, generator=generator).requires_grad_()
        expected = torch.cat([one(part[mine]) for one, part, mine in zip(alone, x, rows, strict=True)])
        y = batch_norm(layer, state, x, rows if some else None)[rows]
        torch.testing.assert_close(y, expected)
        weights = torch.randn(y.shape, dtype=torch.double, generator=generator)
        of_x, *ours = torch.autograd.grad((weights * y).sum(), [x, *learning])
        of_x_alone, *theirs = torch.autograd.grad((weights * expected).sum(), [x, *parameters])
        torch.testing.assert_close(of_x, of_x_alone)
        per_name = [torch.stack(theirs[i :: len(learning)]) for i in range(len(learning))]
        torch.testing.assert_close(ours, per_name)
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, torch.stack([one.state_dict()[key] for one in alone]), msg=key)
    for one in (layer, *alone):
        one.eval()
    before = {key: tensor.clone() for key, tensor in state.items()}
    torch.testing.assert_close(
        batch_norm(layer, state, x), torch.stack([f(part) for f, part in zip(alone, x, strict=True)])
    )
    assert all(torch.equal(state[key], before[key]) for key in before)


@pytest.mark.parametrize("some", [False, True], ids=["all rows", "some rows"])
def test_statistics_of_bfloat16_are_float32(some):
    """Means of numbers near 100, where those of bfloat16 are 0.5 apart."""
    x = (100 + torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(0))).bfloat16()
    layer = nn.BatchNorm1d(3, momentum=1.0)
    state = {key: torch.stack([tensor, tensor]) for key, tensor in layer.state_dict().items()}
    rows = torch.arange(50).expand(2, 50) % 5 > 0 if some else None
    y = batch_norm(layer, state, x, rows)
    assert y.dtype == torch.bfloat16
    counted = x.double() if rows is None else x[rows].view(2, 40, 3).double()
    torch.testing.assert_close(state["running_mean"].double(), counted.mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(state["running_var"].double(), counted.var(1), rtol=1e-4, atol=0)


def network() -> nn.Module:
    layers = [nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)]
    return nn.Sequential(OrderedDict(zip(("fc1", "norm1", "relu", "fc2", "norm2", "out"), layers, strict=True)))


def stacked_engine(net, **options):
    groups = siblings_to_stack(net, 32, "always")
    return ThreadsEngine(net, EngineOptions(2, 1, stacked=tuple(tuple(n.name for n in g) for g in groups), **options))


def examples(rows=32):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 8, generator=generator, dtype=torch.double)
    return Batch(x, torch.randint(3, (rows,), generator=generator), Preprocess())


def test_a_step_and_an_evaluation_are_those_of_single_networks_under_autograd():
    """Of two accumulated batches, which follow one another: running statistics take in both, once each."""
    net = TreeNet(lambda: network().double(), members=4)
    alone = [deepcopy(net.member(m)).train() for m in range(4)]
    engine, batch = stacked_engine(net, accumulate=2), examples()
    report = engine.step(0, batch, losses.independent())
    halves = [(batch.inputs[part], batch.targets[part]) for part in (slice(16), slice(16, 32))]
    total = 0
    for m, member in enumerate(alone):
        loss = sum(F.cross_entropy(member(x), y, reduction="sum") for x, y in halves) / 32
        total += loss.item()
        gradients = torch.autograd.grad(loss, list(member.parameters()))
        torch.testing.assert_close([g[m] for g in engine.gradients["0"]], list(gradients))
        assert net.member(m).norm1.num_batches_tracked == 2
        torch.testing.assert_close(dict(net.member(m).named_buffers()), dict(member.named_buffers()))
    assert report.loss == pytest.approx(total)
    ((outputs, _),) = engine.outputs([lambda: batch])
    torch.testing.assert_close(outputs, torch.stack([member.eval()(batch.inputs) for member in alone]))
    engine.close()
    torch.testing.assert_close(net.member(3).norm2.running_var, alone[3].norm2.running_var)


@pytest.mark.parametrize("frozen", [["norm1"], ["norm1", "norm2"], ["..norm1"]], ids=str)
def test_frozen_layers_keep_their_statistics(frozen):
    net = TreeNet(lambda: network().double(), members=3)
    for member in map(net.member, range(3)):
        nn.init.uniform_(member.norm1.running_mean)
    net.freeze(frozen)
    alone = [deepcopy(net.member(m)).train() for m in range(3)]
    engine, batch = stacked_engine(net), examples()
    engine.step(0, batch, losses.independent())
    for m, member in enumerate(alone):
        for norm in (member.norm1, *([member.norm2] if "norm2" in frozen else [])):
            norm.eval()
        loss = F.cross_entropy(member(batch.inputs), batch.targets)
        learning = [p for p in member.parameters() if p.requires_grad]
        torch.testing.assert_close([g[m] for g in engine.gradients["0"]], list(torch.autograd.grad(loss, learning)))
        torch.testing.assert_close(dict(net.member(m).named_buffers()), dict(member.named_buffers()))
    engine.close()


class Centred(nn.Module):
    batch_statistics = True

    def forward(self, x):
        return x - x.mean(0)


def test_what_is_stacked():
    def sizes(*layers, mode="auto", freeze=(), **options):
        makers = {"fc": partial(nn.Linear, 8, 4), "norm": layers[0], **dict(zip(["last"], layers[1:], strict=False))}
        net = TreeNet(lambda: nn.Sequential(OrderedDict((name, make()) for name, make in makers.items())), members=3)
        net.freeze(freeze)
        return [len(group) for group in siblings_to_stack(net, 48, mode, **options)]

    norm = partial(nn.BatchNorm1d, 4)
    assert sizes(norm, nn.ReLU) == sizes(norm, mode="always") == sizes(nn.ReLU, batch_norm=False) == [3]
    assert sizes(norm, batch_norm=False) == sizes(norm, mode="never") == []
    assert sizes(norm, mode="always", batch_norm=False) == [3]
    # vmap runs stages of these, and knows nothing of rows that are left out, nor of modules that count.
    for layers in ([norm, MeanAndLogVariance], [Centred], [partial(nn.SyncBatchNorm, 4)]):
        assert sizes(*layers) == []
        with pytest.raises(UserError, match=r"0\.norm takes statistics over a batch.*use auto or never"):
            sizes(*layers, mode="always")
    assert sizes(norm, MeanAndLogVariance, mode="always", freeze=["norm"]) == [3]
    trunk = TreeNet(lambda: nn.Sequential(nn.Linear(8, 4), Centred(), nn.Linear(4, 4), nn.Linear(4, 2)), 3, split="2")
    assert [len(group) for group in siblings_to_stack(trunk, 48, "always")] == [3]


def test_siblings_of_which_one_is_frozen_differ():
    def fixed():
        return nn.Linear(4, 4).requires_grad_(False)

    net = TreeNet(lambda: nn.Sequential(nn.Linear(8, 4), fixed(), nn.BatchNorm1d(4, affine=False)), 3, split="0")
    net.freeze([net.tree.leaves[1].name])
    with pytest.raises(UserError, match="differ"):
        siblings_to_stack(net, 48, "always")


@pytest.mark.parametrize("more", [["sampling=bagging"], ["split=norm1"]], ids=str)
def test_a_killed_run_and_two_ranks_have_the_bits_of_one_run(tmp_path, more):
    args = ["train", *TRAIN, *more]
    assert process(*args, "--folder", tmp_path / "one", "engine.workers=1").code == 0
    cut = [*args, "--folder", tmp_path / "cut", "engine.workers=3"]
    assert process(*cut, stop=(signal.SIGKILL, "os.rename", "step-00000006")).code == -signal.SIGKILL
    assert process(*cut).code == 0
    assert_same_run(tmp_path / "cut", tmp_path / "one")
    done = ranks(2, *args, "--folder", tmp_path / "two")
    assert [d.code for d in done] == [0, 0], done[0].err
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert RunFolder(tmp_path / "one").read_result()["engine"]["stacks"] == [4]


def test_a_run_from_before_batch_norm_was_stacked_resumes_without_and_keeps_its_bits(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert process("train", *TRAIN, "engine.stack=never", "--folder", whole).code == 0
    before = ["train", *TRAIN, "engine.stack_batch_norm=never", "--folder", cut]
    assert process(*before, stop=(signal.SIGKILL, "os.rename", "step-00000006")).code == -signal.SIGKILL
    folder = RunFolder(cut)
    text, count = re.subn(r"  stack_batch_norm: never\n", "", folder.config.read_text())
    assert count == 1 and "stack: auto" in text
    folder.write(folder.config, text.encode())
    assert process("train", *TRAIN, "--folder", cut).code == 0
    assert_same_run(cut, whole)
    assert RunFolder(cut).read_result()["engine"]["stacks"] == []
