"""Collectives of torch.distributed on values, and the one order in which a rank runs them.

Every rank runs the same collectives of a group in the same order, one after the other, on a thread of their own while
the workers compute: each waits for its inputs. So nothing needs a tag, and no rank listens for what another may send.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from mheads.common.nested_values import Value, leaves, map_leaves
from mheads.distributed.planning.step_plan import Key, Order
from mheads.engine.gradient_sums import add_subtrees
from mheads.engine.threads import Workers

T = TypeVar("T")
Group = dist.ProcessGroup | None  # None: all ranks
HEADER = 64  # bytes at the start of a block, of which two lengths are used: tensors begin at multiples of it


@dataclass
class Collective:
    """`run` takes the inputs of this rank, by name; `order` is the same on all ranks."""

    order: Order
    inputs: int
    run: Callable[[dict[Any, Value]], None]
    given: SimpleQueue[tuple[Any, Value]] = field(default_factory=SimpleQueue)


class OrderedCollectives:
    """Runs what is planned, in its order; each waits for its inputs. The workers wait for all of them."""

    def __init__(self, workers: Workers, failed: Callable[[BaseException], None]) -> None:
        self._workers, self._failed = workers, failed
        self._planned: Mapping[Key, Collective] = {}
        self._thread = ThreadPoolExecutor(1, "mheads-collectives", initializer=_use_one_thread)
        self.finished = 0

    def plan(self, collectives: Mapping[Key, Collective]) -> None:
        """Plans the collectives that follow; all before have run."""
        self._planned = collectives
        self._workers.hold(len(collectives))
        for one in sorted(collectives.values(), key=lambda one: one.order):
            self._thread.submit(self._run, one)

    def give(self, key: Key, name: Any, value: Value) -> bool:
        """Gives a collective one of its inputs; whether there is such a collective."""
        one = self._planned.get(key)
        if one is not None:
            one.given.put((name, value))
        return one is not None

    def together(self, run: Callable[[], T]) -> T:
        """Runs a collective between two plans, and waits for it; the loss of a rank ends the wait."""
        results: list[T] = []
        self.plan({(): Collective((), 0, lambda _: results.append(run()))})
        self._workers.wait()
        return results[0]

    def _run(self, one: Collective) -> None:
        try:
            one.run(dict(one.given.get() for _ in range(one.inputs)))
        except BaseException as error:
            self._failed(error)
        else:
            self.finished += 1
            self._workers.release()

    def close(self) -> None:
        """Waits for nothing: after a failure, a collective may wait for ever for its inputs or for a lost rank."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _use_one_thread() -> None:
    torch.get_num_threads()  # only then does what is set hold for this thread
    torch.set_num_threads(1)


class Gathering:
    """Gathers values of any form, a block of bytes from each rank, which begins with its length and its form.

    Blocks are as long as the longest one under the same key before; if one is longer now, all see that from its length,
    and gather once more.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device  # where the backend takes tensors from
        self._room: dict[Hashable, int] = {}

    def gather(self, key: Hashable, group: Group, value: Value) -> dict[int, Value]:
        """The values of all ranks of a group, by rank; the tensors of each are views of one buffer."""
        ranks, own, room = dist.get_process_group_ranks(group), pack(value, self.device), self._room.get(key, HEADER)
        while True:
            given = own if len(own) == room else pad(own[:room], (0, max(0, room - len(own))))
            blocks = own.new_empty(len(ranks), room)
            dist.all_gather(list(blocks), given, group=group)
            longest = int(blocks[:, :8].contiguous().view(torch.int64).max())
            if longest <= room:
                break
            room = longest
        self._room[key] = room
        return {rank: unpack(block) for rank, block in zip(ranks, blocks, strict=True)}


def pack(value: Value, device: torch.device) -> Tensor:
    """A block: its length, that of the pickled form, the form, and the tensors as they lie in memory."""
    value = map_leaves(lambda t: _dense(t.detach().to(device).as_subclass(Tensor)), value)
    form = pickle.dumps(map_leaves(lambda t: t.to("meta"), value))
    parts = [torch.frombuffer(bytearray(form), dtype=torch.uint8), *map(memory_of, leaves(value))]
    stops = list(itertools.accumulate((_align(len(part)) for part in parts), initial=HEADER))
    block = torch.empty(stops[-1], dtype=torch.uint8, device=device)
    block[:16] = torch.tensor([len(block), len(form)]).view(torch.uint8)
    for start, part in zip(stops, parts, strict=False):
        block[start : start + len(part)] = part
    return block


def unpack(block: Tensor) -> Value:
    """The value in a block; its tensors are views of it."""
    _, size = block[:16].clone().view(torch.int64).tolist()
    form = pickle.loads(block[HEADER : HEADER + size].cpu().numpy().tobytes())
    starts = itertools.accumulate((_align(t.nbytes) for t in leaves(form)), initial=HEADER + _align(size))

    def take(t: Tensor) -> Tensor:
        start = next(starts)
        flat = block[start : start + t.nbytes].view(t.dtype)
        return torch.as_strided(flat, t.shape, t.stride(), flat.storage_offset())

    return map_leaves(take, form)


def _dense(t: Tensor) -> Tensor:
    """The tensor, or a copy without gaps: in the strides that it has, which decide the bits of what is computed."""
    return t if torch.empty_like(t, device="meta").stride() == t.stride() else t.clone()


def _align(size: int) -> int:
    return -(-size // HEADER) * HEADER


def exchange(
    group: Group, given: Mapping[int, Value], forms: Mapping[int, Value], device: torch.device
) -> dict[int, Value]:
    """Gives ranks values of dense tensors, and takes values of these forms from others."""
    taken = {rank: map_leaves(lambda t: torch.empty_like(t, device=device), form) for rank, form in forms.items()}
    sent = [(rank, memory_of(t.to(device))) for rank, value in given.items() for t in leaves(value)]
    filled = [(rank, memory_of(t)) for rank, value in taken.items() for t in leaves(value)]
    batch = [dist.P2POp(dist.isend, memory, rank, group) for rank, memory in sent]
    batch += [dist.P2POp(dist.irecv, memory, rank, group) for rank, memory in filled]
    for work in dist.batch_isend_irecv(batch) if batch else ():
        work.wait()
    return taken


def memory_of(dense: Tensor) -> Tensor:
    """The bytes of a tensor as they lie in memory, so that channels-last arrives as channels-last."""
    t = dense.resolve_conj().resolve_neg()
    return torch.as_strided(t, (t.numel(),), (1,), t.storage_offset()).view(torch.uint8)


def add_ordered(group: Group, own: Tensor, held: Mapping[int, Sequence[range]]) -> Tensor:
    """The sum over the micro-batches [n] in their fixed pairwise tree, on every rank of the group.

    `own` [k, n] are the sums of this rank's subtrees, and `held` says which subtrees each rank has. A reduce-scatter by
    an all-to-all of chunks and a sum of each chunk in its order, then an all-gather of the chunks.
    """
    ranks = dist.get_process_group_ranks(group)
    (subtrees, n), size = own.shape, len(ranks)
    chunk = -(-n // size)
    chunks = pad(own, (0, chunk * size - n)).view(subtrees, size, chunk).transpose(0, 1)
    counts = [len(held[rank]) for rank in ranks]
    taken = own.new_empty(sum(counts), chunk)
    dist.all_to_all_single(taken, chunks.reshape(size * subtrees, chunk), counts, [subtrees] * size, group=group)
    total = add_subtrees(dict(zip((part for rank in ranks for part in held[rank]), taken, strict=True)))
    whole = own.new_empty(size, chunk)
    dist.all_gather(list(whole), total, group=group)
    return whole.view(-1)[:n]


def add_fast(group: Group, own: Tensor) -> Tensor:
    """The sum of all rows of all ranks, in whatever order the backend adds."""
    total = own.sum(0)
    dist.all_reduce(total, group=group)
    return total
