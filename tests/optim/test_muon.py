"""Muon against numpy, and groups of parameters with learning rates, weight decays and ends of their own."""

import numpy as np
import pytest
import torch
from torch import nn

from mheads import TreeNet, UserError
from mheads.optim.muon import orthogonalise
from mheads.optim.optim_section import OptimOptions
from mheads.optim.schedules import Schedule, ScheduleOptions
from mheads.optim.stage_updates import Optimizer


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 2))


def newton_schulz(g, steps):
    flat = g.reshape(len(g), -1)
    x = flat / np.sqrt((flat**2).sum())
    x = x.T if len(x) > len(x.T) else x
    for _ in range(steps):
        s = x @ x.T
        x = 3.4445 * x - 4.775 * s @ x + 2.0315 * s @ s @ x
    return (x.T if x.shape != flat.shape else x).reshape(g.shape)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_steps_filters_as_in_numpy_and_the_rest_as_sgd(nesterov):
    net = TreeNet(small, members=1).double()
    twin = [p.detach().clone().requires_grad_() for p in net.parameters()]
    options = OptimOptions(
        name="muon", lr=0.2, momentum=0.6, sgd_momentum=0.85, nesterov=nesterov, newton_schulz=3, weight_decay=0.05
    )
    optimizer = Optimizer(net, options)
    sgd = torch.optim.SGD(twin[1:], 0.2, 0.85, weight_decay=0.05, nesterov=nesterov)
    filters, v, rng = twin[0].detach().numpy().copy(), 0.0, np.random.default_rng(0)
    for rate in (0.2, 0.1, 0.05):
        gradients = [rng.normal(size=p.shape) for p in twin]
        optimizer.set_rate(rate)
        optimizer.update("trunk", [torch.from_numpy(g.copy()) for g in gradients])
        v = 0.6 * v + gradients[0]
        filters = filters * 2 / np.sqrt((filters**2).sum())  # the norm of four filters is sqrt(4)
        filters = filters - rate * newton_schulz(gradients[0] + 0.6 * v if nesterov else v, 3)
        sgd.param_groups[0]["lr"] = rate
        for p, g in zip(twin[1:], gradients[1:], strict=True):
            p.grad = torch.from_numpy(g.copy())
        sgd.step()
    ours = list(net.parameters())
    np.testing.assert_allclose(ours[0].detach().numpy(), filters, rtol=1e-6, atol=1e-7)  # epsilon is 1e-7
    for a, b in zip(ours[1:], twin[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(8, 5), (5, 8)])
def test_orthogonalising_brings_singular_values_near_one_and_keeps_singular_vectors(shape):
    matrix = torch.from_numpy(np.random.default_rng(1).normal(size=shape))
    u, _, vt = np.linalg.svd(matrix.numpy(), full_matrices=False)
    inner = u.T @ orthogonalise(matrix, 5).numpy() @ vt.T
    values = np.diag(inner)
    assert (np.abs(inner - np.diag(values)) < 1e-5).all()
    assert ((values > 0.6) & (values < 1.3)).all()
    assert torch.equal(orthogonalise(torch.zeros(3, 4), 3), torch.zeros(3, 4))


def test_muon_knows_filters_of_stacked_stages_by_their_own_dimensions():
    """A stack adds a dimension: its matrices are not filters, and its filters are orthogonalised stage by stage."""

    class Stack:
        def __init__(self, net):
            self.names, self.stages = tuple(net.stages), list(net.stages.values())
            named = [dict(stage.named_parameters()) for stage in self.stages]
            self.parameters = {key: nn.Parameter(torch.stack([own[key].data for own in named])) for key in named[0]}

    options = OptimOptions(name="muon", lr=0.1, nesterov=True)
    net, twin = (TreeNet(small, members=2).double() for _ in range(2))
    stack = Stack(twin)
    first = stack.names[0]
    apart, together = Optimizer(net, options), Optimizer(twin, options, {first: stack})
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        gradients = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in stack.parameters.values()]
        apart.set_rate(0.1)
        together.set_rate(0.1)
        together.update(first, [g.clone() for g in gradients])
        for i, name in enumerate(net.stages):
            apart.update(name, [g[i].clone() for g in gradients])
    for key, stacked in stack.parameters.items():
        for i, name in enumerate(net.stages):
            torch.testing.assert_close(stacked[i], dict(net.stage(name).named_parameters())[key], rtol=1e-9, atol=1e-12)


def grouped(groups, **keys):
    net = TreeNet(small, members=2, split="0").double()
    return net, Optimizer(net, OptimOptions(lr=0.1, momentum=0.0, parameter_groups=groups, **keys))


def test_groups_have_learning_rates_and_weight_decays_of_their_own():
    """By plain SGD on gradients of 1: w - lr (1 + decay w)."""
    net, optimizer = grouped({"*.bias": {"lr": 0.3, "weight_decay": 0.0}, "2.weight": {"lr": 0.02}}, weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer.set_rate(0.05)  # half of optim.lr: so is each group's
    for stage in net.stages:
        optimizer.update(stage, [torch.ones_like(p) for p in net.stage(stage).parameters()])
    for name, p in net.named_parameters():
        lr, decay = (0.15, 0.0) if name.endswith("bias") else (0.01, 0.5) if "2.weight" in name else (0.05, 0.5)
        torch.testing.assert_close(p, before[name] - lr * (1 + decay * before[name]), rtol=1e-12, atol=0)


def test_a_group_that_ends_early_follows_the_schedule_up_to_there_and_then_stands_still():
    net, optimizer = grouped({"0": {"lr": 0.2, "until": 0.25}})
    schedule = Schedule(ScheduleOptions(name="poly"), 0.1, 8)
    trunk = next(iter(net.stages))
    (weight, _), moves = net.stage(trunk).parameters(), []
    for iteration in range(8):
        before = weight.detach().clone()
        optimizer.set_rate(schedule.rate(iteration), lambda until, i=iteration: schedule.rate(i, until))
        optimizer.update(trunk, [torch.ones_like(p) for p in net.stage(trunk).parameters()])
        moves.append((before - weight.detach()).mean().item())
    np.testing.assert_allclose(moves, [0.2, 0.1] + [0] * 6, atol=1e-15)  # two of eight iterations


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"nowhere": {"lr": 1}}, ["'nowhere'", "0.weight", "2.bias"]),
        ({"*.bias": {"lr": 1}, "2": {"lr": 2}}, ["2.bias", "two groups", "'*.bias'", "'2'"]),
    ],
)
def test_a_group_of_nothing_and_a_parameter_in_two_groups_are_errors(groups, words):
    with pytest.raises(UserError) as error:
        grouped(groups)
    assert all(word in str(error.value) for word in words)
