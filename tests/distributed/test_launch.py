"""Launchers as their variables look, and ranks that find each other."""

import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mheads.distributed import launch as launching
from mheads.distributed.launch import Launch, detect, expand_hosts, hint, rendezvous, use_interface
from mheads.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[1]))
from commands import _context

BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29511"}
TORCHRUN = {**BY_HAND, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "3", "GROUP_WORLD_SIZE": "2"}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "PMIX_NAMESPACE": "1208614913", "PMIX_RANK": "2"}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "8"}
# What a batch script has; srun adds the step.
SBATCH = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "5", "SLURM_NPROCS": "5", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
          "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[08-10]", "SLURM_TASKS_PER_NODE": "2(x2),1"}  # fmt: skip
SALLOC = {**SBATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "n[08-10]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}  # fmt: skip
SRUN = {**SBATCH, **STEP, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
SRUN_HERE = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_STEP_NODELIST": "n09", "SLURM_NODEID": "0"}
SEVERAL_HOSTS = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29511"}

FOUND = {
    "nothing": ({}, None),
    "empty values": (dict.fromkeys(TORCHRUN, ""), None),
    "an address alone": (MASTER, None),
    "torchrun": (TORCHRUN, Launch("torchrun", 1, 4, 1, 2, "n1", 29511, 3)),
    "torchrun, one process": (
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        Launch("torchrun", 0, 1, 0, 1, "n1", 29511, 3),
    ),
    "torchrun on each host of srun": ({**SRUN, **TORCHRUN}, Launch("torchrun", 1, 4, 1, 2, "n1", 29511, 3)),
    "torchrun on each host of mpirun": ({**OPEN_MPI, **TORCHRUN}, Launch("torchrun", 1, 4, 1, 2, "n1", 29511, 3)),
    "torchrun in a batch script": (
        {**SBATCH, **TORCHRUN, "GROUP_WORLD_SIZE": "1"},
        Launch("torchrun", 1, 4, 1, 2, "n1", 29511, 3),
    ),
    "torchrun among leftovers": ({**TORCHRUN, "PMI_RANK": "7"}, Launch("torchrun", 1, 4, 1, 2, "n1", 29511, 3)),
    "by hand, a process a host": (BY_HAND, Launch("env", 1, 4, 0, 1, "n1", 29511)),
    "by hand, as mpirun says": (
        {**OPEN_MPI, **MASTER, "RANK": "2", "WORLD_SIZE": "3"},
        Launch("env", 2, 3, 2, 3, "n1", 29511),
    ),
    "Open MPI": (OPEN_MPI, Launch("mpirun", 2, 3, 2, 3, job="1208614913")),
    "Open MPI in salloc, its helpers started by srun": (
        {**SRUN, **OPEN_MPI},
        Launch("mpirun", 2, 3, 2, 3, job="1208614913"),
    ),
    "Open MPI with an address": (
        {**OPEN_MPI, **MASTER},
        Launch("mpirun", 2, 3, 2, 3, "n1", 29511, job="1208614913"),
    ),
    "Open MPI on one host, an address without a port": (
        {**OPEN_MPI, "MASTER_ADDR": "n1"},
        Launch("mpirun", 2, 3, 2, 3, job="1208614913"),
    ),
    "Open MPI on several hosts": (
        {**SEVERAL_HOSTS, "MASTER_ADDR": "n1"},
        Launch("mpirun", 2, 3, 0, 1, "n1", 29500, job="1208614913"),
    ),
    "Open MPI with half of torchrun's, which agrees": (
        {**OPEN_MPI, "WORLD_SIZE": "3"},
        Launch("mpirun", 2, 3, 2, 3, job="1208614913"),
    ),
    "MPICH, Intel MPI": (MPICH, Launch("mpirun", 1, 2, 1, 2)),
    "MPICH, its helpers started by srun": ({**SRUN, **MPICH}, Launch("mpirun", 1, 2, 1, 2)),
    "srun on one host": (SRUN_HERE, Launch("srun", 3, 5, 1, 5, job="77.0.0")),
    "srun, a job that was put back": (
        {**SRUN_HERE, "SLURM_RESTART_COUNT": "2"},
        Launch("srun", 3, 5, 1, 5, job="77.0.2"),
    ),
    "srun with fewer tasks than the job": (
        {**SRUN_HERE, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"},
        Launch("srun", 3, 4, 1, 4, job="77.0.0"),
    ),
    "srun --mpi=pmi2": ({**SRUN_HERE, "PMI_RANK": "3", "PMI_SIZE": "5"}, Launch("srun", 3, 5, 1, 5, job="77.0.0")),
    "srun --mpi=pmix": ({**SRUN_HERE, "PMIX_RANK": "3"}, Launch("srun", 3, 5, 1, 5, job="77.0.0")),
    "srun on several hosts, with an address": (
        {**SRUN, **MASTER},
        Launch("srun", 3, 5, 1, 2, "n1", 29511, job="77.0.0"),
    ),
    "a batch script": (SBATCH, None),
    "a batch script, its step as a signed number": ({**SBATCH, "SLURM_STEP_ID": "-5"}, None),
    "the shell of salloc": (SALLOC, None),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_each_launcher_is_recognised_by_its_variables(name):
    environ, expected = FOUND[name]
    assert detect(environ) == expected


def test_srun_on_several_hosts_meets_on_the_first_at_a_port_of_the_job():
    found = detect(SRUN)
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == ("srun", 3, 5, 1, 2)
    assert found.address == "n08"
    assert 16384 <= found.port < 32768
    first = detect({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert (first.address, first.port) == (found.address, found.port)
    assert detect({**SRUN, "SLURM_STEP_ID": "1"}).port != found.port


WRONG = {
    "half": ({"RANK": "1"}, "RANK=1 without WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start with torchrun"),
    "other half": ({"WORLD_SIZE": "4", **MASTER}, "MASTER_ADDR=n1, MASTER_PORT=29511 without RANK: start"),
    "no port": ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1"}, "RANK=1, WORLD_SIZE=4, MASTER_ADDR=n1 without"),
    "half a host": ({**BY_HAND, "LOCAL_RANK": "1"}, "LOCAL_RANK=1 without LOCAL_WORLD_SIZE"),
    "no number": ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a whole number"),
    "no such rank": ({**TORCHRUN, "RANK": "4"}, "RANK=4, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2 cannot be"),
    "negative": ({**TORCHRUN, "RANK": "-1"}, "RANK=-1, WORLD_SIZE=4"),
    "local rank": ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2 cannot be"),
    "local size": ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "OMPI_COMM_WORLD_LOCAL_SIZE=4 cannot be"),
    "port": ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a port"),
    "by hand against Open MPI": (
        {**OPEN_MPI, **BY_HAND},
        "RANK=1, WORLD_SIZE=4, but mpirun says rank 2 of 3: unset RANK and WORLD_SIZE",
    ),
    "one for all, inherited through mpirun": (
        {**OPEN_MPI, **BY_HAND, "RANK": "0", "WORLD_SIZE": "3"},
        "RANK=0, WORLD_SIZE=3, but mpirun says rank 2 of 3",
    ),
    "half against srun": ({**SRUN, "WORLD_SIZE": "4"}, "WORLD_SIZE=4, but srun says rank 3 of 5"),
    "copies of torchrun": (
        {**SRUN, **TORCHRUN, "GROUP_WORLD_SIZE": "1"},
        "srun started 5 copies of torchrun, which know nothing of each other (GROUP_WORLD_SIZE=1): give them --nnodes",
    ),
    "Open MPI, size missing": (
        {"OMPI_COMM_WORLD_RANK": "0"},
        "OMPI_COMM_WORLD_RANK=0 without OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    "MPICH, local rank missing": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "without MPI_LOCALRANKID, MPI_LOCALNRANKS"),
    "PMIx alone": ({"PMIX_RANK": "1"}, "PMIX_RANK=1 without OMPI_COMM_WORLD_SIZE: start with mpirun"),
    "Open MPI on several hosts": (SEVERAL_HOSTS, "mpirun -x MASTER_ADDR=<host of rank 0>"),
    "srun, rank missing": (
        {k: v for k, v in SRUN.items() if k != "SLURM_PROCID"},
        "without SLURM_PROCID: start with srun",
    ),
    "srun, tasks": ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE='2(x' is not like"),
    "srun, host": ({**SRUN, "SLURM_NODEID": "3"}, "SLURM_NODEID=3, but SLURM_STEP_TASKS_PER_NODE=2(x2),1 lists 3"),
    "srun, hosts": ({**SRUN, "SLURM_STEP_NODELIST": "n[1-"}, "'n[1-' is not a list of hosts"),
    "srun, no hosts": (
        {k: v for k, v in SRUN.items() if "NODELIST" not in k},
        "srun started 5 ranks on several hosts: set MASTER_ADDR",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_variables_that_cannot_be_are_refused_with_their_values_and_a_remedy(name):
    environ, message = WRONG[name]
    with pytest.raises(UserError) as caught:
        detect(environ)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_forgotten_srun_is_one_process_that_says_so():
    assert "SLURM_NTASKS=5" in hint(SBATCH)
    assert "srun starts 5" in hint(SALLOC)
    assert hint(SRUN) is None
    assert hint({**SBATCH, **TORCHRUN}) is None
    assert hint({**SBATCH, "SLURM_NTASKS": "1"}) is None
    assert hint({}) is None


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("node[003-005,7],other", ["node003", "node004", "node005", "node7", "other"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("r[1-2]n[1,3]-ib.site", ["r1n1-ib.site", "r1n3-ib.site", "r2n1-ib.site", "r2n3-ib.site"]),
    ],
)
def test_lists_of_hosts_are_expanded_in_order(text, hosts):
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize("text", ["", "n[", "n]", "n[]", "n[1-]", "n[a-b]", "a,,b", "n[1,2", "a b"])
def test_a_list_of_hosts_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="not a list of hosts"):
        list(expand_hosts(text))


RANGES = st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.integers(0, 12), st.integers(1, 4))


@given(st.lists(RANGES, min_size=1, max_size=8))
def test_any_list_of_ranges_is_expanded_to_their_numbers(ranges):
    text = ",".join(f"{name}[{first:0{width}}-{first + more:0{width}}]" for name, first, more, width in ranges)
    numbers = [(name, i, width) for name, first, more, width in ranges for i in range(first, first + more + 1)]
    assert list(expand_hosts(text)) == [f"{name}{i:0{width}}" for name, i, width in numbers]


# --- ranks that find each other ---


def _in_child(function, environ, results, args):
    os.environ.update(environ)
    tempfile.tempdir = None  # it may have been looked up before TMPDIR was set
    try:
        results.put(function(*args))
    except UserError as error:
        results.put(str(error))
    results.close()
    results.join_thread()
    os._exit(0)


def run(function, environs, *args):
    """What the function returns, or the message of its UserError, in a process for each environment."""
    queues = [_context.Queue() for _ in environs]
    children = [
        _context.Process(target=_in_child, args=(function, environ, results, args), daemon=True)
        for environ, results in zip(environs, queues, strict=True)
    ]
    for child in children:
        child.start()
    try:
        return [results.get(timeout=30) for results in queues]
    except queue.Empty:
        raise AssertionError("a rank did not come to an end") from None
    finally:
        for child in children:
            child.kill()
            child.join()


def meet(timeout):
    """Find the others, and add up the ranks through gloo."""
    import torch
    import torch.distributed as dist

    launch = detect()
    store = rendezvous(launch, timeout)
    interface = use_interface(launch)
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.size)
    total = torch.tensor(launch.rank)
    dist.all_reduce(total)
    store.clone().add("done", 1)
    while launch.rank == 0 and store.add("done", 0) < launch.size:  # the store ends with rank 0
        time.sleep(0.01)
    return int(total), interface


def ranks_of_open_mpi(size, folder, **more):
    names = launching.OPEN_MPI
    job = {"PMIX_NAMESPACE": "test", "TMPDIR": str(folder), **more}
    return [dict(zip(names, map(str, (rank, size, rank, size)), strict=True)) | job for rank in range(size)]


def port_that_is_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def meeting_file(tmp_path, monkeypatch):
    """The file through which the ranks of `ranks_of_open_mpi(size, tmp_path)` meet."""
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        return launching._meeting_file(Launch("mpirun", 0, 3, 0, 3, job="test"))


def test_ranks_on_one_host_meet_in_spite_of_a_file_of_a_former_job(tmp_path, meeting_file):
    with socket.create_server(("127.0.0.1", 0)) as stranger:  # the former job's port is another program's by now
        meeting_file.write_text(f"{stranger.getsockname()[1]}\n")
        environs = ranks_of_open_mpi(3, tmp_path)
        assert run(meet, environs, 20.0) == [(3, "lo")] * 3
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_for_its_user_alone_and_counts_only_while_rank_0_lives(tmp_path, meeting_file, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    zero, one = (Launch("mpirun", rank, 3, rank, 3, job="test") for rank in range(2))
    with launching.ExitStack() as afterwards:
        store = launching._store_by_file(zero, launching._Deadline(5.0), afterwards)
        assert meeting_file.stat().st_mode & 0o777 == 0o600
        assert launching._read_port(meeting_file, one, launching._Deadline(5.0)) == store.port
        left_over = meeting_file.read_text()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda: meeting_file.stat().st_uid + 1)
            with pytest.raises(UserError):
                launching._read_port(meeting_file, one, launching._Deadline(0.05))
    assert list(tmp_path.iterdir()) == []
    meeting_file.write_text(left_over)
    with pytest.raises(UserError, match=r"waited 0.05 s for rank 0 to write"):
        launching._read_port(meeting_file, one, launching._Deadline(0.05))


def test_missing_ranks_are_named(tmp_path):
    environs = ranks_of_open_mpi(4, tmp_path)
    first, second = run(meet, [environs[0], environs[2]], 1.5)
    assert "rank 0 waited 1.5 s, but of 4 ranks these did not come: 1, 3" in first
    assert "rank 2" in second
    assert list(tmp_path.iterdir()) == []


def test_without_rank_0_the_others_say_what_they_waited_for(tmp_path, meeting_file):
    (message,) = run(meet, ranks_of_open_mpi(2, tmp_path)[1:], 0.3)
    assert f"rank 1 of 2 waited 0.3 s for rank 0 to write {Path(tmp_path, 'mheads-')}" in message


def test_a_rank_that_is_started_twice_is_refused(tmp_path):
    zero, one, _ = ranks_of_open_mpi(3, tmp_path)
    messages = run(meet, [zero, one, one], 1.5)
    assert sum("two processes are rank 1 of 3" in message for message in messages) == 1


def test_ranks_meet_at_an_address(tmp_path):
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_that_is_free())}
    assert run(meet, ranks_of_open_mpi(2, tmp_path, **master), 20.0) == [(1, "lo")] * 2
    by_hand = [{**master, "RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    assert run(meet, by_hand, 20.0) == [(1, "lo")] * 2


def test_ranks_of_torchrun_meet_in_the_store_of_its_agent():
    from torch.distributed import TCPStore

    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "TORCHELASTIC_RUN_ID": "none",
              "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}  # fmt: skip
    for restart in ("0", "1"):
        environs = [
            {**common, "RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": restart} for rank in "01"
        ]
        assert run(meet, environs, 20.0) == [(1, "lo")] * 2


@pytest.mark.parametrize("elastic", [{}, {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}])
def test_a_closed_port_is_named_within_the_timeout(monkeypatch, elastic):
    port = port_that_is_free()
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **elastic}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    message = rf"rank 1 of 2 cannot reach rank 0 at 127.0.0.1:{port} in 0.3 s \(Connection refused\): check"
    with pytest.raises(UserError, match=message):
        rendezvous(detect(environ), 0.3)
    assert time.monotonic() - began < 2


def test_a_port_that_says_nothing_is_named_within_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        launch = Launch("env", 1, 2, 0, 1, "127.0.0.1", stranger.getsockname()[1])
        with pytest.raises(UserError, match=rf"{launch.port} in 0.5 s \(something listens there, but it is not"):
            rendezvous(launch, 0.5)


def test_an_unknown_host_is_named():
    with pytest.raises(UserError, match=r"rank 1 of 2 cannot reach rank 0 at nowhere.invalid:29500 in 0.2 s"):
        rendezvous(Launch("mpirun", 1, 2, 0, 1, "nowhere.invalid", 29500), 0.2)


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"rank 0 cannot open port {port} .*: set MASTER_PORT"):
            rendezvous(Launch("mpirun", 0, 2, 0, 1, "127.0.0.1", port), 5.0)


# --- the interface ---


@pytest.fixture
def no_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is restored
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


HERE = Launch("mpirun", 0, 3, 0, 3)
THERE = Launch("srun", 0, 4, 0, 2, "10.1.2.3", 29500)


def test_one_host_uses_the_loopback_interface(no_interface):
    assert use_interface(HERE) == "lo"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_an_address_on_the_loopback_interface_means_that_all_are_here(no_interface, address):
    assert use_interface(THERE, address) == "lo"


def test_the_interface_that_the_user_names_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert use_interface(HERE) == "ib0"


def test_several_hosts_use_the_interface_that_leads_to_rank_0(no_interface, monkeypatch):
    addresses = {"10.1.2.3": "10.1.0.9"}
    monkeypatch.setattr(launching, "_address_towards", addresses.get)
    monkeypatch.setattr(launching, "_interface_with", {"10.1.0.9": "ib0"}.get)
    assert use_interface(THERE) == "ib0"


def test_rank_0_whose_name_is_a_loopback_address_uses_the_default_route(no_interface, monkeypatch):
    monkeypatch.setattr(launching, "_address_towards", {"n1": "127.0.1.1", launching.ELSEWHERE: "192.168.0.2"}.get)
    monkeypatch.setattr(launching, "_interface_with", {"192.168.0.2": "eth0", "127.0.1.1": "lo"}.get)
    assert use_interface(THERE, "n1") == "eth0"


def test_gloo_chooses_where_no_interface_is_found(no_interface, monkeypatch):
    monkeypatch.setattr(launching, "_address_towards", lambda target: None)
    assert use_interface(THERE) is None
    assert "GLOO_SOCKET_IFNAME" not in os.environ


# --- real launchers ---

MEET = """
import os, time
from mheads.distributed.launch import detect, rendezvous
launch = detect()
store = rendezvous(launch, 30.0)
os.write(1, f"{launch.rank}/{launch.size} ".encode())
store.add("done", 1)
while launch.rank == 0 and store.add("done", 0) < launch.size:
    time.sleep(0.01)
"""
WHERE = """
import os
from mheads.distributed.launch import _meeting_file, detect
launch = detect()
os.write(1, f"{launch.rank}/{launch.size}:{_meeting_file(launch)} ".encode())
"""


def launched(command, program, folder):
    """The words that the ranks print. A script that stays, as sites have them, is the parent of each."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (Debian: apt-get install openmpi-bin mpich)")
    script = folder / "wrapper.sh"
    script.write_text('"$@"\nexit $?\n')
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [*command, "sh", script, sys.executable, "-c", program],
        env={**os.environ, **as_root, "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("mheads-*"))
    return sorted(done.stdout.split())


def test_open_mpi_starts_ranks_that_find_each_other(tmp_path):
    assert launched(["mpirun.openmpi", "--oversubscribe", "-n", "3"], MEET, tmp_path) == ["0/3", "1/3", "2/3"]


def test_ranks_of_mpich_which_has_no_name_for_its_job_know_the_same_file(tmp_path):
    words = launched(["mpiexec.hydra", "-n", "3"], WHERE, tmp_path)
    ranks, files = zip(*(word.split(":") for word in words), strict=True)
    assert ranks == ("0/3", "1/3", "2/3")
    assert len(set(files)) == 1


# Their options and ours.


def test_torchrun_hands_every_option_of_train_on_to_us(mheads):
    """It reads the whole command, and takes what begins one of its own options for that option."""
    from torch.distributed.run import get_args_parser
    from typer.main import get_command

    from mheads.cli import app

    parameters = get_command(app).commands["train"].params
    ours = [name for one in parameters if one.param_type_name == "option" for name in (*one.opts, *one.secondary_opts)]
    assert {"--folder", "-f", "--run", "-r", "--force", "--quiet"} <= set(ours)
    for name in set(ours) - {"--run"}:  # kept for those who are used to it
        command = ["train", "digits", "split=conv1", name, "value"]
        parsed = get_args_parser().parse_args(["--nproc-per-node", "2", "-m", "mheads", *command])
        assert (parsed.module, parsed.training_script_args) == (True, command)


def test_the_old_name_of_the_folder_is_still_taken(mheads, tmp_path):
    for name in ("-f", "--run"):
        done = mheads("train", "digits", "optim.iterations=1", "data.limit=100", name, tmp_path / f"run{name}")
        assert done.code == 0
        assert (tmp_path / f"run{name}" / "result.json").is_file()
