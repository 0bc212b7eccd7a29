"""Another package's networks by its factory: timm's where it is installed, and those of a package in its style."""

import pytest
import torch
import torch.nn.functional as F
from helpers.one_step import engine_gradients

from mheads import TreeNet, UserError, losses
from mheads.common.memory_layout import canonical
from mheads.data.batches import Batch
from mheads.networks import resolve

ARGS = {"in_chans": 1, "num_classes": 10}


@pytest.fixture(params=["timm", "helpers.timm_style"])
def model(request):
    if request.param == "timm":
        pytest.importorskip("timm", reason="timm, whose networks these would be, is not installed")
    return f"{request.param}:create_model"


def test_networks_of_another_package_are_cut_and_trained_by_the_name_of_its_factory(model, mheads, tmp_path):
    args = ["model_name=resnet18", *(f"{key}={value}" for key, value in ARGS.items())]
    shown = mheads("cuts", model, *args, "--shape", "1,8,8")
    assert shown.code == 0, shown.err
    names = {line.split()[0] for line in shown.out.splitlines() if line.strip()}
    assert {"bn1", "layer1.0", "layer1", "layer2.0", "layer2", "layer3.0"} <= names
    assert not any("conv2" in name or "downsample" in name for name in names)  # a shortcut goes round these
    done = mheads(
        "train", "digits", f"model={model}", *(f"model_args.{arg}" for arg in args), "split=layer2", "members=2",
        "loss=mcl", "data.limit=40", "optim.batch_size=10", "optim.iterations=2", "--run", tmp_path / "run",
    )  # fmt: skip
    assert done.code == 0, done.err


@pytest.mark.parametrize("name", ["resnet18", "seresnet18"])
@pytest.mark.parametrize("split", ["bn1", "layer1.0", "layer2"])
def test_its_tree_has_the_outputs_gradients_and_statistics_of_the_uncut_networks(model, name, split):
    create = resolve(model)
    net = TreeNet(lambda: create(model_name=name, **ARGS), members=2, split=split).double().train()
    x, y = torch.randn(12, 1, 16, 16, dtype=torch.float64), torch.arange(12) % 10
    whole = [create(model_name=name, **ARGS).double().train() for _ in range(2)]
    for m, network in enumerate(whole):
        network.load_state_dict(net.member(m).state_dict(), strict=True)
    _, got = engine_gradients(
        net, losses.independent(), Batch(x, y, lambda raw, dtype: canonical(raw)), micro_batches=1
    )
    sum(F.cross_entropy(network(x), y) for network in whole).backward()
    for node in net.tree.nodes.values():
        for (key, _), gradient in zip(net.stage(node.name).named_parameters(), got[node.name], strict=True):
            expected = sum(whole[m].get_parameter(key).grad for m in node.members)
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-11)
    outputs = net.eval()(x)
    for m, network in enumerate(whole):
        torch.testing.assert_close(outputs[m], network.eval()(x), rtol=1e-9, atol=1e-11)


def test_paths_that_are_dropped_by_the_global_generator_are_refused(model):
    create = resolve(model)
    net = TreeNet(lambda: create(model_name="resnet18", drop_path_rate=0.1, **ARGS), members=2)
    with pytest.raises(UserError, match="draws random numbers from the global generator of torch"):
        net.probe(torch.randn(2, 1, 16, 16))
