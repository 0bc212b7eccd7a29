# ruff: noqa: E501
"""MPI-Caffe's specifications on ranks: trees to the same bits, other graphs by the layers as they are written."""

import json
import os
import signal
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
from helpers import stock_caffe_nets as nets
from helpers.commands import _context, assert_same_run, process, ranks
from helpers.stock_caffe_nets import broadcast_in_place, data, different_branches, ip, layer, nested, on, relu
from safetensors.torch import load_file

SOLVER = 'base_lr: 0.05 momentum: 0.9 weight_decay: 0.001 lr_policy: "step" gamma: 0.5 stepsize: 4 max_iter: 8 display: 1 snapshot: 3\n'
DIGITS = ["data=digits", "data.scale=0.0625", "data.limit=50"]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "solver.prototxt").write_text(SOLVER)

    def write(text):
        (tmp_path / "net.prototxt").write_text(text)
        return ["train", tmp_path / "net.prototxt", "--solver", tmp_path / "solver.prototxt", *DIGITS, "--folder"]

    return write


def losses(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_the_toy_example_has_the_same_curve_on_one_process_and_under_torchrun(files, tmp_path):
    """Torchrun's agent in a process of its own, which starts its workers as `commands` does."""
    command = files(nets.toy())
    one = process(*command, tmp_path / "one")
    assert one.code == 0, one.err
    agent = _context.Process(target=torchrun, args=([*map(str, command), str(tmp_path / "three")], 3))
    agent.start()
    agent.join(100)
    agent.kill()
    assert agent.exitcode == 0
    assert len(losses(tmp_path / "one")) == 8 and losses(tmp_path / "one")[-1] < losses(tmp_path / "one")[0]
    assert_same_run(tmp_path / "one", tmp_path / "three")


def torchrun(args, number):
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    options = {"monitor_interval": 0.1, "start_method": "fork"}
    where = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(os.getpid())}
    elastic_launch(LaunchConfig(1, 1, nproc_per_node=number, **options, **where), trained)(args)


def trained(args):
    from mheads.cli.main import main

    sys.argv = ["mheads", *args]
    with suppress(SystemExit):
        main()


def test_a_tree_of_four_members_runs_on_two_ranks(files, tmp_path):
    """Begun on one process, with a short last batch in evaluations, clipping, and a loss on each rank."""
    command = files(nested().replace("num_output: 4", "num_output: 10"))
    more = ["optim.clip=0.3", "log.evaluate_every=3"]
    one = process(*command, tmp_path / "one", *more)
    assert one.code == 0, one.err
    first = process(*command, tmp_path / "several", *more, "optim.iterations=3")  # snapshots know nothing of ranks
    assert first.code == 0, first.err
    done = ranks(2, *command, tmp_path / "several", *more)
    assert [d.code for d in done] == [0, 0], done[0].err
    assert_same_run(tmp_path / "one", tmp_path / "several")


def pipeline():
    """Trunk-only root: the rank that broadcasts uses nothing of it; a second dropout and normalisation are elsewhere.

    What goes from rank to rank has five axes.
    """
    five = "reshape_param { shape { dim: 0 dim: 1 dim: 3 dim: 2 dim: 2 } }"
    return (
        on(data(batch=20), 0, 1) + on(ip("a", "data", 12, 0.3), 0) + on(relu("r", "a"), 0)
        + on(layer("d0", "Dropout", "a", "a"), 0)
        + on(layer("f", "Reshape", "a", "f", five), 0) + on(layer("b", "MPIBroadcast", "f", "h"), 0, 1, 2)
        + on(ip("c", "h", 12, 0.3), 1) + on(layer("n", "BatchNorm", "c"), 1) + on(layer("s", "Scale", "n"), 1)
        + on(layer("d", "Dropout", "s", "s"), 1) + on(ip("e", "s", 10, 0.3), 1)
        + on(layer("l", "SoftmaxWithLoss", ["e", "label"]), 1)
    )  # fmt: skip


def shared_weight():
    """Rank 0 has the same weight in its trunk and in its branch, rank 1 one of its own."""
    text = broadcast_in_place().replace("num_output: 4", "num_output: 10").replace("num_output: 6", "num_output: 10")
    text = text.replace("param { lr_mult: 1  }", "param { name: 'w' }").replace('bottom: "data"', 'bottom: "p"')
    first, rest = text.split("\n}\n", 1)
    return f"{first}\n}}\n{on(ip('p', 'data', 10, 0.3), 0)}{rest}"


OTHERS = {  # micro-batches of 7, 7 and 6 examples for one; normalisation wants the whole batch of the other
    "branches that differ": (
        2,
        different_branches().replace("num_output: 4", "num_output: 10"),
        ["engine.micro_batches=3"],
    ),
    "a branch whose gradient stays with it": (
        2,
        different_branches()
        .replace("num_output: 4", "num_output: 10")
        .replace('top: "z"', 'top: "z" propagate_down: false'),
        [],
    ),
    "a weight that trunk and branch share": (2, shared_weight(), []),
    "a root that uses nothing of its broadcast": (3, pipeline(), []),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_graph_runs_by_its_layers_and_gives_what_one_process_gives(name, files, tmp_path):
    number, text, more = OTHERS[name]
    command = files(text)
    one = process(*command, tmp_path / "one", *more)
    assert one.code == 0, one.err
    assert "make no tree" in one.out
    done = ranks(number, *command, tmp_path / "several", *more)
    assert [d.code for d in done] == [0] * number, "\n".join(d.err for d in done)
    np.testing.assert_allclose(losses(tmp_path / "several"), losses(tmp_path / "one"), rtol=1e-5)
    one, several = (load_file(tmp_path / run / "model.safetensors") for run in ("one", "several"))
    assert one.keys() == several.keys()
    for key, value in one.items():
        torch.testing.assert_close(several[key], value, rtol=1e-3, atol=1e-5)


def test_another_graph_that_was_killed_goes_on_to_the_same_weights(files, tmp_path):
    command = files(different_branches().replace("num_output: 4", "num_output: 10"))
    whole = ranks(2, *command, tmp_path / "whole")
    assert [d.code for d in whole] == [0, 0], whole[0].err
    stop = {0: (signal.SIGKILL, "os.rename", "step-00000006")}
    killed = ranks(2, *command, tmp_path / "killed", "timeout=5", stop=stop)
    assert killed[0].code == -signal.SIGKILL and killed[1].code != 0
    assert killed[1].code == 3 and "Traceback" not in killed[1].err
    assert "rank 0 " in killed[1].err
    again = ranks(2, *command, tmp_path / "killed", "timeout=5")
    assert [d.code for d in again] == [0, 0], again[0].err
    assert "resuming at iteration 3" in again[0].out
    first, second = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "killed"))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_another_number_of_processes_is_refused(files, tmp_path):
    done = ranks(3, *files(different_branches().replace("num_output: 4", "num_output: 10")), tmp_path / "run")
    assert [d.code for d in done] == [2, 2, 2]
    assert "on ranks 0 to 1, and its ranks make no tree: start 2 processes, not 3" in done[0].err


def test_a_broadcast_in_place_learns_the_same_on_two_ranks(files, tmp_path):
    command = files(broadcast_in_place().replace("num_output: 4", "num_output: 10"))
    assert process(*command, tmp_path / "one").code == 0
    assert [d.code for d in ranks(2, *command, tmp_path / "two")] == [0, 0]
    assert_same_run(tmp_path / "one", tmp_path / "two")
