"""The recipe cifar10_fast: its steps against plain PyTorch, and the same bits however it is run."""

import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.commands import Running, assert_same_run, process, ranks
from torch.nn.functional import cross_entropy

import mheads
from mheads.config import read as configs
from mheads.runs.folder import RunFolder
from mheads.training.experiment import build_experiment
from mheads.training.loop import train

assert Running  # conftest.py starts the server of processes where it is imported
SMALL = ["model_args.width=6", "optim.batch_size=16", "optim.iterations=4", "data.name=npz"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """48 noisy images of ten classes, smooth enough for patches to be correlated, as .npz."""
    rng = np.random.default_rng(0)
    y = rng.integers(10, size=48)
    coarse = rng.normal(size=(10, 3, 8, 8))[y] + rng.normal(size=(48, 3, 8, 8))
    x = np.clip(128 + 40 * coarse.repeat(4, 2).repeat(4, 3) + 12 * rng.normal(size=(48, 3, 32, 32)), 0, 255)
    path = tmp_path_factory.mktemp("images") / "images.npz"
    x = x.astype(np.uint8)
    np.savez(path, x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    return path


class PlainAirbench:
    """The network and its training in a straight line, after the description of airbench94; summed losses."""

    def __init__(self, weights):
        self.w = {name: t.clone().double() for name, t in weights.items()}
        self.filters = [n for n in self.w if "conv" in n]
        self.norms = [n for n in self.w if "norm" in n and n.endswith("bias")]
        self.v = {n: torch.zeros_like(self.w[n]) for n in (*self.filters, *self.norms, "whiten.bias", "head.weight")}

    def forward(self, x):
        w = self.w
        x = F.gelu(F.conv2d(x, w["whiten.weight"], w["whiten.bias"]))
        for block in ("block1", "block2", "block3"):
            x = F.max_pool2d(F.conv2d(x, w[f"{block}.conv1.weight"], padding=1), 2)
            x = F.gelu(self.normalise(x, f"{block}.norm1"))
            x = F.conv2d(x, w[f"{block}.conv2.weight"], padding=1)
            x = F.gelu(self.normalise(x, f"{block}.norm2"))
        x = F.max_pool2d(x, 3).flatten(1)
        return x @ w["head.weight"].T / x.shape[1]

    def normalise(self, x, name):
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        n = x.numel() / x.shape[1]
        for key, now in (("mean", mean), ("var", var * n / (n - 1))):
            self.w[f"{name}.running_{key}"] = 0.6 * self.w[f"{name}.running_{key}"] + 0.4 * now.detach()
        shape = (1, -1, 1, 1)
        return (x - mean.view(shape)) / (var + 1e-12).sqrt().view(shape) + self.w[f"{name}.bias"].view(shape)

    def step(self, x, y, now, whitening_now):
        """`now` is the part of the learning rates at this step, `whitening_now` that of the whitening bias."""
        for name in self.v:
            self.w[name] = self.w[name].detach().requires_grad_()
        loss = 2000 * cross_entropy(self.forward(x), y, label_smoothing=0.2)  # as if summed over 2,000 examples
        gradients = dict(zip(self.v, torch.autograd.grad(loss, [self.w[name] for name in self.v]), strict=True))
        for name, g in gradients.items():
            w, v = self.w[name].detach(), self.v[name]
            if name in self.filters:
                v.mul_(0.6).add_(g)
                w = w * len(w) ** 0.5 / w.norm()
                self.w[name] = w - 0.24 * now * self.orthogonal(g + 0.6 * v)
                continue
            lr = 0.67 if name == "head.weight" else 0.053
            g = g + 2e-6 * 2000 / lr * w
            v.mul_(0.85).add_(g)
            self.w[name] = w - lr * (whitening_now if name == "whiten.bias" else now) * (g + 0.85 * v)
        return loss.item() / 2000

    def orthogonal(self, g):
        u, s, vt = torch.linalg.svd(g.flatten(1) / g.norm(), full_matrices=False)
        for _ in range(3):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        return (u @ torch.diag(s) @ vt).reshape(g.shape)


def test_the_learning_rates_and_decays_are_those_of_a_sum_over_2000_examples():
    optim = configs.load("cifar10_fast").optim
    lrs = {name: group.lr / 2000 for name, group in optim.parameter_groups.items()}
    assert lrs == pytest.approx({"*.norm?.bias": 0.053, "whiten.bias": 0.053, "head": 0.67})
    assert [group.lr * group.weight_decay for group in optim.parameter_groups.values()] == pytest.approx([0.004] * 3)
    assert (optim.batch_size, optim.iterations * optim.batch_size / 50_000) == (2000, 8)


def test_training_is_that_of_a_plain_version(images, tmp_path):
    experiment = build_experiment(configs.load("cifar10_fast", [*SMALL, f"data.path={images}", "log.every=1"]))
    first = {name: t.clone() for name, t in experiment.net.member(0).state_dict().items()}
    plain, stream, losses = PlainAirbench(first), experiment.stream(), []
    with np.load(images) as file:
        pixels = file["x_train"].transpose(0, 2, 3, 1) / 255
    mean, std = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    for step in range(4):
        batch = stream.read(step)
        x = torch.from_numpy((batch.inputs.numpy() / 255 - mean) / std).permute(0, 3, 1, 2)
        losses.append(plain.step(x, batch.targets, 1 - step / 4, max(0.0, 1 - step / 2)))  # 3 of 8 epochs: 1.5, so 2
    stream.close()
    train(experiment, RunFolder(tmp_path / "run"))
    run = mheads.load(tmp_path / "run")
    ours = run.net.member(0).state_dict()
    np.testing.assert_allclose([line["loss"] for line in run.history.steps], losses, rtol=1e-5)
    assert set(plain.w) == set(ours)
    for name, expected in plain.w.items():
        if name.endswith("num_batches_tracked"):
            continue
        moved = (expected - first[name].double()).abs().max().item()
        error = (ours[name].double() - expected).abs().max().item()
        assert error <= 2e-3 * moved, (name, error, moved)
    fixed = ("whiten.weight", *(f"block{b}.norm{i}.weight" for b in (1, 2, 3) for i in (1, 2)))
    assert {name for name in first if torch.equal(first[name], ours[name])} == set(fixed)


def test_the_network_starts_with_whitened_patches_identities_and_a_head_of_unit_deviation(images):
    """The first half of the whitening filters turns patches into uncorrelated ones of variance l / (l + 5e-4)."""
    experiment = build_experiment(configs.load("cifar10_fast", [*SMALL, f"data.path={images}", "members=2"]))
    with np.load(images) as file:
        x = file["x_train"].transpose(0, 2, 3, 1) / 255
    x = (x - x.mean((0, 1, 2))) / x.std((0, 1, 2))
    windows = np.lib.stride_tricks.sliding_window_view(x, (2, 2), axis=(1, 2))  # [N, 31, 31, C, 2, 2]
    patches = windows.reshape(-1, 12)
    covariance = patches.T @ patches / len(patches)
    eigenvalues = np.linalg.eigvalsh(covariance)
    for m in (0, 1):
        network = experiment.net.member(m)
        filters = network.whiten.weight.detach().double().numpy().reshape(24, 12)
        np.testing.assert_array_equal(filters[12:], -filters[:12])
        whitened = filters[:12] @ covariance @ filters[:12].T
        np.testing.assert_allclose(whitened, np.diag(eigenvalues / (eigenvalues + 5e-4)), atol=1e-5)
        assert not network.whiten.weight.requires_grad
        assert network.whiten.bias.requires_grad
        kernel = network.block2.conv1.weight.detach()  # from 6 to 24 channels
        images_in = torch.randn(1, 6, 5, 5)
        torch.testing.assert_close(F.conv2d(images_in, kernel, padding=1)[:, :6], images_in)
        assert kernel[6:].std() > 0.05
        assert network.head.weight.std().item() == pytest.approx(1)
    assert not torch.equal(experiment.net.member(0).head.weight, experiment.net.member(1).head.weight)


def test_whitening_filters_come_with_the_weights_of_a_run_and_are_measured_for_new_members(images, tmp_path):
    few = [*SMALL, "optim.iterations=2"]
    source = build_experiment(configs.load("cifar10_fast", [*few, f"data.path={images}"]))
    train(source, RunFolder(tmp_path / "source"))
    with np.load(images) as file:
        others = {key: file[key] if key.startswith("y") else 255 - file[key] // 2 for key in file}
    others["x_train"][:, 0] = others["x_train"][:, 1]  # of two equal channels
    np.savez(tmp_path / "others.npz", **others)
    start = [
        f"data.path={tmp_path / 'others.npz'}",
        f"init={tmp_path / 'source'}",
        "members=2",
        "init_members=[0, null]",
    ]
    begun = build_experiment(configs.load("cifar10_fast", [*few, *start]))
    kept, measured = (begun.net.member(m).whiten.weight for m in (0, 1))
    assert torch.equal(kept, source.net.member(0).whiten.weight)
    assert measured.any()
    assert not torch.equal(kept, measured)
    answers = mheads.load(tmp_path / "source").predict(others["x_test"])
    assert answers.std() > 0  # and they are there when a run is loaded


TREE = ["members=3", "split=block2.conv1", "log.checkpoint_every=2", "log.every=1"]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_bits_are_the_same_for_any_workers_and_after_a_kill(images, tmp_path, precision):
    args = ["train", "cifar10_fast", *SMALL, *TREE, f"data.path={images}", f"precision={precision}"]
    done = process(*args, "engine.workers=1", "--folder", tmp_path / "one")
    assert done.code == 0, done.err
    args.append("engine.workers=3")
    killed = ["--folder", tmp_path / "killed"]
    stopped = process(*args, *killed, stop=(signal.SIGKILL, "os.rename", ".step-00000004"))
    assert stopped.code == -signal.SIGKILL
    assert process(*args, *killed).code == 0
    assert_same_run(tmp_path / "killed", tmp_path / "one")


def test_bits_are_the_same_on_ranks(images, tmp_path):
    args = ["train", "cifar10_fast", *SMALL, *TREE, f"data.path={images}"]
    assert process(*args, "--folder", tmp_path / "one").code == 0
    elsewhere = {"trunk": 1, "block2-conv1/0": 0, "block2-conv1/1": 0, "block2-conv1/2": 1}
    for name, keys in {"default": [], "explicit": [f"placement={elsewhere}"]}.items():
        for done in ranks(2, *args, *keys, "--folder", tmp_path / name):
            assert done.code == 0, done.err
        assert_same_run(tmp_path / name, tmp_path / "one")
