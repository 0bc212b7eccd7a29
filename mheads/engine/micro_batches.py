"""How a step cuts its batch: into micro-batches, and each of these into pieces for the stages that members share."""

from __future__ import annotations

import math

from mheads.common.errors import UserError
from mheads.common.number_ranges import cuts
from mheads.trees.tree_spec import Tree
from mheads.trees.treenet import TreeNet


def auto_micro_batches(batch_size: int, net: TreeNet, cores: int = 2) -> int:
    """How many micro-batches a batch is cut into: a pure rule on sizes and `engine.cores`, never on the machine.

    About 80 rows keep the working set in cache and the matrix products efficient. A power of two, so that the fixed
    pairwise sums divide evenly among two, four, ... replicas; two from 114 rows on, so that a single model uses two
    cores. More than two cores need as many tasks, of at least 16 rows, as the stages that see the data do not make by
    their number. Batch statistics need the whole batch; of images with regions, each is one.
    """
    if net.batch_statistics_layers():
        return 1
    if "counts" in net.facts.side_inputs:
        return batch_size
    by_rows = max(0, round(math.log2(batch_size / 80)))
    by_cores = min(math.ceil(math.log2(cores / len(net.tree.roots))), int(math.log2(max(1, batch_size / 16))))
    count: int = 2 ** (by_rows if cores <= 2 else max(by_rows, by_cores))
    return count


def check_micro_batches(net: TreeNet, micro_batches: int, pieces: int = 1) -> None:
    """Refuses to cut a batch over which a layer takes statistics, and pieces whose outputs cannot be joined."""
    if pieces > 1 and net.facts.side_inputs:
        names = ", ".join(sorted(net.facts.side_inputs))
        raise UserError(
            f"engine.shared_micro_batches is {micro_batches * pieces}, but the network takes side inputs ({names}): "
            "its layers may give more or fewer rows than there are examples, and pieces of these cannot be joined; use "
            "auto",
            key="engine.shared_micro_batches",
        )
    layers = net.batch_statistics_layers()
    asked = {"engine.micro_batches": micro_batches, "engine.shared_micro_batches": micro_batches * pieces}
    for key, count in asked.items():
        if layers and count > 1:
            raise UserError(
                f"{key} is {count}, but {layers[0]} needs the statistics of the whole batch; use {key}=1 or auto, or a "
                "normalisation without batch statistics (GroupNorm)",
                key=key,
            )


class Pieces(dict[str, int]):
    """Into how many pieces the stages that members share cut each micro-batch, by name; other stages run it whole.

    Where a stage counts pieces, piece j of micro-batch i is number i * pieces + j.
    """

    def __missing__(self, stage: str) -> int:
        return 1

    def of(self, stage: str, i: int) -> range:
        """What a stage runs of micro-batch i: its pieces, or itself."""
        return range(i * self[stage], (i + 1) * self[stage])

    def whole(self, stage: str, i: int) -> int:
        """The micro-batch that this is, or is a piece of."""
        return i // self[stage]

    def below(self, stage: str, child: str, i: int) -> int:
        """What a child runs with the output of a stage on its i: the same, or the micro-batch that it is a piece of."""
        return i * self[child] // self[stage]


def count_pieces(tree: Tree, pieces: int, num_examples: int, micro_batches: int) -> Pieces:
    """A short batch has fewer, since no piece is empty."""
    pieces = min(pieces, num_examples // micro_batches)
    return Pieces({name: pieces for name, node in tree.nodes.items() if node.children} if pieces > 1 else {})


def cut_pieces(num_examples: int, micro_batches: int, pieces: int) -> list[tuple[int, int]]:
    """The examples of every piece of every micro-batch."""
    return [
        (start + a, start + b)
        for start, stop in cuts(num_examples, micro_batches)
        for a, b in cuts(stop - start, pieces)
    ]
