"""Which rank holds which stage."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mheads import UserError
from mheads.distributed.placement import Placement, default, explicit, meshes, num_first_together, spread_stages
from mheads.engine.gradient_sums import divides_evenly
from mheads.trees.splitting.cut_sequential import ChainLayer
from mheads.trees.tree_spec import parse

LAYERS = [ChainLayer(name, True, False) for name in "abcdefgh"]


def specs(depth=0):
    """Trees and forests of up to three levels of splits."""
    leaves = st.integers(1, 5)
    if depth == 3:
        return leaves
    below = st.lists(specs(depth + 1), min_size=1, max_size=3)
    return st.one_of(leaves, below.map(lambda parts: [{"abc"[depth]: part} for part in parts]))


trees = specs().map(lambda spec: parse(spec, LAYERS))


def children_first(tree, name):
    for child in tree.nodes[name].children:
        yield from children_first(tree, child)
    yield name


@given(trees, st.integers(1, 12), st.integers(1, 12))
def test_every_stage_has_a_rank_and_every_rank_of_the_mesh_a_stage(tree, ranks, micro_batches):
    placement = default(tree, ranks, micro_batches)
    assert list(placement.stages) == list(tree.nodes)
    assert set(placement.stages.values()) == set(range(placement.slots))
    used = [slots * replicas for slots, replicas in meshes(len(tree.nodes), ranks, micro_batches)]
    assert placement.ranks == max(used) <= ranks
    assert divides_evenly(micro_batches, placement.replicas)
    owned = [name for rank in range(placement.slots) for name in placement.stages_on(rank)]
    assert sorted(owned) == sorted(tree.nodes)
    assert placement.rank(tree.roots[0].name) == placement.loss_rank(tree) == 0
    for rank in range(placement.ranks):
        for stage in placement.stages_on(rank):
            assert placement.rank(stage, placement.replica(rank)) == rank
    assert placement.stages_on(placement.ranks) == []


@given(trees, st.integers(1, 12))
@example(parse([{"a": [{"b": 4}]}, {"a": 5}, {"a": 2}], LAYERS), 10)
def test_slots_hold_runs_of_about_the_same_number_of_layers(tree, slots):
    slots = min(slots, len(tree.nodes) - 1) or 1
    held = spread_stages(tree, slots)
    order = [held[name] for root in tree.roots for name in children_first(tree, root.name)]
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes == slots - 1
    sizes = [0] * slots
    for name, slot in held.items():
        sizes[slot] += len(tree.nodes[name].layers)
    largest = max(len(node.layers) for node in tree.nodes.values())
    # A slot is at most half a stage above its share of what is left, or below it; that is left to the others.
    left_over = sum(1 / n for n in range(1, slots))
    assert max(sizes) <= max(largest, sum(sizes) / slots + largest / 2 * (1 + left_over))


SPREAD = {
    "the trunk has a rank of its own where there are enough": ({"a": 3}, 4, {"trunk": 0, "a/0": 1, "a/1": 2, "a/2": 3}),
    "the first members are together, the last beside it": ({"a": 3}, 2, {"trunk": 0, "a/0": 1, "a/1": 1, "a/2": 0}),
    "subtrees stay together": (
        {"a": [{"b": 2}, {"b": 2}]}, 2,
        {"trunk": 0, "a/0": 1, "a/0/b/0": 1, "a/0/b/1": 1, "a/1": 0, "a/1/b/0": 0, "a/1/b/1": 0},
    ),
    "independent members are dealt out in order": (5, 3, {"0": 0, "1": 0, "2": 1, "3": 1, "4": 2}),
}  # fmt: skip


@pytest.mark.parametrize("rule", SPREAD)
def test_stages_are_spread_by_rules(rule):
    spec, slots, expected = SPREAD[rule]
    assert spread_stages(parse(spec, LAYERS), slots) == expected


def test_ranks_that_are_left_hold_replicas():
    placement = default(parse({"a": 3}, LAYERS), 8, 4)
    assert (placement.slots, placement.replicas) == (4, 2)
    assert [placement.rank("a/0", replica) for replica in (0, 1)] == [1, 5]
    assert placement.stages_on(5) == placement.stages_on(1) == ["a/0"]
    assert placement.loss_rank(parse({"a": 3}, LAYERS), 1) == 4


def test_replicas_share_the_micro_batches_evenly_or_are_not_made():
    assert default(parse(1, LAYERS), 3, 4).ranks == 2
    assert default(parse(1, LAYERS), 4, 6).ranks == 3
    assert default(parse(1, LAYERS), 5, 1).ranks == 1


def test_a_stage_that_is_not_named_goes_with_its_parent():
    tree = parse({"a": [{"b": 2}, 1]}, LAYERS)
    placement = explicit(tree, {"trunk": 0, "a/0": 1}, 2, 4)
    assert placement.stages == {"trunk": 0, "a/0": 1, "a/0/b/0": 1, "a/0/b/1": 1, "a/1": 0}
    assert explicit(tree, {"trunk": 0, "a/0": 1}, 5, 4).replicas == 2


@pytest.mark.parametrize(
    ("given", "ranks", "parts"),
    [
        ({"trunk": 0, "a/7": 1}, 2, ["'a/7'", "trunk, a/0, a/1, a/2"]),
        ({"a/0": 1}, 2, ["'trunk'"]),
        ({"trunk": -1}, 2, ["'trunk'", "-1", "from 0"]),
        ({"trunk": 0, "a/0": 3}, 2, ["0 to 3", "2 are running", "start 4"]),
        ({"trunk": 0, "a/0": 2}, 3, ["rank 2", "rank 1 nothing", "without gaps"]),
    ],
)
def test_a_placement_that_cannot_be_is_refused(given, ranks, parts):
    with pytest.raises(UserError) as refused:
        explicit(parse({"a": 3}, LAYERS), given, ranks, 4)
    for part in parts:
        assert part in str(refused.value)


def test_only_the_first_children_that_are_together_are_added_where_they_are():
    assert [num_first_together(slots) for slots in ([1], [1, 1, 1], [1, 1, 0, 1], [1, 0, 1], [0, 1, 1])] == [
        1,
        3,
        2,
        1,
        1,
    ]


def test_ranks_beyond_the_mesh_own_nothing():
    placement = Placement({"trunk": 0, "a/0": 1}, slots=2, replicas=2)
    assert [placement.stages_on(rank) for rank in range(6)] == [["trunk"], ["a/0"], ["trunk"], ["a/0"], [], []]


def test_there_must_be_a_rank():
    with pytest.raises(UserError, match="at least 1 rank"):
        default(parse(2, LAYERS), 0, 4)


@pytest.mark.parametrize("argument", ["placement=fast", "data.reader=all", "timeout=0"])
def test_a_key_about_ranks_that_cannot_be_is_refused_in_one_process_as_well(argument, mheads):
    done = mheads("config", "digits", argument)
    key, _, value = argument.partition("=")
    assert done.code == 2
    assert f"{key} = " in done.err and value in done.err
