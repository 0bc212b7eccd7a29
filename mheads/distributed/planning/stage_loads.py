"""How long a stage takes: counted from the shapes of its layers, or measured on this machine.

Either way looks at one network only, whatever the size of the tree: stages of the same layers take equally long.
"""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mheads.common import nested_values
from mheads.common.modules import children, trainable
from mheads.common.nested_values import Value
from mheads.distributed.planning.workload import Workload
from mheads.engine.cost import costs_on
from mheads.engine.memory import keep_freed_memory
from mheads.engine.stages import StageFacts
from mheads.engine.tape import Context, record
from mheads.optim.optim_section import OptimOptions
from mheads.optim.stage_updates import Optimizer
from mheads.trees.splitting.cut_sequential import SequentialStage
from mheads.trees.tree_spec import Node, Tree
from mheads.trees.treenet import TreeNet


@dataclass(frozen=True)
class StageLoad:
    """Seconds per row on one core, floats per row that the stage hands on, its parameters, seconds to update them."""

    forward: float
    backward: float
    output_floats: int
    parameters: int
    update: float = 0.0


def count_loads(workload: Workload, net: TreeNet, example: Tensor, flops: float) -> dict[str, StageLoad]:
    """Loads from counted multiply-adds, on cores of `flops` operations per second; `example` [1, ...] is any."""
    loads = {}
    for node, piece, x in _pieces(workload.tree, net, example):
        cost = costs_on(piece, x)["trunk"]
        backward = cost.step(node.parent is None) - cost.forward
        part = 1.0 if node.children else workload.share
        loads[node.layers] = StageLoad(
            2 * cost.forward / flops, part * 2 * backward / flops, cost.output_floats, piece.num_parameters()
        )
    return {name: loads[node.layers] for name, node in workload.tree.nodes.items()}


def measure_loads(workload: Workload, net: TreeNet, example: Tensor, seconds: float = 0.4) -> dict[str, StageLoad]:
    """Loads on this machine: the best of a few timed micro-batches on one core, in the shape of an `example` [1, ...].

    The update is that of SGD with momentum: with many parameters and few rows it matters. Counted loads leave it out.
    Each distinct piece takes about `seconds`, or two turns if one takes longer.
    """
    keep_freed_memory()  # as the engine does
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = -(-workload.rows // workload.micro_batches)
    loads = {}
    batch = torch.cat([example] * rows)
    batch = torch.randn_like(batch) if batch.is_floating_point() else batch
    try:
        for node, piece, x in _pieces(workload.tree, net, batch):
            part = 1.0 if node.children else workload.share
            own = -(-rows // workload.pieces_by_stage[node.name])
            x = nested_values.map_leaves(lambda t, own=own: t[:own], x)
            forward, backward, floats = _measure(piece.train(), x, node.parent is not None, part, seconds)
            loads[node.layers] = StageLoad(
                forward / own, backward / own, floats // own, piece.num_parameters(), _measure_update(piece)
            )
    finally:
        torch.set_num_threads(threads)
    return {name: loads[node.layers] for name, node in workload.tree.nodes.items()}


def _pieces(tree: Tree, of: TreeNet, x: Value) -> Iterator[tuple[Node, TreeNet, Value]]:
    """Each distinct piece in the tree: a node that has it, a net of this one stage, and what it is given."""
    network = copy.deepcopy(of.network())  # running a layer may change it: batch statistics, modes
    outputs: dict[tuple[str, ...], Value] = {(): x}
    for node in tree.nodes.values():
        if node.layers in outputs:
            continue
        stage = of.chain.stage(node.layers, network)
        piece = (
            nn.Sequential(OrderedDict(children(stage))) if isinstance(stage, SequentialStage) else nn.Sequential(stage)
        )
        net = TreeNet(partial(_return_network, piece), members=1)
        given = outputs[tree.nodes[node.parent].layers if node.parent else ()]
        with torch.no_grad():
            outputs[node.layers] = net.eval().stage("trunk")(given)
        yield node, net, given


def _return_network(network: nn.Module) -> nn.Module:
    return network


def _measure(net: TreeNet, x: Value, input_gradient: bool, share: float, seconds: float) -> tuple[float, float, int]:
    """Seconds of forward and backward on x, the first turn left out, and how many floats come out."""
    rows = nested_values.num_rows(x)
    learn = None if share >= 1 else torch.arange(rows) < max(1, round(share * rows))
    context = Context(("plan",), rows, {}, input_gradient)
    forward: list[float] = []
    backward: list[float] = []
    stage = StageFacts.of(net.stage("trunk"))
    kept = [torch.zeros_like(p) for p in stage.parameters]
    stop = time.perf_counter() + seconds
    while len(forward) < 2 or (len(forward) < 8 and time.perf_counter() < stop):
        start = time.perf_counter()
        tape = record(stage, x, context, None, share)
        forward.append(time.perf_counter() - start)
        floats = [torch.rand_like(t) if t.is_floating_point() else t for t in nested_values.leaves(tape.output)]
        d_output = nested_values.rebuild(tape.output, floats)
        if learn is not None:
            d_output = nested_values.map_leaves(lambda d: d * learn.view(-1, *(1,) * (d.dim() - 1)), d_output)
        start = time.perf_counter()
        _, gradients = tape.backward(d_output, learn)
        # The gradients of each micro-batch are added to others or kept: both are one pass over them.
        for place, gradient in zip(kept, gradients, strict=True):
            if gradient is not None:
                place.copy_(gradient)
        backward.append(time.perf_counter() - start)
        del gradients
    return min(forward[1:]), min(backward[1:]), sum(t.numel() for t in nested_values.leaves(tape.output))


def _measure_update(net: TreeNet) -> float:
    """Seconds of the optimizer, the first turns left out: the momentum is not there yet."""
    optimizer = Optimizer(net, OptimOptions(weight_decay=0.001))
    optimizer.set_rate(1e-9)
    gradients = [torch.zeros_like(p) for p in trainable(net.stage("trunk"))]
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        optimizer.update("trunk", gradients)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
