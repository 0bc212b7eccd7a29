"""bfloat16: autocast's rules around float32 weights, losses and sums, with the same bits on any number of workers."""

import signal
from collections import OrderedDict

import numpy as np
import pytest
import torch
from helpers.commands import assert_same_run, process, ranks
from helpers.one_step import engine_gradients
from torch import nn

import mheads
from mheads import TreeNet, UserError, losses
from mheads.common import check_precision
from mheads.data.batches import Batch
from mheads.data.preprocessing import Preprocess
from mheads.engine.engine_options import EngineOptions
from mheads.engine.threads import ThreadsEngine
from mheads.networks.dropout import Dropout

BF16 = torch.bfloat16
CPU = torch.device("cpu")
TRAIN = ["digits", "precision=bf16", "members=3", "split=conv1", "loss=mcl", "data.limit=120", "optim.batch_size=30",
         "optim.iterations=9", "log.every=3", "log.checkpoint_every=3", "engine.micro_batches=3"]  # fmt: skip


def known_layers() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 8, 3, padding=1),
            relu1=nn.ReLU(),
            norm=nn.LocalResponseNorm(3, alpha=0.5),
            pool=nn.MaxPool2d(2),
            conv2=nn.Conv2d(8, 8, 3, padding=1),
            relu2=nn.ReLU(),
            mean=nn.AvgPool2d(2),
            drop=Dropout(0.3),
            flatten=nn.Flatten(),
            fc=nn.Linear(8 * 4, 5),
        )
    )


def normalised() -> nn.Module:
    """Layers that only autograd takes back, with statistics of the batch."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 8, 3, padding=1),
            bn=nn.BatchNorm2d(8),
            gelu=nn.GELU(),
            conv2=nn.Conv2d(8, 8, 3, padding=1),
            flatten=nn.Flatten(),
            norm=nn.LayerNorm(8 * 64),
            fc=nn.Linear(8 * 64, 5),
        )
    )


def examples(rows: int = 24, members: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 3, 8, 8, generator=generator)
    y = torch.randint(5, (rows,), generator=generator)
    return Batch(x, y, Preprocess(), ties=torch.rand(members, rows, generator=generator))


@pytest.mark.parametrize(("factory", "parts"), [(known_layers, 3), (normalised, 1)])
@pytest.mark.parametrize("loss", [losses.independent(), losses.mcl(k=1), losses.score_averaged()], ids=lambda x: x.name)
def test_bits_do_not_depend_on_workers_and_gradients_are_float32(factory, parts, loss):
    seen = []
    for workers in (1, 2, 3):
        net = TreeNet(factory, members=3, split="conv1")
        _, gradients = engine_gradients(net, loss, examples(), workers=workers, micro_batches=parts, precision=BF16)
        assert {g.dtype for stage in gradients.values() for g in stage} == {torch.float32}
        seen.append([g for stage in sorted(gradients) for g in gradients[stage]])
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("factory", [known_layers, normalised])
def test_gradients_are_those_of_autocast_on_one_network(factory):
    """Layer by layer or by autograd: as torch's autocast around the whole, but for what each rounds in between."""
    net = TreeNet(factory, members=1)
    for module in net.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
    batch = examples(members=1)
    _, gradients = engine_gradients(net, losses.independent(), batch, micro_batches=1, precision=BF16)
    with torch.autocast("cpu", BF16):
        outputs = net(batch.inputs.to(memory_format=torch.channels_last))
    loss = nn.functional.cross_entropy(outputs[0].float(), batch.targets)
    expected = torch.autograd.grad(loss, list(net.parameters()))
    exact = torch.autograd.grad(
        nn.functional.cross_entropy(net(batch.inputs)[0], batch.targets), list(net.parameters())
    )
    for ours, theirs, right in zip(gradients["trunk"], expected, exact, strict=True):
        scale = right.norm() + 1e-2  # a bias before batch normalisation has no gradient but rounding
        assert (ours - right).norm() < 0.15 * scale  # maxima that are equal in bfloat16 go to other pixels
        assert (ours - right).norm() < 1.5 * (theirs - right).norm() + 1e-3 * scale, "autocast is closer"
    assert not torch.equal(gradients["trunk"][0], exact[0]), "this is float32"


def filters() -> nn.Module:
    """Layers that `vmap` stacks and autocast rounds."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(3, 8, 3, padding=1),
            relu=nn.PReLU(),
            up=nn.ConvTranspose2d(8, 4, 2, stride=2, bias=False),
            flatten=nn.Flatten(),
            fc=nn.Linear(4 * 256, 5),
        )
    )


def test_stacked_filters_are_rounded_as_those_side_by_side():
    found = []
    for stacked in ((), (("0", "1", "2"),)):
        engine = ThreadsEngine(TreeNet(filters, members=3), EngineOptions(1, 1, precision=BF16, stacked=stacked))
        engine.step(0, examples(), losses.independent())
        ((outputs, _),) = engine.outputs([examples])
        gradients = engine.gradients
        of_members = (
            gradients["0"] if stacked else [torch.stack(each) for each in zip(*gradients.values(), strict=True)]
        )
        found.append([outputs.clone(), *(g.clone() for g in of_members)])
        engine.close()
    for apart, together in zip(*found, strict=True):
        assert (together - apart).norm() < 0.05 * apart.norm(), "rounded in other places, and by as much"


def test_the_loss_sees_float32_and_weights_stay_float32():
    dtypes = []

    def watched(outputs, y):
        dtypes.append(outputs.dtype)
        return losses.independent()(outputs, y).losses * 0 + outputs.square().sum(2)

    net = TreeNet(known_layers, members=2, split="conv1")
    engine_gradients(net, losses.Loss("watched", watched), examples(members=2), precision=BF16)
    assert set(dtypes) == {torch.float32}
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_gradients_of_children_are_added_in_float32():
    """1 and 200 times 2^-9: each step would be rounded away in bfloat16."""

    class Scale(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(factor))

        def forward(self, x):
            return x * self.factor

    net = TreeNet(lambda: nn.Sequential(OrderedDict(fc=nn.Linear(1, 1, bias=False), s=Scale(1.0))), tree={"fc": 201})
    for member, stage in enumerate(leaf.name for leaf in net.tree.leaves):
        net.stage(stage).s.factor.data.fill_(1.0 if member == 0 else 2.0**-9)
    batch = Batch(torch.ones(1, 1), torch.zeros(1, dtype=torch.long), Preprocess())
    total = losses.Loss("sum", lambda outputs, y: outputs.sum(2))
    _, gradients = engine_gradients(net, total, batch, micro_batches=1, precision=BF16)
    assert gradients["trunk"][0].item() == pytest.approx(1 + 200 * 2.0**-9, rel=2**-8)


def test_evaluation_computes_in_the_same_precision_and_gives_float32():
    net = TreeNet(known_layers, members=2)
    batch = examples(members=2)
    outputs = {}
    for dtype in (torch.float32, BF16):
        engine = ThreadsEngine(net, EngineOptions(2, 1, precision=dtype))
        ((outputs[dtype], _),) = engine.outputs([lambda: batch])
        engine.close()
    assert outputs[BF16].dtype == torch.float32
    difference = (outputs[BF16] - outputs[torch.float32]).abs().max()
    assert 0 < difference < 0.05


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


def without_bf16() -> None:
    torch.cpu.get_capabilities = dict


def test_a_cpu_without_the_instructions_is_an_error_and_writes_nothing(tmp_path):
    done = process("train", *TRAIN, "--folder", tmp_path / "run", before=without_bf16)
    assert done.code == 2
    said = " ".join(done.err.split())
    assert "precision = bf16: this CPU has no instructions for bfloat16" in said
    assert "use precision=float32" in said
    assert not (tmp_path / "run").exists()


def test_a_run_in_bf16_is_evaluated_in_float32_where_the_cpu_lacks_it(tmp_path):
    assert process("train", *TRAIN, "--folder", tmp_path / "run").code == 0
    done = process("eval", tmp_path / "run", before=without_bf16)
    assert done.code == 0, done.err
    assert "this run computes in bf16, and here in float32" in " ".join(done.err.split())


def test_a_cpu_that_announces_amx_and_lacks_it_is_found_by_a_trial(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True, "avx512_bf16": True})
    monkeypatch.setattr(check_precision, "TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    check_precision._try_bf16.cache_clear()
    with pytest.raises(UserError, match=r"exit code -4: this machine announces AMX .* set ONEDNN_MAX_CPU_ISA="):
        check_precision.check_precision("bf16", CPU, torch.float32)
    monkeypatch.setattr(check_precision, "TRIAL", "")
    check_precision._try_bf16.cache_clear()
    assert check_precision.reason_against("bf16", CPU) is None
    check_precision._try_bf16.cache_clear()


def test_a_float64_network_is_not_trained_in_bf16():
    with pytest.raises(UserError, match=r"those of this network are torch\.float64"):
        check_precision.check_precision("bf16", CPU, torch.float64)


def test_an_exported_file_computes_in_float32_and_is_compared_with_that(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 3, 8, 8)).astype(np.float32)
    keys = {"iterations": 3, "batch_size": 20, "precision": "bf16"}
    run = mheads.fit(TreeNet(normalised, members=2), train=(x, np.arange(40) % 5), **keys)
    file = torch.export.load(run.export(tmp_path / "run.pt2", "members", x)).module()
    with torch.no_grad():
        expected = run.net.eval()(torch.from_numpy(x))
    torch.testing.assert_close(file(torch.from_numpy(x)), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(run.predict(x), expected, rtol=1e-4, atol=1e-5)  # the run itself answers in bfloat16
