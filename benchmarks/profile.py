"""Where the time of a step goes, layer by layer on one core, with freed memory kept and without.

python -m mheads.bench.profile [keep]: one of the two, in a process of its own, since malloc is set up only once.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn

from mheads.common.memory_layout import canonical
from mheads.common.modules import children
from mheads.engine import row_backward
from mheads.engine.memory import keep_freed_memory
from mheads.networks import INPUT_SHAPES, NETWORKS
from mheads.trees.treenet import TreeNet

ROWS, REPEATS = 88, 15


def layer_times(name: str = "cifar10_quick") -> dict[str, float]:
    """Best microseconds per row of each layer's forward and backward, as the engine runs them on a micro-batch."""
    torch.set_num_threads(1)
    stage = TreeNet(NETWORKS[name], members=1).stage("trunk")
    x = canonical(50 * torch.randn(ROWS, *INPUT_SHAPES[name]))
    best: dict[str, float] = {}

    def note(what: str, began: float) -> None:
        micros = 1e6 * (time.perf_counter() - began) / ROWS
        best[what] = min(best.get(what, micros), micros)

    with torch.no_grad():
        for _ in range(REPEATS):
            h, owned, backwards = x, False, []
            for layer_name, layer in children(stage):
                began = time.perf_counter()
                h, backward = row_backward.STEPS[type(layer)](layer, h, owned)
                note(f"{layer_name}.forward", began)
                owned = isinstance(layer, row_backward.GIVES_AWAY)
                backwards.append((layer_name, backward))
            d: torch.Tensor | None = torch.randn_like(h)
            while backwards:
                layer_name, backward = backwards.pop()
                assert d is not None
                began = time.perf_counter()
                d, _ = backward(d, lambda t: t, bool(backwards))
                note(f"{layer_name}.backward", began)
    return {what: round(micros, 1) for what, micros in best.items()}


def convolutions(name: str = "cifar10_quick") -> list[str]:
    return [n for n, layer in children(NETWORKS[name]()) if isinstance(layer, nn.Conv2d | nn.Linear)]


if __name__ == "__main__":
    if sys.argv[1:] == ["keep"]:
        keep_freed_memory()
    print(json.dumps(layer_times()))
