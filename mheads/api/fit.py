"""Trains a tree of members in Python: `mheads.fit`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from mheads import data as datasets
from mheads.api.fit_keywords import (
    CONFIG_KEYS,
    DEFAULTS,
    ConfigKeywords,
    check_keywords,
    list_config_keywords,
    refuse_positional_examples,
    speaking_python,
)
from mheads.api.fit_start import check_not_failed, digest_start, set_init
from mheads.api.run import Run, Temporary, open_run, remember_start
from mheads.common import fingerprint
from mheads.common.errors import UserError, did_you_mean
from mheads.common.progress import Watcher, watcher
from mheads.common.safe_yaml import as_plain
from mheads.config import schema
from mheads.config.options_without_effect import check_idle_keys
from mheads.config.read import validate
from mheads.config.schema import Config
from mheads.distributed.launcher import detect
from mheads.losses import BASE_LOSSES, LOSSES, Loss, base_loss, independent
from mheads.runs.folder import RunFolder
from mheads.training.experiment import Experiment, assemble_experiment
from mheads.training.loop import Stopped, train_config
from mheads.trees.treenet import TreeNet

Examples = Any  # (inputs, labels) as arrays or tensors, a list of pairs, a torch Dataset or DataLoader
ITERATIONS = 1000
TORCH_LOSSES = {  # what torch calls the base losses, as classes and as functions
    "MSELoss": "mse",
    "mse_loss": "mse",
    "L1Loss": "mae",
    "l1_loss": "mae",
    "SmoothL1Loss": "smooth_l1",
    "smooth_l1_loss": "smooth_l1",
    "CrossEntropyLoss": "cross_entropy",
    "cross_entropy": "cross_entropy",
    "BCEWithLogitsLoss": "bce",
    "binary_cross_entropy_with_logits": "bce",
}
DATA_KEYWORDS = (
    *("problem", "normalize", "normalize_targets", "scale", "pad", "padding", "mirror", "validation", "calibration"),
)


class Interrupted(KeyboardInterrupt):
    """Raised by Ctrl-C in fit, once the current step is finished and saved; `run` is the run so far.

    It is None where no step was waited for, before the first one or at a second Ctrl-C: nothing was saved by that.
    """

    def __init__(self, message: str, run: Run | None) -> None:
        super().__init__(message)
        self.run = run


@list_config_keywords
@refuse_positional_examples
def fit(
    net: TreeNet | nn.Module,
    loss: Loss | str | Callable[..., Any] | None = None,
    *,
    train: Examples,
    test: Examples | None = None,
    iterations: int | None = None,
    epochs: float | None = None,
    folder: str | Path | None = None,
    init: str | Path | Mapping[str, Tensor] | TreeNet | Run | None = None,
    init_map: Mapping[str, str | None] | None = None,
    freeze: Sequence[str] | None = None,
    sampling: str | dict[str, Any] | Any = "full",
    teacher: dict[str, Any] | Any = None,
    classes: Sequence[str] | None = None,
    weights: Any = None,
    log: dict[str, Any] | None = None,
    show: bool | None = None,
    **options: Unpack[ConfigKeywords],
) -> Run:
    """Trains a tree of members on labelled examples.

    `train` and `test` are (inputs, labels), lists of pairs, torch Datasets or DataLoaders; labels are class numbers or
    names, or other targets, which `problem` names where they alone do not decide (docs/data.md). Without a test set a
    tenth of the training set is held out; `validation=n` holds out the last n. `weights` [N] weigh training examples.
    `loss` is a loss, its name, a function of outputs and labels, or None for independent cross-entropy. `sampling` says
    who learns from which examples, as in a config, or as an array [M, N] of sample weights. `teacher` are probabilities
    [N, C] to be learned beside the labels, or `{"answers": probabilities, "weight": 0.5, "temperature": 2}`.
    `iterations` counts steps (1,000 by default), `epochs` passes over the training set. `folder` is the run folder, and
    the same call on the same folder resumes; without it nothing outlives the run that is returned. `init` is where
    weights come from, if not from the net: a file, a state dict, the folder of a run, a run, or another tree;
    `init_map` maps name prefixes in a file or state dict to prefixes in this network, None skips them. `freeze` names
    stages or layers that do not learn in this call. `show` shows progress or not; by default where somebody looks. The
    other keywords are keys of the config (docs/configuration.md): `optimizer` is `optim.name`, `schedule="cosine"` or
    `{"name": "step", "every": 500}`, `log={"evaluate_every": 100}`.

    Ctrl-C finishes the step, saves, and raises a KeyboardInterrupt whose attribute `run` is the run so far, or None
    before the first step and at a second Ctrl-C.
    """
    check_keywords(options, fit)
    net, iterations, epochs = _check_net(net), as_plain(iterations), as_plain(epochs)
    _check_types(folder, init_map, log, options, iterations, epochs)
    run_folder = None if folder is None else RunFolder(Path(os.path.expanduser(folder)))
    keywords, watch = DEFAULTS | dict(options), watcher(show)
    with speaking_python(), _freeze(net, freeze):
        loss, teacher = as_loss(loss), _as_teacher(teacher)
        array = None if isinstance(sampling, str | Mapping) else sampling
        arrays = {key: keywords[key] for key in DATA_KEYWORDS}
        data = datasets.from_arrays(train, test, classes=classes, weights=weights, hold_out=keywords["seed"], **arrays)
        count = _count_iterations(iterations, epochs, len(data.train), keywords)
        own = {"init_map": dict(init_map or {}), "sampling": sampling if array is None else "array", "log": log or {}}
        config = _make_config(net, loss, teacher, count, keywords, own)
        _check_idle_keys(config, run_folder)
        # Only now: a call that raises for what it asks has changed nothing.
        config = config.model_copy(update={"init": set_init(net, init, run_folder, watch, init_map)})
        check_not_failed(net, run_folder)
        experiment = assemble_experiment(config, net, loss, data, array=array, answers=teacher.get("answers"))
        return _train(experiment, run_folder, watch)


def _check_net(net: TreeNet | nn.Module) -> TreeNet:
    """The net; raises unless `fit` can train it here and now."""
    if not isinstance(net, TreeNet):
        raise UserError(f"fit trains a TreeNet, not a {type(net).__name__}: mheads.TreeNet(factory, members=...)")
    launch = detect()
    if launch is not None and launch.size > 1:
        raise UserError(
            f"fit trains in one process, but {launch.launcher} started {launch.size}: write a recipe with your network "
            "(model: package.module:factory) and start mheads train with it"
        )
    # Contexts that the caller may have forgotten, and that fit could not honour.
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise UserError("fit is called under torch.no_grad() or inference_mode(), but has to learn: call it outside")
    if any(tensor.is_inference() for tensor in net.state_dict().values()):
        raise UserError("the net was built or copied under torch.inference_mode(), and cannot learn: build it outside")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UserError("fit is called under torch.autocast, which does not reach its threads: call it outside")
    return net


def _check_types(
    folder: Any, init_map: Any, log: Any, options: Mapping[str, Any], iterations: Any, epochs: Any
) -> None:
    if iterations is not None and epochs is not None:
        raise UserError(f"iterations={iterations} and epochs={epochs} say the same thing twice: give one of them")
    if epochs is not None and not (isinstance(epochs, int | float) and 0 < epochs < math.inf):
        raise UserError(f"epochs={epochs!r}: give a number above 0")
    schedule = options.get("schedule", "")
    for name, value, kinds, remedy in (
        ("folder", folder, str | Path | None, "the path of a folder"),
        ("schedule", schedule, str | Mapping, "a name such as 'cosine', or a dict such as {'name': 'step', ...}"),
        ("init_map", init_map, Mapping | None, "a dict such as {'backbone.': ''}"),
        ("log", log, Mapping | None, "a dict such as {'evaluate_every': 100}"),
    ):
        if not isinstance(value, kinds):
            raise UserError(f"{name}={value!r}: give {remedy}")


def _as_teacher(teacher: Any) -> dict[str, Any]:
    """The keys of the config's section; empty without a teacher."""
    if teacher is None:
        return {}
    section = dict(teacher) if isinstance(teacher, Mapping) else {"answers": teacher}
    if section and section.get("answers") is None:
        raise UserError(f"teacher={section!r} has no answers: give probabilities [N, C] under this name")
    return section


def _count_iterations(iterations: Any, epochs: Any, examples: int, keywords: Mapping[str, Any]) -> Any:
    sizes = as_plain([keywords["batch_size"], keywords["accumulate"]])
    if epochs is None or not all(isinstance(size, int | float) and size > 0 for size in sizes):  # or the config raises
        return ITERATIONS if iterations is None else iterations
    return max(1, math.ceil(epochs * examples / math.prod(sizes)))


def _make_config(
    net: TreeNet,
    loss: Loss,
    teacher: Mapping[str, Any],
    iterations: Any,
    keywords: Mapping[str, Any],
    own: Mapping[str, Any],
) -> Config:
    """The config of a call; `own` are keys that are given as they are."""
    # A loss of the user's own is kept as it is, not imported again.
    known = loss.name in LOSSES and not loss.has_own_function
    named = {"name": loss.name, **loss.options} if known else {"name": f"__main__:{loss.name}", "args": loss.options}
    countable = isinstance(iterations, int | float) and math.isfinite(iterations)  # or the config raises
    few = int(iterations) if countable else ITERATIONS
    tree: dict[str, Any] = {
        **own,
        "model": net.network_path,
        "model_args": net.network_args,
        "members": net.num_members,
        "split": net.spec,
        "freeze": list(net.frozen),
        "loss": {
            **named,
            "scores": loss.score_weight,
            "base_loss": base_loss.name_base_loss(loss.base_loss_function),
        },
        "teacher": {**teacher, "answers": "array"} if teacher else {},
        "data": {"name": "arrays"},
        "engine": {},
        "eval": {},
        "optim": {"iterations": iterations},
        "log": {"evaluate_every": max(1, few // 10), "every": max(1, min(50, few // 20)), **own["log"]},
    }
    for keyword, value in keywords.items():
        section, _, key = CONFIG_KEYS[keyword].rpartition(".")
        (tree[section] if section else tree)[key] = value
    return validate(tree, "fit")


def _check_idle_keys(config: Config, folder: RunFolder | None) -> None:
    """Raises for options that would do nothing, unless a run that an older version began resumes with them."""
    if folder is None or not folder.exists():
        keys = schema.differing(config, Config())
        check_idle_keys(config, [key for key in keys if not key.startswith("loss.")])  # of a loss that is made


def _train(experiment: Experiment, folder: RunFolder | None, watch: Watcher) -> Run:
    net, config = experiment.net, experiment.config
    temporary = Temporary() if folder is None else None
    folder = folder or RunFolder(temporary.path / "run")  # type: ignore[union-attr]
    if experiment.data.held_out is not None:
        watch.say(f"holding out {experiment.data.held_out}")
    held = fingerprint.weights(net.state_dict())
    if net.history.weights not in ("", held):  # given to the net since then, by load_state_dict or by hand
        net.history.iterations, net.history.data = 0, None
    before = 0 if folder.exists() else net.history.iterations
    if before:
        origin = f"starting from the weights that {before:,} iterations of an earlier fit left in this net"
        if net.history.weights and net.frozen == net.history.frozen:
            watch.warn(
                f"{origin}: build a new TreeNet to start afresh, or give init=net to continue without this warning"
            )
        else:  # a net that is made of another one, or whose other layers learn now, is meant to continue
            watch.say(origin)
    start = digest_start(net, folder)
    try:
        summary = train_config(config, folder, watch, lambda config: replace(experiment, config=config, start=start))
        net.history.iterations, net.history.failed = before + summary["iterations"], False
        net.history.frozen = net.frozen
        return open_run(folder, config, net, watch.warn, temporary)
    except KeyboardInterrupt:  # before the first step, or for the second time
        raise Interrupted("interrupted without waiting for the end of a step: nothing was saved by it", None) from None
    except Stopped as stop:
        net.history.iterations = before + stop.iteration
        so_far = open_run(folder, config, net, lambda message: None, temporary)
        kept = "the run so far is the attribute run of this exception"
        if temporary is None:
            kept = f"saved in {folder.path}; the same call resumes"
        raise Interrupted(f"{stop} after iteration {stop.iteration}: {kept}", so_far) from None
    except UserError:
        net.history.failed |= held != fingerprint.weights(net.state_dict())
        raise
    finally:
        remember_start(net, folder, start, config.init)


@contextmanager
def _freeze(net: TreeNet, names: Sequence[str] | None) -> Iterator[None]:
    """Inside, these stages and layers do not learn, or those of the net itself; afterwards those again."""
    before = net.frozen
    try:
        net.freeze(before if names is None else names)
        yield
    finally:
        net.freeze(before)


def as_loss(loss: Any) -> Loss:
    """The loss that a user means by a loss, its name, a function, or None."""
    if loss is None:
        return independent()
    if isinstance(loss, Loss):
        return loss
    known = ", ".join(f"mheads.losses.{name}()" for name in LOSSES)
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss]()
    kind = getattr(loss, "__name__", type(loss).__name__)
    of_torch = str(getattr(loss, "__module__", "")).startswith("torch.")
    name = loss if isinstance(loss, str) else TORCH_LOSSES.get(kind) if of_torch else None
    if name in BASE_LOSSES:
        raise UserError(
            f"loss={loss if isinstance(loss, str) else kind} is a base loss, that of one member on one example: give "
            f"mheads.losses.independent(base_loss={name!r}) or mheads.losses.mcl(k=1, base_loss={name!r}); by "
            "default numbers have mse, and classes cross_entropy"
        )
    if isinstance(loss, str):
        raise UserError(f"loss={loss!r} is not a loss{did_you_mean(loss, [*LOSSES])}; there are {', '.join(LOSSES)}")
    if loss in LOSSES.values():
        raise UserError(f"loss is the function {loss.__name__} itself: call it, mheads.losses.{loss.__name__}()")
    if callable(loss) and not type(loss).__module__.startswith("torch.") and not (of_torch and isinstance(loss, type)):
        return Loss(kind, loss)
    raise UserError(
        f"fit needs a loss over all members, not {kind}: {known}, or a function of outputs [M, B, C] and labels [B] "
        f"that gives losses [M, B]. The loss of one member is their base_loss: {', '.join(BASE_LOSSES)}"
    )
