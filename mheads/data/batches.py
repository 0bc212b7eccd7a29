"""Batches: what one training step works on, and the stream of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mheads.common import nested_values, seeds
from mheads.common.nested_values import Value
from mheads.data import Data, Split
from mheads.data.augmentation import alternate
from mheads.data.resampling import stream


@dataclass(frozen=True)
class Batch:
    """The examples of a step, or of one micro-batch of it. B rows, M members.

    `inputs` is what the data gives (pixels as uint8, say); `preprocess` turns it into what the network takes. Each
    example has one row of targets, or `counts[i]` of them. `sample_weights` [M, B] says who may learn from which row,
    None meaning all; `ties` [M, B] are the random keys that break ties; `side` holds side inputs of layers that ask for
    them. Inputs may be there for some examples only, from `first_input` on, or None where they are not needed.
    """

    inputs: Value
    targets: Value
    preprocess: Callable[[Value, torch.dtype], Value]
    sample_weights: Tensor | None = None
    ties: Tensor | None = None
    side: dict[str, Value] = field(default_factory=dict)
    first_input: int = 0
    counts: Tensor | None = None

    def __len__(self) -> int:
        """How many examples there are: a batch is cut between examples."""
        return self.num_rows if self.counts is None else len(self.counts)

    @property
    def num_rows(self) -> int:
        """How many rows the loss sees."""
        return nested_values.num_rows(self.targets)

    def rows(self, start: int, stop: int) -> slice:
        """The rows of the examples start to stop - 1."""
        if self.counts is None:
            return slice(start, stop)
        return slice(int(self.counts[:start].sum()), int(self.counts[:stop].sum()))

    def cut(self, start: int, stop: int) -> Batch:
        """The examples start to stop - 1."""
        rows, examples = self.rows(start, stop), slice(start - self.first_input, stop - self.first_input)

        def only(where: slice, value: Value) -> Value:
            return None if value is None else nested_values.map_leaves(lambda t: t[where], value)

        return replace(
            self,
            inputs=only(examples, self.inputs),
            first_input=0,
            targets=only(rows, self.targets),
            side=only(rows, self.side),
            counts=None if self.counts is None else self.counts[start:stop],
            sample_weights=None if self.sample_weights is None else self.sample_weights[:, rows],
            ties=None if self.ties is None else self.ties[:, rows],
        )

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        if device.type == "cpu":
            return self

        def move(value: Value) -> Value:
            return None if value is None else nested_values.map_leaves(lambda t: t.to(device, non_blocking=True), value)

        parts = {name: move(getattr(self, name)) for name in ("inputs", "targets", "sample_weights", "ties", "side")}
        return replace(self, **parts)  # counts stay on the CPU: Python reads them

    def network_inputs(self, dtype: torch.dtype) -> Value:
        return self.preprocess(self.inputs, dtype)

    def side_inputs(self) -> dict[str, Value]:
        """What layers can ask for: the side inputs, and `counts` where the examples have several rows."""
        return self.side if self.counts is None else {**self.side, "counts": self.counts}


class Batches(Protocol):
    """The batches of a training run."""

    def batch(self, step: int) -> Batch: ...
    def close(self) -> None: ...


class BatchStream:
    """Gives the batch of any step, from the seed alone; the next one is read while this one is worked on.

    `inputs` says for which examples of a batch inputs are wanted here; by default for all. `alternating`: an example is
    mirrored in every other epoch, beginning with the first or the second at random.
    """

    def __init__(
        self,
        data: Data,
        seed: int,
        batch_size: int,
        members: int,
        sample_weights: np.ndarray | None,
        inputs: range | None = None,
        alternating: bool = False,
    ) -> None:
        self.data = data
        self.seed = seed
        self.batch_size = batch_size
        self.members = members
        self.alternating = alternating
        self.sample_weights = None if sample_weights is None else torch.from_numpy(sample_weights)
        self.inputs = range(batch_size) if inputs is None else inputs
        # A thread begins with the intra-op threads of whoever set them last, which may be a worker.
        self._reader = ThreadPoolExecutor(1, "mheads-reader", _set_threads, (torch.get_num_threads(),))
        self._ahead: tuple[int, Future[Batch]] | None = None

    def batch(self, step: int) -> Batch:
        ready = self._ahead
        self._ahead = None
        batch = ready[1].result() if ready is not None and ready[0] == step else self.read(step)
        self._ahead = (step + 1, self._reader.submit(self.read, step + 1))
        return batch

    def read(self, step: int) -> Batch:
        start = step * self.batch_size
        rows, epochs = stream(self.seed, len(self.data.train), start, start + self.batch_size)
        # One seed per example, so that its augmentation does not depend on the batch it happens to be in.
        augmentation = seeds.numpy_generator(self.seed, "augment", step).integers(2**63, size=len(rows))
        if self.alternating:
            augmentation = alternate(augmentation, rows, epochs, seeds.derive(self.seed, "mirror"))
        target_rows = self.data.train.read_targets(rows, augmentation)
        sample_weights = None if self.sample_weights is None else self.sample_weights[:, torch.from_numpy(rows)]
        if sample_weights is not None and target_rows.counts is not None:
            sample_weights = sample_weights.repeat_interleave(target_rows.counts, 1)
        num_rows = nested_values.num_rows(target_rows.targets)
        wanted = slice(self.inputs.start, self.inputs.stop)
        return Batch(
            self._inputs(rows[wanted], augmentation[wanted]) if self.inputs else None,
            target_rows.targets,
            self.data.preprocess,
            sample_weights=sample_weights,
            ties=torch.rand(self.members, num_rows, generator=seeds.generator(self.seed, "ties", step)),
            side=target_rows.side,
            first_input=self.inputs.start,
            counts=target_rows.counts,
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

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def targets(self) -> Value:
        return self.split.read_targets(self.rows, None).targets

    def __call__(self) -> Batch:
        inputs, target_rows = self.split.read(self.rows, None), self.split.read_targets(self.rows, None)
        return Batch(inputs, target_rows.targets, self.preprocess, side=target_rows.side, counts=target_rows.counts)


def evaluation_batches(split: Split, preprocess: Callable[[Value, torch.dtype], Value], rows: int) -> list[Reader]:
    """Readers of the split's consecutive batches of `rows` examples; the last may be shorter."""
    starts = range(0, len(split), rows)
    return [Reader(split, preprocess, np.arange(start, min(start + rows, len(split)))) for start in starts]


def _set_threads(count: int) -> None:
    torch.get_num_threads()  # which makes torch look at this thread: only then can its number be set
    torch.set_num_threads(count)
