"""Whom a rank talks to: enough for all that is sent, and the same seen from both sides."""

import itertools
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mheads.distributed import graph_engine
from mheads.distributed.placement import Placement, default
from mheads.distributed.rank_training_step import RankStep
from mheads.distributed.ranks_engine import RanksEngine, peers, relatives
from mheads.engine.engine_options import EngineOptions
from mheads.trees.splitting.cut_sequential import ChainLayer
from mheads.trees.tree_spec import parse

LAYERS = [ChainLayer(name, True, False) for name in ("a", "b", "c")]
TREES = [4, {"a": 4}, {"a": [{"b": 2}, 2]}, {"a": {"b": 3}}, 1]


@pytest.mark.parametrize("spec", TREES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 5, 8, 16])
def test_two_ranks_listen_to_each_other_or_neither_does(spec, size):
    tree = parse(spec, LAYERS)
    placement = default(tree, size, 8)
    found = {rank: peers(tree, placement, rank, size) for rank in range(size)}
    assert all(rank in found[peer] for rank in found for peer in found[rank])
    assert all(rank not in found[rank] for rank in found)


@pytest.mark.parametrize("spec", TREES, ids=str)
@pytest.mark.parametrize("slots", [1, 2, 4, 5])
def test_a_rank_knows_all_that_its_stages_have_to_do_with(spec, slots):
    """Their parents and children, their replicas, and for members the loss: in meshes of any size."""
    tree = parse(spec, LAYERS)
    slots = min(slots, len(tree.nodes))
    placement = Placement({name: i % slots for i, name in enumerate(tree.nodes)}, slots, replicas=4)
    for rank in range(placement.ranks):
        replica, wanted = rank // slots, set()
        for name in placement.stages_on(rank):
            node = tree.nodes[name]
            wanted |= {r * slots + placement.stages[name] for r in range(4)}
            wanted |= {replica * slots + placement.stages[child] for child in node.children}
            if node.parent is not None:
                wanted.add(replica * slots + placement.stages[node.parent])
            if not node.children:
                wanted.add(replica * slots + placement.stages[tree.roots[0].name])
        assert wanted - {rank} <= peers(tree, placement, rank, placement.ranks + 1)


def test_a_rank_without_relatives_knows_only_its_own():
    tree = parse({"a": 4}, LAYERS)
    placement = Placement({"trunk": 0, "a/0": 1, "a/1": 2, "a/2": 3, "a/3": 4}, 5)
    assert peers(tree, placement, 4, 100) == {0, 1, 9, 10}


@given(st.integers(1, 3000))
def test_reports_of_all_ranks_reach_the_main_rank(size):
    above = {rank: relatives(rank, size)[0] for rank in range(size)}
    below = {rank: relatives(rank, size)[1] for rank in range(size)}
    assert sorted(child for children in below.values() for child in children) == list(range(1, size))
    assert all(above[child] == rank for rank, children in below.items() for child in children)
    assert all(len(children) <= 2 for children in below.values())


@pytest.mark.parametrize("rank", [1, 2])
def test_what_is_on_its_way_to_a_checkpoint_does_not_change_with_the_weights(rank):
    """Sending waits for nobody: the next update may come before the bytes are gone."""
    sent = []
    engine = SimpleNamespace(
        _call=lambda what: f"{what} 1",
        placement=Placement({"trunk": 0, "a/0": 1, "a/1": 2}, 3),
        world=SimpleNamespace(rank=rank),
        courier=SimpleNamespace(send=lambda to, key, value: sent.append((to, key, value))),
        is_main=False,
    )
    weight = torch.ones(3, requires_grad=True)
    momentum = torch.full((3,), 2.0)
    assert RanksEngine.gather(engine, {"model/w": weight, "optim/w": momentum}) == {}
    with torch.no_grad():
        weight.add_(5)
        momentum.zero_()
    ((to, key, value),) = sent
    assert (to, key) == (0, ["gather 1"])
    assert {name: tensor.tolist() for name, tensor in value.items()} == {"model/w": [1] * 3, "optim/w": [2] * 3}


def test_every_use_of_a_channel_has_a_name_of_its_own_and_the_same_on_all_ranks():
    """A fast rank may be one use ahead of a slow one: what it sends is not for this one."""
    names = []
    for _ in range(2):
        engine = SimpleNamespace(_calls=defaultdict(int))
        names.append([RanksEngine._call(engine, what) for what in ("gather", "gather", "evaluation", "gather")])
    assert names[0] == names[1]
    assert len(set(names[0])) == 4


def test_each_rank_is_handed_the_weights_and_the_momentum_of_its_stages():
    sent = {}
    engine = SimpleNamespace(
        _call=lambda what: what,
        placement=Placement({"trunk": 0, "a/0": 1, "a/1": 0}, 2, replicas=2),
        world=SimpleNamespace(rank=0, size=5),
        courier=SimpleNamespace(send=lambda to, key, value: sent.update({to: set(value)})),
        is_main=True,
    )
    kinds = ("model/stages.{}.w", "optim/stages.{}.w:momentum_buffer")
    of = {stage: {kind.format(stage) for kind in kinds} for stage in ("trunk", "a/0", "a/1")}
    kept = RanksEngine.scatter(engine, dict.fromkeys(set().union(*of.values(), {"progress/owned"}), torch.zeros(1)))
    assert set(kept) == of["trunk"] | of["a/1"] | {"progress/owned"}
    assert sent == {1: of["a/0"], 2: of["trunk"] | of["a/1"], 3: of["a/0"], 4: set()}


@pytest.mark.parametrize("asked", [{}, {0: 15}, {2: 15}, {1: 2, 2: 15}], ids=str)
def test_ranks_of_a_graph_of_layers_agree_on_the_loss_and_on_the_signal_of_any(asked, monkeypatch):
    """The ranks are threads here, and their group is a queue for each pair."""
    queues = {pair: Queue() for pair in itertools.permutations(range(3), 2)}
    me = threading.local()
    group = SimpleNamespace(
        send=lambda tensor, to: queues[me.rank, to].put(tensor.clone()),
        recv=lambda tensor, source: tensor.copy_(queues[source, me.rank].get(timeout=30)),
    )
    monkeypatch.setattr(graph_engine, "dist", group)

    def decide(rank):
        me.rank = rank
        engine = SimpleNamespace(
            asked_to_stop=asked.get(rank, 0),
            is_main=rank == 0,
            world=SimpleNamespace(size=3),
            _with=lambda other: nullcontext(),
        )
        return graph_engine.GraphEngine._decide(engine, 0.5 if rank == 0 else 0.0).tolist()

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(decide, range(3)))
    assert found == [[0.5, max(asked.values(), default=0)]] * 3


@pytest.mark.parametrize("learn", [None, torch.tensor([[True, False, True]])], ids=["all rows", "some rows"])
def test_a_member_elsewhere_is_told_which_rows_learn(learn):
    """From where the loss is to where the member is, as if it were here."""
    tree = parse({"a": 2}, LAYERS)
    sent, spawned = [], []
    here, there = (RankStep.__new__(RankStep) for _ in range(2))
    for rank, step in enumerate((here, there)):
        step.me, step.replica, step.channel, step.tree = rank, 0, "step 7", tree
        step.options, step.stages = EngineOptions(1, 1), SimpleNamespace(nodes=tree.nodes, stacks={})
        step.placement = Placement({"trunk": 0, "a/0": 0, "a/1": 1}, 2)
    here.courier = SimpleNamespace(send=lambda to, key, value: sent.append((to, key, value)))
    there._spawn = lambda phase, i, node, function, *args: spawned.append((i, node.name, args))
    d_output = torch.randn(1, 3, 5)  # of one member
    here.hand_back(4, tree.nodes["a/1"], d_output, learn)
    ((to, (channel, *key), value),) = sent
    assert (to, channel) == (1, "step 7")
    there.receive(key, value)
    ((i, name, (d, rows)),) = spawned
    assert (i, name) == (4, "a/1")
    assert torch.equal(d, d_output[0])
    assert rows is None if learn is None else torch.equal(rows, learn[0])
