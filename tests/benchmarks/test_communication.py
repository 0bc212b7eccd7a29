"""The benchmark of communication: what goes over the wire, counted by hand, and a tiny run of all of it."""

import io
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console

from benchmarks import comm, ranks, report, suites
from benchmarks.comm import CAFFENET, CIFAR10_QUICK, Network, best_loads, exposed, fit
from benchmarks.measure import Times
from benchmarks.ranks import RANKS
from mheads.distributed.planning.placement import default
from mheads.distributed.planning.prediction import predict, traffic
from mheads.distributed.planning.stage_loads import StageLoad
from mheads.distributed.planning.workload import Cluster, Workload
from mheads.networks import INPUT_SHAPES, NETWORKS

TINY = Network("cifar10_quick", members=4, rows=16, micro_batches=2, splits=("conv2", "ip1"))
FLOATS = {
    "cifar10_quick": {"conv1": 32 * 16 * 16, "conv2": 32 * 8 * 8, "conv3": 64 * 4 * 4, "ip1": 64},
    "caffenet": {
        "conv1": 96 * 27 * 27, "conv2": 256 * 13 * 13, "conv3": 384 * 13 * 13, "conv4": 384 * 13 * 13,
        "conv5": 256 * 6 * 6, "fc6": 4096, "fc7": 4096,
    },
}  # fmt: skip


@pytest.mark.parametrize("network", [CIFAR10_QUICK, CAFFENET], ids=lambda network: network.model)
def test_floats_over_the_wire_are_those_of_the_shared_layer(network):
    assert set(network.splits) == set(FLOATS[network.model])
    with torch.device("meta"):
        layers = dict(NETWORKS[network.model]().named_children())
        images = torch.empty(1, *INPUT_SHAPES[network.model])
    for split in network.splits:
        case = network.case(split)
        placement = default(case.tree, RANKS, case.micro_batches)
        assert placement.stages["trunk"] == (0, 1)
        trunk = torch.nn.Sequential(*(layers[name] for name in case.tree.nodes["trunk"].layers))
        floats = trunk.eval()(images).numel()
        loads = {name: StageLoad(0, 0, floats, 0) for name in case.tree.nodes}
        (shared,) = traffic(case.workload, loads, placement)
        # Every row once, and back one sum of the two members on the other rank; of the last two of five members, which
        # are no pair of the tree of sums, both gradients go to rank 0, which has the only micro-batch.
        sums = {"cifar10_quick": 1, "caffenet": 2}[network.model]
        assert shared.outputs == network.rows * FLOATS[network.model][split]
        assert shared.gradients == sums * network.rows * FLOATS[network.model][split]


@pytest.mark.full
def test_a_tiny_run_of_all_of_it(tmp_path, monkeypatch):
    told = []

    def tiny(progress, rounds):
        return comm.measure(lambda done, total: told.append((done, total)), rounds, networks=(TINY,))

    monkeypatch.setitem(suites.SUITES, "comm", tiny)
    monkeypatch.setattr(ranks, "measure_loads", partial(ranks.measure_loads, seconds=0.01))
    console = Console(file=io.StringIO(), width=200)
    report.run_suites("comm", 2, tmp_path / "comm.json", console, tmp_path / "comm.png")
    found = json.loads((tmp_path / "comm.json").read_text())
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert found["bandwidth_gb_per_second"] > 0
    for split in TINY.splits:
        layer, floats = found[f"cifar10_quick_{split}"], FLOATS["cifar10_quick"][split]
        assert (layer["batch"], layer["floats_forward"], layer["floats_backward"]) == (16, 16 * floats, 16 * floats)
        assert 0 < layer["transfer_ms"] <= layer["transfer_median_ms"]
        assert layer["exposed_quarter_ms"] <= layer["exposed_median_ms"] <= layer["exposed_three_quarters_ms"]
        assert layer["predicted_ms"] > layer["predicted_exposed_ms"] >= 0
    assert {"transfer_fraction_r2", "exposed_fraction_per_million_floats"} <= set(found["fit_cifar10_quick"])
    assert found["default"]["placement"].startswith("trunk:0,1 ")
    for name in ("auto", "default"):
        assert {"exposed_fraction", "prediction_error", "images_per_second", "replicas"} <= set(found[name])
    for key in ("ratio_threads", "ratio_threads_median", "ratio_threads_default", "ratio_threads_default_median"):
        assert found[key] > 0
    assert imread(tmp_path / "comm.png").std() > 0.05


def test_exposed_time_compares_the_steps_of_one_round():
    found = exposed(Times([1.0, 1.2, 2.0, 1.1, 1.3]), Times([0.8, 1.1, 2.1, 1.0, 1.0]))  # 0.2, 0.1, -0.1, 0.1, 0.3
    assert (found["exposed_ms"], found["exposed_fraction"]) == (200.0, 0.2)
    assert [found[f"exposed_{key}_ms"] for key in ("quarter", "median", "three_quarters")] == [100, 100, 200]
    assert found["exposed_fraction_median"] == round(0.1 / 1.2, 4)


def test_the_line_through_fractions_that_lie_on_one():
    layers = [
        {"floats_forward": 1e6 * x, "transfer_ms": 2.0 * x, "transfer_fraction": 0.1 * x + 0.2, "exposed_fraction": 0.0}
        for x in (1, 2, 5)
    ]
    found = fit(layers)
    assert (found["transfer_ms_at_0"], found["transfer_ms_per_million_floats"]) == pytest.approx((0, 2), abs=1e-5)
    assert found["transfer_fraction_at_0"] == 0.2
    assert found["transfer_fraction_per_million_floats"] == 0.1
    assert found["transfer_fraction_r2"] == 1.0
    assert found["exposed_fraction_per_million_floats"] == 0.0


def test_the_best_of_loads_is_taken_part_by_part():
    a, b = StageLoad(1, 5, 10, 3, 0.5), StageLoad(2, 4, 10, 3, 0.4)
    assert best_loads({"x": a}, {"x": b}) == {"x": StageLoad(1, 4, 10, 3, 0.4)}


@pytest.mark.parametrize(("workers", "seconds"), [(1, 0.6), (2, 0.35), (8, 0.25)])
def test_a_predicted_step_ends_with_the_updates_of_the_rank_that_has_most(workers, seconds):
    """The trunk and two branches on each rank, which its workers share."""
    tree = CIFAR10_QUICK.case("conv2").tree
    placement = default(tree, RANKS, 4)
    assert [len(placement.stages_on(rank)) for rank in range(RANKS)] == [3, 3]
    loads = {name: StageLoad(1, 1, 0, 9, 0.0) for name in tree.nodes}
    updated = {name: replace(load, update=0.1 if name == "trunk" else 0.25) for name, load in loads.items()}
    workload, cluster = Workload(tree, 8, 4, separable=True), Cluster(RANKS, workers, 1e9, 0.0)
    before, after = (predict(workload, cluster, each, placement) for each in (loads, updated))
    assert after.step_seconds - before.step_seconds == pytest.approx(seconds)
    more = [b - a for a, b in zip(before.compute_seconds, after.compute_seconds, strict=True)]
    assert more == pytest.approx([0.6, 0.6])
