"""A net and a solver as a config: what `mheads convert` writes, and `mheads train NET.prototxt` trains.

The text of the net is in the config, so that a run folder needs no other file and a changed net is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mheads.caffe import objective, solver
from mheads.caffe.data_sources import (
    data_of,
    explain_apart,
    explain_unread,
    find_data_layers,
    find_test_layer,
    fit_data,
    shape_of,
)
from mheads.caffe.layers.layer_modules import Shape
from mheads.caffe.member_trees import plan_of
from mheads.caffe.net_plan import NetPlan
from mheads.caffe.prototxt import CaffeLayer, Solver, is_solver, read_net, read_solver
from mheads.common import atomic_files, safe_yaml
from mheads.common.errors import UserError
from mheads.config import read as configs
from mheads.config.schema import Config
from mheads.losses import LOSSES
from mheads.problems.metrics import LEAST_K

MODEL = "mheads.caffe.network:network"
FILLED = {
    "Convolution": "convolution_param", "Deconvolution": "convolution_param", "InnerProduct": "inner_product_param",
}  # fmt: skip


@dataclass
class Converted:
    """A config as plain data, and what there is to say about it."""

    tree: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    asks: str | None = None  # for data, where the net's own cannot be read


def load(net: Path, solver_file: Path | None = None, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """The config that a net is trained by, and notes on it; asks for data where the net's cannot be read."""
    converted = convert(net, solver_file, overrides)
    config = configs.validate(converted.tree, str(net))
    if converted.asks is not None:
        raise UserError(converted.asks)
    return config, converted.notes


def convert(net_file: str | Path, solver_file: str | Path | None = None, overrides: Sequence[str] = ()) -> Converted:
    """The config of a net and a solver, with config keys changed as `key=value` says.

    A solver alone will do, if it names its net.
    """
    tested = None
    if solver_file is None and is_solver(net_file):
        solver_file = net_file
        net_file, tested = read_solver(solver_file).nets()
    net = read_net(net_file)
    converted = Converted({"model": MODEL, "model_args": {"net": net.text}})
    tree, notes = converted.tree, converted.notes
    given = None if solver_file is None else read_solver(solver_file)
    state = {} if given is None else _state(given.message.train_state)
    tree["model_args"] |= state
    plan = plan_of(net, **state)
    tree["members"], tree["split"] = plan.members, plan.split
    layer = find_data_layers(plan)[0]
    testing = {} if given is None or not given.message.test_state else _state(given.message.test_state[0])
    tested_layer = find_test_layer(net if tested is None else read_net(tested), plan, **testing)
    tree["data"], batch = data_of(layer, tested_layer, plan, notes)
    net_data = dict(tree["data"])
    tree["optim"] = {"batch_size": batch} if batch else {}
    if given is not None:
        _add_solver(tree, given)
    for override in overrides:
        key, equals, value = override.partition("=")
        short = key in ("data", "loss", "optim.schedule") and not value.lstrip().startswith("{")
        configs.override(tree, f"{key}.name={value}" if equals and short else override)
    configs.validate(tree, str(net_file))  # refuses what is no section, before it is looked into
    given_keys = {key for override in overrides for key in configs.keys_of(override)}
    fit_data(tree["data"], net_data, given_keys, plan, notes)
    if "batch_size" not in tree["optim"]:
        size = Config().optim.batch_size
        notes.append(f"the net does not say how many examples a batch has: optim.batch_size={size} is taken")
    data = tree["data"]
    shape = shape_of(tree, layer)
    if data.get("name") is None:
        converted.asks = str(layer.refuse(explain_unread(layer)))
    elif (why := explain_apart(plan)) is not None:
        if "path" in net_data and data.get("path") == net_data["path"]:
            converted.asks = why
        else:
            notes.append(f"{why.partition(': here ')[0]}: those of {data['name']} are taken instead")
    if shape is None and converted.asks is None:
        converted.asks = (
            f"{net.file}: the shape of an example is not known: give it, such as model_args.shape=[3,32,32]"
        )
    if shape is not None:
        tree["model_args"]["shape"] = list(shape)
        _add_losses(tree, plan, shape, notes)
    if not tree.get("init"):
        _note_zeros(plan, notes)
    _note_tree(plan, notes)
    return converted


def _add_solver(tree: dict[str, Any], given: Solver) -> None:
    """The keys that a solver sets."""
    tree["optim"] |= solver.optim_of(given)
    tree["log"] = solver.log_of(given)
    if (seed := solver.seed_of(given)) is not None:
        tree["seed"] = seed
    if given.message.weights:
        if len(given.message.weights) > 1 or "," in given.message.weights[0]:
            raise given.refuse("weights", "several files: give one, or merge them")
        tree["init"] = given.message.weights[0]


def _state(state: Any) -> dict[str, Any]:
    """The stages and the level that a solver trains or tests in."""
    keys = {"stages": list(state.stage), "level": state.level}
    return {key: value for key, value in keys.items() if value}


def _add_losses(tree: dict[str, Any], plan: NetPlan, shape: Shape, notes: list[str]) -> None:
    """The loss of the config: the net's own, or the one that the user names over the net's own."""
    built, outputs = plan.build(shape)
    shapes = [built.shapes[blob] for blob in outputs]
    _note_accuracies(tree, plan, {b.name: s[1] for b, s in zip(plan.outputs, shapes, strict=True) if len(s) > 1}, notes)
    terms = plan.describe_terms(shapes)
    if not terms:
        return  # a net without a loss: what the data are decides
    batch = tree["optim"].get("batch_size", Config().optim.batch_size)
    own: dict[str, Any] = {"terms": terms}
    if any(term.get("normalization") == 3 for term in terms):
        own["batch"] = batch
    plain = objective.is_plain(terms, len(shapes[0]))
    whole = objective.needs_whole_batch(terms)
    function = f"mheads.caffe.objective:{'of_batch' if whole else 'of_example'}"
    base_loss = {} if plain else {"base_loss": {"name": function, **own}}
    if whole:
        parts = tree.setdefault("engine", {}).get("micro_batches", "auto")
        if parts not in ("auto", 1):
            raise UserError(
                f"engine.micro_batches = {parts}: the net's loss is divided by how many labels of a batch count, so "
                "that batches are not cut: leave it out"
            )
        tree["engine"]["micro_batches"] = 1
    loss = tree.get("loss", {})
    if "name" in loss:
        _mix_losses(loss, plan, base_loss, notes)
        return
    if plan.combine == "probabilities":
        tree["loss"] = {"name": "prob_averaged", "stable": False, "scale_rate": False}
    elif plan.combine == "mean" and not whole:
        tree["loss"] = {"name": "score_averaged", "scale_rate": False, **base_loss}
    elif plan.combine is not None:
        count = plan.members
        coefficients = [1 / count] * count if plan.combine == "mean" else list(plan.combine)
        arguments = {"coefficients": coefficients, **own}
        tree["loss"] = {"name": "mheads.caffe.objective:combined", "args": arguments, "scale_rate": False}
    elif whole:
        tree["loss"] = {"name": "mheads.caffe.objective:whole", "args": own}
    else:
        tree["loss"] = {"name": "independent", **base_loss}
    tree["loss"] |= loss


def _note_accuracies(tree: dict[str, Any], plan: NetPlan, classes: dict[str, int], notes: list[str]) -> None:
    for layer in plan.graph.net.layers:
        k = layer.message.accuracy_param.top_k
        if layer.type != "Accuracy" or k == 1:
            continue
        if k > classes.get(next(iter(layer.bottoms), ""), k):
            raise layer.refuse(f"top_k: {k} of {classes[layer.bottoms[0]]} classes: give at most as many")
        if k > (most := max(tree["members"], LEAST_K)):
            notes.append(
                f"{layer} of line {layer.line}: top_k: {k} is not measured; result.json has top_k up to {most}"
            )


def _mix_losses(loss: dict[str, Any], plan: NetPlan, base_loss: dict[str, Any], notes: list[str]) -> None:
    """Makes a loss that the user names one over the net's own, if it takes one for each example."""
    if not base_loss or "base_loss" in loss or plan.combine == "probabilities":  # plain cross-entropy is all there is
        return
    name = str(loss["name"])
    if name in LOSSES and LOSSES[name]().takes_base_loss:
        loss |= base_loss
        return
    own = ", ".join(f"{term.step.layer.name} of line {term.step.layer.line}" for term in plan.terms)
    notes.append(f"loss.name={name} says itself what an example costs: the net's losses ({own}) are left out")


def _note_zeros(plan: NetPlan, notes: list[str]) -> None:
    """Deployed nets and those to be fine-tuned have no fillers: Caffe's own is zero, with which nothing is learned."""
    zero = list(dict.fromkeys(step.layer.name for step in plan.steps if _starts_at_zero(step.layer)))
    if zero:
        some = ", ".join(zero[:3]) + (f" and {len(zero) - 3} more" if len(zero) > 3 else "")
        notes.append(
            f"layers without a weight_filler begin at zero, as in Caffe ({some}): give init=FILE.caffemodel, or fillers"
        )


def _starts_at_zero(layer: CaffeLayer) -> bool:
    parameter = FILLED.get(layer.type)
    return parameter is not None and not getattr(layer.message, parameter).HasField("weight_filler")


def _note_tree(plan: NetPlan, notes: list[str]) -> None:
    ranks = len(plan.graph.ranks)
    if ranks == 1:
        return
    if plan.members > 1:
        where = "with nothing in common" if plan.split is None else f"that share a tree: {plan.split}"
        notes.append(f"its {ranks} ranks are {plan.members} members {where}; any number of processes may train them")
    else:
        notes.append(
            f"its {ranks} ranks make no tree: the layers run as they are written, on {ranks} processes or all on one"
        )


# As a recipe.


class _RecipeDumper(safe_yaml.QuotingDumper):
    """Writes texts of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_RecipeDumper.add_representer(str, _text)


def to_yaml(converted: Converted, name: str) -> str:
    """A recipe: notes as comments, then the keys, the net as text that can be read and changed."""
    tree = {key: value for key, value in converted.tree.items() if value not in ({}, None)}
    arguments = tree.pop("model_args")
    text = "\n".join(line.expandtabs(2).rstrip() for line in arguments["net"].splitlines()).rstrip() + "\n"
    tree = {**tree, "model_args": {**{k: v for k, v in arguments.items() if k != "net"}, "net": text}}
    asked = [to_do(converted)] if converted.asks else []
    comments = "".join(f"# {line}\n" for line in (f"Made of {name}.", *converted.notes, *asked))
    return comments + yaml.dump(tree, Dumper=_RecipeDumper, sort_keys=False, width=110, allow_unicode=True)


def to_do(converted: Converted) -> str:
    """What the recipe still lacks. Without the shape of an example it has no loss either: conversion goes again."""
    again = "" if "shape" in converted.tree["model_args"] else "; convert again with it, since shapes and losses follow"
    return f"to do: {converted.asks}{again}"


def convert_files(net: Path, more: Sequence[str], output: Path | None) -> str | None:
    """What to print: the recipe of a net, its solver and overrides, or if it goes to a file what it still lacks."""
    files_of = [given for given in more if "=" not in given]
    if len(files_of) > 1:
        raise UserError(f"{', '.join(files_of)}: give one solver, and config keys as key=value")
    converted = convert(net, files_of[0] if files_of else None, [given for given in more if "=" in given])
    text = to_yaml(converted, " and ".join(Path(str(name)).name for name in (net, *files_of)))
    configs.validate(converted.tree, str(net))  # refused before anything is written
    if output is None:
        return text
    atomic_files.write_atomically(output, text.encode())
    return to_do(converted) if converted.asks else None
