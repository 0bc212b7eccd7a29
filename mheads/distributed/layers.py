"""Broadcast and Gather: layers that carry values from process to process, and their gradients back.

For any network of a user who has called `torch.distributed.init_process_group("gloo")`. A trunk on rank 0, a branch on
each of three ranks, and the loss on rank 0:

    broadcast, gather = Broadcast(0, [0, 1, 2]), Gather(0, [0, 1, 2])

    rank 0:          h = broadcast(trunk(x)); outputs = gather(branch(h)); loss(outputs, y).backward()
    ranks 1 and 2:   h = broadcast();         gather(branch(h)).backward()

A rank whose part of the graph ends in a layer gets a scalar zero, the placeholder, whose backward runs that part.

Every rank calls `backward` on its own, and the layers wait for each other there. A value that a rank does not use, or
takes under `no_grad`, has gradient zero: the rank says so at once, or when it lets go of the value, or when it goes on
to the layer's next value while the sender waits for this gradient. (A rank that keeps an unused value and does not call
the layer again cannot be told from a slow one: `del` the value, or give the layer a `timeout` in seconds, after which
the error names the rank.) A gradient that nobody asks for is an error.

Layers talk over the default group, point to point: there is no group to create or to free. Layers of equal kind, root
and ranks must be constructed in the same order on each of their ranks (others may leave them out) and called equally
often; beyond that the order of calls may differ from rank to rank, since sending never waits. One thread at a time may
use a layer. Values arrive on the CPU, in the layout they were sent in.
"""

from __future__ import annotations

import multiprocessing.util
import sys
import threading
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mheads.distributed import wire
from mheads.distributed.wire import Frame, Note, Outbox
from mheads.errors import UserError

TAGS = 1 << 30  # smaller tags are left to others
VALUE, NOTE, GRADIENT = range(3)  # what goes under one layer's tags
PATIENCE = 1.0  # seconds after which a rank that waits for a gradient says so

_outbox = Outbox()
_numbers: Counter[str] = Counter()  # how many layers of a kind, root and ranks this process has
_debts: weakref.WeakValueDictionary[tuple[str, int, int], _Debt] = weakref.WeakValueDictionary()


def finish() -> None:
    """Waits until all that this process has sent has been taken. No backward may follow.

    A process that ends does so by itself.
    """
    for debt in list(_debts.values()):
        debt.settle()
    _outbox.settle(most=0)


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
        return {key: value for key, value in self.__dict__.items() if key != "_post"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enter()  # a copy is a further layer: it must not answer for the original

    def _enter(self) -> None:
        self._post = _Post(repr(self), self.timeout)

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
        return x


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
            return self._give(self._check_input(x))
        if rank not in self.ranks:
            return None
        value, debt = self._post.receive(self._post.begin(), self.root)
        if debt is None:
            return value

        def backward(gradient: Tensor | None) -> list[None]:
            debt.pay(gradient)
            return [None]

        return _connect([value], backward)[0]

    def _give(self, x: Tensor) -> Tensor:
        others = [rank for rank in self.ranks if rank != self.root]
        claim = self._post.send(self._post.begin(), x, others)
        y = x.detach().clone() if self.root in self.ranks else x.new_zeros(())
        if claim is None:
            return y
        zeros = _zeros(x)

        def backward(gradient: Tensor | None) -> list[Tensor]:
            received = claim.take()
            parts = [gradient if rank == self.root else received[rank] for rank in self.ranks]
            found = [part for part in parts if part is not None]
            return [reduce(torch.add, found) if found else zeros()]

        return _connect([y], backward, x)[0]


class Gather(_Layer):
    """Gives the values of `ranks` to the root, in this order; backward gives each rank the gradient of its value.

    On the root: `values = layer(x)`, a tuple. A root that is not one of `ranks` gives nothing, or a placeholder, which
    then is part of the graph: backward reaches it with gradient zero, after the gradients have gone to the ranks.
    On the other ranks: `layer(x)` is the placeholder. On a rank that has no part: None.
    """

    def forward(self, x: Any = None) -> tuple[Tensor, ...] | Tensor | None:
        self._check_world()
        rank = dist.get_rank()
        if rank == self.root:
            return self._collect(x)
        if rank not in self.ranks:
            return None
        x = self._check_input(x)
        claim = self._post.send(self._post.begin(), x, [self.root])
        if claim is None:
            return x.new_zeros(())
        zeros = _zeros(x)

        def backward(_: Tensor | None) -> list[Tensor]:
            gradient = claim.take()[self.root]
            return [zeros() if gradient is None else gradient]

        return _connect([x.new_zeros(())], backward, x)[0]

    def _collect(self, x: Any) -> tuple[Tensor, ...]:
        if self.root in self.ranks or x is not None:
            x = self._check_input(x)
        call = self._post.begin()
        values, debts = [], []
        for rank in self.ranks:
            value, debt = (x.detach().clone(), None) if rank == self.root else self._post.receive(call, rank)
            values.append(value)
            debts.append(debt)
        linked = torch.is_grad_enabled() and x is not None and x.requires_grad
        if not linked and not any(debts):
            return tuple(values)
        zeros = _zeros(x) if linked else None

        def backward(*gradients: Tensor | None) -> list[Tensor | None]:
            own = None
            for rank, debt, gradient in zip(self.ranks, debts, gradients, strict=True):
                if rank == self.root:
                    own = gradient
                elif debt is not None:
                    debt.pay(gradient)
            if zeros is None:
                return [None]
            return [zeros() if own is None else own]

        return _connect(values, backward, x if linked else None)


class _Post:
    """The messages of one layer.

    A value comes with word whether its gradient is wanted. If so, each receiver answers once for each call: a note
    (call, whether there is a gradient), then the gradient. The numbers of the calls bring gradients to the right one,
    since backward runs through two calls in reverse. The note's place is open before the value is sent, so that it may
    be sent whether or not anybody will ask for it.

    Who waits long for an answer sends a reminder in the place of its next value. A receiver that gets it waits for that
    value, and neither would ever go on: so its answer is that there is no gradient.
    """

    def __init__(self, layer: str, timeout: float | None) -> None:
        self.layer, self.timeout = layer, timeout
        self.name = f"{layer} #{_numbers[layer]}"
        _numbers[layer] += 1
        self.tag = TAGS + 4 * (zlib.crc32(self.name.encode()) >> 4)
        self.calls = 0
        self.dropped: deque[tuple[int, list[int]]] = deque()  # (call, peers) whose answers nobody will ask for
        self._abandoned: set[tuple[int, int]] = set()  # of them the (peer, call) that have not come
        self._notes: dict[int, deque[Note]] = {}
        self._answers: dict[tuple[int, int], deque[Tensor | None]] = {}
        self._reminders: dict[int, deque[tuple[int, wire.Posted]]] = {}  # to a peer, each before the value of a call
        _finish_at_exit()

    def begin(self) -> int:
        """The number of a new call."""
        with self._explaining("take what was sent to it"):
            _outbox.settle()
        self._forget()
        for peer, notes in self._notes.items():
            while notes and notes[0].seems_here():
                self._hear(peer)
        self.calls += 1
        return self.calls - 1

    def send(self, call: int, x: Tensor, peers: list[int]) -> _Claim | None:
        """Sends a copy to the peers; a claim on its gradients if these are wanted."""
        wanted = torch.is_grad_enabled() and x.requires_grad
        frame = Frame([self.name, call, wanted], x.detach().to("cpu", copy=True))
        for peer in peers:
            if wanted:
                self._expect(peer)
            _outbox.put(partial(wire.post, frame, peer, self.tag + VALUE))
        return _Claim(self, call, peers, x.device) if wanted else None

    def receive(self, call: int, peer: int) -> tuple[Tensor, _Debt | None]:
        """The value that a peer sent, and if it wants the gradient and can get one, that debt."""
        with self._explaining(f"send the value of call {call}", "call the layer equally often on all its ranks"):
            frame = wire.take(peer, self.tag + VALUE, timeout=self.timeout)
            while frame.value is None:
                debt = _debts.get((self.name, peer, frame.key))
                if debt is not None:
                    debt.settle()
                frame = wire.take(peer, self.tag + VALUE, timeout=self.timeout)
        name, number, wanted = frame.key
        if (name, number) != (self.name, call):
            raise UserError(
                f"{self.layer}: rank {dist.get_rank()} expected call {call} of {self.name}, and rank {peer} sent call "
                f"{number} of {name}: construct the layers of equal root and ranks in the same order on these ranks"
            )
        debt = _Debt(self, call, peer) if wanted else None
        if debt is not None and not torch.is_grad_enabled():
            debt.settle()
            debt = None
        return frame.value, debt

    def answer(self, call: int, peer: int, gradient: Tensor | None) -> None:
        note = (call, int(gradient is not None))
        _outbox.put(partial(wire.post_note, note, peer, self.tag + NOTE), vital=False)
        if gradient is not None:
            frame = Frame(None, gradient.detach().to("cpu", copy=True))
            _outbox.put(partial(wire.post, frame, peer, self.tag + GRADIENT))

    def ask(self, call: int, peer: int) -> Tensor | None:
        """The gradient that a peer has for a call, waited for; None stands for zero."""
        self._forget()
        while (peer, call) not in self._answers:
            if not self._notes.get(peer):  # a second backward through one graph
                self._expect(peer)
            with self._reminding(peer, call):
                self._hear(peer)
        answers = self._answers[peer, call]
        gradient = answers.popleft()
        if not answers:
            del self._answers[peer, call]
        return gradient

    def _expect(self, peer: int) -> None:
        self._notes.setdefault(peer, deque()).append(Note(peer, self.tag + NOTE))

    def _hear(self, peer: int) -> None:
        """Takes the next answer of a peer, to whichever call."""
        with self._explaining(
            "send a gradient", "run backward on the same calls on all ranks, and let go (`del`) of values not used"
        ):
            call, has_gradient = self._notes[peer].popleft().wait(self.timeout)
            gradient = wire.take(peer, self.tag + GRADIENT, timeout=self.timeout).value if has_gradient else None
        reminders = self._reminders.get(peer)
        while reminders and reminders[0][0] <= call:  # it was taken before the value of this call
            reminders.popleft()
        if (peer, call) in self._abandoned:
            self._abandoned.remove((peer, call))
            self._refuse(peer, call, gradient)
        else:
            self._answers.setdefault((peer, call), deque()).append(gradient)

    def _forget(self) -> None:
        """Calls whose output was let go without a backward: their answers are to be thrown away."""
        while self.dropped:
            call, peers = self.dropped.popleft()
            for peer in peers:
                if (peer, call) in self._answers:
                    for gradient in self._answers.pop((peer, call)):
                        self._refuse(peer, call, gradient)
                else:
                    self._abandoned.add((peer, call))

    def _refuse(self, peer: int, call: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            me = dist.get_rank()
            raise UserError(
                f"{self.layer}: rank {peer} sent the gradient of call {call}, but rank {me} has let go of what that "
                f"call gave, without a backward: rank {me} must call backward on it or on something made from it"
            )

    @contextmanager
    def _reminding(self, peer: int, call: int) -> Iterator[None]:
        """Says after a while that this rank waits for an answer."""

        def remind() -> None:
            reminder = wire.post(Frame(call), peer, self.tag + VALUE)
            self._reminders.setdefault(peer, deque()).append((self.calls, reminder))

        timer = threading.Timer(PATIENCE, _outbox.put, [remind])
        timer.daemon = True
        if not self._notes[peer][0].seems_here():
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def _explaining(self, what: str, remedy: str = "see how that rank ended") -> Iterator[None]:
        try:
            yield
        except wire.PeerError as error:
            raise UserError(
                f"{self.layer}: {error}; rank {dist.get_rank()} waited for it to {what}: {remedy}"
            ) from error


class _Claim:
    """The answers that a sender is to get for a call. Let go unused, they are not waited for."""

    def __init__(self, post: _Post, call: int, peers: list[int], device: torch.device) -> None:
        self.post, self.call, self.peers, self.device = post, call, peers, device
        self.used = False

    def take(self) -> dict[int, Tensor | None]:
        self.used = True
        found = {peer: self.post.ask(self.call, peer) for peer in self.peers}
        return {peer: None if g is None else g.to(self.device) for peer, g in found.items()}

    def __del__(self) -> None:
        if not self.used:
            self.post.dropped.append((self.call, self.peers))


class _Debt:
    """The answer that a receiver owes for a call. Let go unpaid, it pays with word that there is no gradient."""

    def __init__(self, post: _Post, call: int, peer: int) -> None:
        self.post, self.call, self.peer = post, call, peer
        self.paid = self.closed = False
        _debts[post.name, peer, call] = self

    def pay(self, gradient: Tensor | None) -> None:
        if self.closed:
            raise UserError(
                f"{self.post.layer}: this backward comes too late for call {self.call}: rank {self.peer} waited for it "
                f"and rank {dist.get_rank()} went on to the next call, or to its end: run backward before that"
            )
        self.paid = True
        self.post.answer(self.call, self.peer, gradient)

    def settle(self) -> None:
        """There is no gradient, and there will be none."""
        if not self.paid:
            self.pay(None)
            self.closed = True

    __del__ = settle


class _Node(torch.autograd.Function):
    """A node of the graph with these outputs, whose backward is the given function. The graph owns that function."""

    @staticmethod
    def forward(ctx: Any, outputs: list[Tensor], backward: Callable[..., list[Any]], _: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.function = backward
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.function(*gradients)


def _connect(outputs: list[Tensor], backward: Callable[..., list[Any]], x: Tensor | None = None) -> tuple[Tensor, ...]:
    """The outputs as made from x, or from something that only lets them require grad."""
    return _Node.apply(outputs, backward, torch.zeros((), requires_grad=True) if x is None else x)


def _zeros(x: Tensor) -> Callable[[], Tensor]:
    """Makes a gradient of nothing for x, without holding x."""
    return partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device)


@cache
def _finish_at_exit() -> None:
    # Not atexit, which processes of multiprocessing skip.
    multiprocessing.util.Finalize(None, _at_exit, exitpriority=1)


def _at_exit() -> None:
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
    if not failed:  # else it ends at once, so that its peers notice
        try:
            finish()
            _outbox.close()
        except Exception as lost:
            print(f"mheads: {lost}: what was sent to it is lost", file=sys.stderr)
    _outbox.closed = True
