"""Predicted steps against times worked out by hand, and placements chosen by them."""

import itertools
import json
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mheads import TreeNet, UserError
from mheads.config import read as configs
from mheads.distributed.planning.placement import Placement, default, explicit, hold_members, meshes
from mheads.distributed.planning.placement_search import auto
from mheads.distributed.planning.prediction import predict
from mheads.distributed.planning.simulation import Simulation
from mheads.distributed.planning.stage_loads import StageLoad, count_loads, measure_loads
from mheads.distributed.planning.workload import Cluster, Workload
from mheads.engine.cost import costs_on
from mheads.networks import NETWORKS
from mheads.training.build_from_config import count_micro_batches, make_tree
from mheads.training.plan_ranks import input_shape, make_workload, place
from mheads.trees.splitting.cut_sequential import ChainLayer
from mheads.trees.tree_spec import parse

LAYERS = [ChainLayer(name, True, False) for name in "abcd"]
TREE = parse({"a": 2}, LAYERS)
TRUNK, BRANCH = StageLoad(1, 2, 10, 100), StageLoad(3, 5, 2, 40)
LOADS = {"trunk": TRUNK, "a/0": BRANCH, "a/1": BRANCH}
WIRES = {"bandwidth": 40.0, "latency": 0.5}  # a float takes a tenth of a second
FREE = {"bandwidth": float("inf"), "latency": 0.0}
TWO = default(TREE, 2, 1)  # the trunk on both ranks, a branch on each


# By hand.


@pytest.mark.parametrize("separable", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_rank_does_all_the_work_and_sends_nothing(micro_batches, separable):
    found = predict(Workload(TREE, 4, micro_batches, separable), Cluster(9, 1, **WIRES), LOADS, default(TREE, 1, 1))
    assert found.step_seconds == pytest.approx(76)
    assert found.compute_seconds == (76,)
    assert found.idle_share == pytest.approx(0)
    assert (found.exposed_seconds, found.floats_sent, found.exchanges) == (0, 0, ())


def test_workers_of_a_rank_take_earlier_micro_batches_first_and_backward_before_forward():
    found = predict(Workload(TREE, 4, 4, True), Cluster(9, 4, **WIRES), LOADS, default(TREE, 1, 1))
    # Four trunks at once until 1; the branches of the first two until 9; two trunks back until 11, beside them the
    # branches of the third until 17; those of the fourth from 11 until 19, and its trunk back.
    assert found.step_seconds == pytest.approx(21)
    assert found.compute_seconds == (76,)


def test_a_micro_batch_is_run_by_one_rank_and_its_output_goes_to_all():
    found = predict(Workload(TREE, 1, 1, True), Cluster(9, 1, **WIRES), LOADS, TWO)
    # Trunk 1, its output 0.5 + 1, the branches 8 side by side, the gradient of the other one 0.5 + 1, trunk 2; of its
    # 100 weights halves go to each other and sums back, 0.5 + 5 each; a report.
    assert found.step_seconds == pytest.approx(1 + 1.5 + 8 + 1.5 + 2 + 2 * 5.5 + 0.5)
    assert found.exposed_seconds == pytest.approx(1.5 + 1.5 + 11 + 0.5)
    assert found.compute_seconds == (11, 8)
    assert found.idle_share == pytest.approx(1 - 19 / 51)
    (one,) = found.exchanges
    assert (one.stage, one.slots, one.outputs, one.gradients, one.weights) == ("trunk", (0, 1), 10, 10, 100)
    assert found.floats_sent == 120


def test_micro_batches_are_divided_among_the_ranks():
    found = predict(Workload(TREE, 2, 2, True), Cluster(9, 1, **WIRES), LOADS, TWO)
    assert found.step_seconds == pytest.approx(1 + 1.5 + 16 + 1.5 + 2 + 2 * 5.5 + 0.5)
    assert found.compute_seconds == (19, 19)
    assert found.floats_sent == 20 + 20 + 200


def test_a_loss_of_all_members_gathers_the_outputs():
    found = predict(Workload(TREE, 1, 1, False), Cluster(9, 1, **WIRES), LOADS, TWO)
    assert found.step_seconds == pytest.approx(1 + 1.5 + 3 + 0.7 + 5 + 1.5 + 2 + 11 + 0.5)
    assert found.floats_sent == 120 + 2 * 2


def test_batch_statistics_run_a_stage_whole_on_each_of_its_ranks_and_micro_batches_in_order():
    found = predict(Workload(TREE, 2, 2, True, in_order=True), Cluster(9, 1, **WIRES), LOADS, TWO)
    assert found.step_seconds == pytest.approx(2 * (1 + 8 + 1.5 + 2) + 0.5)
    assert found.compute_seconds == (22, 22)
    assert found.floats_sent == 2 * 2 * 10, "no output, no weight"


def test_collectives_are_hidden_behind_the_work_of_other_micro_batches():
    loads = {"trunk": StageLoad(1, 1, 10, 0), "a/0": StageLoad(0.5, 0.5, 2, 0), "a/1": StageLoad(0.5, 0.5, 2, 0)}
    wires = {"bandwidth": 100.0, "latency": 0.0}  # 0.4 for an output
    found = predict(Workload(TREE, 16, 16, True), Cluster(9, 1, **wires), loads, TWO)
    assert found.step_seconds == pytest.approx(8 + 16 + 8)
    assert found.exposed_seconds == 0


def test_an_all_gather_goes_around_a_ring_and_an_all_to_all_at_once():
    tree = parse({"a": 3}, LAYERS)
    loads = {name: StageLoad(0, 0, 10, 0) for name in tree.nodes}
    found = predict(Workload(tree, 1, 1, True), Cluster(9, 1, **WIRES), loads, default(tree, 3, 1))
    # Two hops of 0.5 + 1; two gradients to rank 0, 0.5 + 2; a report around the ring.
    assert found.step_seconds == pytest.approx(2 * 1.5 + 2.5 + 2 * 0.5)


def test_replicas_exchange_their_gradients_in_parts_and_sums():
    tree = parse(1, LAYERS)
    found = predict(Workload(tree, 2, 2, True), Cluster(9, 1, **WIRES), {"trunk": TRUNK}, default(tree, 2, 2))
    assert found.step_seconds == pytest.approx(3 + 2 * (50 * 0.1 + 0.5) + 0.5)
    assert found.compute_seconds == (3, 3)
    assert found.floats_sent == 200


def test_gradients_of_branches_travel_while_the_trunk_computes():
    loads = {"trunk": StageLoad(1, 100, 0, 0), "a/0": StageLoad(3, 5, 2, 100), "a/1": StageLoad(3, 5, 2, 100)}
    placement = Placement(dict.fromkeys(TREE.nodes, (0,)), 1, 2)
    found = predict(Workload(TREE, 2, 2, True), Cluster(9, 1, **WIRES), loads, placement)
    assert found.step_seconds == pytest.approx(1 + 16 + 100 + 0.5)


def test_uneven_micro_batches_make_the_first_replica_the_slowest():
    placement = Placement({"trunk": (0,)}, 1, 2)
    found = predict(Workload(parse(1, LAYERS), 3, 2, True), Cluster(9, 1, **FREE), {"trunk": TRUNK}, placement)
    assert found.compute_seconds == (6, 3)
    assert found.step_seconds == 6


# In general.

specs = st.sampled_from([1, 3, {"a": 2}, {"b": 5}, {"a": [{"b": 2}, 2]}, {"a": [{"b": 2}, {"c": 3}]}, [{"a": 2}, 2]])
times = st.integers(0, 8).map(lambda n: n / 4)
stage_loads = st.builds(StageLoad, times, times, st.integers(0, 50), st.integers(0, 200))


@st.composite
def jobs(draw):
    """A workload, a cluster, and loads by run of layers."""
    tree = parse(draw(specs), LAYERS)
    by_run = {node.layers: draw(stage_loads) for node in tree.nodes.values()}
    loads = {name: by_run[node.layers] for name, node in tree.nodes.items()}
    micro_batches = draw(st.sampled_from([1, 2, 3, 4, 8]))
    rows = micro_batches * draw(st.integers(1, 3)) + draw(st.integers(0, micro_batches - 1))
    cluster = Cluster(
        draw(st.integers(1, 7)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([4.0, 100.0, 1e9])),
        draw(st.sampled_from([0.0, 0.1])),
    )
    return Workload(tree, rows, micro_batches, draw(st.booleans())), cluster, loads


@st.composite
def placements(draw, tree, micro_batches):
    slots, replicas = draw(st.sampled_from(meshes(tree, 6, micro_batches)))
    held = [*range(slots), *draw(st.lists(st.integers(0, slots - 1), min_size=99, max_size=99))][: len(tree.leaves)]
    slot_of = {leaf.name: slot for leaf, slot in zip(tree.leaves, draw(st.permutations(held)), strict=True)}
    return Placement(hold_members(tree, slot_of), slots, replicas)


@given(st.data())
def test_no_step_is_shorter_than_its_work_or_its_longest_path(data):
    workload, cluster, loads = data.draw(jobs())
    tree = workload.tree
    placement = data.draw(placements(tree, workload.micro_batches))
    found = predict(workload, cluster, loads, placement)
    work = {name: load.forward + load.backward for name, load in loads.items()}
    total = workload.rows * sum(work.values())
    assert sum(found.compute_seconds) == pytest.approx(total)
    assert len(found.compute_seconds) == placement.ranks
    assert found.step_seconds * cluster.workers >= max(found.compute_seconds) - 1e-9
    largest = -(-workload.rows // workload.micro_batches)
    paths = [sum(work[node.name] for node in tree.path(member)) for member in range(tree.num_members)]
    assert found.step_seconds >= largest * max(paths) - 1e-9
    assert 0 <= found.idle_share <= 1
    assert 0 <= found.exposed_seconds <= found.step_seconds
    if placement.ranks == 1:
        assert found.exposed_seconds == found.floats_sent == 0
    assert found == predict(workload, cluster, loads, placement)


@given(jobs())
@settings(max_examples=60)
def test_auto_is_never_predicted_to_be_slower_than_the_default(drawn):
    workload, cluster, loads = drawn
    tree, ranks = workload.tree, cluster.ranks
    found = auto(workload, cluster, loads)
    assert list(found.stages) == list(tree.nodes)
    assert {slot for slots in found.stages.values() for slot in slots} == set(range(found.slots))
    assert (found.slots, found.replicas) in meshes(tree, ranks, workload.micro_batches)
    usual = predict(workload, cluster, loads, default(tree, ranks, workload.micro_batches))
    assert predict(workload, cluster, loads, found).step_seconds <= usual.step_seconds * (1 + 1e-8)
    assert auto(workload, cluster, loads) == found


def test_auto_comes_close_to_the_best_of_all_placements():
    draw = random.Random(0)
    for _ in range(12):
        tree = parse(draw.choice([{"a": 3}, {"b": 4}, {"a": [{"b": 2}, 1]}]), LAYERS)
        runs = {
            node.layers: StageLoad(draw.random(), 2 * draw.random(), draw.randint(1, 100), draw.randint(1, 100))
            for node in tree.nodes.values()
        }
        loads = {name: runs[node.layers] for name, node in tree.nodes.items()}
        ranks, micro_batches, separable = draw.choice([2, 3]), draw.choice([1, 2, 4]), draw.random() < 0.5
        bandwidth = 4 * draw.choice([10.0, 1e2, 1e5])
        workload = Workload(tree, 16, micro_batches, separable)
        found = auto(workload, Cluster(ranks, 1, bandwidth, 0.01), loads)
        step, leaves = Simulation(workload, loads, 1), [leaf.name for leaf in tree.leaves]
        best = min(
            step.run(Placement(hold_members(tree, dict(zip(leaves, held, strict=True))), *mesh), 4 / bandwidth, 0.01)[0]
            for mesh in meshes(tree, ranks, micro_batches)
            for held in itertools.product(range(mesh[0]), repeat=len(leaves))
            if set(held) == set(range(mesh[0]))
        )
        assert step.run(found, 4 / bandwidth, 0.01)[0] <= 1.05 * best


def test_auto_keeps_a_tree_together_where_sending_is_dear_and_spreads_it_where_it_is_free():
    workload = Workload(TREE, 4, 1, separable=True)
    assert auto(workload, Cluster(3, 1, 0.01, 0.0), LOADS).ranks == 1
    assert auto(workload, Cluster(3, 1, 1e9, 0.0), LOADS).slots == 2


def test_of_equally_fast_placements_auto_takes_the_one_that_sends_less():
    loads = dict.fromkeys(TREE.nodes, StageLoad(0, 0, 10, 10))
    placement = auto(Workload(TREE, 4, 1, True), Cluster(3, 1, **FREE), loads)
    assert placement == Placement(dict.fromkeys(TREE.nodes, (0,)), 1)


def test_a_thousand_ranks_are_predicted_too():
    tree = parse({"a": 1000}, LAYERS)
    loads = {name: TRUNK if name == "trunk" else BRANCH for name in tree.nodes}
    found = predict(Workload(tree, 4, 4, True), Cluster(9, 1, **FREE), loads, default(tree, 1000, 4))
    # Four ranks run a micro-batch of the trunk each.
    assert sum(found.compute_seconds) == pytest.approx(4 * (3 + 8000))
    assert found.step_seconds == pytest.approx(1 + 4 * 8 + 2)


# What a stage takes.


def small() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 4, 3), norm=nn.BatchNorm2d(4), pool=nn.MaxPool2d(2), flatten=nn.Flatten(),
            hidden=nn.Linear(36, 8), drop=nn.Dropout(0.5), out=nn.Linear(8, 3),
        )
    )  # fmt: skip


@pytest.mark.parametrize("split", [None, "conv1", {"conv1": [{"conv2": 2}, 2]}])
def test_counted_loads_are_those_of_the_whole_tree(split):
    net = TreeNet(NETWORKS["cifar10_quick"], 4, split)
    loads = count_loads(Workload(net.tree, 1, 1, True), net, torch.zeros(1, 3, 32, 32), flops=2.0)
    for name, cost in costs_on(net, torch.zeros(1, 3, 32, 32)).items():
        load, root = loads[name], net.tree.nodes[name].parent is None
        assert load.forward == cost.forward
        assert load.forward + load.backward == cost.step(root)
        assert load.output_floats == cost.output_floats
        assert load.parameters == sum(p.numel() for p in net.stage(name).parameters())


def test_a_member_that_learns_from_some_rows_counts_only_their_backward():
    net = TreeNet(small, tree={"conv": 2}, only=())
    whole, half = (
        count_loads(Workload(net.tree, 1, 1, False, share), net, torch.zeros(1, 1, 8, 8), 1.0) for share in (1.0, 0.5)
    )
    assert half["trunk"] == whole["trunk"]
    assert half["conv/0"].forward == whole["conv/0"].forward
    assert half["conv/0"].backward == whole["conv/0"].backward / 2


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_measuring_changes_neither_the_network_nor_the_threads(share):
    network = small()
    net = TreeNet(lambda: network, tree={"norm": 3}, only=())  # one network, which is drawn again and again
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    threads = torch.get_num_threads()
    workload = Workload(net.tree, 16, 1, False, share)
    found = measure_loads(workload, net, torch.zeros(1, 1, 8, 8), seconds=0.01)
    assert torch.get_num_threads() == threads
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert found.keys() == net.tree.nodes.keys()
    counted = count_loads(workload, net, torch.zeros(1, 1, 8, 8), 1e9)
    for name, load in found.items():
        assert load.forward > 0
        assert load.backward > 0
        assert (load.output_floats, load.parameters) == (counted[name].output_floats, counted[name].parameters)


# Configs.


def test_a_job_is_what_the_config_says():
    config = configs.load("cifar10_quick", ["split=conv2", "loss=mcl", "optim.accumulate=2"])
    workload = make_workload(config)
    assert workload.example.shape == (1, 3, 32, 32)
    assert (workload.rows, workload.micro_batches, workload.separable, workload.share) == (700, 8, False, 0.25)
    assert list(workload.tree.nodes) == ["trunk", "conv2/0", "conv2/1", "conv2/2", "conv2/3"]


def test_the_shape_of_an_example_needs_no_data(tmp_path):
    np.savez(tmp_path / "mine.npz", x_train=np.zeros((5, 2, 9, 7), np.uint8))
    np.savez_compressed(tmp_path / "gray.npz", x_train=np.zeros((5, 9, 7), np.uint8))
    for overrides, shape in (
        (["data=cifar100"], (3, 32, 32)),
        (["data={name: folder, path: nowhere, crop: 24}"], (3, 24, 24)),
        (["data={name: folder, path: nowhere}"], (3, 256, 256)),
        (["data={name: folder, path: nowhere, grey: true}"], (1, 256, 256)),
        (["data={name: npz, path: nowhere}"], (1, 8, 8)),  # what the network is known for
        ([f"data={{name: npz, path: {tmp_path}/mine.npz}}"], (2, 9, 7)),
        ([f"data={{name: npz, path: {tmp_path}/gray.npz}}"], (1, 9, 7)),
    ):
        assert input_shape(configs.load("digits", overrides)) == shape
    with pytest.raises(UserError, match=r"data\.path"):
        input_shape(configs.load("digits", ["model=user_networks:with_dropout", "data={name: npz, path: nowhere}"]))
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(UserError, match=r"text\.npz has no array x_train"):
        input_shape(configs.load("digits", [f"data={{name: npz, path: {tmp_path}/text.npz}}"]))


def test_only_auto_needs_costs_and_so_the_shape_of_the_data():
    own = ["model=user_networks:with_dropout", "split=conv", "data={name: npz, path: nowhere}", "engine.stack=never"]
    workload = make_workload(configs.load("digits", own))
    cluster, by_hand = Cluster(2), {"trunk": 0, "conv/0": 1}
    assert place("default", workload, cluster) == default(workload.tree, 2, workload.micro_batches)
    assert place(by_hand, workload, cluster) == explicit(workload.tree, by_hand, 2, workload.micro_batches)
    assert place("auto", workload, cluster, dict.fromkeys(workload.tree.nodes, BRANCH)).ranks <= 2
    with pytest.raises(UserError, match="not known"):
        place("auto", workload, cluster)


# Commands.

PLAN = ["plan", "cifar10_quick", "split=conv2", "--flops", "0.1"]


def test_plan_shows_the_default_and_auto_beside_one_rank(mheads, tmp_path):
    done = mheads(*PLAN, "--ranks", "2", "--json", tmp_path / "plan.json")
    assert done.code == 0
    for text in ("4 members, batch 350 in 4 micro-batches", "step", "images/s", "exposed communication", "replicas x"):
        assert text in done.out
    assert "trunk, conv2/0-1" in done.out
    written = json.loads((tmp_path / "plan.json").read_text())
    one, usual, best = (written["placements"][way] for way in ("one rank", "default", "auto"))
    workload = make_workload(configs.load("cifar10_quick", ["split=conv2"]))
    cluster = Cluster(2)
    expected = predict(workload, cluster, workload.count_loads(1e11), place("default", workload, cluster))
    assert usual["step_seconds"] == expected.step_seconds
    # Outputs of all rows, for each the sum of the two gradients on the other rank, and the gradients of weights.
    assert usual["floats_sent"] == 2048 * (350 + 350) + 2 * 28064
    assert best["step_seconds"] <= usual["step_seconds"] < one["step_seconds"]
    assert one["images_per_second"] == pytest.approx(350 / one["step_seconds"])


def test_plan_shows_what_more_micro_batches_would_give_and_the_key_that_train_needs(mheads, tmp_path):
    command = ["plan", "cifar10_quick", "members=2", "--ranks", "12", "--placement", "default"]
    command += ["--flops", "0.1", "--json", tmp_path / "plan.json"]
    done = mheads(*command)
    assert done.code == 0, done.err
    written = json.loads((tmp_path / "plan.json").read_text())
    key = written["faster_with"]
    assert key == "engine.micro_batches=16" and f"{key} is faster" in done.out
    usual, finer = written["placements"]["default"], written["placements"]["16 micro-batches"]
    assert (usual["micro_batches"], finer["micro_batches"]) == (4, 16)
    assert finer["step_seconds"] < 0.95 * usual["step_seconds"]
    # The same as for a run with that key, which the engine then cuts so.
    config = configs.load("cifar10_quick", ["members=2", key])
    assert make_workload(config).micro_batches == count_micro_batches(config, make_tree(config, only=())) == 16
    assert mheads(*command, key).code == 0
    as_given = json.loads((tmp_path / "plan.json").read_text())
    assert as_given["placements"]["default"] == finer and as_given["faster_with"] is None


def test_plan_shows_what_finer_pieces_for_a_trunk_would_give(mheads, tmp_path):
    """A hundred ranks, each with a member: four of them run a micro-batch of the trunk, or all a piece of one."""
    command = ["plan", "cifar10_quick", "split=conv2", "members=100", "--ranks", "100", "--placement", "default"]
    done = mheads(*command, "--flops", "0.1", "--json", tmp_path / "plan.json")
    assert done.code == 0, done.err
    written = json.loads((tmp_path / "plan.json").read_text())
    key = written["faster_with"]
    assert key.startswith("engine.shared_micro_batches=") and f"{key} is faster" in done.out
    pieces = int(key.split("=")[1])
    usual, finer = written["placements"]["default"], written["placements"][f"{pieces} shared micro-batches"]
    assert usual["micro_batches"] == finer["micro_batches"] == 4, "of the members"
    assert finer["step_seconds"] < 0.5 * usual["step_seconds"]
    workload = make_workload(configs.load("cifar10_quick", ["split=conv2", "members=100", key]))
    assert 4 * workload.pieces == pieces


@pytest.mark.parametrize(
    "keys",
    [
        ["split=conv2", "--ranks", "4"],
        ["engine.micro_batches=1", "--ranks", "8"],
        ["split=conv2", "engine.micro_batches=1", "engine.shared_micro_batches=1", "--ranks", "8"],
        ["split=conv2", "members=12", "engine.shared_micro_batches=8", "--ranks", "20"],
    ],
)
def test_plan_leaves_micro_batches_alone_where_ranks_are_few_or_the_recipe_decides(mheads, keys):
    done = mheads("plan", "cifar10_quick", *keys, "--flops", "0.1", "--placement", "default")
    assert done.code == 0 and "is faster" not in done.out


def test_plan_cuts_no_batch_that_a_loss_needs_whole(mheads):
    done = mheads("plan", "cifar10_quick", "loss=mcl", "loss.normalize=wins", "--ranks", "8", "--flops", "0.1")
    assert done.code == 0 and "is faster" not in done.out


def test_plan_refuses_what_training_refuses(mheads):
    done = mheads("plan", "cifar10_resnet20", "engine.micro_batches=2", "--ranks", "3", "--flops", "0.1")
    assert done.code == 2 and "engine.micro_batches is 2" in done.err and "statistics of the whole batch" in done.err


def test_plan_cuts_batches_where_batch_norm_is_frozen(mheads):
    keys = ["model=user_networks:normalised", "members=2", "split=norm", "freeze=[trunk]", "engine.micro_batches=2"]
    done = mheads("plan", "digits", *keys, "engine.stack=never", "--ranks", "2", "--flops", "0.1")
    assert done.code == 0, done.err


def test_plan_shows_a_placement_of_ones_own(mheads):
    done = mheads(*PLAN, "placement={trunk: 0, conv2/0: 1}", "--ranks", "2")
    assert done.code == 0
    assert "as given" in done.out
    assert "trunk, conv2/1-3" in done.out
    assert (
        "as given" not in mheads(*PLAN, "placement={trunk: 0, conv2/0: 1}", "--ranks", "2", "--placement", "auto").out
    )


def test_plan_is_short_for_many_ranks_and_fits_80_columns(mheads, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = mheads(*PLAN, "members=200", "engine.micro_batches=1", "--ranks", "210", "--placement", "default")
    assert done.code == 0
    assert "trunk, conv2/0-199, 2 each" in done.out
    assert "one tree on 200 ranks; 10 ranks of 210 with nothing to do" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert len(done.out.splitlines()) < 30


def test_plan_measures_where_it_is_not_told(mheads):
    done = mheads("plan", "digits", "split=conv1", "--ranks", "2")
    assert done.code == 0
    assert "measured on this machine" in done.out


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--ranks", "2", "--placement", "best"], ["default or auto", "'best'"]),
        (["--ranks", "2", "--bandwidth", "0"], ["--bandwidth", "above 0"]),
        (["--ranks", "2", "--latency", "-1"], ["--latency"]),
        (["--ranks", "2", "--flops", "0"], ["--flops", "above 0"]),
        (["--ranks", "2", "placement={trunk: 0, conv2/0: 4}"], ["0 to 4", "2 are running"]),
        (["--ranks", "2", "model=user_networks:with_dropout", "split=conv"], ["conv", "(2, 3, 32, 32)"]),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(mheads, options, parts):
    done = mheads(*PLAN, *options)
    assert done.code == 2
    assert done.err.startswith("error: ")
    for part in parts:
        assert part in done.err


def test_the_tree_shows_who_holds_what_and_what_is_sent(mheads):
    done = mheads("tree", "cifar10_quick", "split=conv2", "loss=mcl", "--ranks", "2")
    assert done.code == 0
    assert "trunk  ranks 0-1  conv1" in done.out
    assert "conv2/2  rank 1" in done.out
    lines = [line.split() for line in done.out.splitlines()]
    assert ["trunk", "0-1", "716,800", "716,800", "56,128"] in lines
    assert ["loss", "0-1", "14,000", "0", "0"] in lines
    assert "1,503,728 floats per step are given to other ranks" in done.out


def test_the_tree_shows_replicas(mheads):
    done = mheads("tree", "cifar10_quick", "split=conv2", "--ranks", "9")
    assert done.code == 0
    assert "2 replicas of 4 ranks each; 1 rank of 9 with nothing to do" in done.out
    assert "conv2/3  ranks 3, 7" in done.out


def test_the_tree_without_ranks_is_as_before(mheads):
    assert "rank" not in mheads("tree", "cifar10_quick", "split=conv2").out
