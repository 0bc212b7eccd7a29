"""Small members: many networks with little arithmetic, beside the ways in which people train them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import interleave, ratio
from benchmarks.ours import running
from benchmarks.peers import Peer, duplicate, states
from benchmarks.remote import RemotePeers
from mheads import losses
from mheads.config.schema import Config
from mheads.data.batches import Batch
from mheads.networks import NETWORKS
from mheads.optim.stage_updates import Optimizer
from mheads.training.build_from_config import make_engine
from mheads.trees.treenet import TreeNet

LEARNING_RATE = 1e-3
STEPS = 10  # in a turn: after a pause the cores sleep, and waking them up takes longer than such a step
Progress = Callable[[int, int], None]


def sixteen() -> nn.Module:
    """8-64-64-64-1, as people train on tables of numbers."""
    hidden = [nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(64, 1))


def thousand() -> nn.Module:
    """Next to no arithmetic: 32-8-10."""
    return nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 10))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


# Network, members, rows, shape of an example, outputs.
CASES: dict[str, tuple[Callable[[], nn.Module], int, int, tuple[int, ...], int]] = {
    "mlp_m16": (sixteen, 16, 256, (8,), 1),
    "tiny_m1000": (thousand, 1000, 32, (32,), 10),
    "two_layers_m4": (two_layers, 4, 128, (64,), 10),
    "digits_m4": (NETWORKS["digits"], 4, 64, (1, 8, 8), 10),
}


def arrays(case: str) -> tuple[Tensor, Tensor]:
    """Inputs, and targets: numbers for one output, classes for several."""
    _, _, rows, shape, outputs = CASES[case]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, *shape, generator=generator)
    numbers = torch.randn(rows, 1, generator=generator)
    return x, numbers if outputs == 1 else torch.randint(outputs, (rows,), generator=generator)


class SmallOurs:
    """Our engine as a config makes it by default."""

    def __init__(self, case: str, **engine: Any) -> None:
        factory, members, rows, _, outputs = CASES[case]
        x, y = arrays(case)
        optim = {"name": "adamw", "lr": LEARNING_RATE, "weight_decay": 0.01, "batch_size": rows}
        config = Config.model_validate({"members": members, "optim": optim, "engine": engine})
        self.net = TreeNet(factory, members=members)
        self.loss = losses.independent(base_loss="mse" if outputs == 1 else None)
        self.batch = Batch(x, y, lambda value, dtype: value)
        self.engine = make_engine(config, self.net, self.loss)
        self.optimizer = Optimizer(self.net, config.optim, self.engine.stacks)
        self.optimizer.set_rate(LEARNING_RATE)
        self.count = 0

    def step(self) -> None:
        self.engine.step(self.count, self.batch, self.loss)
        self.engine.update(self.optimizer.update)
        self.count += 1

    def weights(self) -> list[dict[str, Tensor]]:
        return [dict(self.net.member(m).named_parameters()) for m in range(self.net.num_members)]

    def close(self) -> None:
        self.engine.close()


def criterion(outputs: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(outputs, y) if y.is_floating_point() else F.cross_entropy(outputs, y)


def adamw(parameters: Sequence[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01)


def loop(members: Sequence[nn.Module], x: Tensor, y: Tensor) -> Peer:
    """A loop over the networks, each with an optimizer."""
    nets = [duplicate(net) for net in members]
    optimizers = [adamw(list(net.parameters())) for net in nets]

    def step() -> None:
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            criterion(net(x), y).backward()
            optimizer.step()

    return Peer(step, states(nets))


def vmap(members: Sequence[nn.Module], x: Tensor, y: Tensor) -> Peer:
    """Stacked weights, torch.func's vmap over the networks, one optimizer."""
    stacked, _ = torch.func.stack_module_state([duplicate(net) for net in members])
    params = {name: p.detach().requires_grad_() for name, p in stacked.items()}
    base = duplicate(members[0]).to("meta")
    optimizer = adamw(list(params.values()))

    def loss(p: dict[str, Tensor]) -> Tensor:
        return criterion(torch.func.functional_call(base, p, (x,)), y)

    def step() -> None:
        optimizer.zero_grad()
        torch.func.vmap(loss)(params).sum().backward()
        optimizer.step()

    return Peer(step, lambda: [{k: p[m] for k, p in params.items()} for m in range(len(members))])


def baddbmm(members: Sequence[nn.Module], x: Tensor, y: Tensor) -> Peer:
    """Batched products written by hand, for networks of Linear and ReLU; one optimizer."""
    params = {
        name: torch.stack([dict(net.named_parameters())[name].detach() for net in members]).requires_grad_()
        for name, _ in members[0].named_parameters()
    }
    names = [name for name, layer in members[0].named_children() if isinstance(layer, nn.Linear)]
    optimizer = adamw(list(params.values()))

    def step() -> None:
        optimizer.zero_grad()
        h = x.expand(len(members), *x.shape)
        for name in names:
            h = torch.baddbmm(params[f"{name}.bias"].unsqueeze(1), h, params[f"{name}.weight"].transpose(1, 2))
            h = h.relu() if name != names[-1] else h
        if y.is_floating_point():
            total = (h - y).square().mean((1, 2)).sum()
        else:
            total = F.cross_entropy(h.flatten(0, 1), y.repeat(len(members)), reduction="sum") / len(y)
        total.backward()
        optimizer.step()

    return Peer(step, lambda: [{k: p[m] for k, p in params.items()} for m in range(len(members))])


def peers_of(case: str) -> dict[str, Callable[[], Peer]]:
    """Everybody else on our batch and our first weights; runs in a process of its own."""
    factory, count, *_ = CASES[case]
    net = TreeNet(factory, members=count)
    members = [net.member(m) for m in range(count)]
    makers = {"loop": loop, "vmap": vmap}
    if all(isinstance(layer, nn.Linear | nn.ReLU) for layer in members[0].children()):
        makers["baddbmm"] = baddbmm
    return {name: partial(make, members, *arrays(case)) for name, make in makers.items()}


def repeat(step: Callable[[], float | None]) -> float:
    """Seconds of a step, the mean of several in a row."""
    total = 0.0
    for _ in range(STEPS):
        began = time.perf_counter()
        total += step() or time.perf_counter() - began
    return total / STEPS


def small(progress: Progress, rounds: int) -> dict[str, Any]:
    """Small members by default, beside a loop over them, vmap and batched products by hand; update included."""
    from benchmarks.suites import check, clones  # here, since it imports this module

    result: dict[str, Any] = {}
    for case in CASES:
        ours, unstacked, others = SmallOurs(case), SmallOurs(case, stack="never"), RemotePeers(partial(peers_of, case))
        with running(ours, unstacked, others):
            start = [clones(member) for member in ours.weights()]
            ours.step()
            unstacked.step()
            for weights in others.weights.values():
                check(weights, ours.weights(), start, 5e-2)
            sides: dict[str, Callable[[], Any]] = {"ours": ours.step, "ours_never_stacked": unstacked.step}
            sides |= {name: others.side(name) for name in others.weights}
            times = interleave({name: partial(repeat, step) for name, step in sides.items()}, rounds, progress)
        result |= {f"{case}_{name}": t.to_dict() for name, t in times.items()}
        for name in ("ours_never_stacked", *others.weights):
            result |= ratio(f"{case}_{name}", times[name], times["ours"])
    return result
