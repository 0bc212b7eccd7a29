"""What the simulation counts is what a step on real ranks sends."""

import os
from functools import partial

import pytest
from helpers.commands import ranks

from mheads.config import read as configs
from mheads.distributed.planning.prediction import traffic
from mheads.distributed.planning.simulation import Simulation
from mheads.distributed.planning.workload import Cluster
from mheads.engine import large_outputs
from mheads.training.plan_ranks import make_workload, place

COMMON = [
    "digits", "members=4", "data.limit=60", "optim.batch_size=22", "optim.iterations=2", "engine.micro_batches=4",
    "engine.stack=never", "log.evaluate_every=0",
]  # fmt: skip
CASES = {
    "tree": (3, ["split=conv1"]),
    "gathered": (2, ["split=conv1", "loss=score_averaged"]),
    "losses alone": (2, ["split=conv1", "loss=mcl"]),
    "nested, by hand": (
        3,
        [
            "split={conv1: [{conv2: 2}, 2]}",
            "loss=mcl",
            "placement={trunk: 2, conv1/0: 0, conv1/0/conv2/0: 1, conv1/0/conv2/1: 0, conv1/1: 1, conv1/2: 0}",
        ],
    ),
    "replicas": (4, ["split=conv1", "placement={trunk: 0}"]),
    "by pieces": (3, ["split={conv1: [{conv2: 2}, 2]}", "loss=mcl", "engine.shared_micro_batches=16"]),
    "replicas by pieces": (4, ["split=conv1", "placement={trunk: 0, conv1/3: 1}", "engine.shared_micro_batches=12"]),
    "batch statistics": (
        3,
        ["model=user_networks:normalised", "split=norm", "optim.accumulate=2", "engine.micro_batches=auto"],
    ),
}


def log_collectives(folder, large):
    """Each collective of a step that this rank takes part in, as a line: how many floats this rank gives to it."""
    from mheads.common import nested_values
    from mheads.distributed import rank_evaluation, rank_training_step
    from mheads.distributed.collectives import Gathering

    large_outputs.LARGE = large
    start, over = rank_evaluation.EvaluationWindow.start, []

    def start_evaluation(self):
        over.append(True)  # it comes after the last step
        start(self)

    rank_evaluation.EvaluationWindow.start = start_evaluation

    def write(floats):
        if over:
            return
        with (folder / os.environ["OMPI_COMM_WORLD_RANK"]).open("a") as file:
            file.write(f"{floats}\n")

    gather, exchange, add_ordered = Gathering.gather, rank_training_step.exchange, rank_training_step.add_ordered

    def logged_gather(self, key, group, value):
        if key != "report":
            write(0 if value is None else sum(t.numel() for t in nested_values.leaves(value)))
        return gather(self, key, group, value)

    def logged_exchange(group, given, *args):
        write(sum(t.numel() for t in nested_values.leaves(given)))
        return exchange(group, given, *args)

    def logged_sum(group, own, *args):
        write(sum(t.numel() for t in own))
        return add_ordered(group, own, *args)

    Gathering.gather, rank_training_step.exchange = logged_gather, logged_exchange
    rank_training_step.add_ordered = logged_sum


@pytest.mark.parametrize("name", CASES)
def test_collectives_and_floats_of_a_step_are_those_that_run(name, tmp_path, monkeypatch):
    size, overrides = CASES[name]
    large = 1 if name == "losses alone" else large_outputs.LARGE
    monkeypatch.setattr(large_outputs, "LARGE", large)
    before = dict.fromkeys(range(size), partial(log_collectives, tmp_path, large))
    done = ranks(size, "train", *COMMON, *overrides, "--run", tmp_path / "run", before=before)
    assert [d.code for d in done] == [0] * size, done[0].err
    given = [int(line) for rank in range(size) for line in (tmp_path / str(rank)).read_text().splitlines()]
    config = configs.load("digits", [*COMMON[1:], *overrides])
    workload = make_workload(config)
    loads, placement = workload.count_loads(1.0), place(config.placement, workload, Cluster(size))
    collectives, floats = Simulation(workload, loads, 1).count(placement)
    assert (len(given), sum(given)) == (2 * collectives, 2 * floats), "of two steps"
    exchanges = traffic(workload, loads, placement)
    assert floats == sum(one.outputs + one.gradients + one.weights for one in exchanges)
