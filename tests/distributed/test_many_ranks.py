"""What torch brings: pretended ranks in one process (its `fake` backend), and FSDP2 around a part of a tree."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.gloo_worlds import run_world
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import mheads
from mheads import TreeNet
from mheads.data.batches import Batch
from mheads.distributed.planning.placement import default
from mheads.distributed.planning.simulation import Simulation
from mheads.distributed.planning.stage_loads import StageLoad
from mheads.distributed.planning.workload import Workload
from mheads.distributed.ranks_engine import RanksEngine
from mheads.engine.engine_options import EngineOptions

RANKS, ROWS, PARTS = 64, 128, 64


def network():
    layers = {"hidden": nn.Linear(6, 5), "relu": nn.ReLU(), "out": nn.Linear(5, 3)}
    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, layer)
    return net


@pytest.fixture
def pretended():
    """The default group of 64 ranks, of which this process is one; collectives return at once, and bring nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("parts", "pieces"), [(PARTS, 1), (2, 32)], ids=["micro-batches", "pieces"])
def test_sixty_four_ranks_build_and_step_and_run_the_collectives_that_are_planned(
    parts, pieces, pretended, monkeypatch
):
    net = TreeNet(network, tree={"hidden": RANKS}, only=())
    placement = default(net.tree, RANKS, parts)
    own = TreeNet(network, tree={"hidden": RANKS}, only=placement.stages_on(3))
    watch = SimpleNamespace(tell=lambda **_: None, suspect=lambda error: pytest.fail(str(error)))
    world = SimpleNamespace(rank=3, size=RANKS, is_main=False, watch=watch)
    world.wire_device = lambda device: device
    engine = RanksEngine(own, EngineOptions(1, parts, pieces=pieces), world, placement)
    run = []
    gathering = engine.gathering

    def gather(key, group, value):
        """As if all ranks gave what this one gives; the fake backend leaves buffers as they are."""
        run.append(key)
        return dict.fromkeys(dist.get_process_group_ranks(group), value)

    monkeypatch.setattr(gathering, "gather", gather)
    from mheads.distributed import rank_training_step

    for name in ("exchange", "add_ordered"):
        real = getattr(rank_training_step, name)

        def counted(*args, real=real, name=name):
            run.append(name)
            return real(*args)

        monkeypatch.setattr(rank_training_step, name, counted)
    x, y = torch.randn(ROWS, 6), torch.zeros(ROWS, dtype=torch.int64)
    monkeypatch.setattr(engine, "_report", lambda task: task.results.report())
    report = engine.step(0, Batch(x, y, lambda t, dtype: t.to(dtype)), mheads.losses.independent())
    assert engine.writers == {"trunk": 0, **{f"hidden/{rank}": rank for rank in range(RANKS)}}
    engine.close()
    assert report.losses.shape == (RANKS, ROWS)
    assert report.losses[3].all(), "of the member that is here, on all rows"
    loads = {name: StageLoad(1, 1, 5, 10) for name in net.tree.nodes}
    planned, _ = Simulation(Workload(net.tree, ROWS, parts, True, pieces=pieces), loads, 1).count(placement)
    assert len(run) * RANKS == planned == 3 * RANKS
    assert run == [("down", "trunk"), "exchange", "add_ordered"]


def shard(rank):
    """Trains a tree whose trunk is sharded over both ranks, each on half of the rows; returns the losses."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = TreeNet(network, tree={"hidden": 2})
    fully_shard(net.stage("trunk"), mesh=init_device_mesh("cpu", (2,)))
    trunk = net.stage("trunk")
    held = sum(p.to_local().numel() for p in trunk.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 6, generator=generator)
    y = (x[:, 0] > 0).long()
    mine, losses = slice(16 * rank, 16 * rank + 16), []
    for _ in range(30):
        hidden = trunk(x[mine])
        outputs = [net.stage(f"hidden/{member}")(hidden) for member in range(2)]
        each = torch.stack([nn.functional.cross_entropy(output, y[mine]) for output in outputs])
        loss = each.sum()
        optimizer.zero_grad()
        loss.backward()
        for member in range(2):
            for parameter in net.stage(f"hidden/{member}").parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
                parameter.grad /= 2
        optimizer.step()
        losses.append(loss.item())
    weight = net.stage("hidden/0").out.weight.detach()
    return held, losses, weight


def test_a_trunk_that_is_wrapped_by_fsdp2_trains_on_two_ranks():
    (held, losses, weight), (other, _, same) = run_world(2, shard)
    assert held + other == 6 * 5 + 5, "each rank holds a part of the trunk"
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(weight, same)
