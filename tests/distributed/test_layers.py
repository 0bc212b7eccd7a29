"""Broadcast and Gather in real processes, against plain autograd in one. Numbers of defects are those of MPI-Caffe."""

import copy
import os
import pickle
import random
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_wire import is_dense, tensors
from torch import nn
from worlds import run_world

from mheads.distributed import Broadcast, Gather, finish
from mheads.errors import UserError

NUM_PROGRAMS = 30
ROWS = (8, 8, 3, 1)  # of the batch of each step


def stage(name):
    """A trunk or a branch, whose weights come from its name alone."""
    torch.manual_seed(sum(map(ord, name)))
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double()


def batch(step):
    torch.manual_seed(100 + step)
    return torch.randn(ROWS[step], 5).double(), torch.randint(5, (ROWS[step],))


def mean_loss(outputs, y):
    return F.cross_entropy(torch.stack(outputs).mean(0), y)


def update(module):
    """A step of plain gradient descent; the gradients of the step."""
    found = [p.grad.clone() for p in module.parameters()]
    with torch.no_grad():
        for p in module.parameters():
            p -= 0.5 * p.grad
            p.grad = None
    return found


def assert_same_steps(got, expected):
    """Lists, one entry a step, of the gradients of a module's parameters."""
    assert len(got) == len(expected)
    for step, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, msg=lambda text, s=step: f"step {s}: {text}")


# ---- MPI-Caffe's example: a trunk on rank 0, branches on some ranks, the mean of their outputs on rank 0


def train(rank, ranks, slow=()):
    """The gradients of this rank's modules at each step. `slow` ranks take their time."""
    broadcast, gather = Broadcast(0, ranks), Gather(0, ranks)
    trunk, branch = stage("trunk"), stage(f"branch {rank}")
    found = {"trunk": [], "branch": []}
    for step in range(len(ROWS)):
        x, y = batch(step)
        h = broadcast(trunk(x) if rank == 0 else None)
        if rank in slow:
            time.sleep(0.05)
        output = branch(h) if rank in ranks else h
        if rank == 0:
            mean_loss(gather(output), y).backward()
            found["trunk"].append(update(trunk))
        else:
            gather(output).backward()
        if rank in ranks:
            found["branch"].append(update(branch))
    return found


def trainings(rank):
    return (
        train(rank, [0, 1, 2]),
        train(rank, [0, 1, 2], slow=[0]),
        train(rank, [0, 1, 2], slow=[1]),
        train(rank, [1, 2]),
    )


def train_alone(ranks):
    trunk, branches = stage("trunk"), [stage(f"branch {rank}") for rank in ranks]
    found = {"trunk": [], **{rank: [] for rank in ranks}}
    for step in range(len(ROWS)):
        x, y = batch(step)
        h = trunk(x)
        mean_loss([branch(h) for branch in branches], y).backward()
        found["trunk"].append(update(trunk))
        for rank, branch in zip(ranks, branches, strict=True):
            found[rank].append(update(branch))
    return found


@pytest.fixture(scope="module")
def trained():
    return run_world(3, trainings)


def test_a_tree_on_three_ranks_learns_as_in_one_process(trained):
    """Defects 1 and 4: from the second step on, and when the batch is shorter."""
    expected = train_alone([0, 1, 2])
    assert_same_steps(trained[0][0]["trunk"], expected["trunk"])
    for rank in range(3):
        assert_same_steps(trained[rank][0]["branch"], expected[rank])


def test_a_root_that_holds_the_trunk_alone_learns_as_in_one_process(trained):
    """Defect 1: the gradient of the step before is not added again. One backward runs through gather and broadcast."""
    expected = train_alone([1, 2])
    assert_same_steps(trained[0][3]["trunk"], expected["trunk"])
    for rank in (1, 2):
        assert_same_steps(trained[rank][3]["branch"], expected[rank])


def test_who_is_slow_does_not_change_a_bit(trained):
    for results in trained:
        plain, *slow = results[:3]
        for other in slow:
            for name in plain:
                for a, b in zip(plain[name], other[name], strict=True):
                    assert all(map(torch.equal, a, b))


# ---- one layer after another, in many ways; each check runs on all ranks of one world


def chain(rank):
    """A path through three processes; then one where each hop leaves something behind, and each rank has a loss."""
    own = stage(f"stage {rank}")
    first, second = Broadcast(0, [1]), Broadcast(1, [2])
    third, fourth = Broadcast(0, [0, 1]), Broadcast(1, [1, 2])
    straight, forked = [], []
    for step in range(3):
        x, y = batch(step)
        if rank == 0:
            first(own(x)).backward()
        elif rank == 1:
            second(own(first())).backward()
        else:
            F.cross_entropy(own(second()), y).backward()
        straight.append(update(own))
    for step in range(3):
        x, y = batch(step)
        if rank == 0:
            third(own(x)).square().sum().backward()
        elif rank == 1:
            fourth(own(third())).square().sum().backward()
        else:
            F.cross_entropy(own(fourth()), y).backward()
        forked.append(update(own))
    return straight, forked


def chain_alone():
    stages = [stage(f"stage {rank}") for rank in range(3)]
    straight, forked = [[], [], []], [[], [], []]
    for found, left_behind in ((straight, 0), (forked, 1)):
        for step in range(3):
            x, y = batch(step)
            a = stages[0](x)
            b = stages[1](a)
            loss = F.cross_entropy(stages[2](b), y) + left_behind * (a.square().sum() + b.square().sum())
            loss.backward()
            for rank in range(3):
                found[rank].append(update(stages[rank]))
    return straight, forked


def in_place(rank):
    """Values and outputs changed in place on either side of either layer."""
    broadcast, gather = Broadcast(0, [0, 1, 2]), Gather(0, [0, 1, 2])
    leaf = torch.arange(1.0, 5.0, requires_grad=True)
    x = leaf * 2
    y = broadcast(x if rank == 0 else None)
    if rank == 0:
        kept = x.detach().clone()
        y.mul_(10)
        untouched = torch.equal(x, kept)
        x.zero_()  # the others have not taken it yet, perhaps: they get a copy
        dist.barrier()
    else:
        dist.barrier()
        y.add_(rank)
    output = y * y
    values = gather(output)
    output.zero_()  # after it was sent
    if rank != 0:
        values.backward()
        return None
    for value in values:
        value.mul_(2)
    (sum(value.sum() for value in values) + x.sum()).backward()
    return untouched, [value.detach() for value in values], leaf.grad


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
        if rank == 0:
            sum((value * weights(value)).sum() for value in values).backward()
            found.append((values, x.grad))
        else:
            values.backward()
    return found


def float_tensors():
    return [tensor for tensor in tensors() if tensor.is_floating_point()]


def weights(tensor):
    """Small whole numbers, each element its own, in a layout of their own."""
    return (torch.arange(tensor.numel()) % 7).view(tensor.shape).to(tensor.dtype)


def calls(rank):
    """A layer that is called twice in a step, and used before and after; 30 calls ahead of a receiver; any order."""
    twice, often = Broadcast(0, [0, 1]), Broadcast(0, [1])
    a, b = (torch.tensor([value], requires_grad=True) for value in (2.0, 3.0))
    found = []
    for _ in range(2):
        y, z = twice(a * 1), twice(b * 1)
        if rank < 2:
            (y**2 * z * (rank + 1)).backward()
            found.append((a.grad, b.grad))
            a.grad = b.grad = None
    xs = [torch.tensor(float(i), requires_grad=True) for i in range(30)]
    if rank == 0:
        sum(often(x * 1) for x in xs).backward()
        found.append([x.grad.item() for x in xs])
    elif rank == 1:
        received = [often() for _ in xs]
        sum(y * i for i, y in enumerate(received)).backward()
    return found


def any_order(rank):
    """Layers constructed only where they are used, called in another order on each rank."""
    x = torch.tensor(float(rank + 1), requires_grad=True)
    layer = {pair: Broadcast(pair[0], [pair[1]]) for pair in ((0, 1), (0, 2), (1, 2), (1, 0), (2, 0)) if rank in pair}
    order = {
        0: [(0, 2), (0, 1), (2, 0), (1, 0)],
        1: [(1, 0), (1, 2), (0, 1)],
        2: [(2, 0), (1, 2), (0, 2)],
    }[rank]
    seen = []
    for _ in range(3):
        x.grad = None
        outputs = {pair: layer[pair](x * 1) for pair in order}
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
        return value

    with torch.no_grad():
        y = broadcast(x)
        values = gather(y + rank)
        assert not y.requires_grad
        found["no_grad"] = [value.tolist() for value in values] if rank == 0 else values.item()
    # The root uses the value of rank 1 alone: the others' gradient is zero.
    values = gather(x * (rank + 1))
    (values[1].sum() if rank == 0 else values).backward()
    found["one used"] = grad()
    # A value that needs no gradient is gathered beside others that do.
    values = gather(x * 1 if rank == 1 else torch.full((2,), float(rank)))
    if rank == 0:
        (values[0].sum() + (values[1] * 5).sum()).backward()
    elif rank == 1:
        values.backward()
    found["mixed"] = grad()
    # Whole numbers beside floats.
    values = gather(x * 1 if rank == 1 else torch.tensor([rank]))
    if rank == 0:
        found["whole"] = values[2]
        (values[1] * values[2]).sum().backward()
    elif rank == 1:
        values.backward()
        found["whole"] = grad()
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
    finish()
    return found


def copies(rank):
    """A copy of a layer is a layer of its own."""
    original = Broadcast(0, [1])
    copied, loaded = copy.deepcopy(original), pickle.loads(pickle.dumps(original))
    order = [original, copied, loaded] if rank == 0 else [loaded, copied, original]
    if rank == 0:
        for i, layer in enumerate(order):
            layer(torch.tensor(i))
        return None
    return [layer().item() for layer in order] if rank == 1 else copied()


def no_part(rank):
    """Ranks without a part get None; errors that need a world."""
    broadcast, gather = Broadcast(0, [1]), Gather(1, [0])
    found = {"part": [broadcast(torch.ones(2)), gather(torch.ones(3))]}
    mistakes = {
        "root": lambda: Broadcast(7, [0, 1]),
        "rank": lambda: Gather(0, [0, 3]),
        "negative": lambda: Broadcast(0, [-1]),
        "number": lambda: Broadcast(rank, [2])(3.0),
        "nothing": lambda: Gather(0, [0, 1, 2])() if rank else Broadcast(0, [1])(),
        "sparse": lambda: Broadcast(rank, [2])(torch.eye(2).to_sparse()),
    }
    for name, mistake in mistakes.items():
        with pytest.raises(UserError) as caught:
            mistake()
        found[name] = str(caught.value)
    return found


def random_program(seed):
    """Layers with random roots and ranks, some called again; each call with what its receivers make of the value."""
    draw = random.Random(seed)
    kinds = [
        (draw.choice(["broadcast", "gather"]), draw.randrange(3), draw.sample(range(3), draw.randint(1, 3)))
        for _ in range(4)
    ]
    program = []
    for _ in range(10):
        which = draw.randrange(len(kinds))
        uses = {rank: draw.choice(["add", "multiply", "twice"]) for rank in range(3)}
        program.append((which, *kinds[which], uses))
    return kinds, program


def use(state, value, how):
    """A state into which a value has gone, in one of several ways."""
    if how == "add":
        return state + torch.tanh(value)
    if how == "multiply":
        return state * torch.cos(value)
    return state + value * torch.sin(value)


def start(rank, seed):
    return torch.linspace(rank, rank + 1, 4 + seed % 3).double().requires_grad_()


def programs(rank):
    """The gradient of this rank's input to each of some random programs."""
    found = []
    for seed in range(NUM_PROGRAMS):
        kinds, program = random_program(seed)
        made = [(Broadcast if kind == "broadcast" else Gather)(root, ranks, timeout=30) for kind, root, ranks in kinds]
        leaf = start(rank, seed)
        state, ends = leaf * 1, []
        for which, kind, root, ranks, uses in program:
            y = made[which](state if rank == root or kind == "gather" else None)
            if rank == root and kind == "gather":
                for i, value in enumerate(y):
                    state = use(state, value, uses[i])
            elif kind == "broadcast" and rank in ranks:
                state = use(state, y, uses[rank])
            elif y is not None:
                ends.append(y)
        (state.sum() + sum(ends)).backward()
        found.append(leaf.grad)
    return found


def programs_alone(seed):
    leaves = [start(rank, seed) for rank in range(3)]
    states = [leaf * 1 for leaf in leaves]
    for _, kind, root, ranks, uses in random_program(seed)[1]:
        before = list(states)
        if kind == "broadcast":
            for rank in ranks:
                states[rank] = use(before[rank], before[root], uses[rank])
        else:
            for i, rank in enumerate(ranks):
                states[root] = use(states[root], before[rank], uses[i])
    sum(state.sum() for state in states).backward()
    return [leaf.grad for leaf in leaves]


CHECKS = (chain, in_place, round_trips, calls, any_order, programs, without_gradient, copies, no_part)


def check_all(rank):
    return {check.__name__: check(rank) for check in CHECKS}


@pytest.fixture(scope="module")
def world():
    return run_world(3, check_all)


def test_broadcasts_in_a_row_are_one_path_through_three_processes(world):
    """Defect 1, at every hop."""
    straight, forked = chain_alone()
    for rank in range(3):
        assert_same_steps(world[rank]["chain"][0], straight[rank])
        assert_same_steps(world[rank]["chain"][1], forked[rank])


def test_changes_in_place_reach_nobody_else_and_give_the_right_gradient(world):
    """Defect 2."""
    untouched, values, grad = world[0]["in_place"]
    leaf = torch.arange(1.0, 5.0, requires_grad=True)
    expected = [2 * (leaf * 20) ** 2, 2 * (leaf * 2 + 1) ** 2, 2 * (leaf * 2 + 2) ** 2]
    sum(value.sum() for value in expected).backward()
    assert untouched
    assert all(map(torch.equal, values, expected))
    assert torch.equal(grad, leaf.grad)


def test_every_shape_dtype_and_layout_goes_there_and_back(world):
    """Defect 4: more than 4 dimensions, no rows, one row."""
    found = world[0]["round_trips"]
    for tensor, (values, grad) in zip(float_tensors(), found, strict=True):
        for factor, value in zip((2, 4, 3), values, strict=True):  # as listed: ranks 0, 2, 1
            assert torch.equal(value, tensor * factor)
        assert torch.equal(grad, weights(tensor) * 9), (tensor.shape, tensor.stride())


def test_each_call_gets_its_own_gradient(world):
    for rank in range(2):
        for a, b in world[rank]["calls"][:2]:
            assert (a, b) == ((2 * 2 * 3 * 3, 2**2 * 3) if rank == 0 else (None, None))
    assert world[0]["calls"][2] == list(range(30))


def test_random_programs_have_the_gradients_of_one_process(world):
    for seed in range(NUM_PROGRAMS):
        for rank, grad in enumerate(programs_alone(seed)):
            torch.testing.assert_close(world[rank]["programs"][seed], grad, rtol=1e-12, atol=1e-12)


def test_layers_may_be_called_in_another_order_on_each_rank(world):
    """Defect 7: nobody waits for a receiver."""
    assert [world[rank]["any_order"] for rank in range(3)] == [[32.0] * 3, [22.0] * 3, [1.0] * 3]


def test_values_without_gradient_stand_beside_others(world):
    zero, one, two, three = (*(world[rank]["without_gradient"] for rank in range(3)), torch.ones(3))
    assert zero["no_grad"] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    assert one["no_grad"] == two["no_grad"] == 0
    assert torch.equal(zero["one used"], three * 0)
    assert torch.equal(one["one used"], three * 2)
    assert torch.equal(two["one used"], three * 0)
    assert torch.equal(one["mixed"], three * 5)
    assert zero["mixed"] is None and two["mixed"] is None
    assert zero["whole"].tolist() == [2] and not zero["whole"].requires_grad
    assert torch.equal(one["whole"], three * 2)
    assert torch.equal(zero["twice"], three * 6)


def test_a_copy_of_a_layer_is_a_layer_of_its_own(world):
    assert world[1]["copies"] == [2, 1, 0]


def test_a_rank_without_a_part_gets_none(world):
    assert world[2]["no_part"]["part"] == [None, None]


def test_mistakes_name_the_layer_the_rank_and_the_remedy(world):
    found = world[0]["no_part"]
    assert found["root"] == (
        "Broadcast(root=7, ranks=(0, 1)): root 7 is not in the world, whose ranks are 0 to 2: "
        "start more processes, or name others"
    )
    assert found["rank"].startswith("Gather(root=0, ranks=(0, 3)): rank 3 is not in the world")
    assert found["negative"].startswith("Broadcast(root=0, ranks=(-1,)): rank -1 is not in the world")
    assert found["number"].endswith("rank 0 gave float: give it a dense tensor")
    assert found["nothing"].endswith("rank 0 gave NoneType: give it a dense tensor")
    assert world[1]["no_part"]["nothing"].startswith("Gather(root=0, ranks=(0, 1, 2)): rank 1 gave NoneType")
    assert found["sparse"].endswith("rank 0 gave a torch.sparse_coo tensor: give it a dense tensor")


def test_mistakes_that_need_no_world():
    with pytest.raises(UserError, match=r"Broadcast\(root=0, ranks=\(\)\): ranks is empty"):
        Broadcast(0, [])
    with pytest.raises(UserError, match=r"Gather\(root=0, ranks=\(1, 1\)\): a rank is named twice"):
        Gather(0, [1, 1])
    with pytest.raises(UserError, match="timeout must be above 0"):
        Gather(0, [1], timeout=0)
    with pytest.raises(UserError, match=r"Gather\(root=0, ranks=\(1,\)\): there is no process group: call torch"):
        Gather(0, [1])(torch.zeros(1))


# ---- ends, good and bad: each needs a world of its own


def leave(rank):
    """Rank 1 ends as soon as it has sent its last gradient; rank 2 tidies up first. The root is slow to ask."""
    broadcast = Broadcast(0, [1, 2])
    x = torch.ones(2, requires_grad=True)
    y = broadcast(x * 1)
    if rank == 0:
        time.sleep(0.5)
        y.backward()
        return x.grad.tolist()
    (y * rank).sum().backward()
    if rank == 2:
        finish()
        dist.destroy_process_group()
    return None


def test_a_process_that_ends_has_delivered_what_it_sent():
    """Defect 5: slow ranks lose nothing."""
    assert run_world(3, leave)[0] == [3.0, 3.0]


SCRIPT = """
import sys, time, torch, torch.distributed as dist
from mheads.distributed import Broadcast
rank, store, end = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
x = torch.ones(2, requires_grad=True)
broadcast = Broadcast(0, [1])
y = broadcast(x * 1)
if rank == 0:
    if end == "fails":
        broadcast(x * 1)  # which nobody takes
        raise ValueError("a mistake")
    time.sleep(0.5)
    y.backward()
    print(x.grad.tolist())
elif end == "fails":
    dist.recv(torch.zeros(1), 0)
else:
    y.sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", ["is done", "fails"])
def test_whole_programs_end_as_they_should(end, tmp_path):
    """Defect 5: one that is done reports success and has delivered all; one that fails waits for nobody."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", SCRIPT]
    programs = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), end], env=env, stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]
    (out, error), (_, other_error) = (program.communicate(timeout=60) for program in programs)
    if end == "is done":
        assert [program.returncode for program in programs] == [0, 0], error + other_error
        assert out == "[1.0, 1.0]\n"
    else:
        assert "ValueError: a mistake" in error
        assert all(program.returncode != 0 for program in programs), other_error  # the other has noticed


def hang(rank):
    """Rank 1 holds a value without a backward, and goes on."""
    broadcast = Broadcast(0, [0, 1], timeout=0.5)
    y = broadcast(torch.ones(2, requires_grad=True) * 1)
    if rank == 0:
        with pytest.raises(UserError) as caught:
            y.sum().backward()
        return str(caught.value)
    with pytest.raises(RuntimeError):  # until the root gives up, which ends all connections
        dist.recv(torch.zeros(1), 0)
    return None


def test_a_gradient_that_does_not_come_names_the_rank():
    assert run_world(2, hang)[0] == (
        "Broadcast(root=0, ranks=(0, 1)): rank 1 did not answer within 0.5 s; rank 0 waited for it to send the "
        "gradient of call 0: run one backward for each call on all ranks"
    )


def skip(rank, who):
    """A rank lets go of a value that has a gradient, and goes on to the next call."""
    broadcast = Broadcast(0, [0, 1])
    y = broadcast(torch.ones(2, requires_grad=True) * 1)
    if rank != who:
        if rank == 1:
            y.sum().backward()
        dist.barrier()
        return None
    del y
    with pytest.raises(UserError) as caught:
        broadcast(torch.ones(2, requires_grad=True) * 1)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_skips_the_backward_is_told_at_its_next_call(who):
    assert run_world(2, skip, who)[who] == (
        f"Broadcast(root=0, ranks=(0, 1)): rank {who} let go of what call 0 gave it without a backward, and other "
        "ranks wait for that gradient: run backward on all ranks, or put the call under no_grad on all"
    )


def lose(rank):
    """Rank 1 takes a value under no_grad though rank 0 wants its gradient; then a rank that has ended is waited for."""
    broadcast, gather = Broadcast(0, [1]), Gather(0, [0, 1])
    x = torch.ones(2, requires_grad=True)
    y = broadcast(x * 1) if rank == 0 else None
    if rank == 1:
        with torch.no_grad(), pytest.raises(UserError) as caught:
            broadcast()
        return str(caught.value)
    with pytest.raises(UserError) as ended:
        gather(x)
    return str(ended.value), y is not None


def test_no_grad_on_one_side_and_an_ended_rank_are_errors():
    (ended, _), one_sided = run_world(2, lose)
    assert one_sided == (
        "Broadcast(root=0, ranks=(1,)): rank 0 wants the gradient of call 0, which rank 1 takes under no_grad: "
        "put the call under no_grad on all ranks or on none"
    )
    assert ended == (
        "Gather(root=0, ranks=(0, 1)): rank 1 has ended, or its connection is lost; rank 0 waited for it to send the "
        "value of call 0: call the layer equally often on all its ranks"
    )
