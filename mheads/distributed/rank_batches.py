"""Who reads the examples: each rank what it needs, or the main rank for all."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
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
from mheads.distributed.planning.placement import Division
from mheads.distributed.process_group import World
from mheads.trees.tree_spec import Tree

if TYPE_CHECKING:
    from mheads.distributed.ranks_engine import RanksEngine


class SharedStream:
    """Batches that the main rank reads for all, ahead of time; each rank gets what it needs of them."""

    def __init__(
        self, engine: RanksEngine, stream: BatchStream | None, preprocess: Preprocess, needs: Callable[[int], range]
    ) -> None:
        self.engine, self.stream, self.preprocess, self.needs = engine, stream, preprocess, needs

    def batch(self, step: int) -> Batch:
        return replace(self.engine.scatter_objects(lambda: self._parts(step)), preprocess=self.preprocess)

    def _parts(self, step: int) -> list[Batch]:
        assert self.stream is not None
        batch = self.stream.batch(step)
        return [keep_inputs(batch, self.needs(rank)) for rank in range(self.engine.world.size)]

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()


def keep_inputs(batch: Batch, rows: range) -> Batch:
    """A batch as it is sent to a rank that needs the inputs of some examples; what prepares them is there already."""
    inputs = None
    if rows:  # a copy: a view would be sent with all that it is a view of
        inputs = nested_values.map_leaves(lambda t: t[rows.start : rows.stop].clone(), batch.inputs)
    return replace(batch, inputs=inputs, first_input=rows.start, preprocess=_unprepared)


def _unprepared(inputs: Value, dtype: torch.dtype) -> Value:
    raise AssertionError("a batch that was sent has no preprocessing yet")


def inputs_needed(tree: Tree, division: Division, rank: int, batch_size: int) -> range:
    """The examples of a batch whose inputs a rank needs: those of the micro-batches that it begins."""
    begun, slices = division.begins(tree, rank), cuts(batch_size, division.parts)
    return range(slices[begun[0]][0], slices[begun[-1]][1]) if begun else range(0)


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
