"""Ranks that find each other, in spite of what is in the way."""

import os
import socket
import time

import pytest
from helpers.gloo_worlds import by_hand, by_mpirun, free_port, run_each

from mheads.common.errors import UserError
from mheads.distributed import rendezvous as meeting
from mheads.distributed.launcher import Launch, detect
from mheads.distributed.rendezvous import rendezvous


def meet(_, timeout):
    """Find the others, and add up the ranks through gloo."""
    import torch
    import torch.distributed as dist

    launch = detect()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = rendezvous(launch, timeout)
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.size)
    total = torch.tensor(launch.rank)
    dist.all_reduce(total)
    store.add("done", 1)
    while launch.rank == 0 and store.add("done", 0) < launch.size:  # the store ends with rank 0
        time.sleep(0.01)
    return int(total)


def test_ranks_on_one_host_meet_at_a_port_of_their_job():
    assert run_each(meet, by_mpirun(3), 20.0) == [3] * 3


def test_missing_ranks_are_named():
    environs = by_mpirun(4)
    first, second = run_each(meet, [environs[0], environs[2]], 0.8)
    assert "rank 0 waited 0.8 s, but of 4 ranks these did not come: 1, 3" in first
    assert "rank 2" in second


def test_a_rank_that_is_started_twice_is_refused():
    zero, one, _ = by_mpirun(3)
    messages = run_each(meet, [zero, one, one], 0.8)
    assert sum("two processes are rank 1 of 3" in message for message in messages) == 1


def test_ranks_meet_at_an_address():
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert run_each(meet, by_mpirun(2, **master), 20.0) == [1] * 2
    assert run_each(meet, by_hand(2), 20.0) == [1] * 2


@pytest.mark.parametrize("agents", [True, False])
def test_ranks_of_torchrun_meet_in_the_store_of_its_agent_or_of_rank_0(agents):
    from torch.distributed import TCPStore

    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if agents else None
    common = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": str(agents), "LOCAL_WORLD_SIZE": "2"}
    for restart in ("0", "1"):
        common["TORCHELASTIC_RESTART_COUNT"] = restart
        port = {"MASTER_PORT": str(agent.port)} if agents else {}
        environs = [{**one, **common, **port, "LOCAL_RANK": one["RANK"]} for one in by_hand(2)]
        assert run_each(meet, environs, 20.0) == [1] * 2


@pytest.mark.parametrize("agent", [False, True])
def test_a_closed_port_is_named_within_the_timeout(agent):
    port = free_port()
    began = time.monotonic()
    message = rf"rank 1 of 2 cannot reach rank 0 at 127.0.0.1:{port} in 0.3 s \(Connection refused\): check"
    with pytest.raises(UserError, match=message):
        rendezvous(Launch("torchrun", 1, 2, 0, True, "127.0.0.1", port, agent=agent), 0.3)
    assert time.monotonic() - began < 2


def test_a_port_that_says_nothing_is_named_within_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        launch = Launch("env", 1, 2, 0, True, "127.0.0.1", stranger.getsockname()[1])
        with pytest.raises(UserError, match=rf"{launch.port} in 0.5 s \(something listens there, but it is not"):
            rendezvous(launch, 0.5)


def test_an_unknown_host_is_named():
    with pytest.raises(UserError, match=r"rank 1 of 2 cannot reach rank 0 at nowhere.invalid:29500 in 0.2 s"):
        rendezvous(Launch("mpirun", 1, 2, 0, False, "nowhere.invalid", 29500), 0.2)


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"rank 0 cannot open port {port} .*: set MASTER_PORT"):
            rendezvous(Launch("mpirun", 0, 2, 0, True, "127.0.0.1", port), 5.0)


@pytest.mark.parametrize(("one_host", "expected"), [(True, {"127.0.0.1"}), (False, {"::", "0.0.0.0"})])
def test_the_store_of_one_host_listens_to_no_other(one_host, expected):
    with meeting._listen(Launch("env", 0, 3, 0, one_host, "127.0.0.1", free_port())) as listener:
        assert listener.getsockname()[0] in expected
