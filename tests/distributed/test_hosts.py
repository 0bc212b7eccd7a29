"""Training over several hosts, here network namespaces, and under real launchers."""

import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial

import pytest
from helpers.commands import PYTHONPATH, TINY, Finished, Running, assert_same_run, when_logged
from helpers.gloo_worlds import impatient

CLONE_NEWNET = 0x40000000
TRAIN = ["train", "digits", *TINY]
_numbers = itertools.count()


class Network:
    """Hosts that are network namespaces, joined by a bridge in one more.

    Each has an interface of another name to the others, and before it one that leads nowhere.
    """

    def __init__(self, size):
        self.bridge = f"mheads-{os.getpid()}-{next(_numbers)}"
        self.hosts = [f"{self.bridge}-{rank}" for rank in range(size)]
        self.addresses = [f"10.77.0.{rank + 1}" for rank in range(size)]

    def set_up(self):
        ip("netns", "add", self.bridge)
        ip("-n", self.bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.bridge, "link", "set", "bridge", "up")
        for rank, (host, address) in enumerate(zip(self.hosts, self.addresses, strict=True)):
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "add", "admin", "type", "veth", "peer", "name", "nowhere")
            ip("-n", host, "address", "add", f"10.78.0.{rank + 1}/24", "dev", "admin")
            cable = [f"to{rank}", "type", "veth", "peer", "name", f"fast{rank}", "netns", host]
            ip("-n", self.bridge, "link", "add", *cable)
            ip("-n", self.bridge, "link", "set", f"to{rank}", "master", "bridge", "up")
            ip("-n", host, "address", "add", f"{address}/24", "dev", f"fast{rank}")
            for name in ("nowhere", "admin", f"fast{rank}"):
                ip("-n", host, "link", "set", name, "up")

    def remove(self):
        for name in (*self.hosts, self.bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def cable(self, rank, state):
        """Up or down."""
        ip("-n", self.bridge, "link", "set", "dev", f"to{rank}", state)

    def isolate(self, ranks):
        """These reach the others, but not each other."""
        for rank in range(len(self.hosts)):
            state = "on" if rank in ranks else "off"
            ip("-n", self.bridge, "link", "set", f"to{rank}", "type", "bridge_slave", "isolated", state)

    def start(self, *args, before):
        """The command on all hosts, a rank each, with what somebody would set by hand."""
        common = {"WORLD_SIZE": str(len(self.hosts)), "MASTER_ADDR": self.addresses[0], "MASTER_PORT": "29500"}
        return [
            Running(*args, before=partial(before, host), env={**common, **towards_others(rank), "RANK": str(rank)})
            for rank, host in enumerate(self.hosts)
        ]


def towards_others(rank):
    """What a user says of a host whose name is not the address that others know."""
    return {"GLOO_SOCKET_IFNAME": f"fast{rank}"}


def ip(*args):
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def network():
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2 for network namespaces (Debian: apt-get install iproute2)")
    made = Network(3)
    try:
        made.set_up()
        yield made
    except subprocess.CalledProcessError as error:
        remedy = "run as root, in a container with --cap-add SYS_ADMIN --cap-add NET_ADMIN"
        pytest.skip(f"network namespaces cannot be made here ({error.stderr.strip()}): {remedy}")
    finally:
        made.remove()


def enter(host):
    """This process is on that host from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/var/run/netns/{host}", os.O_RDONLY)
    if libc.setns(handle, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(handle)


def enter_and_hold(gate, host):
    """Step 8 begins when there is such a file."""
    enter(host)
    from mheads.distributed.ranks_engine import RanksEngine

    step = RanksEngine.step

    def wait_and_step(self, number, *args, **options):
        while number == 8 and not gate.exists():
            time.sleep(0.01)
        return step(self, number, *args, **options)

    RanksEngine.step = wait_and_step


def enter_impatiently(host):
    enter(host)
    impatient()


def all_succeed(running):
    done = [one.finish(60) for one in running]
    assert [one.code for one in done] == [0] * len(running), "\n".join(one.err for one in done)
    return done


def cut_in_training(network, rank, command, gate):
    """What the ranks say when a cable is cut before step 8; it is up again afterwards."""
    running = network.start(*command, before=partial(enter_and_hold, gate))
    when_logged(command[-1], 8)
    network.cable(rank, "down")
    try:
        gate.touch()
        done = [one.finish(2 + 10) for one in running]
    finally:
        network.cable(rank, "up")
    assert [one.code for one in done] == [3, 3, 3], "\n".join(one.err for one in done)
    assert [one.err.count("error: ") for one in done] == [1, 1, 1]
    return [one.err for one in done]


def test_a_cut_cable_ends_all_ranks_and_the_same_command_goes_on_once_it_is_mended(network, undisturbed, tmp_path):
    run = tmp_path / "run"
    command = [*TRAIN, "timeout=2", "--run", run]
    said = cut_in_training(network, 2, command, tmp_path / "first gate")
    lost = "error: rank 2 has given no sign of life for 2 s (timeout)\n"
    assert lost in said[0]
    assert f"rank 1 {lost}" in said[1]
    assert "rank 2 error: rank 0 cannot be reached: its store has not answered for 2 s" in said[2]
    # Again, with a cable that is loose for a moment: that changes nothing.
    gate = tmp_path / "gate"
    running = network.start(*command, before=partial(enter_and_hold, gate))
    when_logged(run, 8)
    network.cable(1, "down")
    gate.touch()
    time.sleep(0.5)
    network.cable(1, "up")
    done = all_succeed(running)
    assert "resuming at iteration 6 of 24" in done[0].out
    assert_same_run(run, undisturbed)


def test_without_its_cable_rank_0_misses_the_others_as_they_miss_it(network, tmp_path):
    said = cut_in_training(network, 0, [*TRAIN, "timeout=2", "--run", tmp_path / "run"], tmp_path / "gate")
    assert re.search(r"error: rank [12] has given no sign of life for 2 s", said[0])
    for rank in (1, 2):
        assert f"rank {rank} error: rank 0 cannot be reached: its store has not answered for 2 s" in said[rank]


def test_hosts_that_cannot_connect_to_each_other_are_named(network, tmp_path):
    """A firewall, say, that leaves them the port of rank 0."""
    network.isolate({1, 2})
    try:
        running = network.start(*TRAIN, "timeout=2", "--run", tmp_path / "run", before=enter_impatiently)
        done = [one.finish(40) for one in running]
    finally:
        network.isolate(set())
    assert [one.code for one in done] == [3, 3, 3], "\n".join(one.err for one in done)
    for one in done:
        assert "not connected to all others after 2 s: rank 1, rank 2; check that every host" in one.err
        assert "GLOO_SOCKET_IFNAME" in one.err


# --- real launchers ---

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def start(*command, folder, **more):
    """A launcher at work, which ends what it started when it is told to."""
    env = {**os.environ, **AS_ROOT, **more, "PYTHONPATH": PYTHONPATH, "COLUMNS": "200", "TMPDIR": str(folder)}
    return subprocess.Popen(
        list(map(str, command)), env=env, cwd=folder, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(launched, seconds=60):
    try:
        out, err = launched.communicate(timeout=seconds)
    finally:
        launched.terminate()
    return Finished(launched.returncode, out, err)


def check_output(out):
    """All that a run says, once."""
    assert out.count("run folder") == 1
    assert out.count("iteration     24") == 1
    assert out.count("Oracle   ") == 1, "the table of the result"
    assert "24 iterations" in out


def not_of_torchrun(err):
    """All but its own notices: that it sets OMP_NUM_THREADS, that hosts here have no names, that an agent has left."""
    own = ("torch/distributed/run.py", "OMP_NUM_THREADS", "hostname of the client socket cannot be retrieved", "*****")
    # An agent that sees the first one leave, and its store with it, tells of every call on its own stack.
    own += ("[c10d] recvValueWithTimeout failed", "[c10d] sendBytes failed", "Exception raised from", "frame #")
    own += ("<omitting python frames>", "torch/distributed/elastic/agent/")
    return [line for line in err.splitlines() if line and not any(text in line for text in own)]


def test_torchrun_on_two_hosts(network, undisturbed, tmp_path):
    run = tmp_path / "run"
    meet = ["--nnodes", 2, "--nproc-per-node", 1, "--master-addr", network.addresses[0], "--master-port", 29511]
    launched = [
        start("ip", "netns", "exec", host, *TORCHRUN, *meet, "--node-rank", rank, "-m", "mheads", *TRAIN, "-f", run,
              folder=tmp_path, **towards_others(rank))
        for rank, host in enumerate(network.hosts[:2])
    ]  # fmt: skip
    first, second = map(finish, launched)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    check_output(first.out)
    assert second.out == ""
    assert not_of_torchrun(first.err) == not_of_torchrun(second.err) == []
    assert_same_run(run, undisturbed)


def test_one_rank_of_a_launcher_is_one_process(mheads, monkeypatch, tmp_path):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1" if "SIZE" in name else "0")
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    monkeypatch.setenv("MASTER_PORT", "1")
    done = mheads(*TRAIN, "optim.iterations=1", "--folder", tmp_path / "run")
    assert done.code == 0, done.err
    assert (tmp_path / "run" / "result.json").exists()


@pytest.fixture
def mpirun():
    for name in ("mpirun.openmpi", "mpirun"):
        if shutil.which(name) is not None:
            return [name, "--oversubscribe", "-n", "3", sys.executable, "-m", "mheads"]
    pytest.skip("mpirun is not installed (Debian: apt-get install openmpi-bin)")


def test_mpirun_ends_well_with_all_that_was_said(mpirun, undisturbed, tmp_path):
    done = finish(start(*mpirun, *TRAIN, "--folder", tmp_path / "run", folder=tmp_path))
    assert done.code == 0, done.err
    check_output(done.out)
    assert "\x1b[?25l" not in done.out, "no bar in a file, though mpirun gives every rank a terminal"
    assert done.err == ""
    assert_same_run(tmp_path / "run", undisturbed)
    assert not list(tmp_path.glob("mheads-*")), "what the ranks met through"


def test_a_mistake_under_mpirun_is_said_once_and_is_a_failure(mpirun, tmp_path):
    done = finish(start(*mpirun, "train", "digits", "optim.lrr=1", "-f", tmp_path / "run", folder=tmp_path))
    assert done.code != 0
    assert (done.out + done.err).count("did you mean 'optim.lr'") == 1
    assert not (tmp_path / "run").exists()
