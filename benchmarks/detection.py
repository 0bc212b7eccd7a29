"""Detection: pooling of regions, and what sharing the layers below it saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import interleave, ratio, step_multiply_adds
from benchmarks.ours import MEMBERS, Ours, running
from mheads import losses
from mheads.data.batches import Batch
from mheads.data.preprocessing import Preprocess
from mheads.networks import NETWORKS
from mheads.networks.roi_pooling import RegionPool
from mheads.problems.member_losses import region_losses


def detection(progress: Callable[[int, int], None], rounds: int) -> dict[str, Any]:
    """Regions of an image pooled by us and one by one; and a step of four Fast R-CNN, and of a tree of them."""
    generator = torch.Generator().manual_seed(0)
    x, regions = maps(generator), boxes(2000, generator)
    pool, counts = RegionPool(6, 1 / 16), torch.tensor([len(regions)])
    last = x.contiguous(memory_format=torch.channels_last)
    same = one_by_one(x, regions)
    assert torch.equal(pool(last, regions, counts), same), "the two do not pool alike"
    sides: dict[str, Callable[[], Any]] = {
        "pool": lambda: pool(last, regions, counts),
        "pool_loop": lambda: one_by_one(x, regions),
        "pool_loop_channels_last": lambda: one_by_one(last, regions),
    }
    times = interleave(sides, rounds, lambda done, total: None)
    steps = {
        "caffenet": Detecting("caffenet", MEMBERS, generator),
        "caffenet_conv5": Detecting("caffenet", {"conv5": MEMBERS}, generator),
        "quick": Detecting("cifar10_quick", MEMBERS, generator),
        "quick_conv3": Detecting("cifar10_quick", {"conv3": MEMBERS}, generator),
    }
    with running(*steps.values()):
        times |= interleave({name: side.step for name, side in steps.items()}, rounds, progress)
    work = {name: side.multiply_adds() for name, side in steps.items()}
    result: dict[str, Any] = {name: t.to_dict() for name, t in times.items()}
    for name in ("pool_loop", "pool_loop_channels_last"):
        result |= ratio(name, times[name], times["pool"])
    for name in ("caffenet_conv5", "quick_conv3"):
        four = name.partition("_")[0]
        result |= ratio(name, times[name], times[four])
        result[f"ratio_{name}_multiply_adds"] = round(work[name] / work[four], 3)
    return result


LARGE = (3, 600, 1000)  # an image of PASCAL VOC as Fast R-CNN sees it


def maps(generator: torch.Generator) -> Tensor:
    """What CaffeNet's last convolution gives for such an image."""
    return torch.randn(1, 256, 38, 63, generator=generator).relu()


def boxes(count: int, generator: torch.Generator) -> Tensor:
    """Regions of all sizes inside of what the map covers of the image."""
    corners = torch.rand(count, 2, 2, generator=generator) * torch.tensor([992 - 40, 592 - 40])
    return torch.cat([corners.amin(1), corners.amax(1) + 39], 1).round()


def one_by_one(x: Tensor, regions: Tensor) -> Tensor:
    """What one writes without us: torch's pooling to a fixed size, for one region after the other."""
    corners = (regions / 16 + 0.5).floor().long()
    parts = [
        torch.nn.functional.adaptive_max_pool2d(x[:, :, top : bottom + 1, left : right + 1], 6)
        for left, top, right, bottom in corners.tolist()
    ]
    return torch.cat(parts)


class Detecting(Ours):
    """Our engine on Fast R-CNN: two images, 64 regions of each."""

    def __init__(self, base: str, tree: Any, generator: torch.Generator) -> None:
        factory = partial(NETWORKS["fast_rcnn"], base)
        super().__init__(tree, losses.independent(region_losses), rows=2, factory=factory)
        regions, members = 128, self.net.num_members
        classes = torch.randint(21, (regions,), generator=generator)
        targets = (classes, torch.randn(regions, 4, generator=generator))
        pixels = torch.randint(256, (2, *LARGE[1:], 3), dtype=torch.uint8, generator=generator)
        counts, ties = torch.tensor([64, 64]), torch.rand(members, regions, generator=generator)
        side = {"regions": boxes(regions, generator)}
        self.batch = Batch(
            pixels, targets, Preprocess(mean=torch.full((3, 1, 1), 120.0)), ties=ties, side=side, counts=counts
        )

    def multiply_adds(self) -> int:
        one = self.batch.cut(0, 1)
        return step_multiply_adds(self.net, LARGE, one.side_inputs())
