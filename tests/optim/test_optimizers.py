"""Optimizers against Caffe's update in numpy, and the schedules."""

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from helpers.one_step import engine_gradients
from torch import nn

from mheads import TreeNet, UserError, losses
from mheads.data import Preprocess
from mheads.data.batches import Batch
from mheads.optim.optim_section import OptimOptions
from mheads.optim.schedules import Schedule, ScheduleOptions
from mheads.optim.stage_updates import Optimizer


def one_layer() -> nn.Sequential:
    layer = nn.Linear(3, 2)
    layer.multipliers = {"weight": (1.0, 1.0), "bias": (2.0, 0.0)}
    return nn.Sequential(layer)


def test_caffe_momentum_keeps_the_rate_inside_over_changes_of_the_rate():
    net = TreeNet(one_layer, members=1).double()
    options = OptimOptions(lr=0.1, momentum=0.9, weight_decay=0.01, caffe_momentum=True)
    optimizer = Optimizer(net, options)
    weight, bias = (p.detach().numpy().copy() for p in net.parameters())
    v_weight, v_bias = np.zeros_like(weight), np.zeros_like(bias)
    rng = np.random.default_rng(0)
    for rate in (0.1, 0.1, 0.01, 0.01, 0.05):
        g_weight, g_bias = rng.normal(size=weight.shape), rng.normal(size=bias.shape)
        optimizer.set_rate(rate)
        optimizer.update("trunk", [torch.from_numpy(g_weight.copy()), torch.from_numpy(g_bias.copy())])
        v_weight = 0.9 * v_weight + rate * (g_weight + 0.01 * weight)
        v_bias = 0.9 * v_bias + 2 * rate * g_bias
        weight, bias = weight - v_weight, bias - v_bias
    for parameter, expected in zip(net.parameters(), (weight, bias), strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        (
            {"name": "sgd", "momentum": 0.9, "nesterov": True},
            lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01, nesterov=True),
        ),
        ({"name": "sgd", "momentum": 0.0}, lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01)),
        ({"name": "adamw"}, lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.01)),
        (
            {"name": "adamw", "momentum": 0.8, "momentum2": 0.95, "delta": 1e-3},
            lambda p: torch.optim.AdamW(p, 0.1, (0.8, 0.95), 1e-3, weight_decay=0.01),
        ),
    ],
)
def test_optimizers_equal_torchs_own(options, reference):
    net = TreeNet(lambda: nn.Sequential(nn.Linear(3, 2)), members=1).double()
    twin = TreeNet(lambda: nn.Sequential(nn.Linear(3, 2)), members=1).double()
    optimizer, other = Optimizer(net, OptimOptions(lr=0.1, weight_decay=0.01, **options)), reference(twin.parameters())
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in net.parameters()]
        for p, g in zip(twin.parameters(), gradients, strict=True):
            p.grad = g.clone()
        other.step()
        optimizer.set_rate(0.1)
        optimizer.update("trunk", gradients)
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_a_member_that_won_nothing_still_decays_and_keeps_its_momentum():
    net = TreeNet(one_layer, members=1).double()
    optimizer = Optimizer(net, OptimOptions(lr=0.1, momentum=0.5, weight_decay=0.1))
    optimizer.set_rate(0.1)
    optimizer.update("trunk", [torch.ones(2, 3).double(), torch.ones(2).double()])
    weight = net.member(0)[0].weight.detach().clone()
    optimizer.update("trunk", [torch.zeros(2, 3).double(), torch.zeros(2).double()])
    assert not torch.equal(net.member(0)[0].weight, weight)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_state_survives_saving_and_loading_bit_for_bit(name):
    def trained(steps, saved=None):
        net = TreeNet(one_layer, members=2)
        optimizer = Optimizer(net, OptimOptions(name=name, lr=0.1))
        if saved is not None:
            net.load_state_dict(saved[0])
            optimizer.load_state(saved[1], 0.1)
        for step in steps:
            optimizer.set_rate(0.1)
            for stage in net.stages:
                generator = torch.Generator().manual_seed(step)
                optimizer.update(
                    stage, [torch.randn(p.shape, generator=generator) for p in net.stage(stage).parameters()]
                )
        return net, optimizer

    whole, _ = trained(range(6))
    first, optimizer = trained(range(3))
    saved = {k: v.clone() for k, v in optimizer.state().items()}
    before = {k: v.clone() for k, v in saved.items()}
    resumed, _ = trained(range(3, 6), (first.state_dict(), saved))
    assert all(torch.equal(saved[k], before[k]) for k in saved)  # what was loaded is not what is trained on
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(key.startswith("stages.") for key in saved)


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
@pytest.mark.parametrize("rates", [(0.1, 0.1, 0.01, 0.01, 0.01), (0.1, 0.05, 0.2, 0.2, 0.1)])
def test_a_rate_that_changes_where_training_was_cut_reaches_caffes_momentum(cut, rates):
    """Caffe's momentum has the rate inside: whoever goes on must know the last one, by numpy."""
    options = OptimOptions(lr=0.1, momentum=0.9, weight_decay=0.0, caffe_momentum=True)
    gradients = np.random.default_rng(3).normal(size=(len(rates), 2, 3))
    net = TreeNet(lambda: nn.Sequential(nn.Linear(3, 2, bias=False)), members=1).double()
    (parameter,) = net.parameters()
    weight, v = parameter.detach().numpy().copy(), np.zeros((2, 3))
    optimizer = Optimizer(net, options)
    for i, rate in enumerate(rates):
        if i == cut:
            saved, last = {name: t.clone() for name, t in optimizer.state().items()}, optimizer.rate
            optimizer = Optimizer(net, options)
            optimizer.load_state(saved, last)
        optimizer.set_rate(rate)
        optimizer.update("trunk", [torch.from_numpy(gradients[i].copy())])
        v = 0.9 * v + rate * gradients[i]
        weight = weight - v
    np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=1e-12)


def rates(options: dict, iterations: int, lr: float = 1.0) -> list[float]:
    schedule = Schedule(ScheduleOptions(**options), lr, iterations)
    return [schedule.rate(i) for i in range(iterations)]


def test_schedules():
    assert rates({"name": "constant"}, 3) == [1, 1, 1]
    assert rates({"name": "step", "every": 2, "gamma": 0.5}, 6) == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert rates({"name": "multistep", "at": [2, 3], "gamma": 0.1}, 5) == pytest.approx([1, 1, 0.1, 0.01, 0.01])
    cosine = rates({"name": "cosine"}, 4)
    assert cosine == pytest.approx([0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)])
    assert min(cosine) > 0
    assert rates({"name": "constant", "warmup": 4}, 6) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_plateau_drops_when_a_window_has_not_improved_by_the_threshold():
    schedule = Schedule(ScheduleOptions(name="plateau", window=2, threshold=0.01, gamma=0.1), 1.0, 100)
    seen = []
    for i, loss in enumerate([4.0, 4.0, 3.0, 3.0, 2.99, 2.99, 2.99, 2.99, 2.0, 2.0, 2.0, 2.0]):
        seen.append(schedule.rate(i))
        schedule.observe(loss)
    seen.append(schedule.rate(12))
    # 4 -> 3 is progress; 3 -> 2.99 is not: a tenth, and a new window; 2.99 -> 2 is; 2 -> 2 is not.
    assert seen == pytest.approx([1] * 6 + [0.1] * 6 + [0.01])


def test_plateau_drops_when_losses_rise():
    schedule = Schedule(ScheduleOptions(name="plateau", window=1, threshold=0.1, gamma=0.5), 1.0, 100)
    for loss in (1.0, 2.0, 3.0, 9.0, 8.5):
        schedule.observe(loss)
    # 1 -> 2 drops, and 3 begins anew; 3 -> 9 drops, and 8.5 begins anew.
    assert schedule.rate(5) == 0.25


def test_plateau_state_survives_a_checkpoint():
    options = ScheduleOptions(name="plateau", window=3)
    whole, first = Schedule(options, 1.0, 100), Schedule(options, 1.0, 100)
    losses = [3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2]
    for loss in losses:
        whole.observe(loss)
    for loss in losses[:5]:
        first.observe(loss)
    second = Schedule(options, 1.0, 100)
    second.load_state(first.state())
    for loss in losses[5:]:
        second.observe(loss)
    assert second.state() == whole.state()
    assert second.rate(12) == whole.rate(12) < 1


def test_adamw_takes_no_notice_of_caffes_momentum():
    net = TreeNet(one_layer, members=1)
    optimizer = Optimizer(net, OptimOptions(name="adamw", caffe_momentum=True))
    for rate in (0.1, 0.01):
        optimizer.set_rate(rate)
        optimizer.update("trunk", [torch.ones(2, 3), torch.ones(2)])
    assert optimizer.rate == 0.01


def test_a_frozen_stage_is_left_alone_and_can_be_resumed():
    net = TreeNet(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), tree={"0": 2})
    for parameter in net.stage("trunk").parameters():
        parameter.requires_grad_(False)
    before = net.stage("trunk").state_dict()["0.weight"].clone()
    optimizer = Optimizer(net, OptimOptions())
    optimizer.set_rate(0.1)
    optimizer.update("trunk", [])
    optimizer.update("0/0", [torch.ones(2, 3), torch.ones(2)])
    saved = {k: v.clone() for k, v in optimizer.state().items()}
    Optimizer(net, OptimOptions()).load_state(saved, 0.1)
    assert torch.equal(net.stage("trunk").state_dict()["0.weight"], before)
    assert all("0/0" in key for key in saved)


def test_a_weight_that_two_layers_share_is_stepped_once():
    def tied():
        a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        b.weight = a.weight
        return nn.Sequential(a, b)

    net = TreeNet(tied, members=1)
    before = net.member(0)[0].weight.detach().clone()
    optimizer = Optimizer(net, OptimOptions(momentum=0.0))
    optimizer.set_rate(1.0)
    optimizer.update("trunk", [torch.ones(3, 3)])
    torch.testing.assert_close(net.member(0)[0].weight, before - 1)


def test_a_multiplier_of_no_parameter_is_refused():
    def network():
        layer = nn.Linear(3, 2)
        layer.multipliers = {"wieght": (0, 0)}
        return nn.Sequential(layer)

    with pytest.raises(UserError, match="'wieght'; its parameters are weight, bias"):
        Optimizer(TreeNet(network, members=1), OptimOptions())


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_weight_moves_in_any_precision(name, dtype):
    net = TreeNet(lambda: nn.Sequential(nn.Linear(16, 32)).to(dtype), members=1)
    options = OptimOptions(name=name, lr=0.1, weight_decay=0.0)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    optimizer = Optimizer(net, options)
    optimizer.set_rate(0.1)
    (stage,) = net.stages
    optimizer.update(stage, [torch.ones_like(p) for p in net.parameters()])
    assert all((value != before[key]).all() for key, value in net.state_dict().items())


@pytest.mark.parametrize("tree", [{"layer": 4}, {"layer": [{"other": 3}, 1]}], ids=str)
def test_the_mean_over_members_moves_what_they_share_as_one_network_would(tree):
    """All members are alike and get the same gradients: a tree then learns as one network does, whatever it shares."""

    def network():
        torch.manual_seed(0)
        return nn.Sequential(OrderedDict(layer=nn.Linear(3, 4), other=nn.Linear(4, 4), last=nn.Linear(4, 2)))

    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1, 0, 1, 0])
    batch, weights = Batch(x, y, Preprocess()), []
    for split in (1, tree):
        net = TreeNet(network, tree=split)
        for stage in net.stages.values():
            for name, weight in stage.named_parameters():
                weight.data.copy_(network().get_parameter(name))
        options = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01, "shared_gradients": "mean"}
        optimizer = Optimizer(net, OptimOptions(**options))
        for step in range(3):
            _, gradients = engine_gradients(net, losses.independent(), batch, step=step)
            optimizer.set_rate(0.5)
            for stage, own in gradients.items():
                optimizer.update(stage, own)
        weights.append([dict(net.member(m).named_parameters()) for m in range(net.num_members)])
    (one,), several = weights
    for member in several:
        for name, weight in one.items():
            torch.testing.assert_close(member[name], weight, rtol=1e-5, atol=1e-6)
