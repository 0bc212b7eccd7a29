"""Broadcast and Gather: layers that carry values from process to process, and their gradients back.

For any network of a user who has called `torch.distributed.init_process_group("gloo")`. A trunk on rank 0, a branch on
each of three ranks, and the loss on rank 0:

    broadcast, gather = Broadcast(0, [0, 1, 2]), Gather(0, [0, 1, 2])

    rank 0:          h = broadcast(trunk(x)); outputs = gather(branch(h)); loss(outputs, y).backward()
    ranks 1 and 2:   h = broadcast();         gather(branch(h)).backward()

A rank whose part of the graph ends in a layer gets a scalar zero, the placeholder, whose backward runs that part.

Ranks talk point to point over the default group, since a group of the layer's own would have to be made by all ranks
of the world. All ranks of a layer call it equally often, and layers that have ranks in common in the same order;
backward takes them in the opposite order by itself. If a value that is sent requires grad, each rank that the call gave
something runs backward through it, once. A rank that lets go of such a value instead is told so at its next call. Who
waits for longer than `timeout` seconds (the process group's own by default) gets an error that names the rank. To use
no gradient, put the call under `no_grad` on all ranks.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mheads.common.errors import UserError


class _Layer(nn.Module):
    """What Broadcast and Gather share: who takes part, and the calls whose backward has not run."""

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
        return {**self.__dict__, "_open": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enter()  # a copy is a further layer: it must not answer for the original

    def _enter(self) -> None:
        self._calls = 0
        self._open: dict[int, weakref.ref[Any]] = {}  # calls whose backward has not run, and whether it still can

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

    def _check_wanted(self, call: int, wanted: bool) -> None:
        if wanted and not torch.is_grad_enabled():
            raise UserError(
                f"{self}: another rank wants the gradient of call {call}, which rank {dist.get_rank()} takes under "
                "no_grad: put the call under no_grad on all ranks or on none"
            )

    # What goes between the root and the others. Each value goes with the number of its call.

    @property
    def others(self) -> list[int]:
        return [rank for rank in self.ranks if rank != self.root]

    def spread(self, call: int, value: Any) -> Any:
        """The root's value, on all ranks."""
        if dist.get_rank() == self.root:
            return self.hand_out(call, dict.fromkeys(self.others, value))
        return self._take(call, self.root)

    def hand_out(self, call: int, values: dict[int, Any] | None) -> Any:
        """What the root has for each of the others."""
        if values is None:
            return self._take(call, self.root)
        under_way = [(rank, self._send(call, rank, values.get(rank, ()))) for rank in self.others]
        for rank, works in under_way:
            with self._explaining(rank):
                for work in works:
                    self._wait(work)
        return None

    def collect(self, call: int, value: Any) -> dict[int, Any]:
        """The values of the others, on the root."""
        if dist.get_rank() == self.root:
            return {rank: self._take(call, rank) for rank in self.others}
        with self._explaining(self.root):
            for work in self._send(call, self.root, value):
                self._wait(work)
        return {}

    def _send(self, call: int, rank: int, value: Any) -> list[Any]:
        file = io.BytesIO()
        plain = (t.as_subclass(Tensor).clone() for t in value)  # a view would be sent with all that it is a view of
        torch.save((call, *plain), file)
        block = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        with self._explaining(rank):
            return [dist.isend(part, rank) for part in (torch.tensor([block.numel()]), block)]

    def _take(self, call: int, rank: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        with self._explaining(rank):
            self._wait(dist.irecv(length, rank))
            block = torch.empty(int(length), dtype=torch.uint8)
            self._wait(dist.irecv(block, rank))
        there, *value = torch.load(io.BytesIO(block.numpy().data), weights_only=True)
        self._check_call(call, there)
        return value

    def _wait(self, work: Any) -> None:
        work.wait() if self.timeout is None else work.wait(timedelta(seconds=self.timeout))

    def _check_call(self, call: int, there: int) -> None:
        if there != call:
            raise UserError(
                f"{self}: rank {dist.get_rank()} is at call {call}, and another rank at call {there}: run the "
                "calls in the same order on all ranks, and their backwards in the opposite one"
            )

    @contextmanager
    def _explaining(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            late = "did not answer in time" if self.timeout is None else f"did not answer within {self.timeout:g} s"
            what = late if "Timed out" in str(error) else "has ended, or its connection is lost"
            raise UserError(
                f"{self}: rank {rank} {what}, while rank {dist.get_rank()} waited for it: call the layers equally "
                "often and in the same order on all their ranks, with one backward for each call"
            ) from error


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
            return _apply_broadcast(self, self._begin(), self._check_input(x))
        if rank not in self.ranks:
            return None
        call = self._begin()
        value, wanted = self.spread(call, None)
        self._check_wanted(call, bool(wanted))
        return _apply_take(self, call, value, bool(wanted), _anchor(bool(wanted)))


class Gather(_Layer):
    """Gives the values of `ranks` to the root, in this order; backward gives each rank the gradient of its value.

    On the root: `values = layer(x)`, a tuple. A root that is not one of `ranks` gives nothing, or a placeholder, which
    then is part of the graph: backward reaches it with gradient zero, after the gradients have gone to the ranks.
    On the other ranks: `layer(x)` is the placeholder, in the graph if any rank's value is. On a rank that has no part:
    None.
    """

    def forward(self, x: Any = None) -> tuple[Tensor, ...] | Tensor | None:
        self._check_world()
        rank = dist.get_rank()
        if rank not in (self.root, *self.ranks):
            return None
        if rank in self.ranks or x is not None:
            x = self._check_input(x)
        call = self._begin()
        own = x is not None and x.requires_grad
        if rank != self.root:
            self.collect(call, (x.detach().cpu(), torch.tensor(own)))
            (wanted,) = map(bool, self.spread(call, None))
            self._check_wanted(call, wanted)
            return _apply_give(self, call, wanted, x if own else _anchor(wanted))
        taken = self.collect(call, ())
        wants = {source: bool(wanted) for source, (_, wanted) in taken.items()}
        self.spread(call, (torch.tensor(any(wants.values())),))
        self._check_wanted(call, any(wants.values()))
        if rank in self.ranks:
            taken[rank] = [x.detach()]
        linked = x if own else _anchor(any(wants.values()))
        return _apply_collect(self, call, [taken[source][0] for source in self.ranks], wants, linked)


class _BroadcastFunction(torch.autograd.Function):
    """On the root: spreads x. Backward gathers the gradients and adds them in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, call: int, x: Tensor) -> Tensor:
        wanted = bool(ctx.needs_input_grad[2])
        layer.spread(call, (x.detach().cpu(), torch.tensor(wanted)))
        layer._link(ctx, call, x, wanted and bool(layer.others))
        return x.detach().clone() if layer.root in layer.ranks else x.new_zeros((), dtype=x.dtype.to_real())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, own: Tensor | None) -> tuple[Any, ...]:
        layer, zero = ctx.layer, ctx.layer._close(ctx)
        parts = layer.collect(ctx.call, ())
        parts[layer.root] = (own,) if own is not None and layer.root in layer.ranks else ()
        gradients = [parts[rank][0].to(zero.device) for rank in layer.ranks if len(parts[rank])]
        return None, None, reduce(torch.add, gradients) if gradients else zero


class _TakeFunction(torch.autograd.Function):
    """On another rank: the value of a broadcast. Backward gives the root its gradient."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, call: int, value: Tensor, wanted: bool, linked: Tensor) -> Tensor:
        layer._link(ctx, call, linked, wanted)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        zero = ctx.layer._close(ctx)
        ctx.layer.collect(ctx.call, () if gradient is None else (gradient.detach().cpu(),))
        return None, None, None, None, zero


class _GiveFunction(torch.autograd.Function):
    """On a rank whose value was gathered elsewhere: the placeholder. Backward takes the gradient of the value."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, call: int, awaited: bool, linked: Tensor) -> Tensor:
        layer._link(ctx, call, linked, awaited)
        return linked.new_zeros((), dtype=linked.dtype.to_real())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Any, ...]:
        zero = ctx.layer._close(ctx)
        taken = ctx.layer.hand_out(ctx.call, None)
        return None, None, None, taken[0].to(zero.device) if len(taken) else zero


class _CollectFunction(torch.autograd.Function):
    """On the root: the values of all ranks, as made from `linked`. Backward hands each its gradient."""

    @staticmethod
    def forward(
        ctx: Any, layer: _Layer, call: int, values: list[Tensor], wants: dict[int, bool], linked: Tensor
    ) -> tuple[Tensor, ...]:
        layer._link(ctx, call, linked, any(wants.values()))
        ctx.wants = wants
        copies = tuple(value.clone() for value in values)
        ctx.mark_non_differentiable(*(t for t in copies if not (t.is_floating_point() or t.is_complex())))
        return copies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        layer, total = ctx.layer, ctx.layer._close(ctx)
        by_rank = {rank: g for rank, g in zip(layer.ranks, gradients, strict=True) if g is not None}
        if any(ctx.wants.values()):
            wanted = {rank: (g.detach().cpu(),) for rank, g in by_rank.items() if ctx.wants.get(rank)}
            layer.hand_out(ctx.call, wanted)
        return None, None, None, None, by_rank.get(layer.root, total)


# torch has no annotations for `Function.apply`: its arguments are those of `forward` without `ctx`.
_apply_broadcast: Callable[[_Layer, int, Tensor], Tensor] = _BroadcastFunction.apply
_apply_take: Callable[[_Layer, int, Tensor, bool, Tensor], Tensor] = _TakeFunction.apply
_apply_give: Callable[[_Layer, int, bool, Tensor], Tensor] = _GiveFunction.apply
_apply_collect: Callable[[_Layer, int, list[Tensor], dict[int, bool], Tensor], tuple[Tensor, ...]]
_apply_collect = _CollectFunction.apply


def _anchor(wanted: bool) -> Tensor:
    """Something to have been made from, so that values from elsewhere require grad."""
    return torch.zeros((), requires_grad=wanted)
