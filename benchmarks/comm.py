"""What communication costs on two ranks: for each layer that can be shared, and beside the engine of one process.

A step is timed as it is, and with its tensors left out (the same tasks and collectives, of a byte each): the
difference is what sending adds to the step, the exposed time. Reported with it are the time that the same collectives
take when nothing else is done, and what the planner predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measure import Times, interleave
from benchmarks.ranks import RANKS, Case, RemoteRanks
from mheads import losses
from mheads.distributed.planning.placement import Placement, default
from mheads.distributed.planning.placement_search import auto
from mheads.distributed.planning.prediction import Prediction, predict, traffic
from mheads.distributed.planning.stage_loads import StageLoad
from mheads.distributed.planning.workload import Cluster

Progress = Callable[[int, int], None]
TRANSFERS = 20


@dataclass(frozen=True)
class Network:
    """A network, the layers that its members may share, and the part of the rounds that it gets."""

    model: str
    members: int
    rows: int
    micro_batches: int
    splits: tuple[str, ...]
    rounds: float = 1.0

    def case(self, split: str) -> Case:
        return Case(self.model, split, self.members, self.rows, self.micro_batches)


# CaffeNet gets fewer rows than the 256 of its recipe, so that a step takes seconds, in one micro-batch.
CIFAR10_QUICK = Network("cifar10_quick", 4, 350, 4, ("conv1", "conv2", "conv3", "ip1"))
CAFFENET = Network("caffenet", 5, 16, 1, ("conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7"), rounds=0.34)


def measure(
    progress: Progress, rounds: int, networks: Sequence[Network] = (CIFAR10_QUICK, CAFFENET), beside: str = "conv2"
) -> dict[str, Any]:
    """Measures every layer of every network; then the first one split at `beside`, in turn with the threads engine."""
    result: dict[str, Any] = {}
    layers = [(network, split) for network in networks for split in network.splits]
    with closing(RemoteRanks()) as ranks:
        result["bandwidth_gb_per_second"] = round(ranks.bandwidth / 1e9, 3)
        for i, (network, split) in enumerate(layers):
            turns = max(2, round(network.rounds * rounds))
            result[f"{network.model}_{split}"] = share_layer(ranks, network.case(split), turns)
            progress(i + 1, len(layers) + 1)
        for network in networks:
            found = [result[f"{network.model}_{split}"] for split in network.splits]
            result[f"fit_{network.model}"] = fit(found)
        result |= beside_threads(ranks, networks[0].case(beside), rounds)
    progress(len(layers) + 1, len(layers) + 1)
    return result


def share_layer(ranks: RemoteRanks, case: Case, rounds: int) -> dict[str, Any]:
    """Measures forward and backward without the optimizer, as the paper does, in the default placement."""
    placement, loads = default(case.tree, RANKS, case.micro_batches), case.loads()
    ranks.build(case, placement)
    times = interleave({"step": ranks.step, "bare": partial(ranks.step, payload=False)}, rounds, _nobody)
    loads = best_loads(loads, case.loads())
    without_update = {name: replace(load, update=0.0) for name, load in loads.items()}
    (shared,) = traffic(case.workload, loads, placement)
    floats = (shared.outputs, shared.gradients, case.micro_batches)
    transfer = Times([ranks.transfer(*floats) for _ in range(TRANSFERS)])
    return {
        "network": case.model,
        "members": case.members,
        "batch": case.rows,
        "micro_batches": case.micro_batches,
        "floats_forward": shared.outputs,
        "floats_backward": shared.gradients,
        "transfer_ms": _ms(transfer.best),
        "transfer_median_ms": _ms(transfer.median),
        **times["step"].to_dict(),
        "transfer_fraction": round(transfer.best / times["step"].best, 5),
        **exposed(times["step"], times["bare"]),
        **compare(prediction(case, without_update, placement, ranks), times["step"]),
    }


def beside_threads(ranks: RemoteRanks, case: Case, rounds: int) -> dict[str, Any]:
    """Measures whole steps: two ranks of one worker, in two placements, and one process of two workers."""
    from benchmarks.ours import Ours

    loads = case.loads()
    chosen = auto(case.workload, Cluster(RANKS, 1, ranks.bandwidth), loads)  # as training chooses
    placements = {"auto": chosen, "default": default(case.tree, RANKS, case.micro_batches)}
    threads = Ours({case.split: case.members}, losses.independent(), RANKS, case.rows, case.micro_batches)
    with closing(threads), closing(RemoteRanks()) as others:
        worlds = {"auto": ranks, "default": others}
        sides: dict[str, Callable[[], Any]] = {"threads": threads.step}
        for name, world in worlds.items():
            world.build(case, placements[name], update=True)
            sides[name] = world.step
            sides[f"{name}_bare"] = partial(world.step, payload=False)
        times = interleave(sides, rounds, _nobody)
        loads = best_loads(loads, case.loads())
        found = {name: prediction(case, loads, placement, ranks) for name, placement in placements.items()}
    result: dict[str, Any] = {
        "threads": times["threads"].to_dict() | {"images_per_second": round(case.rows / times["threads"].best, 1)}
    }
    for name in placements:
        result[name] = {
            "placement": " ".join(
                f"{stage}:{','.join(map(str, slots))}" for stage, slots in placements[name].stages.items()
            ),
            "replicas": placements[name].replicas,
            **times[name].to_dict(),
            "images_per_second": round(case.rows / times[name].best, 1),
            **exposed(times[name], times[f"{name}_bare"]),
            **compare(found[name], times[name]),
        }
        suffix = "" if name == "auto" else f"_{name}"
        result[f"ratio_threads{suffix}"] = round(times["threads"].best / times[name].best, 3)
        result[f"ratio_threads{suffix}_median"] = round(times["threads"].median / times[name].median, 3)
    return result


def exposed(step: Times, bare: Times) -> dict[str, float]:
    """What the bytes add to a step: best against best, and over the rounds, comparing the two steps of a round."""
    pairs = [a - b for a, b in zip(step.seconds, bare.seconds, strict=True)]
    low, middle, high = (float(q) for q in np.percentile(pairs, (25, 50, 75)))
    return {
        "exposed_ms": _ms(step.best - bare.best),
        "exposed_median_ms": _ms(middle),
        "exposed_quarter_ms": _ms(low),
        "exposed_three_quarters_ms": _ms(high),
        "exposed_fraction": round((step.best - bare.best) / step.best, 4),
        "exposed_fraction_median": round(middle / step.median, 4),
    }


def best_loads(*turns: Mapping[str, StageLoad]) -> dict[str, StageLoad]:
    """The lower of the loads measured before and after the steps: the machine may have been busy at either time."""
    return {
        name: replace(
            load,
            forward=min(turn[name].forward for turn in turns),
            backward=min(turn[name].backward for turn in turns),
            update=min(turn[name].update for turn in turns),
        )
        for name, load in turns[0].items()
    }


def prediction(case: Case, loads: Mapping[str, StageLoad], placement: Placement, ranks: RemoteRanks) -> Prediction:
    """What `mheads plan` predicts with the bandwidth and the latency between these ranks."""
    return predict(case.workload, Cluster(RANKS, 1, ranks.bandwidth, ranks.latency()), loads, placement)


def compare(found: Prediction, step: Times) -> dict[str, float]:
    """Compares the planner with the clock: an error above 0 is a step that takes longer than predicted."""
    return {
        "predicted_ms": _ms(found.step_seconds),
        "predicted_exposed_ms": _ms(found.exposed_seconds),
        "prediction_error": round(step.best / found.step_seconds - 1, 3),
        "prediction_error_median": round(step.median / found.step_seconds - 1, 3),
    }


def fit(layers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Least-squares lines against millions of floats, and what part of the variance they explain.

    The transfer itself, and the fractions of the step: these need not lie on a line, since a step that shares more
    layers is shorter.
    """
    floats = np.array([layer["floats_forward"] for layer in layers], float) / 1e6
    result: dict[str, float] = {}
    for what in ("transfer_ms", "transfer_fraction", "exposed_fraction"):
        values = np.array([layer[what] for layer in layers])
        slope, intercept = np.polyfit(floats, values, 1)
        spread = float(((values - values.mean()) ** 2).sum())
        rest = float(((values - slope * floats - intercept) ** 2).sum())
        result[f"{what}_at_0"] = round(float(intercept), 5)
        result[f"{what}_per_million_floats"] = round(float(slope), 5)
        result[f"{what}_r2"] = round(1 - rest / spread, 3) if spread else 1.0
    return result


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def _nobody(done: int, total: int) -> None:
    """Ignores the progress of rounds: it is shown layer by layer."""
