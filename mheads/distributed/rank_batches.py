"""Who reads the examples: each rank what it needs, or the main rank for all."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from mheads import problems
from mheads.common import nested_values
from mheads.common.nested_values import Value
from mheads.common.number_ranges import cuts
from mheads.data import Data, Preprocess
from mheads.data.batches import Batch, BatchStream
from mheads.data.splits import TargetRows
from mheads.distributed.placement import Placement
from mheads.distributed.process_group import World
from mheads.trees.tree_spec import Tree

if TYPE_CHECKING:
    from mheads.distributed.ranks_engine import RanksEngine

# What every rank gets of a batch, beside the inputs of some examples.
SENT = ("targets", "sample_weights", "ties", "side", "counts")


class SendingStream(BatchStream):
    """The main rank reads every batch and sends each rank what it needs of it, as soon as it is read."""

    def __init__(self, engine: RanksEngine, stream: BatchStream, needs: dict[int, range]) -> None:
        sample_weights = None if stream.sample_weights is None else stream.sample_weights.numpy()
        super().__init__(
            stream.data,
            stream.seed,
            stream.batch_size,
            stream.members,
            sample_weights,
            alternating=stream.alternating,
        )
        self.engine, self.needs = engine, needs

    def read(self, step: int) -> Batch:
        batch = super().read(step)
        for rank, rows in self.needs.items():
            inputs = (
                nested_values.map_leaves(lambda t, rows=rows: t[rows.start : rows.stop], batch.inputs) if rows else None
            )
            parts = {"inputs": inputs, **{name: getattr(batch, name) for name in SENT}}
            there = {name: part for name, part in parts.items() if part is not None}
            self.engine.courier.send(rank, [f"batch {step}", rows.start], there)
        return batch


class ReceivedStream:
    """Batches that the main rank has read."""

    def __init__(self, engine: RanksEngine, preprocess: Callable[[Value, torch.dtype], Value]) -> None:
        self.engine, self.preprocess = engine, preprocess

    def batch(self, step: int) -> Batch:
        (((first,), value),) = self.engine.hear(f"batch {step}", 1)
        return Batch(**{"inputs": None, **value}, preprocess=self.preprocess, first_input=first)

    def close(self) -> None:
        pass


def inputs_needed(tree: Tree, placement: Placement, rank: int, batch_size: int, parts: int) -> range:
    """The examples of a batch whose inputs a rank needs: those of its micro-batches, if it has a root."""
    roots = {root.name for root in tree.roots}
    if not roots & set(placement.stages_on(rank)):
        return range(0)
    size = parts // placement.replicas
    slices = cuts(batch_size, parts)[placement.replica(rank) * size :][:size]
    return range(slices[0][0], slices[-1][1])


def facts_of(data: Data) -> dict[str, Any]:
    return {
        "name": data.name,
        "problem": data.problem.to_dict(),
        "scale": data.preprocess.scale,
        "bgr": data.preprocess.bgr,
        "tensors": base64.b64encode(save_tensors(data.preprocess.tensors())).decode(),
        "shape": list(data.train.shape),
        "fingerprint": data.fingerprint,
        "train": len(data.train),
        "test": len(data.test),
    }


def absent_data(world: World) -> Data:
    """What is known of data that only the main rank reads."""
    facts = world.share("data", dict)
    tensors = load_tensors(base64.b64decode(facts["tensors"]))
    preprocess = Preprocess.from_tensors(tensors, facts["scale"], facts["bgr"])
    shape = tuple(facts["shape"])
    train, test = (AbsentSplit(facts[name], shape) for name in ("train", "test"))
    problem = problems.from_dict(facts["problem"])
    return Data(facts["name"], train, test, problem, preprocess, facts["fingerprint"])


class AbsentSplit:
    """Examples that are on another rank."""

    def __init__(self, length: int, shape: tuple[int, ...]) -> None:
        self.targets = np.zeros(length, np.int64)
        self.shape = shape

    def __len__(self) -> int:
        return len(self.targets)

    def without_augmentation(self) -> Self:
        return self

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        raise AssertionError("data.reader is lead: only rank 0 reads")

    def read_targets(self, rows: np.ndarray, seeds: np.ndarray | None) -> TargetRows:
        raise AssertionError("data.reader is lead: only rank 0 reads")

    def places(self, seeds: np.ndarray) -> torch.Tensor | None:
        return None
