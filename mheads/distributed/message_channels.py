"""The traffic of a process: frames to and from other ranks, in any order.

A frame's key begins with the channel that it is for: a step, an evaluation, ... A channel hands its frames to a
listener; what comes before anybody listens waits. Frames of one pair of ranks stay in order, and no two threads send to
one rank at once: that is all that gloo needs (and NCCL, which knows no tags, would need no more).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from mheads.common.nested_values import Value
from mheads.distributed.tensor_messages import Frame, Outbox, PeerError, post, take

Handler = Callable[[list[Any], Value], None]
BYE = "bye"


class Courier:
    """Sends without waiting and listens to all peers, one thread each."""

    def __init__(self, rank: int, peers: Iterable[int], failed: Callable[[int, BaseException], None]) -> None:
        self.rank = rank
        self.peers = sorted(set(peers) - {rank})
        self.received = 0  # frames so far
        self.payload = True  # False: the bytes of tensors are left out, to measure what they cost
        self._failed = failed
        self._sending = {peer: threading.Lock() for peer in self.peers}
        self._lock = threading.Lock()
        self._handlers: dict[str, Handler] = {}
        self._waiting: dict[str, list[Frame]] = defaultdict(list)
        self._outbox = Outbox(self._report_lost)
        self._listeners = [
            threading.Thread(target=self._listen, args=(peer,), name=f"mheads-from-{peer}", daemon=True)
            for peer in self.peers
        ]
        for thread in self._listeners:
            thread.start()

    def send(self, to: int, key: list[Any], value: Value = None) -> None:
        """Begins to send; the tensors must stay as they are."""
        frame = Frame(key, value)
        try:
            with self._sending[to]:
                posted = post(frame, to, payload=self.payload)
        except PeerError as error:
            self._report_lost(error)
        else:
            self._outbox.put(posted)

    def listen(self, channel: str, handler: Handler) -> None:
        """From now on `handler(rest of the key, value)` gets the frames of a channel, on any thread."""
        while True:
            with self._lock:
                frames = self._waiting.pop(channel, [])
                if not frames:  # only now, so that none overtakes those that waited
                    self._handlers[channel] = handler
                    return
            for frame in frames:
                handler(frame.key[1:], frame.value)

    def forget(self, channel: str) -> None:
        with self._lock:
            self._handlers.pop(channel, None)

    def close(self) -> None:
        """Says goodbye to every peer and waits for theirs: nothing that was sent is lost."""
        for peer in self.peers:
            self.send(peer, [BYE])
        for thread in self._listeners:
            thread.join()
        self._outbox.close()

    def _listen(self, peer: int) -> None:
        while True:
            try:
                frame = take(peer)
            except PeerError as error:
                self._report_lost(error)
                return
            if frame.key[0] == BYE:
                return
            with self._lock:
                self.received += 1
                handler = self._handlers.get(frame.key[0])
                if handler is None:
                    self._waiting[frame.key[0]].append(frame)
            if handler is not None:
                handler(frame.key[1:], frame.value)
            del frame, handler

    def _report_lost(self, error: PeerError) -> None:
        self._failed(error.rank, error)
