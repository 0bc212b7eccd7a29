"""Which rank holds which stage, and which rank runs which micro-batches of it."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mheads import UserError
from mheads.distributed.planning.placement import Division, Placement, default, explicit, meshes, parts_by_rank, spread
from mheads.engine.gradient_sums import PairwiseSum, add_subtrees, subtrees
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


@given(trees, st.integers(1, 12), st.integers(1, 12))
def test_a_stage_lives_on_every_rank_that_holds_one_of_its_members(tree, ranks, micro_batches):
    placement = default(tree, ranks, micro_batches)
    assert list(placement.stages) == list(tree.nodes)
    assert (placement.slots, placement.replicas) in meshes(tree, ranks, micro_batches)
    assert placement.slots == min(ranks, len(tree.leaves))
    slot_of = [placement.stages[leaf.name] for leaf in tree.leaves]
    assert all(len(slots) == 1 for slots in slot_of)
    assert sorted({slot for slots in slot_of for slot in slots}) == list(range(placement.slots))
    for name, node in tree.nodes.items():
        assert placement.stages[name] == tuple(sorted({slot_of[member][0] for member in node.members}))
    for rank in range(placement.ranks):
        held = [name for name in tree.nodes if rank in placement.all_holders(name)]
        assert placement.stages_on(rank) == held != []
    assert placement.stages_on(placement.ranks) == []


@given(trees, st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_each_micro_batch_of_a_stage_is_run_once_in_its_replica_or_whole_on_each_rank(tree, ranks, parts, whole):
    placement = default(tree, ranks, 1 if whole else parts)
    division = Division(placement, parts, whole)
    shares = [division.share(replica * placement.slots) for replica in range(placement.replicas)]
    assert [i for share in shares for i in share] == list(range(parts))
    for name in tree.nodes:
        holders = placement.all_holders(name)
        runs = [division.runs(name, rank) for rank in holders]
        if whole:
            assert runs == [range(parts)] * len(holders)
        else:
            assert [i for own in runs for i in own] == list(range(parts))
        for i in range(parts):
            assert division.owner(name, i) == next(r for r, own in zip(holders, runs, strict=True) if i in own)
    for rank in range(placement.ranks):
        assert sorted(division.turns(rank)) == list(division.share(rank))
        for name in placement.stages_on(rank):
            rounds = [] if whole else division.rounds(name, rank)
            assert sorted(i for owned in rounds for i in owned.values()) == (
                [] if whole else list(division.share(rank))
            )
    assert division.share(placement.ranks) == range(0)


@given(st.integers(1, 40), st.lists(st.integers(1, 40), max_size=6), st.integers(0, 2**32 - 1))
def test_subtrees_of_any_ranges_add_up_to_the_bits_of_the_whole_tree(n, stops, seed):
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.standard_normal(n).astype(np.float32) * 1e3)

    def add(own):
        one, found = PairwiseSum(n, subtrees(n, own)), None
        for i in rng.permutation(own):
            assert found is None
            found = one.add(int(i), [values[i]])
        assert sorted(i for part in found for i in part) == list(own)
        assert list(subtrees(n, own)) == sorted(found, key=lambda part: part.start)
        return {part: total for part, (total,) in found.items()}

    whole = add(range(n))
    assert list(whole) == [range(n)]
    edges = sorted({0, n, *(stop for stop in stops if stop < n)})
    sums = {}
    for start, stop in itertools.pairwise(edges):
        sums |= add(range(start, stop))
    assert torch.equal(add_subtrees(sums), whole[range(n)])


def test_children_that_are_together_are_added_where_they_are():
    assert parts_by_rank([0, 0, 1, 1]) == {0: [range(2)], 1: [range(2, 4)]}
    assert parts_by_rank([1, 1, 1]) == {1: [range(3)]}
    assert parts_by_rank([1, 0, 0, 1, 1]) == {1: [range(1), range(3, 4), range(4, 5)], 0: [range(1, 2), range(2, 3)]}
    assert parts_by_rank([3]) == {3: [range(1)]}


def test_members_that_are_left_over_are_on_the_first_ranks():
    assert default(parse({"a": 5}, LAYERS), 3, 1) == Placement(
        {"trunk": (0, 1, 2), "a/0": (0,), "a/1": (0,), "a/2": (1,), "a/3": (1,), "a/4": (2,)}, 3
    )
    nested = parse({"a": [{"b": 2}, {"b": 2}]}, LAYERS)
    held = spread(nested, [1, 3]).stages
    assert (held["trunk"], held["a/0"], held["a/1"]) == ((0, 1), (0, 1), (1,))


def test_ranks_that_are_left_hold_replicas_as_long_as_there_are_micro_batches():
    tree = parse({"a": 2}, LAYERS)
    assert [default(tree, ranks, 3).replicas for ranks in (1, 2, 3, 4, 7, 9)] == [1, 1, 1, 2, 3, 3]
    placement = default(tree, 4, 4)
    assert [placement.holders("trunk", replica) for replica in range(2)] == [(0, 1), (2, 3)]
    assert placement.all_holders("a/1") == (1, 3)


def test_a_stage_that_is_not_named_goes_with_its_parent_and_one_that_is_named_is_there_too():
    tree = parse({"a": [{"b": 2}, 1]}, LAYERS)
    placement = explicit(tree, {"trunk": 0, "a/0": 1}, 5, 4)
    held = {"trunk": (0, 1), "a/0": (1,), "a/0/b/0": (1,), "a/0/b/1": (1,), "a/1": (0,)}
    assert placement == Placement(held, 2, 2)
    apart = explicit(parse({"a": 2}, LAYERS), {"trunk": 0, "a/0": 1, "a/1": 1}, 2, 4)
    assert apart.stages == {"trunk": (0, 1), "a/0": (1,), "a/1": (1,)}, "rank 0 takes its part of the trunk's rows"


@pytest.mark.parametrize(
    ("given", "ranks", "parts"),
    [
        ({"a/9": 0}, 2, ["'a/9'", "trunk, a/0, a/1"]),
        ({"a/0": 0}, 2, ["nothing about 'trunk'"]),
        ({"trunk": -1}, 2, ["'trunk' on rank -1"]),
        ({"trunk": 0, "a/0": 2}, 2, ["ranks 0 to 2", "2 are running"]),
        ({"trunk": 0, "a/0": 2, "a/1": 2}, 3, ["rank 2", "rank 1 nothing to do"]),
    ],
)
def test_a_placement_that_cannot_be_is_refused(given, ranks, parts):
    with pytest.raises(UserError) as caught:
        explicit(parse({"a": 2}, LAYERS), given, ranks, 1)
    for part in parts:
        assert part in str(caught.value)


def test_there_must_be_a_rank():
    with pytest.raises(UserError, match="at least 1 rank, not 0"):
        default(parse(2, LAYERS), 0, 1)


@pytest.mark.parametrize("argument", ["placement=fast", "timeout=0", "distributed.sums=any"])
def test_a_key_about_ranks_that_cannot_be_is_refused_in_one_process_as_well(argument, mheads):
    done = mheads("train", "digits", argument)
    assert done.code == 2
    assert argument.partition("=")[0] in done.err
