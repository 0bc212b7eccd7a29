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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mheads.common.errors import UserError
from mheads.distributed import tensor_messages
from mheads.distributed.tensor_messages import Frame, Outbox

TAGS = 1 << 30  # smaller tags are left to others
REMEDIES = {
    "value": "call the layer equally often on all its ranks", "gradient": "run one backward for each call on all ranks"
}  # fmt: skip

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
        return {**self.__dict__, "_open": {}, "_early": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enter()  # a copy is a further layer: it must not answer for the original

    def _enter(self) -> None:
        self._name = f"{self} #{_numbers[repr(self)]}"
        _numbers[repr(self)] += 1
        self._tag = TAGS + (zlib.crc32(self._name.encode()) >> 2)
        self._calls = 0
        self._open: dict[int, weakref.ref[Any]] = {}  # calls whose backward has not run, and whether it still can
        self._early: dict[tuple[int, str, int], tuple[Any, bool]] = {}  # come before it was asked for
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

    # A call has a node in the graph (`ctx`); if another rank waits for its backward, the call is open until then.

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

    def _link(self, ctx: Any, call: int, made_from: Tensor, awaited: bool) -> None:
        if awaited:
            self._open[call] = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.call, ctx.awaited = self, call, awaited
        ctx.like = made_from.shape, made_from.dtype, made_from.device

    def _close(self, ctx: Any) -> Tensor:
        """Backward of a call, of which there is one; a zero for whoever gets no gradient."""
        if ctx.awaited and self._open.pop(ctx.call, None) is None:
            raise UserError(f"{self}: a second backward through call {ctx.call}: there is one for each call")
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device)

    # What goes from rank to rank: values, each with word whether its gradient is wanted, and gradients.

    def _send(self, what: str, call: int, tensor: Tensor | None, peers: Iterable[int], wanted: bool = False) -> None:
        copy = None if tensor is None else tensor.detach().to("cpu", copy=True)
        frame = Frame([self._name, what, call, wanted], copy)
        with self._explaining("take what was sent to it", "see how that rank ended"):
            for peer in peers:
                _outbox.put(tensor_messages.post(frame, peer, self._tag))

    def _take(self, what: str, call: int, peer: int) -> tuple[Any, bool]:
        """A peer's value of a call, or its gradient (None: zero). Those of other calls may come first."""
        while (peer, what, call) not in self._early:
            with self._explaining(f"send the {what} of call {call}", REMEDIES[what]):
                frame = tensor_messages.take(peer, self._tag, timeout=self.timeout)
            name, kind, number, wanted = frame.key
            assert name == self._name, f"{name} has the tag of {self._name}"
            self._early[peer, kind, number] = frame.value, wanted
        return self._early.pop((peer, what, call))

    def _take_value(self, call: int, peer: int) -> tuple[Tensor, bool]:
        value, wanted = self._take("value", call, peer)
        if wanted and not torch.is_grad_enabled():
            raise UserError(
                f"{self}: rank {peer} wants the gradient of call {call}, which rank {dist.get_rank()} takes under "
                "no_grad: put the call under no_grad on all ranks or on none"
            )
        return value, wanted

    @contextmanager
    def _explaining(self, what: str, remedy: str) -> Iterator[None]:
        try:
            yield
        except tensor_messages.PeerError as error:
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
            return _apply_send(self, self._begin(), self.ranks, x)
        if rank not in self.ranks:
            return None
        call = self._begin()
        received = self._take_value(call, self.root)
        return _apply_receive(self, call, [self.root], [received], _anchor(received[1]))[0]


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
            return _apply_send(self, self._begin(), [self.root], x)
        call = self._begin()
        received = [
            (x.detach().clone(), False) if source == rank else self._take_value(call, source) for source in self.ranks
        ]
        linked = x if x is not None and x.requires_grad else _anchor(any(wanted for _, wanted in received))
        return _apply_receive(self, call, self.ranks, received, linked)


class _Send(torch.autograd.Function):
    """Sends x to those of `ranks` that are others. Backward takes their gradients and adds them in this order."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, call: int, ranks: Iterable[int], x: Tensor) -> Tensor:
        me, wanted = dist.get_rank(), ctx.needs_input_grad[3]
        others = [rank for rank in ranks if rank != me]
        layer._send("value", call, x, others, wanted)
        layer._link(ctx, call, x, wanted and bool(others))
        ctx.ranks = ranks
        return x.detach().clone() if me in ranks else x.new_zeros((), dtype=x.dtype.to_real())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, own: Tensor | None) -> tuple[Any, ...]:
        zero, me = ctx.layer._close(ctx), dist.get_rank()
        parts = [own if rank == me else ctx.layer._take("gradient", ctx.call, rank)[0] for rank in ctx.ranks]
        gradients = [part.to(zero.device) for part in parts if part is not None]
        return None, None, None, reduce(torch.add, gradients) if gradients else zero


class _Receive(torch.autograd.Function):
    """The values that `ranks` sent, as made from `linked`. Backward sends each of them its gradient, if it wants it.

    received: for each rank its value, and whether the gradient is wanted.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: _Layer, call: int, ranks: Iterable[int], received: list[tuple[Tensor, bool]], linked: Tensor
    ) -> tuple[Tensor, ...]:
        values, wanted = zip(*received, strict=True)
        layer._link(ctx, call, linked, any(wanted))
        ctx.ranks, ctx.wanted = ranks, wanted
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        total = ctx.layer._close(ctx)
        for rank, wanted, gradient in zip(ctx.ranks, ctx.wanted, gradients, strict=True):
            if wanted:
                ctx.layer._send("gradient", ctx.call, gradient, [rank])
            elif rank == dist.get_rank() and gradient is not None:
                total = gradient
        return None, None, None, None, total


# torch has no annotations for `Function.apply`: its arguments are those of `forward` without `ctx`.
_apply_send: Callable[[_Layer, int, Iterable[int], Tensor], Tensor] = _Send.apply
_apply_receive: Callable[[_Layer, int, Iterable[int], list[tuple[Tensor, bool]], Tensor], tuple[Tensor, ...]]
_apply_receive = _Receive.apply


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
