"""Accelerators, on one that is pretended: the CPU's bits, no mixed devices, and a host that waits once per step."""

import signal
from collections import OrderedDict

import numpy as np
import pytest
import torch
from helpers.counterfeit_device import NAME, counterfeit_device
from helpers.painted_scenes import keys, paint
from torch import nn

import mheads
from mheads import TreeNet, UserError, losses
from mheads.api.distil import distil
from mheads.api.evaluate import evaluate_run
from mheads.common import device as devices
from mheads.common.check_precision import reason_against
from mheads.common.progress import Silent
from mheads.config import read as configs
from mheads.data.batches import Batch
from mheads.data.preprocessing import Preprocess
from mheads.engine import tape
from mheads.engine.engine_options import EngineOptions
from mheads.engine.rows import Rows
from mheads.engine.threads import ThreadsEngine
from mheads.networks.dropout import Dropout
from mheads.runs.folder import RunFolder
from mheads.training.loop import Stopped, train_config


def plain() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 4, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(4, 6, 3),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc=nn.Linear(24, 5),
        )
    )


def after(name: str, layer: nn.Module, make=plain) -> nn.Sequential:
    """The network with one more layer after the one of this name."""
    layers = OrderedDict()
    for own, each in make().named_children():
        layers[own] = each
        if own == name:
            layers["added"] = layer
    return nn.Sequential(layers)


NETWORKS = {
    "plain": plain,
    "dropout": lambda: after("relu1", Dropout(0.3)),
    "torch's dropout2d": lambda: after("relu1", nn.Dropout2d(0.3)),
    "batch norm": lambda: after("conv1", nn.BatchNorm2d(4)),
    "layer norm": lambda: after("conv1", nn.LayerNorm([4, 8, 8])),
    "scores": mheads.with_scores(plain),
    "gelu and dropout": lambda: after("relu1", nn.GELU(), lambda: after("conv2", nn.Dropout(0.3))),
    "response norm": lambda: after("conv1", nn.LocalResponseNorm(3)),
    "average pool": lambda: after("relu1", nn.AvgPool2d(1)),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 5)),
    "normalised mlp": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 5)
    ),
}
BAGGING = {"sampling": "bagging"}

# name: network, loss, keywords of fit. `split` and `tree` are those of TreeNet.
CONFIGURATIONS = {
    "independent": ("plain", losses.independent(), {}),
    "score_averaged": ("plain", losses.score_averaged(), {}),
    "prob_averaged": ("plain", losses.prob_averaged(), {}),
    "mcl": ("plain", losses.mcl(k=1), {}),
    "mcl k=2": ("plain", losses.mcl(k=2), {}),
    "mcl with ce_weight": ("plain", losses.mcl(k=1, ce_weight=0.5), {}),
    "mcl by wins": ("plain", losses.mcl(k=1, normalize="wins"), {}),
    "relaxed": ("plain", losses.relaxed(), {}),
    "evolving": ("plain", losses.evolving(), {}),
    "annealed": ("plain", losses.annealed(), {}),
    "confident": ("plain", losses.confident(), {}),
    "scored": ("scores", losses.scored(), {}),
    "sgd, nesterov, weight decay": ("plain", losses.mcl(), {"nesterov": True, "weight_decay": 0.01}),
    "sgd, caffe momentum": ("plain", losses.mcl(), {"caffe_momentum": True, "schedule": "cosine"}),
    "sgd, l1": ("plain", losses.mcl(), {"regularization": "l1", "weight_decay": 0.01}),
    "adamw": ("plain", losses.mcl(), {"optimizer": "adamw"}),
    "adam": ("plain", losses.mcl(), {"optimizer": "adam"}),
    "adagrad": ("plain", losses.mcl(), {"optimizer": "adagrad"}),
    "rmsprop": ("plain", losses.mcl(), {"optimizer": "rmsprop"}),
    "adadelta": ("plain", losses.mcl(), {"optimizer": "adadelta"}),
    "tree": ("plain", losses.independent(), {"split": "conv1"}),
    "tree, mcl": ("plain", losses.mcl(), {"split": "conv2"}),
    "nested tree": ("plain", losses.mcl(), {"tree": {"conv1": [{"conv2": 2}, 1]}}),
    "forest": ("plain", losses.score_averaged(), {"tree": [{"conv1": 2}, 1]}),
    "dropout": ("dropout", losses.independent(), {}),
    "dropout, mcl": ("dropout", losses.mcl(), {"split": "conv1"}),
    "torch's dropout2d": ("torch's dropout2d", losses.mcl(), {}),
    "dropout by autograd": ("gelu and dropout", losses.mcl(), {}),
    "batch norm": ("batch norm", losses.independent(), {}),
    "batch norm, mcl, tree": ("batch norm", losses.mcl(), {"split": "added"}),
    "layer norm": ("layer norm", losses.mcl(), {}),
    "response norm": ("response norm", losses.mcl(), {}),
    "average pool": ("average pool", losses.mcl(), {}),
    "small networks": ("mlp", losses.independent(), {}),
    "small networks, mcl": ("mlp", losses.mcl(), {}),
    "small networks, batch norm": ("normalised mlp", losses.mcl(), {}),
    "small networks, batch norm, bagging": ("normalised mlp", losses.independent(), BAGGING),
    "micro-batches": ("plain", losses.mcl(), {"micro_batches": 3}),
    "pieces": ("plain", losses.mcl(), {"tree": {"conv1": [{"conv2": 2}, 1]}, "shared_micro_batches": 4}),
    "accumulation": ("plain", losses.mcl(), {"accumulate": 2}),
    "clipping": ("plain", losses.independent(), {"clip": 0.01, "split": "conv1"}),
    "two workers": ("dropout", losses.mcl(), {"workers": 2, "micro_batches": 2}),
    "pretraining": ("plain", losses.mcl(), {"pretrain": 2}),
    "bagging": ("plain", losses.independent(), BAGGING),
    "bagging, mcl": ("dropout", losses.mcl(), BAGGING),
    "bagging, dropout by autograd": ("gelu and dropout", losses.mcl(), BAGGING),
    "bagging, batch norm": ("batch norm", losses.independent(), BAGGING),
    "frozen": ("plain", losses.mcl(), {"split": "conv2", "freeze": ["conv1"]}),
    "mean image": ("plain", losses.mcl(), {"normalize": "mean_image"}),
    "mean and standard deviation, padded, mirrored": (
        "plain",
        losses.mcl(),
        {"normalize": "mean_std", "pad": 1, "mirror": True},
    ),
    "bf16": ("plain", losses.independent(), {"precision": "bf16"}),
    "bf16, mcl, tree, dropout": ("dropout", losses.mcl(), {"precision": "bf16", "split": "conv1"}),
    "bf16, batch norm": ("batch norm", losses.independent(), {"precision": "bf16"}),
}

# `make full` has all of them.
QUICK = ("mcl", "adamw", "adam", "nested tree", "dropout by autograd", "batch norm, mcl, tree", "small networks",
         "small networks, batch norm, bagging", "pieces", "accumulation", "clipping", "bagging, batch norm",
         "bf16, mcl, tree, dropout")  # fmt: skip


def examples(seed=0, rows=72):
    generator = np.random.default_rng(seed)
    return generator.random((rows, 1, 8, 8), np.float32), generator.integers(5, size=rows)


def train(network, loss, options, device, **more):
    options = {"iterations": 4, "batch_size": 24, "lr": 0.05, "workers": 1, "log": {"every": 2}, **options, **more}
    tree = {key: options.pop(key) for key in ("split", "tree") if key in options}
    tree |= {} if "tree" in tree else {"members": 3}
    net = TreeNet(NETWORKS[network], **tree, seed=1)
    return mheads.fit(net, loss, train=examples(), test=examples(1, 30), device=device, show=False, **options)


class AllRows(Rows):
    """Takes all rows back, as an accelerator does: sums over fewer have other bits."""

    @staticmethod
    def where(mask, exactly=False):
        return None


@pytest.fixture
def all_rows(monkeypatch):
    monkeypatch.setattr(tape, "Rows", AllRows)


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor.cpu(), theirs[name].cpu()), name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in CONFIGURATIONS]
)
def test_weights_metrics_and_outputs_have_the_bits_of_the_cpu(name, all_rows):
    if "bf16" in name and reason_against("bf16", devices.CPU):
        pytest.skip("this CPU has no bfloat16")
    expected = train(*CONFIGURATIONS[name], "cpu")
    x = examples(2, 7)[0]
    outputs = expected.predict(x)
    with counterfeit_device() as counts:
        run = train(*CONFIGURATIONS[name], "auto")
        assert next(run.net.parameters()).device.type == NAME
        assert_same(run.net.state_dict(), expected.net.state_dict())
        assert run.result.to_dict() == expected.result.to_dict()
        assert torch.equal(torch.as_tensor(run.predict(x)).cpu(), torch.as_tensor(outputs))
    assert counts.operations.total() > 100


def test_mcl_on_the_rows_that_learn_and_on_all_rows_agree():
    """What the bits above leave open: the CPU takes back only the rows that a member learns from."""
    expected = train("plain", losses.mcl(), {}, "cpu").net.state_dict()
    with counterfeit_device():
        weights = train("plain", losses.mcl(), {}, NAME).net.state_dict()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor.cpu(), expected[name], rtol=1e-5, atol=1e-6)


def test_the_host_waits_once_per_step_and_uploads_do_not_block():
    def measure(loss, iterations):
        with counterfeit_device() as counts:
            log = {"every": 1000, "evaluate_every": 0}
            train("plain", loss, {"micro_batches": 3, "log": log, **BAGGING}, NAME, iterations=iterations)
        return counts

    for loss in (losses.independent(), losses.mcl()):
        few, more = measure(loss, 2), measure(loss, 6)
        assert more.synchronisations.total() - few.synchronisations.total() == 4
        assert more.uploads["blocking"] == few.uploads["blocking"]
        assert more.uploads["non-blocking"] > few.uploads["non-blocking"]


class OnTheWrongDevice(nn.Module):
    """Adds a tensor of the CPU, which goes unnoticed there."""

    def __init__(self):
        super().__init__()
        self.fc, self.shift = nn.Linear(4, 3), torch.ones(3)

    def forward(self, x):
        return self.fc(x) + self.shift


def test_a_tensor_on_the_wrong_device_fails():
    batch = Batch(torch.ones(6, 4), torch.zeros(6, dtype=torch.long), Preprocess())

    def step(device):
        net = TreeNet(lambda: nn.Sequential(OrderedDict(layer=OnTheWrongDevice())), members=2)
        engine = ThreadsEngine(net, EngineOptions(1, 1, device=torch.device(device)))
        try:
            engine.step(0, batch, losses.independent())
        finally:
            engine.close()

    step("cpu")
    with counterfeit_device(), pytest.raises(RuntimeError, match="operands on counterfeit and on cpu"):
        step(NAME)


# By configs, as the commands do.

DIGITS = ["members=3", "split=conv1", "loss=mcl", "data.limit=120", "optim.batch_size=30", "optim.iterations=6",
          "optim.name=adam", "log.every=2", "log.checkpoint_every=2", "engine.workers=1"]  # fmt: skip


class StopAt(Silent):
    def __init__(self, iteration):
        self.iteration = iteration

    def step(self, step, *args):
        if step == self.iteration:
            signal.raise_signal(signal.SIGTERM)


def run_weights(path):
    return mheads.load(path, trust=True).net.state_dict()


def test_a_stopped_run_resumes_and_is_evaluated_and_distilled_with_the_bits_of_the_cpu(tmp_path, all_rows):
    def load(device):
        return configs.load("digits", [*DIGITS, f"device={device}"])

    overrides = ["optim.iterations=3", "data.limit=120"]
    expected = train_config(load("cpu"), RunFolder(tmp_path / "cpu"), Silent())
    distil(tmp_path / "cpu", [*overrides, "device=cpu"], tmp_path / "distilled on the cpu", Silent())
    with counterfeit_device():
        with pytest.raises(Stopped):
            train_config(load(NAME), RunFolder(tmp_path / "run"), StopAt(3))
        result = train_config(load(NAME), RunFolder(tmp_path / "run"), Silent())
        evaluated = evaluate_run(tmp_path / "run", None, Silent())
        distil(tmp_path / "run", [*overrides, f"device={NAME}"], tmp_path / "distilled", Silent())
    assert result["ensemble_mean"] == expected["ensemble_mean"] == evaluated["ensemble_mean"]
    assert_same(run_weights(tmp_path / "run"), run_weights(tmp_path / "cpu"))
    assert_same(run_weights(tmp_path / "distilled"), run_weights(tmp_path / "distilled on the cpu"))


def test_detection_has_the_bits_of_the_cpu(tmp_path, all_rows):
    scenes = paint(tmp_path / "VOC")
    for device in ("cpu", NAME):
        with counterfeit_device():
            config = configs.load("fast_rcnn", [*keys(scenes), "optim.iterations=4", f"device={device}"])
            train_config(config, RunFolder(tmp_path / device), Silent())
    assert_same(run_weights(tmp_path / NAME), run_weights(tmp_path / "cpu"))


# Names of devices.


def test_auto_is_the_accelerator_where_there_is_one():
    assert devices.resolve("auto") == torch.device("cpu")
    with counterfeit_device():
        assert devices.resolve("auto", local_rank=3) == torch.device(NAME, 0)
        assert devices.resolve(NAME).type == NAME
        with pytest.raises(
            UserError, match=r"'counterfeit:1', but the devices here are counterfeit:0 to counterfeit:0"
        ):
            devices.resolve(f"{NAME}:1")
        with pytest.raises(UserError, match=r"'cuda', but torch sees only counterfeit here; use device=cpu or auto"):
            devices.resolve("cuda")


@pytest.mark.parametrize("name", ["cuda", "cuda:3", "xpu", "mps"])
def test_a_device_that_is_not_there_is_an_error_and_writes_nothing(name, mheads, tmp_path):
    done = mheads("train", "digits", f"device={name}", "--folder", tmp_path / "run")
    assert done.code == 2
    assert f"device = '{name}', but torch sees no accelerator here; use device=cpu or auto" in " ".join(
        done.err.split()
    )
    assert not (tmp_path / "run").exists()
