"""Bytes from nobody on the ports of the ranks while they start."""

import os
import random
import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from helpers.commands import TINY, Running, assert_same_run
from helpers.gloo_worlds import by_hand, by_mpirun

LOOPBACK = "0100007F"
STORE = (0x3C85F7CE).to_bytes(4, "little")  # how a client of torch's store begins, after the number of its question


def listening(pids):
    """(address, port) at which these processes listen, the address as Linux writes it."""
    sockets = set()
    for handle in (path for pid in pids for path in Path(f"/proc/{pid}/fd").glob("*")):
        with suppress(OSError):
            sockets.add(os.readlink(handle))
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()]
    places = [line[1].split(":") for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]
    return {(address, int(port, 16)) for address, port in places}


class Stranger:
    """Connects to every port of some processes, again and again, and sends rubbish."""

    def __init__(self, pids, seed):
        self.pids, self.rng, self.seen, self.sent = pids, random.Random(seed), set(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._annoy, daemon=True)
        self._thread.start()

    def _annoy(self):
        with ExitStack() as kept:
            while not self._stop.wait(0.005):
                for address, port in listening(self.pids):
                    self.seen.add(address)
                    with suppress(OSError):
                        connection = socket.create_connection(("127.0.0.1", port), timeout=0.2)
                        kept.enter_context(connection)
                        connection.sendall(self._rubbish())
                        self.sent += 1
                        if self.rng.random() < 0.5:
                            connection.close()

    def _rubbish(self):
        rng = self.rng
        any_bytes = rng.randbytes(rng.choice([1, 4, 8, 16, 100, 5000]))
        like_the_store = bytes([rng.randrange(20)]) + STORE + rng.randbytes(40)
        return rng.choice(
            [any_bytes, b"GET / HTTP/1.0\r\n\r\n", bytes(rng.choice([1, 8, 64])), b"\xff" * 64, like_the_store]
        )

    def end(self):
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("launcher", [by_hand, by_mpirun])
def test_ranks_that_strangers_disturb_train_on_or_end_with_a_message(launcher, undisturbed, tmp_path):
    command = ["train", "digits", *TINY, "timeout=30", "--folder", tmp_path / "run"]
    running = [Running(*command, env=env) for env in launcher(3)]
    stranger = Stranger([one.pid for one in running], seed=1)
    done = [one.finish(100) for one in running]
    stranger.end()
    assert stranger.sent > 50
    assert stranger.seen == {LOOPBACK}, "no other host can reach them"
    if any(one.code for one in done):
        for one in done:
            assert one.code in (2, 3), one.err
            assert "error: " in one.err
            assert "Traceback" not in one.err
            assert "terminate" not in one.err
    else:
        assert_same_run(tmp_path / "run", undisturbed)


def test_a_stranger_who_listens_in_the_place_of_rank_0_is_a_message_and_no_abort(tmp_path):
    """It takes connections and hangs up when the rank gives up: threads of torch that wait must not end in an abort."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1]), "WORLD_SIZE": "2", "RANK": "1"}
        running = Running("train", "digits", *TINY, "timeout=1", "--folder", tmp_path / "run", env=env, before=hasty)
        done = running.finish(60)
    assert done.code == 2, done.err
    assert "rank 1 error: rank 1 of 2 cannot reach rank 0" in done.err
    assert "something listens there, but it is not rank 0" in done.err
    assert "terminate" not in done.err


def hasty():
    from mheads.distributed import process_group

    process_group.TIMEOUT_TO_START = 1.0
