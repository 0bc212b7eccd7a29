"""Batches: what one training step works on, and the stream of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mheads import seeds, values
from mheads.data import Data, Split
from mheads.data.sampling import stream
from mheads.values import Value


@dataclass(frozen=True)
class Batch:
    """The examples of a step, or of one micro-batch of it. B rows, M members.

    `inputs` is what the data gives (pixels as uint8, say) and `preprocess` makes of it what the network takes; `prior`
    [M, B] says who may learn from what, None meaning all; `ties` [M, B] are the random keys that break ties; `side`
    holds side inputs of layers that ask for them. Inputs and side inputs may be those of some rows only, from
    `first_input` on, or None where they are not needed. A subclass with another rule for cutting overrides `cut`.
    """

    inputs: Value
    targets: Value
    preprocess: Callable[[Value, torch.dtype], Value]
    prior: Tensor | None = None
    ties: Tensor | None = None
    side: dict[str, Value] = field(default_factory=dict)
    first_input: int = 0

    def __len__(self) -> int:
        return len(self.targets)

    def cut(self, start: int, stop: int) -> Batch:
        """Rows start to stop - 1."""

        def rows(value: Value, first: int) -> Value:
            return None if value is None else values.map_leaves(lambda t: t[start - first : stop - first], value)

        return replace(
            self,
            inputs=rows(self.inputs, self.first_input),
            targets=rows(self.targets, 0),
            side=rows(self.side, self.first_input),
            first_input=0,
            prior=None if self.prior is None else self.prior[:, start:stop],
            ties=None if self.ties is None else self.ties[:, start:stop],
        )

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        if device.type == "cpu":
            return self

        def move(value: Value) -> Value:
            return None if value is None else values.map_leaves(lambda t: t.to(device, non_blocking=True), value)

        parts = {name: move(getattr(self, name)) for name in ("inputs", "targets", "prior", "ties", "side")}
        return replace(self, **parts)

    def network_inputs(self, dtype: torch.dtype) -> Value:
        return self.preprocess(self.inputs, dtype)


class Batches(Protocol):
    """The batches of a training."""

    def batch(self, step: int) -> Batch: ...
    def close(self) -> None: ...


class BatchStream:
    """The batch of any step, from the seed alone; the next one is read while this one is worked on.

    `inputs` are the rows of a batch whose inputs are wanted here, all by default.
    """

    def __init__(
        self,
        data: Data,
        seed: int,
        batch_size: int,
        members: int,
        prior: np.ndarray | None,
        inputs: range | None = None,
    ) -> None:
        self.data = data
        self.seed = seed
        self.batch_size = batch_size
        self.members = members
        self.prior = None if prior is None else torch.from_numpy(prior)
        self.inputs = range(batch_size) if inputs is None else inputs
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="mheads-reader")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def batch(self, step: int) -> Batch:
        ready = self._ahead
        self._ahead = None
        batch = ready[1].result() if ready is not None and ready[0] == step else self.read(step)
        self._ahead = (step + 1, self._reader.submit(self.read, step + 1))
        return batch

    def read(self, step: int) -> Batch:
        start = step * self.batch_size
        rows, _ = stream(self.seed, len(self.data.train), start, start + self.batch_size)
        # One seed an example, so that its augmentation does not depend on the batch it happens to be in.
        augmentation = seeds.numpy_generator(self.seed, "augment", step).integers(2**63, size=len(rows))
        wanted = slice(self.inputs.start, self.inputs.stop)
        return Batch(
            self._inputs(rows[wanted], augmentation[wanted]) if self.inputs else None,
            torch.from_numpy(self.data.train.targets[rows]),
            self.data.preprocess,
            prior=None if self.prior is None else self.prior[:, torch.from_numpy(rows)],
            ties=torch.rand(self.members, len(rows), generator=seeds.generator(self.seed, "ties", step)),
            first_input=self.inputs.start,
        )

    def _inputs(self, rows: np.ndarray, augmentation: np.ndarray) -> Value:
        raw = self.data.train.read(rows, augmentation)
        places = self.data.train.places(augmentation) if self.data.preprocess.has_mean_image else None
        return raw if places is None else (raw, places)

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class Reader:
    """Consecutive examples of a split, read when called."""

    split: Split
    preprocess: Callable[[Value, torch.dtype], Value]
    rows: np.ndarray

    @property
    def targets(self) -> Tensor:
        return torch.from_numpy(self.split.targets[self.rows])

    def __call__(self) -> Batch:
        return Batch(self.split.read(self.rows, None), self.targets, self.preprocess)


def evaluation_batches(split: Split, preprocess: Callable[[Value, torch.dtype], Value], rows: int) -> list[Reader]:
    """Readers of the split's consecutive batches of `rows` examples; the last may be shorter."""
    starts = range(0, len(split), rows)
    return [Reader(split, preprocess, np.arange(start, min(start + rows, len(split)))) for start in starts]
