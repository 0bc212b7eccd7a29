"""Benchmarks: peers must do the same step before they are timed, and the counts must be right."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import peers, suites
from benchmarks.__main__ import main
from benchmarks.measure import Times, interleave, step_multiply_adds
from benchmarks.memory import peak_mb
from benchmarks.ours import Ours
from mheads import TreeNet, losses
from mheads.engine import memory
from mheads.engine.cost import costs_on
from mheads.networks import NETWORKS

ROOT = Path(__file__).parents[2]

PEERS = {
    "loop": peers.plain_loop,
    "channels last": peers.channels_last_loop,
    "vmap": peers.vmapped,
    "grouped": peers.grouped,
}


@pytest.fixture(scope="module")
def ours():
    side = Ours(2, losses.independent(), rows=8)
    start = [{name: p.detach().clone() for name, p in member.items()} for member in side.weights()]
    members = [peers.duplicate(side.net.member(m)) for m in range(2)]
    side.step()
    yield side, start, members
    side.close()


def arrays(weights):
    return [{key: p.detach().numpy() for key, p in member.items()} for member in weights]


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_does_the_same_step(ours, name):
    side, start, members = ours
    x = side.batch.network_inputs(torch.float32)
    peer = PEERS[name](members, x, side.batch.targets)
    peer.step()
    suites.check(arrays(peer.weights()), side.weights(), start)
    moved = max(
        (a - b).abs().max()
        for m, s in zip(side.weights(), start, strict=True)
        for a, b in zip(m.values(), s.values(), strict=True)
    )
    assert moved > 0


def test_a_peer_that_does_another_step_is_refused(ours):
    side, start, members = ours
    x = side.batch.network_inputs(torch.float32)
    peer = peers.plain_loop(members, 2 * x, side.batch.targets)
    peer.step()
    with pytest.raises(AssertionError, match="not the same step"):
        suites.check(arrays(peer.weights()), side.weights(), start)


def test_sides_take_turns_in_a_moving_order_and_may_time_themselves():
    calls = []
    sides = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = interleave(sides | {"d": lambda: 0.25}, rounds=2, progress=lambda done, total: None, warmup=1)
    assert [calls[i : i + 3] for i in (0, 3, 6)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert times["d"].seconds == [0.25, 0.25]
    assert Times([3.0, 1.0, 2.0]).to_dict() == {"best_ms": 1000.0, "median_ms": 2000.0}


def test_multiply_adds_of_cifar10_quick_are_those_counted_by_hand():
    conv1, conv2, conv3 = 32 * 32 * 32 * 75, 16 * 16 * 32 * 800, 8 * 8 * 64 * 800
    linear = 1024 * 64 + 64 * 10
    single = TreeNet(NETWORKS["cifar10_quick"], members=1)
    assert step_multiply_adds(single, (3, 32, 32)) == 3 * (conv1 + conv2 + conv3 + linear) - conv1
    tree = TreeNet(NETWORKS["cifar10_quick"], members=4, split="conv2")
    costs = costs_on(tree, torch.zeros(1, 3, 32, 32))
    assert costs["trunk"].forward == conv1 + conv2
    assert costs["trunk"].output_floats == 8 * 8 * 32
    assert step_multiply_adds(tree, (3, 32, 32)) == 3 * (conv1 + conv2) - conv1 + 4 * 3 * (conv3 + linear)


def test_counting_leaves_hooks_and_modes_as_they_were():
    net = TreeNet(lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2)), members=1).train()
    costs_on(net, torch.zeros(1, 4))
    assert all(module.training for module in net.modules())
    pickle.dumps(net.stage("trunk"))  # a hook of ours would not go into a file


def test_malloc_is_left_alone_where_the_user_has_set_it_up(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert memory.keep_freed_memory.__wrapped__() is False


def test_unknown_benchmarks_are_refused_and_known_ones_write_json(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="step, mcl"):
        main(["stepp"])
    monkeypatch.setitem(suites.SUITES, "mcl", lambda progress, rounds: {"ratio_k1": 0.5})
    main(["mcl", "--json", str(tmp_path / "mcl.json")])
    found = json.loads((tmp_path / "mcl.json").read_text())
    assert found["ratio_k1"] == 0.5
    assert found["machine"]["torch"] == torch.__version__


def test_the_peak_of_a_case_is_not_that_of_the_process_which_started_it():
    ballast = np.ones(75_000_000)  # 600 MB, on top of what the imports take
    code = "from benchmarks.memory import peak_mb; print(peak_mb())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(done.stdout) < peak_mb() - ballast.nbytes / 2**20 / 2


def test_a_result_is_told_in_words_and_ratios_that_people_can_read():
    from io import StringIO

    from rich.console import Console

    from benchmarks.report import compared, table

    result = {
        "suite": "step",
        "machine": {"cpu": "A CPU with a long name that goes on and on", "cores": 2, "torch": "2.13.0"},
        "rounds": 3,
        "ours": {"best_ms": 412.4, "median_ms": 420.0},
        "loop_channels_last": {"best_ms": 530.2, "median_ms": 550.2},
        "ratio_loop_channels_last": 1.286,
        "ratio_loop_channels_last_median": 1.31,
        "matmul_gflops": 315.2,
        "not_timed": {"compile": "conv1.weight of member 0 is 1e-2 off"},
    }
    out = StringIO()
    Console(file=out, width=80).print(table(result))
    text = " ".join(out.getvalue().split())
    assert "mheads 412 ms 420 ms" in text
    assert "channels-last loop 530 ms 550 ms mheads is 1.29 times as fast (medians: 1.31)" in text
    assert "matmul gflops: 315.2" in text
    assert "not timed: compile conv1.weight of member 0 is 1e-2 off" in text
    assert all(len(line) <= 80 for line in out.getvalue().splitlines())
    mcl = {"suite": "mcl", "ratio_k1": 0.5, "ratio_k1_median": 0.625}
    assert compared(mcl, "k1") == "2.00 times as fast as where all learn (medians: 1.60)"
