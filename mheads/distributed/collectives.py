"""Collectives of torch.distributed on values, and the one order in which a rank runs them.

Every rank runs the same collectives of a group in the same order, one after the other, on a thread of their own while
the workers compute: a collective is offered when its input is there, and runs when all before it have run. So nothing
needs a tag, and no rank listens for what another may send.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mheads.common import nested_values
from mheads.common.nested_values import Value

ALIGNED = 64  # bytes: where tensors begin in a block
SMALL_BLOCK = 2048  # bytes that a first gathering has room for
all_gather_single = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # the name before torch 2.13


@dataclass(frozen=True)
class Group:
    """Ranks that run collectives together, in this order, and torch's handle of them."""

    ranks: tuple[int, ...]
    handle: Any

    def __len__(self) -> int:
        return len(self.ranks)


class OrderedCollectives:
    """Runs what is planned, in the order of the plan, each when it has been offered."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._lock = threading.Lock()
        self._order: deque[Hashable] = deque()
        self._offered: dict[Hashable, Callable[[], None]] = {}
        self._thread = ThreadPoolExecutor(1, "mheads-collectives", initializer=_use_one_thread)
        self.finished = 0

    def plan(self, keys: Iterable[Hashable]) -> None:
        """Sets the order of the collectives that follow; all before have run."""
        assert not self._order and not self._offered
        self._order.extend(keys)

    def offer(self, key: Hashable, run: Callable[[], None]) -> None:
        with self._lock:
            self._offered[key] = run
            while self._order and self._order[0] in self._offered:
                self._thread.submit(self._run, self._offered.pop(self._order.popleft()))

    def submit(self, run: Callable[[], None]) -> None:
        """Runs a collective between two plans."""
        assert not self._order
        self._thread.submit(self._run, run)

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
            self.finished += 1
        except BaseException as error:
            self._failed(error)

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def _use_one_thread() -> None:
    torch.get_num_threads()  # only then does what is set hold for this thread
    torch.set_num_threads(1)


class Gathering:
    """All-gathers of values: each rank of a group gives one of any form, and gets those of all.

    A rank's block holds its length, the form of its value and the tensors. Blocks are as long as the longest one under
    the same key before; if one is longer now, all see that from its length, and gather once more.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device  # where the backend takes tensors from
        self._room: dict[Hashable, int] = {}

    def gather(self, key: Hashable, group: Group, value: Value) -> list[Value]:
        """The values of all ranks, in their order; the tensors of each are views of one buffer."""
        form, tensors, length = _describe(value)
        room = self._room.get(key, SMALL_BLOCK)
        while True:
            own = _block(room, form, tensors, length, self.device)
            blocks = own.new_empty(len(group) * room)
            all_gather_single(blocks, own, group=group.handle)
            each = blocks.view(len(group), room)
            longest = int(each[:, :8].contiguous().view(torch.int64).max())
            if longest <= room:
                break
            room = _aligned(longest)
        self._room[key] = room
        return [unpack(block) for block in each]

    def gather_on_main(self, group: Group, value: Value) -> list[Value]:
        """The values of all ranks, on the first rank of the group; nothing on the others."""
        form, tensors, length = _describe(value)
        lengths = torch.empty(len(group), dtype=torch.int64, device=self.device)
        all_gather_single(lengths, torch.tensor([length], device=self.device), group=group.handle)
        own = _block(int(lengths.max()), form, tensors, length, self.device)
        main = dist.get_rank() == group.ranks[0]
        blocks = [torch.empty_like(own) for _ in group.ranks] if main else None
        dist.gather(own, blocks, dst=group.ranks[0], group=group.handle)
        return [unpack(block) for block in blocks or ()]


def broadcast_value(group: Group, value: Value) -> Value:
    """The value of the first rank of a group, on all of them; the others give whatever."""
    block, root = pack(value), group.ranks[0]
    length = torch.tensor([block.numel()])
    dist.broadcast(length, root, group=group.handle)
    if dist.get_rank() != root:
        block = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(block, root, group=group.handle)
    return unpack(block)


def pack(value: Value) -> Tensor:
    """A value as bytes."""
    form, tensors, length = _describe(value)
    return _block(length, form, tensors, length, torch.device("cpu"))


def _block(room: int, form: Tensor, tensors: Sequence[Tensor], length: int, device: torch.device) -> Tensor:
    """A value in so many bytes; of one that needs more, the length alone."""
    block = torch.empty(room, dtype=torch.uint8, device=device)
    block[:8] = _to_bytes(length)
    if length <= room:
        block[8:16] = _to_bytes(form.numel())
        block[16 : 16 + form.numel()] = form
        for start, tensor in zip(_places(form, tensors), tensors, strict=False):
            block[start : start + tensor.nbytes] = as_bytes(tensor)
    return block


def _describe(value: Value) -> tuple[Tensor, list[Tensor], int]:
    """The form of a value as bytes, its tensors in dense memory, and the length of its block."""
    tensors: list[Tensor] = []

    def describe(t: Tensor) -> Tensor:
        t = t.detach().resolve_conj().resolve_neg()
        tensors.append(t if _is_dense(t) else t.contiguous())
        return torch.empty_strided(t.shape, tensors[-1].stride(), dtype=t.dtype, device="meta")

    form = _to_bytes(pickle.dumps(nested_values.map_leaves(describe, value)))
    return form, tensors, _places(form, tensors)[-1]


def _places(form: Tensor, tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor begins in a block, and where the block ends."""
    places = [_aligned(16 + form.numel())]
    for tensor in tensors:
        places.append(_aligned(places[-1] + tensor.nbytes))
    return places


def unpack(block: Tensor) -> Value:
    """The value in a block; its tensors are views of it."""
    size = int(block[8:16].clone().view(torch.int64))
    form = block[16 : 16 + size]
    value = pickle.loads(form.cpu().numpy().tobytes())
    starts = iter(_places(form, nested_values.leaves(value)))

    def view(like: Tensor) -> Tensor:
        start = next(starts)
        flat = block[start : start + like.nbytes].view(like.dtype)
        return torch.as_strided(flat, like.shape, like.stride(), flat.storage_offset())

    return nested_values.map_leaves(view, value)


def exchange(
    group: Group, given: Mapping[int, Tensor], sizes: Mapping[int, int], device: torch.device
) -> dict[int, Tensor]:
    """An all-to-all of bytes: gives each rank what is for it, and takes so many bytes from each."""
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    parts = [given.get(rank, empty).to(device) for rank in group.ranks]
    into = [sizes.get(rank, 0) for rank in group.ranks]
    taken = torch.empty(sum(into), dtype=torch.uint8, device=device)
    dist.all_to_all_single(taken, torch.cat(parts), into, [part.numel() for part in parts], group=group.handle)
    return dict(zip(group.ranks, taken.split(into), strict=True))


def add_ordered(
    group: Group, own: Sequence[Tensor], held: Mapping[int, Sequence[range]], like: Tensor, device: torch.device
) -> Tensor:
    """The sum of flat tensors in the fixed pairwise tree over the micro-batches, on every rank of the group.

    `own` are the sums of this rank's subtrees, and `held` says which subtrees each rank has. A reduce-scatter by an
    all-to-all of chunks and a sum of each chunk in its order, then an all-gather of the chunks.
    """
    chunk = -(-like.numel() // len(group))
    padded = [torch.nn.functional.pad(t, (0, chunk * len(group) - t.numel())) for t in own]
    given = {
        rank: torch.cat([as_bytes(t[k * chunk : (k + 1) * chunk]) for t in padded])
        for k, rank in enumerate(group.ranks)
        if padded
    }
    size = chunk * like.element_size()
    taken = exchange(group, given, {rank: len(held[rank]) * size for rank in group.ranks}, device)
    parts = {
        subtree.start: (subtree.stop, part.view(like.dtype))
        for rank in group.ranks
        for subtree, part in zip(held[rank], taken[rank].split(size) if held[rank] else (), strict=True)
    }
    total = _add_tree(parts, 0, max(stop for stop, _ in parts.values()))
    whole = torch.empty(chunk * len(group), dtype=like.dtype, device=device)
    all_gather_single(whole, total.contiguous(), group=group.handle)
    return whole[: like.numel()]


def add_fast(group: Group, own: Sequence[Tensor], like: Tensor, device: torch.device) -> Tensor:
    """The sum in whatever order the backend adds."""
    total = sum(own, start=torch.zeros_like(like, device=device))
    dist.all_reduce(total, group=group.handle)
    return total


def subtrees(parts: int, own: range) -> list[range]:
    """The largest subtrees of the pairwise sum of so many parts that lie within a range."""
    roots: list[range] = []
    start = own.start
    while start < own.stop:
        size = 1
        while start % (2 * size) == 0 and min(start + 2 * size, parts) <= own.stop and start + size < parts:
            size *= 2
        roots.append(range(start, min(start + size, parts)))
        start = roots[-1].stop
    return roots


def _add_tree(parts: Mapping[int, tuple[int, Tensor]], start: int, stop: int) -> Tensor:
    """The sum over start to stop - 1, of which some subtrees are already added."""
    end, part = parts[start]
    if end == stop:
        return part
    half = 1 << (stop - start - 1).bit_length() - 1
    return _add_tree(parts, start, start + half) + _add_tree(parts, start + half, stop)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one block of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((r, s) for r, s in zip(tensor.stride(), tensor.shape, strict=True) if s > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor."""
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8) if tensor.numel() else flat.new_empty(0, dtype=torch.uint8)


def _to_bytes(what: int | bytes) -> Tensor:
    return torch.frombuffer(bytearray(what.to_bytes(8, "little") if isinstance(what, int) else what), dtype=torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
