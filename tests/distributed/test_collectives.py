"""The collectives of a step on values of every form, and sums in their fixed order."""

from collections import namedtuple

import torch
import torch.distributed as dist
from helpers.gloo_worlds import run_world

from mheads.common.nested_values import leaves
from mheads.distributed.collectives import Gathering, add_fast, add_ordered
from mheads.engine.gradient_sums import PairwiseSum, subtrees

Boxes = namedtuple("Boxes", "scores corners")


class Named(torch.Tensor):
    """A tensor as other packages make them."""


CPU = torch.device("cpu")
FORMS = {
    "numbers": lambda rank: torch.arange(6.0).view(2, 3) + rank,
    "images": lambda rank: torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(rank)),
    "channels last": lambda rank: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last) * rank,
    "a member's, channels last": lambda rank: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)[None] * rank,
    "of a class of its own": lambda rank: (torch.ones(3) * rank).as_subclass(Named),
    "one channel": lambda rank: torch.full((2, 1, 3, 3), float(rank)).as_strided((2, 1, 3, 3), (9, 9, 3, 1)),
    "a view with gaps": lambda rank: (torch.arange(20.0).view(4, 5) + rank)[::2, 1:3],
    "of other lengths": lambda rank: {"a": torch.ones(rank, 2), "b": torch.tensor(rank)},
    "kinds": lambda rank: (torch.ones(3, dtype=torch.bfloat16) * rank, torch.tensor([True, False]), torch.tensor(2j)),
    "names": lambda rank: [Boxes(torch.zeros(2) + rank, torch.zeros(2, 4, dtype=torch.int64))],
    "conjugated": lambda rank: torch.tensor([1 + 2j, 3j]).conj() * (rank + 1),
    "that learn": lambda rank: torch.nn.Parameter(torch.ones(2) * rank) * 2,
    "nothing here and there": lambda rank: torch.ones(3) if rank == 1 else (),
}


def gather_each(rank):
    """Gathers each twice, under one key: values grow and shrink; each is compared with what was given there."""
    gathering = Gathering(CPU)
    for _ in range(2):
        for name, form in FORMS.items():
            found = gathering.gather("key", dist.group.WORLD, form(rank))
            assert list(found) == [0, 1, 2]
            for other, value in found.items():
                expected = form(other)
                assert isinstance(value, torch.Tensor) or type(value) is type(expected)
                for a, b in zip(leaves(value), leaves(expected), strict=True):
                    assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, False), name
                    assert type(a) is torch.Tensor
                    assert torch.equal(a, b.detach().as_subclass(torch.Tensor)), name
                    assert a.stride() == torch.empty_like(b).stride(), "in the strides that it had, without gaps"
    return rank


def test_values_of_every_form_reach_all_ranks():
    assert run_world(3, gather_each) == [0, 1, 2]


HELD = {0: range(3), 1: range(3, 4), 2: range(4, 7)}  # the micro-batches of each rank
SIZE = 10  # which three does not divide


def term(i):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(i)) * 10.0 ** (i % 4)


def add_each(rank):
    held = {other: subtrees(7, own) for other, own in HELD.items()}
    own = PairwiseSum(7, held[rank])
    sums = [own.add(i, [term(i)]) for i in HELD[rank]][-1]
    given = torch.stack([sums[part][0] for part in held[rank]])
    return add_ordered(dist.group.WORLD, given, held), add_fast(dist.group.WORLD, given)


def test_ordered_sums_have_the_bits_of_one_process_and_fast_ones_are_near():
    whole = PairwiseSum(7)
    expected = [whole.add(i, [term(i)]) for i in range(7)][-1][range(7)][0]
    for ordered, fast in run_world(3, add_each):
        assert torch.equal(ordered, expected)
        torch.testing.assert_close(fast, ordered)
