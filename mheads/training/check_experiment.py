"""Checks that the network, the loss, the data and the config of an experiment fit each other."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import nn

from mheads.common import nested_values
from mheads.common.errors import UserError, warn
from mheads.common.nested_values import Value
from mheads.config.schema import Config
from mheads.data import Data
from mheads.data.batches import Batch, Reader
from mheads.losses import LOSSES, Loss
from mheads.losses.check_promises import check_promises
from mheads.problems import PROBABILITIES, Problem, are_probabilities, finds_objects, gives_numbers, is_single_label
from mheads.training.build_from_config import count_micro_batches
from mheads.trees.checks.hidden_randomness_and_state import LayerError
from mheads.trees.identical_members import are_parted_by_dropout, are_parted_by_freezing, find_identical_members
from mheads.trees.member_scores import OWN, answer_of, check_order
from mheads.trees.treenet import TreeNet

LARGE = 300  # root mean square of targets; those of the diabetes recipe, which are learned as they are, have 170
EXPECTED = 3  # examples of a class are enough to wonder that a test set has none of it


def check_test_examples(data: Data) -> None:
    if not len(data.test):
        raise UserError(f"{data.name} has no test examples to evaluate on; give some, or data.validation=N")


def probe_network(net: TreeNet, loss: Loss, data: Data) -> tuple[Batch, Value]:
    """The first two training examples, and what a member gives for them; raises if a tree would get them wrong."""
    batch = Reader(data.train, data.preprocess, np.arange(min(2, len(data.train))))()
    inputs = batch.network_inputs(net.dtype)
    if data.seen is not None and data.seen.kind == "tokens":
        inputs = inputs.clone()
        inputs[0, -1] = int(data.seen.high)  # that the network knows
    try:
        outputs = net.probe(inputs, batch.side_inputs())
    except LayerError as error:
        raise UserError(f"{error}{_hint(error, inputs, loss, data)}") from error
    check_order(outputs, net.network_name)
    return batch, outputs


def _hint(error: LayerError, inputs: torch.Tensor, loss: Loss, data: Data) -> str:
    """What may be the reason that a layer fails."""
    if loss.has_scores and isinstance(error.__cause__, TypeError | LookupError | AttributeError):
        # With a score the last layer gives a dict, which no later operation can take.
        return f"; it goes on with what its last layer gives. For loss {loss.name}, {OWN}"
    if inputs.dim() == 4 and inputs.shape[1] == 1 and error.shapes == [tuple(inputs.shape)]:
        return (
            " (examples [N, H, W] are taken as grey images [N, 1, H, W]; if they are sequences [N, C, T], begin with a "
            "layer that gives x.squeeze(1))"
        )
    if not inputs.is_floating_point():
        return f" ({data.name} holds {data.seen}; integers are tokens, and numbers are given as float32)"
    if isinstance(error.__cause__, RuntimeError | ValueError):
        first = inputs.dim() == 4 and error.shapes == [tuple(inputs.shape)]  # which looks at channels alone
        channels = f" model_args.channels={inputs.shape[1]}?" if first else ""
        if first and data.name in ("folder", "list"):
            channels = f"{channels.rstrip('?')}, or data.grey=true?"
        shape = tuple(inputs.shape[1:])
        return f" (an example of {data.name} has the shape {shape}: is the network made for it?{channels})"
    return ""


def check_single_examples(config: Config, net: TreeNet, data: Data) -> None:
    """Raises for batches of one example where a layer's statistics would be of one value (of an image they are not)."""
    if config.optim.batch_size > 1 or not net.batch_statistics_layers():
        return
    batch = Reader(data.train, data.preprocess, np.arange(1))()
    try:
        net.probe(batch.network_inputs(net.dtype), batch.side_inputs())
    except UserError as error:
        raise UserError(
            f"{error}; of a batch of one example it has no statistics: use a larger optim.batch_size, or a "
            "normalisation without batch statistics (GroupNorm)"
        ) from error


def check_views(config: Config, shape: tuple[int, ...], problem: Problem, side: Collection[str] | None) -> None:
    """Raises for views of examples that are no images, or whose answers would have to be moved along with them."""
    views, reason = config.eval.views, ""
    if not views:
        return
    far = max(abs(pixels) for view in views for pixels in (view.down, view.right))
    if len(shape) != 3:
        reason = f"are for images, and an example has the shape {shape}"
    elif side:
        reason = f"are for images alone, and there are side inputs: {', '.join(side)}"
    elif problem.answer_dims != 2 or config.data.problem == "examples":
        reason = "would be averaged pixel by pixel, and the pixels of a view are elsewhere"
    elif far >= min(shape[1:]):
        reason = f"move the image by up to {far} pixels, and it has {shape[1]} x {shape[2]}"
    if reason:
        raise UserError(f"eval.views {reason}: give eval.views=[]", key="eval.views")


def check_rows(net: TreeNet, batch: Batch, outputs: Value) -> None:
    if nested_values.num_rows(outputs) != batch.num_rows:
        raise UserError(
            f"{net.network_name} gives {nested_values.num_rows(outputs)} rows of outputs for {len(batch)} examples "
            f"with {batch.num_rows} targets: give one row per target"
        )


def check_outputs(net: TreeNet, data: Data, outputs: Value) -> None:
    doubt = _doubt_labels(data)
    try:
        data.problem.check_output(outputs, net.network_name, data.name)
    except UserError as error:
        error.hint = error.hint or (None if "are numbers" in str(error) else doubt)
        raise
    if doubt:
        warn(f"{data.name}: {doubt}")
    if is_single_label(data.problem) and are_probabilities(data.problem.answer(outputs)):
        warn(f"{net.network_name} gives {PROBABILITIES}")


def warn_of_absent_classes(config: Config, data: Data) -> None:
    """Warns of classes that the test set has and training has not, and of those that the test set should have.

    A small test set lacks some by chance: `EXPECTED` examples of a class would be there at the share of training.
    Nothing is said of examples that were held out or left out by a key.
    """
    train, test = data.train.targets, data.test.targets
    chosen = data.held_out is not None or config.data.limit is not None or _doubt_labels(data) is not None
    if not is_single_label(data.problem) or train.ndim > 1 or chosen:
        return
    names = data.problem.groups
    trained, tested = (np.bincount(labels, minlength=len(names)) for labels in (train, test))
    for absent, text in (
        ((trained == 0) & (tested > 0), "no training example has class {}, which the test set has"),
        ((tested == 0) & (trained * len(test) >= EXPECTED * len(train)), "the test set has no example of class {}"),
    ):
        if absent.any():
            lacking = [names[label] for label in np.flatnonzero(absent)]
            listed = ", ".join(lacking[:10]) + (f" and {len(lacking) - 10} more" if len(lacking) > 10 else "")
            warn(f"{data.name}: {text.format(listed)}: are labels or files missing?")


def warn_of_scale_of_targets(config: Config, loss: Loss, data: Data) -> None:
    """Warns of numbers that are far larger or smaller than what a new network gives, under our own losses."""
    known = loss.name in LOSSES and not loss.uses_own_code
    given = gives_numbers(data.problem) and config.data.problem != "examples"
    if not known or not given or config.data.normalize_targets:
        return
    targets = data.train.targets
    size = float(np.sqrt(np.einsum("nd,nd->", targets, targets, dtype=np.float64) / targets.size))
    if size > LARGE or 0 < size < 1 / LARGE:
        warn(
            f"{data.name}: the targets have a root mean square of {size:.3g}, and networks begin with answers near 1 "
            "or below: data.normalize_targets=true learns them with mean 0 and standard deviation 1, and gives answers "
            "in their own units"
        )


def warn_of_untaught_outputs(net: TreeNet, loss: Loss, problem: Problem, outputs: Value) -> None:
    """Warns of scores, and of values beside the answer, that no loss teaches."""
    answer, known = answer_of(outputs), loss.name in LOSSES and not loss.uses_own_code
    if answer is not outputs and known and not loss.has_scores:
        warn(
            f"{net.network_name} gives scores, but loss {loss.name} does not train them, so the members' "
            "probabilities have no meaning; give loss.scores=1 (in Python, the loss .with_scores()), or leave scores "
            "out"
        )
    values = len(nested_values.leaves(answer))
    if values > 1 and known and not finds_objects(problem) and not loss.learns_variances:
        warn(
            f"{net.network_name} gives {values} values, but loss {loss.name} uses only the first, the answer: layers "
            "that only the other values need do not learn. Give a loss or base_loss of your own that uses all values"
        )


def _doubt_labels(data: Data) -> str | None:
    """A question where classes are numbered, and no training example has the first."""
    classes = getattr(data.problem, "classes", ())
    if not is_single_label(data.problem) or classes != tuple(map(str, range(len(classes)))):
        return None
    labels = data.train.targets
    if labels.ndim > 1:  # probabilities of classes
        return None
    return None if (labels == 0).any() else "no training example has class 0: do labels start at 1?"


def check_whole_batches(config: Config, net: TreeNet, loss: Loss) -> None:
    """Raises if the loss of an example depends on others and these would be in another part of the step."""
    each = loss.each_batch or not loss.whole_batch or config.optim.accumulate == 1
    parts = count_micro_batches(config, net, loss) * (1 if each else config.optim.accumulate)
    if not (loss.whole_batch or loss.base_loss_of_whole_batch) or parts == 1:
        return
    why = " (loss.normalize=wins counts over them)" if config.loss.whole_batch else ""
    asked = config.engine.micro_batches
    remedies = [] if asked in ("auto", 1) else [f"engine.micro_batches=1 (it is {asked})"]
    remedies += [] if each else [f"optim.accumulate=1 (it is {config.optim.accumulate})"]
    who = f"base_loss = {loss.base_loss_name}" if loss.base_loss_of_whole_batch else loss.name
    raise UserError(
        f"{who} looks at whole batches{why}, but a {'batch' if each else 'step'} is cut into {parts} parts: use "
        f"{' and '.join(remedies)}"
    )


def check_weights_on_examples(loss: Loss, data: Data) -> None:
    if loss.averaged and data.weights is not None:
        raise UserError(f"{loss.name} averages the members and cannot take weights on examples: leave weights out")


def check_gradients(
    config: Config,
    net: TreeNet,
    loss: Loss,
    data: Data,
    sample_weights: np.ndarray | None,
    batch: Batch,
    outputs: Value,
) -> None:
    """Raises if the loss breaks its promises, or if members would stay identical for ever."""
    iterations = config.optim.iterations
    last = loss.at(iterations - 1, iterations, net.num_members)  # it may begin by teaching all alike
    weighted = sample_weights is not None or data.weights is not None
    gradients = check_promises(last, outputs, batch.targets, net.num_members, weighted)
    if not all(torch.allclose(g, g[:1], rtol=1e-5) for g in gradients):
        return  # the loss tells members apart
    for a, b in find_identical_members(net):
        if sample_weights is not None and not np.array_equal(sample_weights[a], sample_weights[b]):
            continue
        if not are_parted_by_dropout(net, a, b) and not are_parted_by_freezing(net, a, b):
            raise _identical_members(config, net, loss, a, b)


def _identical_members(config: Config, net: TreeNet, loss: Loss, a: int, b: int) -> UserError:
    remedy = "sampling=bagging, dropout, or loss.name=mcl"
    if net.init == "same":
        return UserError(
            f"init=same with {loss.name} would keep the members identical for ever: every one gets the same gradient "
            f"from the same weights. Use init=random, {remedy}"
        )
    if isinstance(net.factory, nn.Module):
        return UserError(
            f"the TreeNet was given a network, so all members begin as copies of it, and {loss.name} would keep them "
            "identical for ever: give it the function that builds the network, TreeNet(build, ...) and not "
            f"TreeNet(build(), ...), or use {remedy}"
        )
    why = f"Does {net.network_name} seed torch itself, load weights or fill in constants? Let it draw its weights"
    if config.init_members is not None and config.init_members[a] is not None:
        why = f"init_members = {config.init_members} names member {config.init_members[a]} for both. Give null for one"
    return UserError(
        f"members {a} and {b} start with the same weights, and {loss.name} would keep them identical for ever: every "
        f"one gets the same gradient. {why}, or use {remedy}"
    )
