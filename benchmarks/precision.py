"""bfloat16 beside float32, and beside a channels-last loop under autocast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import interleave, ratio
from benchmarks.ours import BATCH, MEMBERS, Ours, network, pixels, running
from benchmarks.peers import Peer, duplicate, sgd, states
from benchmarks.remote import RemotePeers
from mheads import losses
from mheads.common.check_precision import reason_against
from mheads.common.device import CPU
from mheads.losses import Loss
from mheads.networks import NETWORKS
from mheads.trees.treenet import TreeNet

Progress = Callable[[int, int], None]
RESIDUAL_ROWS = 128
# Factory, rows of a batch, how many times as fast biases learn.
NETS: dict[str, tuple[Callable[[], nn.Module], int, float]] = {
    "quick": (network, BATCH, 2.0),
    "resnet20": (NETWORKS["resnet20"], RESIDUAL_ROWS, 1.0),
}


def autocast_loop(members: Sequence[nn.Module], x: Tensor, y: Tensor, bias_rate: float) -> Peer:
    """A loop over networks in channels-last, each under autocast; losses and weights in float32."""
    nets = [duplicate(net, torch.channels_last) for net in members]
    optimizers = [sgd(list(net.named_parameters()), bias_rate) for net in nets]
    x = x.contiguous(memory_format=torch.channels_last)

    def step() -> None:
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                outputs = net(x)
            F.cross_entropy(outputs.float(), y).backward()
            optimizer.step()

    return Peer(step, states(nets))


def loops(name: str) -> dict[str, Callable[[], Peer]]:
    """The loop on our batch and our first weights; runs in a process of its own."""
    factory, rows, bias_rate = NETS[name]
    batch, net = pixels(rows, MEMBERS), TreeNet(factory, members=MEMBERS)
    members = [net.member(m) for m in range(MEMBERS)]
    x = batch.network_inputs(torch.float32)
    return {"loop_autocast": partial(autocast_loop, members, x, batch.targets, bias_rate)}


def precision(progress: Progress, rounds: int) -> dict[str, Any]:
    """A step in bfloat16: by our own in float32, and by a channels-last loop under autocast."""
    if reason := reason_against("bf16", CPU):
        return {"not_timed": {"bf16": reason}}
    result: dict[str, Any] = {}
    for name, (factory, rows, _) in NETS.items():

        def ours(dtype: torch.dtype, loss: Loss, factory: Any = factory, rows: int = rows) -> Ours:
            return Ours(MEMBERS, loss, rows=rows, factory=factory, precision=dtype)

        sides = {
            f"{name}_float32": ours(torch.float32, losses.independent()),
            f"{name}_bf16": ours(torch.bfloat16, losses.independent()),
            f"{name}_k1_float32": ours(torch.float32, losses.mcl(k=1)),
            f"{name}_k1_bf16": ours(torch.bfloat16, losses.mcl(k=1)),
        }
        others = RemotePeers(partial(loops, name))
        with running(*sides.values(), others):
            steps: dict[str, Callable[[], Any]] = {side: one.step for side, one in sides.items()}
            times = interleave(steps | {f"{name}_loop": others.side("loop_autocast")}, rounds, progress)
        result |= {side: t.to_dict() for side, t in times.items()}
        result |= ratio(f"{name}_float32", times[f"{name}_float32"], times[f"{name}_bf16"])
        result |= ratio(f"{name}_k1_float32", times[f"{name}_k1_float32"], times[f"{name}_k1_bf16"])
        result |= ratio(f"{name}_loop", times[f"{name}_loop"], times[f"{name}_bf16"])
    return result
