"""Batches: what one training step works on, and the stream of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

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
    holds side inputs of layers that ask for them. A subclass with another rule for cutting overrides `cut`.
    """

    inputs: Value
    targets: Value
    preprocess: Callable[[Value, torch.dtype], Value]
    prior: Tensor | None = None
    ties: Tensor | None = None
    side: dict[str, Value] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.targets)

    def cut(self, start: int, stop: int) -> Batch:
        """Rows start to stop - 1."""

        def rows(value: Value) -> Value:
            return values.map_leaves(lambda t: t[start:stop], value)

        return replace(
            self,
            inputs=rows(self.inputs),
            targets=rows(self.targets),
            side=rows(self.side),
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


class BatchStream:
    """The batch of any step, from the seed alone; the next one is read while this one is worked on."""

    def __init__(self, data: Data, seed: int, batch_size: int, members: int, prior: np.ndarray | None) -> None:
        self.data = data
        self.seed = seed
        self.batch_size = batch_size
        self.members = members
        self.prior = None if prior is None else torch.from_numpy(prior)
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
        targets = torch.from_numpy(self.data.train.labels[rows])
        return Batch(
            self.data.train.read(rows, augmentation),
            targets,
            self.data.preprocess,
            prior=None if self.prior is None else self.prior[:, torch.from_numpy(rows)],
            ties=torch.rand(self.members, len(rows), generator=seeds.generator(self.seed, "ties", step)),
        )

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)


def evaluation_batches(
    split: Split, preprocess: Callable[[Value, torch.dtype], Value], rows: int
) -> list[Callable[[], Batch]]:
    """Readers of the split's consecutive batches of `rows` examples; the last may be shorter."""

    def reader(start: int) -> Callable[[], Batch]:
        stop = min(start + rows, len(split))

        def read() -> Batch:
            where = np.arange(start, stop)
            return Batch(split.read(where, None), torch.from_numpy(split.labels[where]), preprocess)

        return read

    return [reader(start) for start in range(0, len(split), rows)]
