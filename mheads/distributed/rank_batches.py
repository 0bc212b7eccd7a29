"""Who reads the examples: each rank what it needs, or the main rank for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mheads.common import nested_values
from mheads.common.nested_values import Value
from mheads.common.number_ranges import cuts
from mheads.data import Preprocess
from mheads.data.batches import Batch, BatchStream
from mheads.distributed.planning.placement import Division
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
