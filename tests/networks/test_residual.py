"""The newer networks: published sizes, an independent reading of their blocks, and what they do as trees."""

import pytest
import torch
import torch.nn.functional as F
from helpers.one_step import engine_gradients
from torch import nn

from mheads import TreeNet, UserError, losses
from mheads.data.batches import Batch
from mheads.networks import INPUT_SHAPES, NETWORKS

SIZES = {
    ("resnet20", ()): 269_722,
    ("resnet56", ()): 853_018,
    ("resnet18", ()): 11_689_512,
    ("wide_resnet", ()): 2_748_890,
    ("wide_resnet", (("depth", 28), ("width", 10))): 36_479_194,
    ("vit", ()): 2_693_194,
    ("mlp", (("features", 10),)): 4_929,
    ("text", ()): 120_706,
}


@pytest.mark.parametrize(("name", "args"), SIZES, ids=str)
def test_number_of_parameters_is_the_published_one(name, args):
    with torch.device("meta"):
        net = NETWORKS[name](**dict(args)).eval()
        shape = INPUT_SHAPES.get(name, (10,))
        assert net(torch.zeros(3, *shape, dtype=torch.int64 if name == "text" else None)).dim() == 2
    assert sum(p.numel() for p in net.parameters()) == SIZES[name, args]


def test_a_block_is_what_the_paper_draws():
    torch.manual_seed(0)
    net = NETWORKS["resnet20"]().eval()
    block = net.layer2[0]
    x = torch.randn(2, 16, 8, 8)
    inner = F.relu(block.bn1(F.conv2d(x, block.conv1.weight, stride=2, padding=1)))
    inner = block.bn2(F.conv2d(inner, block.conv2.weight, padding=1))
    shortcut = torch.zeros(2, 32, 4, 4)
    shortcut[:, 8:24] = x[:, :, ::2, ::2]
    torch.testing.assert_close(block(x), F.relu(inner + shortcut))


def test_gradients_of_a_shortcut_keep_the_layout_of_images():
    """A gradient in another layout makes every pass over it, down to the first layer, several times as slow."""
    block = NETWORKS["resnet20"]().layer2[0].to(memory_format=torch.channels_last)
    x = torch.randn(2, 16, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    (dx,) = torch.autograd.grad(block(x).square().sum(), x)
    assert dx.is_contiguous(memory_format=torch.channels_last)


def test_a_transformer_block_attends_as_torchs_own():
    torch.manual_seed(0)
    block = NETWORKS["vit"](width=24, heads=3, depth=1).block0.eval()
    own = nn.MultiheadAttention(24, 3, batch_first=True).eval()
    own.load_state_dict(
        {
            "in_proj_weight": block.qkv.weight,
            "in_proj_bias": block.qkv.bias,
            "out_proj.weight": block.out.weight,
            "out_proj.bias": block.out.bias,
        }
    )
    x = torch.randn(2, 5, 24)
    torch.testing.assert_close(block.attend(x), own(x, x, x)[0])


CUTS = {
    "resnet20": ("layer1", {}),
    "wide_resnet": ("layer2", {"depth": 10, "width": 1, "dropout": 0.2}),
    "vit": ("block0", {"width": 12, "depth": 2, "dropout": 0.2}),
    "mlp": ("fc1", {"features": 6, "outputs": 3, "hidden": [8, 8], "dropout": 0.2, "layer_norm": True}),
}


def case(name, dtype=torch.float32, **changed):
    split, args = CUTS[name]
    net = TreeNet(lambda: NETWORKS[name](**{**args, **changed}), members=2, split=split, seed=3).to(dtype)
    shape = (6,) if name == "mlp" else (3, 32, 32)
    inputs = torch.randn(12, *shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    net.probe(inputs[:2])
    return net, Batch(inputs, torch.arange(12) % 3, lambda raw, dtype: raw.to(dtype))


@pytest.mark.parametrize("name", CUTS)
def test_trees_of_them_have_the_same_bits_for_any_workers(name):
    found = []
    for workers in (1, 2, 4):
        net, batch = case(name)
        _, grads = engine_gradients(net, losses.independent(), batch, workers=workers, micro_batches=1)
        found.append((grads, net.state_dict()))  # with running statistics
    for grads, state in found[1:]:
        assert all(torch.equal(a, b) for s in grads for a, b in zip(grads[s], found[0][0][s], strict=True))
        assert all(torch.equal(state[key], found[0][1][key]) for key in state)


@pytest.mark.parametrize("name", CUTS)
def test_gradients_of_trees_of_them_are_those_of_autograd(name):
    net, batch = case(name, torch.float64, **({"dropout": 0.0} if name != "resnet20" else {}))
    found = engine_gradients(net, losses.independent(), batch, micro_batches=1)[1]
    (losses.independent()(net(batch.inputs), batch.targets).total / 12).backward()
    for stage, kept in found.items():
        for got, parameter in zip(kept, net.stages[stage].parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("wide_resnet", {"depth": 15}, "depth is 15 .* depth is 10, 16, 22"),
        ("vit", {"patch": 5}, "image=32 must be a multiple of patch=5"),
        ("mlp", {"features": 0}, "features=0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(name, args, message):
    with pytest.raises(UserError, match=message):
        NETWORKS[name](**args)


def test_the_table_of_numbers_trains_from_its_recipe(mheads, tmp_path):
    done = mheads("train", "diabetes", "optim.iterations=200", "--run", tmp_path / "run")
    assert done.code == 0, done.err
    (line,) = (line for line in done.out.splitlines() if line.strip().startswith("Ensemble-Mean"))
    assert float(line.split()[1]) < 65  # always saying the mean is 77 off
