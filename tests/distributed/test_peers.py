"""Whom a rank talks to: enough for all that is sent, and the same seen from both sides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mheads.chain import Layer
from mheads.distributed.placement import Placement, default
from mheads.distributed.ranks import peers, relatives
from mheads.tree import parse

LAYERS = [Layer(name, True, False) for name in ("a", "b", "c")]
TREES = [4, {"a": 4}, {"a": [{"b": 2}, 2]}, {"a": {"b": 3}}, 1]


@pytest.mark.parametrize("spec", TREES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 5, 8, 16])
def test_two_ranks_listen_to_each_other_or_neither_does(spec, size):
    tree = parse(spec, LAYERS)
    placement = default(tree, size, 8)
    found = {rank: peers(tree, placement, rank, size) for rank in range(size)}
    assert all(rank in found[peer] for rank in found for peer in found[rank])
    assert all(rank not in found[rank] for rank in found)


def test_a_rank_without_relatives_knows_only_its_own():
    tree = parse({"a": 4}, LAYERS)
    placement = Placement({"trunk": 0, "a/0": 1, "a/1": 2, "a/2": 3, "a/3": 4}, 5)
    assert peers(tree, placement, 4, 100) == {0, 1, 9, 10}


@given(st.integers(1, 3000))
def test_reports_of_all_ranks_reach_the_lead(size):
    above = {rank: relatives(rank, size)[0] for rank in range(size)}
    below = {rank: relatives(rank, size)[1] for rank in range(size)}
    assert sorted(child for children in below.values() for child in children) == list(range(1, size))
    assert all(above[child] == rank for rank, children in below.items() for child in children)
    assert all(len(children) <= 2 for children in below.values())
