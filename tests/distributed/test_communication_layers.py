"""Broadcast and Gather in real processes, against plain autograd in one. Numbers of defects are those of MPI-Caffe."""

import copy
import io
import os
import pickle
import random
import runpy
import time
from contextlib import redirect_stdout

import pytest
import torch
import torch.distributed as dist
from helpers.commands import HERE
from helpers.gloo_worlds import by_hand, run_each, run_world
from helpers.tensors_of_every_kind import is_dense, tensors

from mheads.common.errors import UserError
from mheads.distributed import Broadcast, Gather

NUM_PROGRAMS, STEPS = 30, 3


# ---- one layer after another, in many ways; each check runs on all ranks of one world


def in_place(rank):
    """Values and outputs changed in place on either side of either layer."""
    broadcast, gather = Broadcast(0, [0, 1, 2]), Gather(0, [0, 1, 2])
    leaf = torch.arange(1.0, 5001.0, requires_grad=True)
    x = leaf * 2
    if rank == 0:
        y = broadcast(x)
        kept = x.detach().clone()
        y.mul_(10)
        untouched = torch.equal(x, kept)
        x.zero_()
        output = y * y
        values = gather(output)
        output.zero_()
        for value in values:
            value.mul_(2)
        (sum(value.sum() for value in values) + x.sum()).backward()
        return untouched, [value.detach() for value in values], leaf.grad
    y = broadcast()
    y.add_(rank)
    output = y * y
    end = gather(output)
    output.zero_()
    end.backward()
    return None


def float_tensors():
    return [tensor for tensor in tensors() if tensor.is_floating_point()]


def weights(tensor):
    """Small whole numbers, each element its own, in a layout of their own."""
    return (torch.arange(tensor.numel()) % 7).view(tensor.shape).to(tensor.dtype)


def round_trips(rank):
    """Every layout and number of dimensions, there and back; the results of rank 0 are checked by the test."""
    broadcast, gather = Broadcast(0, [0, 1, 2]), Gather(0, [0, 2, 1])  # in an order of its own
    found = []
    for tensor in float_tensors():
        x = tensor.detach().requires_grad_(rank == 0)
        y = broadcast(x)
        assert torch.equal(y, tensor), tensor.shape
        assert y.requires_grad
        assert y.dtype == tensor.dtype
        if is_dense(tensor):
            assert y.stride() == tensor.stride(), (tensor.shape, y.stride())
        values = gather(y * (rank + 2))
        (sum((value * weights(value)).sum() for value in values) if rank == 0 else values).backward()
        found.append((values, x.grad))
    return found if rank == 0 else None


def calls_ahead(rank):
    """30 calls before the first is used; backward takes them in the opposite order."""
    layer = Broadcast(0, [1])
    xs = [torch.tensor(float(i), requires_grad=True) for i in range(30)]
    if rank == 0:
        sum(layer(x * 1) for x in xs).backward()
        return [x.grad.item() for x in xs]
    if rank == 1:
        sum(y * i for i, y in enumerate([layer() for _ in xs])).backward()
    return None


def in_pairs(rank):
    """Layers constructed only where they are used; those that have a rank in common are called in one order."""
    x = torch.tensor(float(rank + 1), requires_grad=True)
    pairs = [pair for pair in ((0, 1), (0, 2), (1, 2), (1, 0), (2, 0)) if rank in pair]
    layer = {pair: Broadcast(pair[0], [pair[1]]) for pair in pairs}
    seen = []
    for _ in range(3):
        x.grad = None
        outputs = {pair: layer[pair](x * 1) for pair in pairs}
        received = {pair: y for pair, y in outputs.items() if pair[0] != rank}
        assert all(y.item() == pair[0] + 1 for pair, y in received.items())
        sum(y * (10 * rank + 1) if pair in received else y for pair, y in outputs.items()).backward()
        seen.append(x.grad.item())
    return seen


def without_gradient(rank):
    """Values whose gradient nobody wants, beside others that have one."""
    broadcast, gather = Broadcast(0, [0, 1, 2], timeout=20), Gather(0, [0, 1, 2], timeout=20)
    x = torch.ones(3, requires_grad=True)
    found = {}

    def grad():
        value, x.grad = x.grad, None
        return value if value is None else value.tolist()

    with torch.no_grad():
        y = broadcast(x)
        values = gather(y + rank)
        assert not y.requires_grad
        found["no_grad"] = [value.tolist() for value in values] if rank == 0 else values.item()
    # The root uses the value of rank 1 alone: the others' gradient is zero.
    values = gather(x * (rank + 1))
    (values[1].sum() if rank == 0 else values).backward()
    found["one used"] = grad()
    # A value that needs no gradient is gathered beside others that do; here it holds whole numbers, too.
    values = gather(x * 1 if rank == 1 else torch.tensor([rank]))
    if rank == 0:
        assert values[2].tolist() == [2] and not values[2].requires_grad
        (values[1] * values[2]).sum().backward()
    else:
        values.backward()  # also on rank 2, since rank 1 waits for a gradient
    found["mixed"] = grad()
    # Nobody else waits for what goes from a rank to itself.
    alone = Gather(rank, [rank])
    for _ in range(2):
        alone(x * 1)
    # One backward for each call.
    y = broadcast(x * 1)
    (y * 2).sum().backward(retain_graph=True)
    with pytest.raises(UserError, match="a second backward through call 1"):
        (y * 3).sum().backward()
    found["twice"] = grad()
    return found


def rank_order(rank):
    """Gradients whose sum depends on the order: 0 in that of the ranks, 1 in that of the list."""
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (Broadcast(0, [2, 0, 1])(x * 1) * (1e16, 1.0, -1e16)[rank]).backward()
    return x.grad


def copies(rank):
    """A copy of a layer is a layer of its own."""
    original = Broadcast(0, [1])
    copied, loaded = copy.deepcopy(original), pickle.loads(pickle.dumps(original))
    original(torch.tensor(7)) if rank == 0 else original()  # its first call is none of theirs
    values = [layer(torch.tensor(i)) for i, layer in enumerate([copied, loaded])]
    return [value.item() for value in values] if rank == 1 else None


MISTAKES = {
    "root": (lambda rank: Broadcast(7, [0, 1]),
             "Broadcast(root=7, ranks=(0, 1)): root 7 is not in the world, whose ranks are 0 to 2: start more"),
    "rank": (lambda rank: Gather(0, [0, 3]), "Gather(root=0, ranks=(0, 3)): rank 3 is not in the world"),
    "negative": (lambda rank: Broadcast(0, [-1]), "Broadcast(root=0, ranks=(-1,)): rank -1 is not in the world"),
    "number": (lambda rank: Broadcast(rank, [2])(3.0), "gave float: give it a dense tensor"),
    "nothing": (lambda rank: Broadcast(rank, [2])(), "gave NoneType: give it a dense tensor"),
    "nothing to gather": (lambda rank: Gather((rank + 2) % 3, [rank])(), "gave NoneType: give it a dense tensor"),
    "sparse": (lambda rank: Broadcast(rank, [2])(torch.eye(2).to_sparse()), "gave a torch.sparse_coo tensor"),
}  # fmt: skip


def no_part(rank):
    """What ranks without a part get; errors that need a world."""
    for mistake, message in MISTAKES.values():
        with pytest.raises(UserError) as caught:
            mistake(rank)
        assert message in str(caught.value)
        assert "gave" not in message or f"rank {rank} gave" in str(caught.value)
    return Broadcast(0, [1])(torch.ones(2)), Gather(1, [0])(torch.ones(3))


class Named(torch.Tensor):
    """A tensor as other packages make them."""


def of_a_class_of_its_own(rank):
    """It arrives as a plain tensor, there and back."""
    x = torch.ones(3).as_subclass(Named).requires_grad_(rank == 0)
    y = Broadcast(0, [0, 1, 2])(x)
    values = Gather(0, [0, 1, 2])(y * (rank + 1))
    (sum(value.sum() for value in values) if rank == 0 else values).backward()
    return type(y) is torch.Tensor or rank == 0, x.grad


def random_program(seed):
    """Layers with random roots and ranks, some called again; each call with what its receivers make of the value."""
    draw = random.Random(seed)
    parts = (draw.sample(range(3), draw.randint(1, 3)) for _ in range(4))
    kinds = [(draw.choice([Broadcast, Gather]), draw.randrange(3), ranks) for ranks in parts]
    return kinds, [(draw.randrange(len(kinds)), draw.choices([add, multiply, twice], k=3)) for _ in range(10)]


def add(state, value):
    return state + torch.tanh(value)


def multiply(state, value):
    return state * torch.cos(value)


def twice(state, value):
    return state + value * torch.sin(value)


def start(rank, number):
    """An input, whose length is not always that of the step before."""
    return torch.linspace(rank, rank + 1 + number / 10, 4 + number % 3).double().requires_grad_()


def run_program(rank, layers, program, leaf, pause=0.0):
    """The gradient of this rank's input."""
    state, ends = leaf * 1, []
    for which, uses in program:
        layer = layers[which]
        y = layer(state if rank == layer.root or isinstance(layer, Gather) else None)
        time.sleep(pause)
        if isinstance(y, tuple):
            for value, use in zip(y, uses, strict=False):
                state = use(state, value)
        elif isinstance(layer, Broadcast) and rank in layer.ranks:
            state = uses[rank](state, y)
        elif y is not None:
            ends.append(y)
    (state.sum() + sum(ends)).backward()
    return leaf.grad


def programs(rank):
    """The gradients of each step of some random programs."""
    found = []
    for seed in range(NUM_PROGRAMS):
        kinds, program = random_program(seed)
        layers = [kind(root, ranks, timeout=30) for kind, root, ranks in kinds]
        for step in range(STEPS):
            found.append(run_program(rank, layers, program, start(rank, seed + step)))
        pause = 0.002 if rank == seed % 3 else 0.0
        again = run_program(rank, layers, program, start(rank, seed + STEPS - 1), pause)
        assert torch.equal(again, found[-1]), "who is slow does not change a bit"
    return found


def programs_alone(seed, step):
    leaves = [start(rank, seed + step) for rank in range(3)]
    states = [leaf * 1 for leaf in leaves]
    kinds, program = random_program(seed)
    for which, uses in program:
        kind, root, ranks = kinds[which]
        before = list(states)
        for i, rank in enumerate(ranks):
            if kind is Broadcast:
                states[rank] = uses[rank](before[rank], before[root])
            else:
                states[root] = uses[i](states[root], before[rank])
    sum(state.sum() for state in states).backward()
    return [leaf.grad for leaf in leaves]


def complex_numbers(rank):
    """Each gives a complex value to rank 0, which has a loss of their squares."""
    leaf = torch.full((3,), 1 + rank * 1j, dtype=torch.complex128, requires_grad=True)
    found = Gather(0, [0, 1, 2])(leaf * 1)
    end = sum((value.real.square() + value.imag.square()).sum() for value in found) if rank == 0 else found
    end.backward()
    return leaf.grad


CHECKS = (
    in_place,
    complex_numbers,
    round_trips,
    calls_ahead,
    in_pairs,
    programs,
    without_gradient,
    rank_order,
    copies,
    no_part,
    of_a_class_of_its_own,
)


def check_all(rank):
    return {check.__name__: check(rank) for check in CHECKS}


@pytest.fixture(scope="module")
def world():
    return run_world(3, check_all)


def test_changes_in_place_reach_nobody_else_and_give_the_right_gradient(world):
    """Defect 2."""
    untouched, values, grad = world[0]["in_place"]
    leaf = torch.arange(1.0, 5001.0, requires_grad=True)
    expected = [2 * (leaf * 20) ** 2, 2 * (leaf * 2 + 1) ** 2, 2 * (leaf * 2 + 2) ** 2]
    sum(value.sum() for value in expected).backward()
    assert untouched
    assert all(map(torch.equal, values, expected))
    assert torch.equal(grad, leaf.grad)


def test_complex_values_have_their_gradients(world):
    for rank in range(3):
        assert torch.equal(world[rank]["complex_numbers"], torch.full((3,), 2 + 2j * rank, dtype=torch.complex128))


def test_every_shape_dtype_and_layout_goes_there_and_back(world):
    """Defect 4: more than 4 dimensions, no rows, one row."""
    for tensor, (values, grad) in zip(float_tensors(), world[0]["round_trips"], strict=True):
        for factor, value in zip((2, 4, 3), values, strict=True):  # as listed: ranks 0, 2, 1
            assert torch.equal(value, tensor * factor)
        assert torch.equal(grad, weights(tensor) * 9), (tensor.shape, tensor.stride())


def test_tensors_of_a_class_of_their_own_arrive_as_plain_ones(world):
    assert [world[rank]["of_a_class_of_its_own"][0] for rank in range(3)] == [True] * 3
    assert world[0]["of_a_class_of_its_own"][1].tolist() == [6.0] * 3


def test_random_programs_have_the_gradients_of_one_process_in_every_step(world):
    """Defects 1 and 4: nothing is left from the step before, whose values may have been longer."""
    steps = [(seed, step) for seed in range(NUM_PROGRAMS) for step in range(STEPS)]
    for number, place in enumerate(steps):
        for rank, grad in enumerate(programs_alone(*place)):
            torch.testing.assert_close(world[rank]["programs"][number], grad, rtol=1e-12, atol=1e-12)


def test_gradients_are_added_in_the_order_of_the_ranks(world):
    assert world[0]["rank_order"] == 0


def test_calls_are_taken_back_in_the_opposite_order_on_every_rank(world):
    assert world[0]["calls_ahead"] == list(range(30))
    assert [world[rank]["in_pairs"] for rank in range(3)] == [[32.0] * 3, [22.0] * 3, [1.0] * 3]


def test_values_without_gradient_stand_beside_others(world):
    zero, one, two = (world[rank]["without_gradient"] for rank in range(3))
    assert zero["no_grad"] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    assert one["no_grad"] == two["no_grad"] == 0
    assert [rank["one used"] for rank in (zero, one, two)] == [[0.0] * 3, [2.0] * 3, [0.0] * 3]
    assert [rank["mixed"] for rank in (zero, one, two)] == [None, [2.0] * 3, None]
    assert zero["twice"] == [6.0] * 3


def test_a_copy_of_a_layer_is_a_layer_of_its_own(world):
    assert world[1]["copies"] == [0, 1]


def test_a_rank_without_a_part_gets_none_and_mistakes_name_the_layer_the_rank_and_the_remedy(world):
    assert world[2]["no_part"] == (None, None)


def test_mistakes_that_need_no_world():
    with pytest.raises(UserError, match=r"Broadcast\(root=0, ranks=\(\)\): ranks is empty"):
        Broadcast(0, [])
    with pytest.raises(UserError, match=r"Gather\(root=0, ranks=\(1, 1\)\): a rank is named twice"):
        Gather(0, [1, 1])
    with pytest.raises(UserError, match="timeout must be above 0"):
        Gather(0, [1], timeout=0)
    with pytest.raises(UserError, match=r"Gather\(root=0, ranks=\(1,\)\): there is no process group: call torch"):
        Gather(0, [1])(torch.zeros(1))


def example(_):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(HERE.parent / "examples/broadcast_gather.py"))
    return out.getvalue()


def test_the_example_learns():
    first, *others = run_each(example, by_hand(3))
    losses = [float(line.split()[-1]) for line in first.splitlines()]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert others == ["", ""]


# ---- ends, good and bad: each needs a world of its own


def leave(rank):
    """Ranks end as soon as they have given their last gradient. The root is slow to ask."""
    x = torch.ones(2, requires_grad=True)
    y = Broadcast(0, [1, 2])(x * 1)
    if rank == 0:
        time.sleep(0.3)
    (y * rank if rank else y).sum().backward()
    return x.grad


def test_a_process_that_ends_has_delivered_what_it_sent():
    """Defect 5: slow ranks lose nothing."""
    assert run_world(3, leave)[0].tolist() == [3.0, 3.0]


def hang(rank):
    """Rank 1 holds a value without a backward, and goes on."""
    y = Broadcast(0, [0, 1], timeout=1.5)(torch.ones(2, requires_grad=True) * 1)
    if rank == 0:
        y.sum().backward()
    with pytest.raises(RuntimeError):  # until the root gives up, and ends
        dist.recv(torch.zeros(1), 0)


def skip(rank, who):
    """A rank lets go of a value that has a gradient, and goes on to the next call; the other waits for its end."""
    broadcast = Broadcast(0, [0, 1], timeout=20)
    y = broadcast(torch.ones(2, requires_grad=True) * 1)
    del y
    if rank == who:
        broadcast(torch.ones(2, requires_grad=True) * 1)
    with pytest.raises(RuntimeError):
        dist.recv(torch.zeros(1), who)


def other_order(rank):
    """Rank 1 takes two calls back in the order in which they were made."""
    broadcast = Broadcast(0, [0, 1], timeout=20)
    x = torch.ones(2, requires_grad=True)
    first, second = (broadcast(x * 1) for _ in range(2))
    if rank == 0:
        (first + second).sum().backward()
    else:
        first.sum().backward()
        with pytest.raises(UserError):
            second.sum().backward()


def one_sided(rank):
    """Rank 1 takes a value under no_grad though rank 0 wants its gradient, and ends; rank 0 waits for another value."""
    x = torch.ones(2, requires_grad=True)
    broadcast, gather = Broadcast(0, [1]), Gather(0, [0, 1])
    with torch.set_grad_enabled(rank == 0):
        broadcast(x * 1 if rank == 0 else None)
    gather(x)


SKIPPED = (
    "Broadcast(root=0, ranks=(0, 1)): rank {} let go of what call 0 gave it without a backward, and other ranks wait "
    "for that gradient: run backward on all ranks, or put the call under no_grad on all"
)
ENDS = {
    "a gradient that does not come": (hang, (), {
        0: "Broadcast(root=0, ranks=(0, 1)): rank 1 did not answer within 1.5 s, while rank 0 waited for it: call "
           "the layers equally often and in the same order",
    }),
    "a backward that the root skips": (skip, (0,), {0: SKIPPED.format(0)}),
    "a backward that another skips": (skip, (1,), {1: SKIPPED.format(1)}),
    "a backward in another order": (other_order, (), {
        0: "Broadcast(root=0, ranks=(0, 1)): rank 0 is at call 1, and another rank at call 0: run the calls in the "
           "same order on all ranks, and their backwards in the opposite one",
    }),
    "no_grad on one side, and a rank that has ended": (one_sided, (), {
        0: "(root=0, ranks=(0, 1)): rank 1 has ended, or its connection is lost",
        1: "Broadcast(root=0, ranks=(1,)): another rank wants the gradient of call 0, which rank 1 takes under "
           "no_grad: put the call under no_grad on all ranks or on none",
    }),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_does_not_do_its_part_is_named(end):
    function, args, messages = ENDS[end]
    found = run_world(2, function, *args)
    for rank, message in messages.items():
        assert message in found[rank]
