"""What the network between ranks can carry, measured once they are connected."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from mheads.distributed.lost_ranks import GONE
from mheads.distributed.process_group import World


def measure_bandwidth(world: World) -> float:
    """Bytes per second between the first rank and the last, there and back; the other ranks get 0."""
    last, block = world.size - 1, torch.zeros(1 << 20)
    other = {0: last, last: 0}.get(world.rank)
    if other is None:
        return 0.0
    turns = (dist.send, dist.recv) if world.is_main else (dist.recv, dist.send)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        try:
            for turn in turns:
                turn(block, other)
        except RuntimeError:
            world.watch.report(other, f"rank {other} {GONE}")
            world.watch.check()
            raise
        seconds.append(time.perf_counter() - began)
    return 2 * block.nbytes / min(seconds)
