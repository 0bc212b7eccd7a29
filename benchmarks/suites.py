"""The benchmarks by name. Each returns what `--json` writes; the keys are documented in benchmarks/README.md."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.cores import cores
from benchmarks.detection import detection
from benchmarks.fma_peak import fma_peak
from benchmarks.measure import MATMUL_FLOPS, interleave, machine, matmul_rate, ratio, step_multiply_adds
from benchmarks.ours import BATCH, MEMBERS, SHAPE, Ours, network, pixels, running, tiny
from benchmarks.precision import precision
from benchmarks.profile import convolutions
from benchmarks.remote import RemotePeers
from benchmarks.small import small
from mheads import losses
from mheads.engine.threads import available_cores
from mheads.losses import Loss
from mheads.networks import NETWORKS
from mheads.trees.treenet import TreeNet

Progress = Callable[[int, int], None]
EVAL_ROWS, EVAL_COUNT = 100, 20
TOLERANCE = 1e-2  # of the largest change of a weight in the step: float32 sums in another order


def step(progress: Progress, rounds: int) -> dict[str, Any]:
    """A training step of four independent networks, ours and everybody else's, and the rate of matrix products."""
    ours = Ours(MEMBERS, losses.independent())
    fused = Ours(MEMBERS, losses.score_averaged())
    start = [clones(member) for member in ours.weights()]
    others = RemotePeers(everybody_else)
    with running(ours, fused, others):
        ours.step()
        fused.step()
        skipped = dict(others.failed)
        for name, weights in others.weights.items():
            try:
                check(weights, (fused if name.endswith("fusion") else ours).weights(), start)
            except AssertionError as error:
                skipped[name] = str(error)
        found = [name for name in others.weights if name not in skipped]
        sides: dict[str, Callable[[], Any]] = {"ours": ours.step, "ours_score_averaged": fused.step}
        sides |= {name: others.side(name) for name in found}
        sides["matmul"] = matmul_rate()
        times = interleave(sides, rounds, progress)
    matmul = MATMUL_FLOPS / times["matmul"].best
    useful = 2 * step_multiply_adds(ours.net, SHAPE) * BATCH
    result: dict[str, Any] = {name: t.to_dict() for name, t in times.items() if name != "matmul"}
    for name in found:
        base = "ours_score_averaged" if name.endswith("fusion") else "ours"
        result |= ratio(name, times[name], times[base])
    result["matmul_gflops"] = round(matmul / 1e9, 1)
    result["useful_gflops"] = round(useful / times["ours"].best / 1e9, 1)
    result["fraction_of_matmul"] = round(useful / times["ours"].best / matmul, 3)
    result["images_per_second"] = round(BATCH / times["ours"].best, 1)
    if (peak := fma_peak(available_cores())) is not None:
        result["peak_gflops"] = round(peak / 1e9, 1)
        result["fraction_of_peak"] = round(useful / times["ours"].best / peak, 3)
    return result | ({"not_timed": skipped} if skipped else {})


def everybody_else() -> dict[str, Callable[[], peers.Peer]]:
    """The peers on our batch and our first weights; runs in a process of its own."""
    batch, net = pixels(BATCH, MEMBERS), TreeNet(network, members=MEMBERS)
    x, members = batch.network_inputs(torch.float32), [net.member(m) for m in range(MEMBERS)]
    makers: dict[str, Callable[..., peers.Peer]] = {
        "loop": peers.plain_loop,
        "loop_channels_last": peers.channels_last_loop,
        "vmap": peers.vmapped,
        "grouped": peers.grouped,
        "compile": peers.compiled_loop,
    }
    if importlib.util.find_spec("torchensemble") is not None:
        makers |= {"torchensemble": peers.torchensemble_voting, "torchensemble_fusion": peers.torchensemble_fusion}
    return {name: partial(make, members, x, batch.targets) for name, make in makers.items()}


def clones(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in weights.items()}


def check(
    got: list[dict[str, np.ndarray]], expected: peers.Weights, start: peers.Weights, tolerance: float = TOLERANCE
) -> None:
    """Refuses to time a peer that does not compute the same step."""
    for m, (a, b) in enumerate(zip(got, expected, strict=True)):
        for key, before in start[m].items():
            moved = (b[key] - before).abs().max()
            off = (torch.from_numpy(a[key]) - b[key]).abs().max()
            rounding = 2 * torch.finfo(before.dtype).eps * before.abs().max()
            if not off <= tolerance * moved + rounding:
                raise AssertionError(
                    f"{key} of member {m} is {off:.1e} off after a step that moved it {moved:.1e}: not the same step"
                )


def mcl(progress: Progress, rounds: int) -> dict[str, Any]:
    """Multiple Choice Learning: examples that a member did not win cost it no backward."""
    sides = {"dense": Ours(MEMBERS, losses.independent())}
    sides |= {f"k{k}": Ours(MEMBERS, losses.mcl(k=k)) for k in (1, 2, 3)}
    with running(*sides.values()):
        times = interleave({name: side.step for name, side in sides.items()}, rounds, progress)
    result: dict[str, Any] = {name: t.to_dict() for name, t in times.items()}
    for name in ("k1", "k2", "k3"):
        result |= ratio(name, times[name], times["dense"])
    return result


def tree(progress: Progress, rounds: int) -> dict[str, Any]:
    """TreeNets against the independent ensemble, and a single model on one core and on all."""
    splits = ("conv1", "conv2", "conv3")
    sides = {"independent": Ours(MEMBERS, losses.independent())}
    sides |= {split: Ours({split: MEMBERS}, losses.independent()) for split in splits}
    sides["single"] = Ours(1, losses.independent())
    sides["single_one_core"] = Ours(1, losses.independent(), workers=1)
    with running(*sides.values()):
        times = interleave({name: side.step for name, side in sides.items()}, rounds, progress)
    work = {name: step_multiply_adds(side.net, SHAPE) for name, side in sides.items()}
    result: dict[str, Any] = {name: t.to_dict() for name, t in times.items()}
    for split in splits:
        result |= ratio(split, times[split], times["independent"])
        result[f"ratio_{split}_multiply_adds"] = round(work[split] / work["independent"], 3)
    result |= ratio("single", times["single"], times["independent"])
    result["speedup_single"] = round(times["single_one_core"].best / times["single"].best, 3)
    return result


def residual(progress: Progress, rounds: int) -> dict[str, Any]:
    """Four ResNet-20: batch statistics keep batches whole, so what fills the cores is members, or a trunk's threads."""
    splits = ("layer1", "layer2")
    sides = {"ours": Residual(MEMBERS), "k1": Residual(MEMBERS, losses.mcl(k=1)), "single": Residual(1)}
    sides |= {split: Residual({split: MEMBERS}) for split in splits}
    start = {name: [clones(member) for member in sides[name].weights()] for name in ("ours", "single")}
    others = RemotePeers(residual_loops)
    with running(*sides.values(), others):
        for name in start:
            sides[name].step()
        for name, weights in others.weights.items():
            base = "single" if name.startswith("single") else "ours"
            # Rounding grows through twenty normalisations; in float64 our tests find the step of autograd to 1e-9.
            check(weights, sides[base].weights(), start[base], 5 * TOLERANCE)
        timed: dict[str, Callable[[], Any]] = {name: side.step for name, side in sides.items()}
        times = interleave(timed | {name: others.side(name) for name in others.weights}, rounds, progress)
    work = {name: step_multiply_adds(side.net, SHAPE) for name, side in sides.items()}
    result: dict[str, Any] = {name: t.to_dict() for name, t in times.items()}
    for name in others.weights:
        result |= ratio(name, times[name], times["single" if name.startswith("single") else "ours"])
    for name in ("k1", *splits):
        result |= ratio(name, times[name], times["ours"])
    return result | {f"ratio_{split}_multiply_adds": round(work[split] / work["ours"], 3) for split in splits}


RESIDUAL_ROWS = 128


class Residual(Ours):
    """Our engine on ResNet-20."""

    def __init__(self, tree: Any, loss: Loss | None = None) -> None:
        super().__init__(tree, loss or losses.independent(), rows=RESIDUAL_ROWS, factory=NETWORKS["resnet20"])


def residual_loops() -> dict[str, Callable[[], peers.Peer]]:
    """Loops over four ResNet-20 and over one, on our batch and our first weights; runs in a process of its own."""
    found: dict[str, Callable[[], peers.Peer]] = {}
    for members, prefix in ((MEMBERS, ""), (1, "single_")):
        batch, net = pixels(RESIDUAL_ROWS, members), TreeNet(NETWORKS["resnet20"], members=members)
        x, nets = batch.network_inputs(torch.float32), [net.member(m) for m in range(members)]
        for name, make in (("loop", peers.plain_loop), ("loop_channels_last", peers.channels_last_loop)):
            found[prefix + name] = partial(make, nets, x, batch.targets, bias_rate=1.0)
    return found


def evaluation(progress: Progress, rounds: int) -> dict[str, Any]:
    """Outputs of four members on 2,000 images."""
    ours = Ours(MEMBERS, losses.independent(), rows=EVAL_ROWS)
    others = RemotePeers(evaluation_loops)

    def engine() -> list[Tensor]:
        return [outputs for outputs, _ in ours.engine.outputs([lambda: ours.batch] * EVAL_COUNT)]

    with running(ours, others):
        outputs = engine()[0]
        for name, weights in others.weights.items():
            expected = np.stack([member["outputs"] for member in weights])
            np.testing.assert_allclose(outputs.numpy(), expected, rtol=1e-3, atol=1e-4, err_msg=name)
        times = interleave({"ours": engine} | {n: others.side(n) for n in others.weights}, rounds, progress)
    result: dict[str, Any] = {name: t.to_dict() for name, t in times.items()}
    for name in others.weights:
        result |= ratio(name, times[name], times["ours"])
    return result | {"images_per_second": round(EVAL_ROWS * EVAL_COUNT / times["ours"].best, 1)}


def evaluation_loops() -> dict[str, Callable[[], peers.Peer]]:
    """The plain loop and the channels-last one; their `weights` are the outputs of the first batch."""

    def loop(memory_format: torch.memory_format) -> peers.Peer:
        net = TreeNet(network, members=MEMBERS)
        nets = [peers.duplicate(net.member(m), memory_format).eval() for m in range(MEMBERS)]
        x = pixels(EVAL_ROWS, MEMBERS).network_inputs(torch.float32).contiguous(memory_format=memory_format)

        @torch.no_grad()
        def outputs() -> list[Tensor]:
            return [torch.stack([net(x) for net in nets]) for _ in range(EVAL_COUNT)]

        return peers.Peer(outputs, lambda: [{"outputs": member} for member in outputs()[0]])

    formats = {"loop": torch.contiguous_format, "loop_channels_last": torch.channels_last}
    return {name: partial(loop, memory_format) for name, memory_format in formats.items()}


def scale(progress: Progress, rounds: int) -> dict[str, Any]:
    """The cost per member as their number grows; with tiny members up to a thousand, where all the overhead shows."""
    sides = {f"m{m}": Ours(m, losses.independent()) for m in (1, 2, 4, 8, 16)}
    small = {f"tiny_m{m}": Ours(m, losses.independent(), rows=32, factory=tiny) for m in (10, 100, 1000)}
    with running(*sides.values(), *small.values()):
        times = interleave({name: side.step for name, side in (sides | small).items()}, rounds, progress)
    per_member = {name: times[name].best / side.net.num_members for name, side in sides.items()}
    result: dict[str, Any] = {name: t.to_dict() for name, t in times.items()}
    result |= {f"per_member_{name}_ms": round(1e3 * seconds, 2) for name, seconds in per_member.items()}
    for name, side in small.items():
        result[f"per_member_{name}_ms"] = round(1e3 * times[name].best / side.net.num_members, 4)
    from_two = [seconds for name, seconds in per_member.items() if name != "m1"]
    result["spread_from_m2"] = round(max(from_two) / min(from_two) - 1, 3)
    return result


def memory(progress: Progress, rounds: int) -> dict[str, Any]:
    """Peak memory of training beyond weights, gradients and momentum; each case in a process of its own."""
    cases = [("independent", 1), ("independent", 4), ("independent", 16), ("mcl", 4), ("mcl", 16)]
    result: dict[str, Any] = {}
    for i, (loss, members) in enumerate(cases):
        command = [sys.executable, "-m", "benchmarks.memory", loss, str(members)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result[f"{loss}_m{members}"] = json.loads(done.stdout)
        progress(i + 1, len(cases))
    for loss in ("independent", "mcl"):
        four, sixteen = (result[f"{loss}_m{m}"]["beyond_state_mb"] for m in (4, 16))
        result[f"ratio_{loss}_m16"] = round(sixteen / four, 3)
    return result


def profile(progress: Progress, rounds: int) -> dict[str, Any]:
    """Layers of one network on one core: what is matrix products, what is not, and what keeping memory saves."""
    result: dict[str, Any] = {}
    for i, mode in enumerate(("keep", "default")):
        command = [sys.executable, "-m", "benchmarks.profile", *(["keep"] if mode == "keep" else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result[mode] = json.loads(done.stdout)
        progress(i + 1, 2)
    products = [what for what in result["keep"] if what.split(".")[0] in convolutions()]
    for mode in ("keep", "default"):
        result[f"us_per_row_{mode}"] = round(sum(result[mode].values()), 1)
    result["us_per_row_products"] = round(sum(result["keep"][what] for what in products), 1)
    useful = 2 * step_multiply_adds(TreeNet(network, members=1), SHAPE)
    result["gflops_of_products"] = round(useful / result["us_per_row_products"] / 1e3, 1)
    return result


def comm(progress: Progress, rounds: int) -> dict[str, Any]:
    """What communication costs on two ranks."""
    from benchmarks.comm import measure  # here, since it imports this module

    return measure(progress, rounds)


SUITES: dict[str, Callable[[Progress, int], dict[str, Any]]] = {
    "step": step,
    "mcl": mcl,
    "tree": tree,
    "residual": residual,
    "detection": detection,
    "eval": evaluation,
    "scale": scale,
    "small": small,
    "precision": precision,
    "cores": cores,
    "memory": memory,
    "profile": profile,
    "comm": comm,
}


def run(name: str, progress: Progress, rounds: int) -> dict[str, Any]:
    """Runs one suite; the result also says which machine it was measured on."""
    return {"suite": name, "machine": machine(), "rounds": rounds, **SUITES[name](progress, rounds)}
