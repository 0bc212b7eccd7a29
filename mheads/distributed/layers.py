"""Broadcast and Gather: layers that carry values from process to process, and their gradients back.

For any network of a user who has called `torch.distributed.init_process_group("gloo")`. A trunk on rank 0, a branch on
each of three ranks, and the loss on rank 0:

    broadcast, gather = Broadcast(0, [0, 1, 2]), Gather(0, [0, 1, 2])

    rank 0:          h = broadcast(trunk(x)); outputs = gather(branch(h)); loss(outputs, y).backward()
    ranks 1 and 2:   h = broadcast();         gather(branch(h)).backward()

A rank whose part of the graph ends in a layer gets a scalar zero, the placeholder, whose backward runs that part.

If the value that is sent requires grad, each rank that the call gave something runs backward through it, once: there
the ranks wait for each other. A rank that lets go of such a value instead is told so at its next call. One that keeps
it cannot be told from a slow one: the others wait for `timeout` seconds (the process group's own by default) and then
name it. To use no gradient, put the call under `no_grad` on all ranks.

Layers talk over the default group, point to point: there is no group to create or to free. Layers of equal kind, root
and ranks must be constructed in the same order on each of their ranks (others may leave them out) and called equally
often; beyond that the order of calls may differ from rank to rank, since sending never waits. One thread at a time may
use a layer. Values arrive on the CPU, in the layout they were sent in.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mheads.distributed import wire
from mheads.distributed.wire import Frame, Outbox
from mheads.errors import UserError

TAGS = 1 << 30  # smaller tags are left to others
VALUE, GRADIENT = range(2)  # what goes under one layer's tags

_outbox = Outbox()
_numbers: Counter[str] = Counter()  # how many layers of a kind, root and ranks this process has


def finish() -> None:
    """Waits until all that this process has sent has been taken.

    A process that ends does so by itself, unless an exception ends it; `sys.exit(1)` is none.
    """
    _outbox.settle()


class _Layer(nn.Module):
    """What Broadcast and Gather share: who takes part, and the messages of a call."""

    def __init__(self, root: int, ranks: Iterable[int], timeout: float | None = None) -> None:
        super().__init__()
        self.root, self.ranks, self.timeout = int(root), tuple(map(int, ranks)), timeout
        if not self.ranks:
            raise UserError(f"{self}: ranks is empty: name the ranks that take part")
        if len(set(self.ranks)) < len(self.ranks):
            raise UserError(f"{self}: a rank is named twice: name each once")
        if timeout is not None and timeout <= 0:
            raise UserError(f"{self}: the timeout must be above 0 seconds, or None for that of the process group")
        if dist.is_available() and dist.is_initialized():
            self._check_world()
        self._enter()

    def extra_repr(self) -> str:
        return f"root={self.root}, ranks={self.ranks}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_gradients": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enter()  # a copy is a further layer: it must not answer for the original

    def _enter(self) -> None:
        self._name = f"{self} #{_numbers[repr(self)]}"
        _numbers[repr(self)] += 1
        self._tag = TAGS + 4 * (zlib.crc32(self._name.encode()) >> 4)
        self._calls = 0
        self._open: dict[int, weakref.ref[Any]] = {}  # calls whose backward has not run, and whether it still can
        self._gradients: dict[tuple[int, int], Tensor | None] = {}  # (rank, call): come before they were asked for
        _finish_at_exit(os.getpid())

    def _check_world(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UserError(f"{self}: there is no process group: call torch.distributed.init_process_group first")
        size = dist.get_world_size()
        outside = [rank for rank in (self.root, *self.ranks) if rank not in range(size)]
        if outside:
            what = "root" if outside[0] == self.root else "rank"
            raise UserError(
                f"{self}: {what} {outside[0]} is not in the world, whose ranks are 0 to {size - 1}: "
                "start more processes, or name others"
            )

    def _check_input(self, x: Any) -> Tensor:
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            given = f"a {x.layout} tensor" if isinstance(x, Tensor) else type(x).__name__
            raise UserError(f"{self}: rank {dist.get_rank()} gave {given}: give it a dense tensor")
        return x if torch.is_grad_enabled() else x.detach()

    def _begin(self) -> int:
        """The number of a new call."""
        for call, graph in self._open.items():
            if graph() is None:
                raise UserError(
                    f"{self}: rank {dist.get_rank()} let go of what call {call} gave it without a backward, and other "
                    "ranks wait for that gradient: run backward on all ranks, or put the call under no_grad on all"
                )
        self._calls += 1
        return self._calls - 1

    # What goes from rank to rank: values, each with word whether its gradient is wanted, and gradients.

    def _send_value(self, call: int, x: Tensor, wanted: bool, peers: Iterable[int]) -> None:
        frame = Frame([self._name, call, wanted], x.detach().to("cpu", copy=True))
        for peer in peers:
            self._send(frame, peer, VALUE)

    def _take_value(self, call: int, peer: int) -> tuple[Tensor, bool]:
        with self._explaining(f"send the value of call {call}", "call the layer equally often on all its ranks"):
            frame = wire.take(peer, self._tag + VALUE, timeout=self.timeout)
        name, number, wanted = frame.key
        me = dist.get_rank()
        if (name, number) != (self._name, call):
            raise UserError(
                f"{self}: rank {me} expected call {call} of {self._name}, and rank {peer} sent call {number} of "
                f"{name}: construct the layers of equal root and ranks in the same order on these ranks"
            )
        if wanted and not torch.is_grad_enabled():
            raise UserError(
                f"{self}: rank {peer} wants the gradient of call {call}, which rank {me} takes under no_grad: "
                "put the call under no_grad on all ranks or on none"
            )
        return frame.value, wanted

    def _send_gradient(self, call: int, gradient: Tensor | None, peer: int) -> None:
        self._send(Frame(call, None if gradient is None else gradient.detach().to("cpu", copy=True)), peer, GRADIENT)

    def _take_gradient(self, call: int, peer: int) -> Tensor | None:
        """The gradient that a peer has for a call; None stands for zero. Those of other calls may come before it."""
        while (peer, call) not in self._gradients:
            with self._explaining(f"send the gradient of call {call}", "run one backward for each call on all ranks"):
                frame = wire.take(peer, self._tag + GRADIENT, timeout=self.timeout)
            self._gradients[peer, frame.key] = frame.value
        return self._gradients.pop((peer, call))

    def _send(self, frame: Frame, peer: int, what: int) -> None:
        with self._explaining("take what was sent to it", "see how that rank ended"):
            _outbox.put(wire.post(frame, peer, self._tag + what))

    def _close(self, call: int) -> None:
        """Backward of a call, of which there is one."""
        if self._open.pop(call, None) is None:
            raise UserError(f"{self}: a second backward through call {call}: there is one for each call")

    @contextmanager
    def _explaining(self, what: str, remedy: str) -> Iterator[None]:
        try:
            yield
        except wire.PeerError as error:
            raise UserError(f"{self}: {error}; rank {dist.get_rank()} waited for it to {what}: {remedy}") from error


class Broadcast(_Layer):
    """Gives the root's value to `ranks`; backward sums their gradients on the root, in the order of the ranks.

    On the root: `y = layer(x)`, a copy of x if the root is one of `ranks`, else the placeholder.
    On the other ranks: `y = layer()`; it requires grad if x does. On a rank that has no part: None.
    """

    def __init__(self, root: int, ranks: Iterable[int], timeout: float | None = None) -> None:
        super().__init__(root, sorted(ranks), timeout)

    def forward(self, x: Any = None) -> Tensor | None:
        self._check_world()
        rank = dist.get_rank()
        if rank == self.root:
            x = self._check_input(x)
            return _Send.apply(self, self._begin(), self.ranks, x)
        if rank not in self.ranks:
            return None
        call = self._begin()
        found = self._take_value(call, self.root)
        return _Receive.apply(self, call, [self.root], [found], _anchor(found[1]))[0]


class Gather(_Layer):
    """Gives the values of `ranks` to the root, in this order; backward gives each rank the gradient of its value.

    On the root: `values = layer(x)`, a tuple. A root that is not one of `ranks` gives nothing, or a placeholder, which
    then is part of the graph: backward reaches it with gradient zero, after the gradients have gone to the ranks.
    On the other ranks: `layer(x)` is the placeholder. On a rank that has no part: None.
    """

    def forward(self, x: Any = None) -> tuple[Tensor, ...] | Tensor | None:
        self._check_world()
        rank = dist.get_rank()
        if rank not in (self.root, *self.ranks):
            return None
        if rank in self.ranks or x is not None:
            x = self._check_input(x)
        if rank != self.root:
            return _Send.apply(self, self._begin(), [self.root], x)
        call = self._begin()
        found = [
            (x.detach().clone(), False) if source == rank else self._take_value(call, source) for source in self.ranks
        ]
        linked = x if x is not None and x.requires_grad else _anchor(any(wanted for _, wanted in found))
        return _Receive.apply(self, call, self.ranks, found, linked)


class _Send(torch.autograd.Function):
    """Sends x to those of `ranks` that are others. Backward takes their gradients and adds them in this order."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, call: int, ranks: Iterable[int], x: Tensor) -> Tensor:
        me = dist.get_rank()
        wanted = ctx.needs_input_grad[3]
        others = [rank for rank in ranks if rank != me]
        layer._send_value(call, x, wanted, others)
        ctx.waited_for = wanted and bool(others)
        if ctx.waited_for:
            layer._open[call] = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.call, ctx.ranks = layer, call, ranks
        ctx.like = x.shape, x.dtype, x.device
        return x.detach().clone() if me in ranks else x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        shape, dtype, device = ctx.like
        if ctx.waited_for:
            ctx.layer._close(ctx.call)
        me = dist.get_rank()
        parts = [gradient if rank == me else ctx.layer._take_gradient(ctx.call, rank) for rank in ctx.ranks]
        found = [part.to(device) for part in parts if part is not None]
        total = reduce(torch.add, found) if found else torch.zeros(shape, dtype=dtype, device=device)
        return None, None, None, total


class _Receive(torch.autograd.Function):
    """The values that `ranks` sent, as made from `linked`. Backward sends each of them its gradient, if it wants it.

    found: for each rank its value, and whether the gradient is wanted.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: _Layer, call: int, ranks: Iterable[int], found: list[tuple[Tensor, bool]], linked: Tensor
    ) -> tuple[Tensor, ...]:
        values, wanted = zip(*found, strict=True)
        ctx.waited_for = any(wanted)
        if ctx.waited_for:
            layer._open[call] = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.call, ctx.ranks, ctx.wanted = layer, call, ranks, wanted
        ctx.like = linked.shape, linked.dtype, linked.device
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        shape, dtype, device = ctx.like
        if ctx.waited_for:
            ctx.layer._close(ctx.call)
        own = None
        for rank, wanted, gradient in zip(ctx.ranks, ctx.wanted, gradients, strict=True):
            if rank == dist.get_rank():
                own = gradient
            elif wanted:
                ctx.layer._send_gradient(ctx.call, gradient, rank)
        own = torch.zeros(shape, dtype=dtype, device=device) if own is None else own
        return None, None, None, None, own


def _anchor(wanted: bool) -> Tensor:
    """Something to have been made from, so that values from elsewhere require grad."""
    return torch.zeros((), requires_grad=wanted)


@cache
def _finish_at_exit(process: int) -> None:
    # Once for each process, those forked from it too. Not atexit, which processes of multiprocessing skip.
    multiprocessing.util.Finalize(None, _at_exit, exitpriority=1)


def _at_exit() -> None:
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
    if not failed:  # else it ends at once, so that its peers notice
        try:
            _outbox.close()
        except Exception as lost:
            print(f"mheads: {lost}: what was sent to it is lost", file=sys.stderr)
