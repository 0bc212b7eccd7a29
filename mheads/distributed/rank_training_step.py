"""The tasks of a step and of an evaluation that belong to one rank, and what the ranks exchange between them.

down   the output of a shared stage, all-gathered to the ranks that hold it, round by round: in round j each rank
       gives its j-th micro-batch
loss   the outputs of the members on a micro-batch, all-gathered; every rank then computes the loss by itself
up     the gradients of a shared stage's output: each goes to the rank that runs the micro-batch (all-to-all)
sum    the gradients of a stage's weights, summed over all ranks that share it
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.memory_layout import canonical
from mheads.common.nested_values import Value
from mheads.data.batches import Batch
from mheads.distributed.collectives import Group, add_fast, add_ordered, as_bytes, exchange, subtrees
from mheads.distributed.planning.placement import Division
from mheads.distributed.shared_outputs import Key, SharedOutputs
from mheads.engine.gradient_sums import Gradients, PairwiseSum
from mheads.engine.training_step import BACKWARD, FORWARD, LOSS, PREPARE, TrainingStep, add_in_order
from mheads.losses import Loss
from mheads.trees.tree_spec import Node

if TYPE_CHECKING:
    from mheads.distributed.ranks_engine import RanksEngine

Roots = list[tuple[range, Gradients]]


class SubtreeSums:
    """The sums of a rank's subtrees of the pairwise tree over the micro-batches; complete when each is."""

    def __init__(self, parts: int, own: range, first: int) -> None:
        self.first = first
        self.roots = subtrees(parts, own)
        self._sums = [PairwiseSum(len(root)) for root in self.roots]
        self._lock, self._done = threading.Lock(), Roots()

    def add(self, index: int, gradients: Gradients) -> Any:
        """Takes entry `index`, counted from `first`; returns all sums once they are complete."""
        i = index + self.first
        k = next(k for k, root in enumerate(self.roots) if i in root)
        total = self._sums[k].add(i - self.roots[k].start, gradients)
        if total is None:
            return None
        with self._lock:
            self._done.append((self.roots[k], total))
            return self._done if len(self._done) == len(self.roots) else None


class RankStep(TrainingStep):
    """The tasks of a step that belong to this rank."""

    def __init__(self, engine: RanksEngine, step: int, batch: Batch, loss: Loss, division: Division) -> None:
        self.engine, self.division, self.me = engine, division, engine.world.rank
        spawn, share = engine.workers.spawn, division.share(self.me)
        super().__init__(
            engine.stages, loss, batch, division.parts, step, spawn, engine.gradients, engine.options, share
        )
        self.down = SharedOutputs(engine, division, self.deliver)
        runs = {name: division.runs(name, self.me) for name in self.stages.facts}
        sums: Any = {name: SubtreeSums(division.parts, own, share.start) for name, own in runs.items()}
        self.sums = sums
        self._shared_outputs: dict[tuple[str, int], Value] = {}
        self._terms: dict[Key, dict[tuple[int, str], Value]] = defaultdict(dict)
        self._here = [leaf.name for leaf in self.stages.here(tuple(leaf.name for leaf in self.tree.leaves))]
        self._turn = division.turns(self.me)
        self._plan()

    def _plan(self) -> None:
        """Plans the collectives of the step, in an order that is the same on all ranks."""
        engine, depth = self.engine, self.engine.depth
        self._ups = {
            name: [dict.fromkeys(engine.replica_group(name).ranks, i) for i in self.mine]
            if self.division.whole
            else self.division.rounds(name, self.me)
            for name, node in self.tree.nodes.items()
            if node.children and name in self.stages and engine.is_shared(name)
            and (self.stages.statistics or self.stages.wanted[node.children[0]])
        }  # fmt: skip
        planned = self.down.keys()
        planned += [
            ((2, -depth[name], j, name), ("up", name, j)) for name, ups in self._ups.items() for j in range(len(ups))
        ]
        if not self.loss.separable and len(engine.loss_group) > 1:
            planned += [((1, self._turn[i]), ("loss", i)) for i in self.mine]
        self._summed = set() if self.division.whole else self._shared_weights()
        planned += [((3, -depth[name], name), ("sum", name)) for name in self._summed]
        if self.stages.statistics:  # micro-batches follow one another
            planned = [((key[2] if key[0] == "up" else self._turn[key[1]], *order), key) for order, key in planned]
        elif self.loss.separable:  # so do members that have nothing in common
            planned = [((self.stages.groups[key[1]], *order), key) for order, key in planned]
        engine.workers.hold(len(planned))
        engine.collectives.plan(key for _, key in sorted(planned))

    def _shared_weights(self) -> set[str]:
        """The stages here whose gradients other ranks have a part of."""
        return {n for n, facts in self.stages.facts.items() if facts.parameters and len(self.engine.sum_group(n)) > 1}

    def start(self) -> None:
        self.down.start()
        for name, ups in self._ups.items():
            for j in range(len(ups)):
                if not self._awaited(name, j):
                    self._offer_up(name, j)
        for name in self._summed:
            if not self.division.runs(name, self.me):
                self.keep(name, [])
        if not self._here and not self.loss.separable:
            for i in self.mine:
                self._offer_loss(i)
        own = [i for i in self.mine if any(i in self.division.runs(root.name, self.me) for root in self.stages.roots)]
        for i in own[:1] if self.stages.statistics else own:
            self._spawn(PREPARE, i, None, self.prepare)

    def _spawn(self, phase: int, i: int, node: Node | None, function: Callable[..., None], *args: object) -> None:
        """Shared stages run first, since others wait for them, and are taken back last, while gradients travel."""
        group = self.stages.groups[node.name] if node is not None and self.loss.separable else 0
        wide = node is not None and self.stages[node.name].threads > self.stages.threads
        shared = phase == PREPARE or (node is not None and node.name in self.down.rounds)
        when = 0 if not shared else 1 if phase == BACKWARD else -1
        self.spawn(
            (group, when, self._turn[i], phase), function, i, *(() if node is None else (node,)), *args, wide=wide
        )

    def prepare(self, i: int) -> None:
        x = self.batches[i].network_inputs(self.dtype)
        for root in self.stages.roots:
            if i in self.division.runs(root.name, self.me):
                self._spawn(FORWARD, i, root, self.forward, x)

    # Outputs go down.

    def hand_down(self, i: int, node: Node, output: Value) -> None:
        if not self.stages.wanted[node.children[0]] and not self.stages.statistics:
            self._tapes.pop((node.name, i))  # nothing is ever taken back
        if node.name in self.down.rounds:
            self.down.give(i, node, output)
        else:
            self.deliver(i, node, output)

    def deliver(self, i: int, node: Node, output: Value) -> None:
        if node.name in self._ups:
            self._shared_outputs[node.name, i] = nested_values.map_leaves(lambda t: t.to("meta"), output)
        for child in self.stages.here(node.children):
            if i in self.division.runs(child.name, self.me):
                self._spawn(FORWARD, i, child, self.forward, output)

    # The loss.

    def hand_over(self, i: int, leaf: Node, output: Value) -> None:
        if len(self.engine.loss_group) == 1:
            super().hand_over(i, leaf, output)
            return
        with self._lock:
            self._outputs[i].append((leaf, output))
            complete = len(self._outputs[i]) == len(self._here)
        if complete:
            self._offer_loss(i)

    def _offer_loss(self, i: int) -> None:
        own = {leaf.name: output for leaf, output in self._outputs[i]}

        def run() -> None:
            outputs: dict[str, Value] = {}
            for value in self.engine.gathering.gather("loss", self.engine.loss_group, own):
                outputs |= self.engine.to_device(value)
            self._outputs[i] = [(self.stages.nodes[name], output) for name, output in (outputs | own).items()]
            self._spawn(LOSS, i, None, self.apply_loss)
            self.engine.workers.release()

        self.engine.collectives.offer(("loss", i), run)

    def hand_back(self, i: int, leaf: Node, d_output: Value, learn: Tensor | None) -> None:
        if leaf.name in self.stages:
            super().hand_back(i, leaf, d_output, learn)

    # Gradients of outputs go up.

    def hand_up(self, i: int, node: Node, d_input: Value) -> None:
        assert node.parent is not None
        if node.parent not in self._ups:
            if self.stages.wanted[node.name] or self.stages.statistics:
                super().hand_up(i, node, d_input)
            return
        if self.division.owner(node.name, i) != self.me:
            return  # of those that run it whole, the first one gives it
        j = next(j for j, owned in enumerate(self._ups[node.parent]) if i in owned.values())
        with self._lock:
            terms = self._terms[node.parent, j]
            terms[i, node.name] = d_input
            complete = len(terms) == len(self._awaited(node.parent, j))
        if complete:
            self._offer_up(node.parent, j)

    def _awaited(self, name: str, j: int) -> list[tuple[int, str]]:
        """The gradients that this rank gives in a round: micro-batch and child of each."""
        return [
            (i, child)
            for i in sorted(set(self._ups[name][j].values()))
            for term in self._terms_of(name, i, self.me)
            for child in term
        ]

    def _terms_of(self, name: str, i: int, rank: int) -> list[list[str]]:
        """The gradients that a rank gives for a micro-batch of a stage: the children whose sum each is."""
        terms = self.division.terms(self.tree.nodes[name].children, i).get(rank, [])
        if self.options.precision != torch.float32:  # the sum of all is rounded once
            terms = [[child] for term in terms for child in term]
        return terms

    def _offer_up(self, name: str, j: int) -> None:
        terms = self._terms.pop((name, j), {})
        run = self._gather_terms if self.division.whole else self._exchange_terms
        self.engine.collectives.offer(("up", name, j), lambda: run(name, j, terms))

    def _gather_terms(self, name: str, j: int, terms: dict[tuple[int, str], Value]) -> None:
        """Where every rank runs the stage whole, each gets the gradients of all children."""
        i = self.mine[j]
        own = {child: term for (_, child), term in terms.items()}
        arrived: dict[str, Value] = {}
        for value in self.engine.gathering.gather(("up", name), self.engine.replica_group(name), own):
            arrived |= self.engine.to_device(value)
        self.collect(i, self.tree.nodes[name], arrived | own)
        self.engine.workers.release()

    def _exchange_terms(self, name: str, j: int, terms: dict[tuple[int, str], Value]) -> None:
        """Gives each rank the gradients for the micro-batch that it runs, and takes those for its own."""
        engine, owned, group = self.engine, self._ups[name][j], self.engine.replica_group(name)
        added = {i: self._add_terms(name, i, terms) for i in owned.values()}
        given = {
            rank: torch.cat([_lay_out(value, self._shared_outputs[name, i]) for value in added[i].values()])
            for rank, i in owned.items()
            if rank != self.me and added[i]
        }
        mine, sizes = owned.get(self.me), {}
        if mine is not None:
            like = self._shared_outputs[name, mine]
            size = sum(t.nbytes for t in nested_values.leaves(like))
            sizes = {rank: size * len(self._terms_of(name, mine, rank)) for rank in group.ranks if rank != self.me}
        taken = exchange(group, given, sizes, engine.wire)
        if mine is not None:
            arrived = added[mine]
            for rank in sizes:
                parts = taken[rank].split(size) if sizes[rank] else ()
                for (first, *_), part in zip(self._terms_of(name, mine, rank), parts, strict=True):
                    arrived[first] = engine.to_device(_restore(part, like))
            parent = self.tree.nodes[name]
            self.collect(mine, parent, {child: arrived.get(child) for child in parent.children})
        engine.workers.release()

    def _add_terms(self, name: str, i: int, terms: dict[tuple[int, str], Value]) -> dict[str, Value]:
        """The gradients that this rank gives, by the first child of each."""
        return {
            term[0]: nested_values.map_leaves(add_in_order, *(terms[i, child] for child in term))
            if len(term) > 1
            else terms[i, term[0]]
            for term in self._terms_of(name, i, self.me)
        }

    # Gradients of weights are summed.

    def keep(self, name: str, total: Any) -> None:
        if name not in self._summed:
            ((_, gradients),) = total
            super().keep(name, gradients)
            return
        kept = self.gradients[name]
        roots: Roots = sorted(total, key=lambda root: root[0].start)

        def run() -> None:
            # -0.0 for a gradient that is not there: adding it changes nothing.
            own = [_flatten(kept, gradients).to(self.engine.wire) for _, gradients in roots]
            whole = self._sum(self.engine.sum_group(name), name, own, _flatten(kept, [None] * len(kept)))
            for tensor, piece in zip(kept, whole.split([k.numel() for k in kept]), strict=True):
                tensor.copy_(piece.view(tensor.shape))
            self.engine.workers.release()

        self.engine.collectives.offer(("sum", name), run)

    def _sum(self, group: Group, name: str, own: list[Tensor], like: Tensor) -> Tensor:
        if self.engine.sums == "fast":
            return add_fast(group, own, like, self.engine.wire)
        held = {rank: subtrees(self.division.parts, self.division.runs(name, rank)) for rank in group.ranks}
        return add_ordered(group, own, held, like, self.engine.wire)


def _flatten(kept: Sequence[Tensor], gradients: Gradients) -> Tensor:
    pairs = zip(kept, gradients, strict=True)
    return torch.cat([torch.full_like(k, -0.0).reshape(-1) if g is None else g.reshape(-1) for k, g in pairs])


def _lay_out(value: Value, like: Value) -> Tensor:
    """A gradient as bytes, in the dtype of the output that it belongs to and in canonical strides."""
    pairs = zip(nested_values.leaves(value), nested_values.leaves(like), strict=True)
    return torch.cat([as_bytes(canonical(t.to(form.dtype))) for t, form in pairs])


def _restore(part: Tensor, like: Value) -> Value:
    pieces = iter(part.split([t.nbytes for t in nested_values.leaves(like)]))

    def view(form: Tensor) -> Tensor:
        strides = canonical(torch.empty(form.shape, device="meta")).stride()
        piece = next(pieces)
        fits = piece.storage_offset() % form.element_size() == 0
        return torch.as_strided((piece if fits else piece.clone()).view(form.dtype), form.shape, strides)

    return nested_values.map_leaves(view, like)
