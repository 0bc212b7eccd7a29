"""Values on the wire: tensors of any shape, dtype and layout, sent as the bytes that they are.

A frame is a header, which says what follows, and the bytes of each tensor, within the header if they fit: a second
message would double the time. So a receiver need know nothing beforehand, and a batch of another size is no event.
Layouts travel along: a channels-last tensor arrives channels-last, which torch.distributed alone refuses (`send`) or
silently scrambles (`broadcast`).

What gloo does not say, and this module is built around: a send ends only when the receiver has asked for it; nothing
tells whether one has ended except waiting for it; a wait that times out closes every connection; and a send or a
receive that is forgotten under way jams its connection for good.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mheads.common.nested_values import Value

GONE = "has ended, or its connection is lost"
HEADER = 4096  # bytes of the first message; a longer description goes on in a second one


@dataclass(frozen=True)
class Frame:
    """A message: `key` says what it is (plain data), `value` holds tensors."""

    key: Any
    value: Value = None


class PeerError(RuntimeError):
    """A rank did not send, or did not take, what was waited for."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} {why}")
        self.rank = rank


class Posted:
    """A frame under way: holds its bytes until they are gone. Must be kept, and waited for once."""

    def __init__(self, to: int, works: list[Any], parts: list[Tensor]) -> None:
        self.to, self.works, self.parts = to, works, parts
        self.num_bytes = sum(part.numel() for part in parts)

    def wait(self) -> None:
        for work in self.works:
            _wait(work, self.to)


def post(frame: Frame, to: int, tag: int = 0, payload: bool = True) -> Posted:
    """Begins to send a frame to a rank. Its tensors must not change before `wait` has returned.

    Without payload the receiver gets zeros instead: only to measure what sending costs.
    """
    parts: list[Tensor] = []
    text = json.dumps([frame.key, _describe(frame.value, parts), *([] if payload else ["zeros"])]).encode()
    if not payload:
        parts.clear()
    start = torch.frombuffer(bytearray(len(text).to_bytes(4, "big") + text), dtype=torch.uint8)
    header = torch.zeros(HEADER, dtype=torch.uint8)
    size = sum(part.numel() for part in (start, *parts))
    if size <= HEADER:
        torch.cat([start, *parts], out=header[:size])
        return _post([header], to, tag)
    header[: start.numel()] = start[:HEADER]
    if start.numel() > HEADER:
        parts.insert(0, start[HEADER:])
    return _post([header, *parts], to, tag)


def take(source: int, tag: int = 0, timeout: float | None = None) -> Frame:
    """Waits for the next frame from a rank; `timeout` in seconds, the group's own if None."""
    header = torch.empty(HEADER, dtype=torch.uint8)
    _wait(_receive(header, source, tag), source, timeout)
    end = 4 + int.from_bytes(header[:4].numpy().tobytes(), "big")
    text = header[4:end].numpy().tobytes()
    if end > HEADER:
        rest = torch.empty(end - HEADER, dtype=torch.uint8)
        _wait(_receive(rest, source, tag), source, timeout)
        text += rest.numpy().tobytes()
    key, form, *zeros = json.loads(text)
    tensors: list[Tensor] = []
    value = _build(form, tensors)
    if zeros:
        for tensor in tensors:
            tensor.zero_()
        return Frame(key, value)
    places = [_bytes(tensor) for tensor in tensors if tensor.numel()]
    sizes = [place.numel() for place in places]
    if end + sum(sizes) <= HEADER:
        for place, part in zip(places, header[end : end + sum(sizes)].split(sizes), strict=True):
            place.copy_(part)
        return Frame(key, value)
    # All at once: the transfer of one goes on while another's is set up.
    works = [_receive(place, source, tag) for place in places]
    for work in works:
        _wait(work, source, timeout)
    return Frame(key, value)


class Outbox:
    """What has been sent and not yet taken. Sending waits for no receiver: a thread waits, and lets go of the bytes.

    What a send met is given to `failed`, or else raised at the next call.
    """

    def __init__(self, failed: Callable[[PeerError], None] | None = None) -> None:
        self._failed = failed or self._keep
        self._under_way: Queue[Posted | None] = Queue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: PeerError | None = None

    def put(self, posted: Posted) -> None:
        """Keeps what was posted until it is taken."""
        with self._starting:
            if self._thread is None:
                # A daemon: a process that fails must not wait for peers that wait for it.
                self._thread = threading.Thread(target=self._wait, name="mheads-outbox", daemon=True)
                self._thread.start()
        self._under_way.put(posted)
        self._raise()

    def settle(self) -> None:
        """Waits until all has been taken."""
        self._under_way.join()
        self._raise()

    def close(self) -> None:
        """Waits for all, and for the thread: one that lets go of C++ objects while Python ends aborts the process."""
        if self._thread is not None:
            self._under_way.put(None)
            self._thread.join()
        self._raise()

    def _keep(self, error: PeerError) -> None:
        self._error = self._error or error

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait(self) -> None:
        while (posted := self._under_way.get()) is not None:
            try:
                posted.wait()
            except PeerError as error:
                self._failed(error)
            del posted  # not held until the next message
            self._under_way.task_done()


def _post(parts: list[Tensor], to: int, tag: int) -> Posted:
    with _naming(to):
        return Posted(to, [dist.isend(part, to, tag=tag) for part in parts], parts)


def _receive(buffer: Tensor, source: int, tag: int) -> Any:
    with _naming(source):
        work = dist.irecv(buffer, source, tag=tag)
    assert work is not None, "this process is not in the group"
    return work


def _wait(work: Any, rank: int, timeout: float | None = None) -> None:
    with _naming(rank, timeout):
        work.wait() if timeout is None else work.wait(timedelta(seconds=timeout))


@contextmanager
def _naming(rank: int, timeout: float | None = None) -> Iterator[None]:
    """gloo's errors name an address: ours name the rank."""
    try:
        yield
    except RuntimeError as error:
        late = f"did not answer within {timeout:g} s" if timeout is not None else "did not answer in time"
        raise PeerError(rank, late if "Timed out" in str(error) else GONE) from error


def _describe(value: Value, parts: list[Tensor]) -> Any:
    """The form of a value as plain data; the bytes of its tensors go to `parts`."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        tensor = value.detach().cpu().resolve_conj().resolve_neg()
        if not _is_dense(tensor):
            tensor = tensor.contiguous()
        if tensor.numel():
            parts.append(_bytes(tensor))
        return {"t": str(tensor.dtype).removeprefix("torch."), "s": list(tensor.shape), "r": list(tensor.stride())}
    if isinstance(value, dict):
        return {"d": [[key, _describe(part, parts)] for key, part in value.items()]}
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"a value holds tensors in tuples, lists and dicts, not {type(value).__name__}")
    forms = [_describe(part, parts) for part in value]
    if hasattr(value, "_fields"):
        return {"n": f"{type(value).__module__}:{type(value).__qualname__}", "v": forms}
    return {"l" if isinstance(value, list) else "u": forms}


def _build(form: Any, tensors: list[Tensor]) -> Value:
    """A value of this form, whose tensors are still to be filled."""
    if form is None:
        return None
    if "t" in form:
        tensor = torch.empty_strided(form["s"], form["r"], dtype=getattr(torch, form["t"]))
        tensors.append(tensor)
        return tensor
    if "d" in form:
        return {key: _build(part, tensors) for key, part in form["d"]}
    if "n" in form:
        module, _, name = form["n"].partition(":")
        kind: Any = importlib.import_module(module)
        for attribute in name.split("."):
            kind = getattr(kind, attribute)
        if not (isinstance(kind, type) and issubclass(kind, tuple)):  # a frame must not be able to call what it likes
            raise TypeError(f"{form['n']} is not a named tuple")
        return kind(*(_build(part, tensors) for part in form["v"]))
    parts = [_build(part, tensors) for part in form["l" if "l" in form else "u"]]
    return parts if "l" in form else tuple(parts)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one block of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((r, s) for r, s in zip(tensor.stride(), tensor.shape, strict=True) if s > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor."""
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8) if tensor.numel() else flat.new_empty(0, dtype=torch.uint8)
