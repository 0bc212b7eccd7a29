"""Runs peers in a process of their own, as their users do.

Our engine tells malloc to keep freed memory, which acts on the whole process: in ours, the peers would be faster than
anybody ever sees them. They are still timed turn by turn with us, one at a time.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.peers import Peer

Build = Callable[[], dict[str, Callable[[], Peer]]]  # at the top of a module: it is called in the other process


class RemotePeers:
    """Peers by name; `failed` says why some could not do a step."""

    def __init__(self, build: Build) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, build), daemon=True)
        self._process.start()
        other.close()
        # The weights after one step of each peer, to be compared with ours.
        self.weights: dict[str, list[dict[str, np.ndarray]]]
        self.weights, self.failed = self._pipe.recv()

    def side(self, name: str) -> Callable[[], float]:
        """Does one step there and returns its seconds."""

        def step() -> float:
            self._pipe.send(name)
            seconds: float = self._pipe.recv()
            return seconds

        return step

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Connection, build: Build) -> None:
    peers: dict[str, Peer] = {}
    failed: dict[str, str] = {}
    for name, make in build().items():
        try:
            peer = make()
            peer.step()
        except Exception as error:  # a compiler that is missing, say: the others are still worth timing
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            peers[name] = peer
    pipe.send(({name: _arrays(peer) for name, peer in peers.items()}, failed))
    while (name := pipe.recv()) is not None:
        began = time.perf_counter()
        peers[name].step()
        pipe.send(time.perf_counter() - began)


def _arrays(peer: Peer) -> list[dict[str, Any]]:
    return [{key: p.detach().numpy().copy() for key, p in member.items()} for member in peer.weights()]
