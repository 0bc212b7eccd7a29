"""What the simulation counts is what a step on real ranks sends."""

import json
import os
from functools import partial

import pytest
from helpers.commands import ranks

from mheads.config import read as configs
from mheads.distributed.step_time.placement_search import count_exchanged_floats, traffic
from mheads.distributed.step_time.simulation import Simulation
from mheads.distributed.step_time.workload import Cluster
from mheads.training.plan_ranks import make_workload, place

COMMON = [
    "digits", "members=4", "data.limit=60", "optim.batch_size=22", "optim.iterations=2", "engine.micro_batches=4",
    "log.evaluate_every=0",
]  # fmt: skip
CASES = {
    "tree": (3, ["split=conv1"]),
    "gathered": (2, ["split=conv1", "loss=score_averaged"]),
    "nested, by hand": (
        3,
        [
            "split={conv1: [{conv2: 2}, 2]}",
            "loss=mcl",
            "placement={trunk: 2, conv1/0: 0, conv1/0/conv2/0: 1, conv1/0/conv2/1: 0, conv1/1: 1, conv1/2: 0}",
        ],
    ),
    "replicas": (4, ["split=conv1", "placement={trunk: 0}"]),
}


def log_frames(folder):
    """Each frame of a step that this rank sends, as a line: the step, and how many floats are in it."""
    from mheads.common import nested_values
    from mheads.distributed.message_channels import Courier

    send = Courier.send

    def logged(self, to, key, value=None):
        if key[0].startswith("step "):
            floats = sum(t.numel() for t in nested_values.leaves(value) if t.is_floating_point())
            with (folder / os.environ["OMPI_COMM_WORLD_RANK"]).open("a") as file:
                file.write(json.dumps([key[0], floats]) + "\n")
        send(self, to, key, value)

    Courier.send = logged


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name == "gathered" else name for name in CASES]
)
def test_messages_and_floats_of_a_step_are_those_that_are_sent(name, tmp_path):
    size, overrides = CASES[name]
    before = dict.fromkeys(range(size), partial(log_frames, tmp_path))
    done = ranks(size, "train", *COMMON, *overrides, "--run", tmp_path / "run", before=before)
    assert [d.code for d in done] == [0] * size, done[0].err
    files = [tmp_path / str(rank) for rank in range(size) if (tmp_path / str(rank)).exists()]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    config = configs.load("digits", [*COMMON[1:], *overrides])
    workload = make_workload(config)
    loads, placement = workload.count_loads(1.0), place(config.placement, workload, Cluster(size))
    messages, floats = Simulation(workload, loads, 1).count_messages(placement)
    edges = traffic(workload, loads, placement)
    assert floats == sum(edge.forward + edge.backward for edge in edges) + count_exchanged_floats(loads, placement)
    for step in ("step 0", "step 1"):
        sent = [found for channel, found in lines if channel == step]
        assert (len(sent), sum(sent)) == (messages, floats)
