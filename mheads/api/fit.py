"""Python's front door: fit, evaluate, load."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Never
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mheads import data as datasets
from mheads.api.fit_keywords import refuse_unknown, speaking_python
from mheads.api.foreign_models import outputs_of_all, outputs_of_one
from mheads.api.run import Run, Temporary, make_labelled_split, open_run
from mheads.common import fingerprint
from mheads.common.errors import UserError
from mheads.common.errors import warn as told
from mheads.common.nested_values import Value
from mheads.common.progress import Silent, Watcher, watcher
from mheads.common.safe_yaml import as_plain, short
from mheads.config import read as configs
from mheads.config import schema
from mheads.config.options_without_effect import refuse_idle_keys
from mheads.data import Preprocess
from mheads.data.batches import Batch
from mheads.distributed.launcher import detect
from mheads.engine.measure import Models, answers, in_eval_mode, measure
from mheads.losses import LOSSES, Loss, base_loss, independent
from mheads.problems import PROBABILITIES, are_probabilities, is_single_label
from mheads.runs.checkpoint import Checkpoints
from mheads.runs.folder import RunFolder
from mheads.training.build_from_config import build_net_of_run
from mheads.training.experiment import Experiment, assemble_experiment
from mheads.training.init_weights import check_state_dict, load_init, load_into
from mheads.training.loop import Stopped, train_config
from mheads.trees.treenet import TreeNet

Examples = Any  # (inputs, labels) as arrays or tensors, a list of pairs, a torch Dataset or DataLoader


class Interrupted(KeyboardInterrupt):
    """Raised by Ctrl-C in fit, once the current step is finished and saved; `run` is the run so far."""

    def __init__(self, message: str, run: Run | None) -> None:
        super().__init__(message)
        self.run = run


def fit(
    net: TreeNet | nn.Module,
    loss: Loss | str | Callable[..., Any] | None = None,
    *,
    train: Examples,
    test: Examples | None = None,
    iterations: int | None = None,
    epochs: float | None = None,
    run: str | Path | None = None,
    init: str | Path | Mapping[str, Tensor] | TreeNet | Run | None = None,
    init_map: Mapping[str, str | None] | None = None,
    freeze: Sequence[str] | None = None,
    show: bool | None = None,
    optimizer: str = "sgd",
    lr: float = 0.01,
    momentum: float = 0.9,
    nesterov: bool = False,
    caffe_momentum: bool = False,
    momentum2: float = 0.999,
    rms_decay: float = 0.99,
    delta: float = 1e-8,
    weight_decay: float = 0.0,
    regularization: str = "l2",
    clip: float | None = None,
    batch_size: int = 100,
    accumulate: int = 1,
    schedule: str | dict[str, Any] = "constant",
    scale_rate: bool = True,
    pretrain: int = 0,
    sampling: str | dict[str, Any] | Any = "full",
    teacher: dict[str, Any] | Any = None,
    classes: Sequence[str] | None = None,
    problem: str = "auto",
    normalize: str = "none",
    scale: float | str = "auto",
    pad: int = 0,
    mirror: bool = False,
    validation: int = 0,
    weights: Any = None,
    workers: int | str = "auto",
    micro_batches: int | str = "auto",
    device: str = "auto",
    seed: int = 0,
    log: dict[str, Any] | None = None,
    **unknown: Never,
) -> Run:
    """Trains a tree of members on labelled examples.

    `train` and `test` are (inputs, labels), lists of pairs, torch Datasets or DataLoaders; labels are class numbers or
    names, or other targets (docs/data.md): `problem` says what they are where they alone do not decide, as in
    `problem="soft_labels"`. Without a test set a tenth of the training set is held out, in proportion to the classes,
    drawn by the seed; `validation=n` holds out the last n. `weights` [N] say how much each training example
    counts. `scale` multiplies the inputs; auto brings uint8 to 0..1 and leaves floats alone.

    `loss` is a loss, its name, a function of outputs and labels, or None for independent cross-entropy.
    `sampling` says who learns from which examples: as in a config, or an array [M, N] of weights on the training
    examples.
    `teacher` is what an ensemble or another network answers to the training examples, probabilities [N, C] to be
    learned beside the labels, or `{"answers": probabilities, "weight": 0.5, "temperature": 2}`.
    `iterations` counts steps (1,000 by default); `epochs` is another way to say it: passes over the training set.
    `run` is a folder, and the same call on the same folder resumes; without it nothing is kept longer than the run
    that is returned. `init` is where the weights come from, if not from the net as it is: a file of weights, a
    state dict of one network or of the whole tree, the folder of a run, a run, or another tree; `init_map` says which
    beginnings of names in a file or state dict are others here, None to leave some out. `freeze` names stages or
    layers that do not learn here, instead of those that `net.freeze` named. `show` decides about progress in the
    terminal or the notebook; by default it is shown where somebody looks. The other keywords
    are keys of the config, under the same names (docs/configuration.md): `optimizer` is `optim.name`,
    `schedule="cosine"` or `{"name": "step", "every": 500}`, `log={"evaluate_every": 100}`.

    Ctrl-C finishes the step, saves, and raises a KeyboardInterrupt whose attribute `run` is the run so far.
    """
    refuse_unknown(unknown, fit)
    if not isinstance(net, TreeNet):
        raise UserError(f"fit trains a TreeNet, not a {type(net).__name__}: mheads.TreeNet(factory, members=...)")
    launch = detect()
    if launch is not None and launch.size > 1:
        raise UserError(
            f"fit trains in one process, but {launch.launcher} started {launch.size}: write a recipe with your network "
            "(model: package.module:factory) and start mheads train with it"
        )
    iterations, epochs, batch_size, accumulate = map(as_plain, (iterations, epochs, batch_size, accumulate))
    if iterations is not None and epochs is not None:
        raise UserError(f"iterations={iterations} and epochs={epochs} say the same thing twice: give one of them")
    if epochs is not None and not (isinstance(epochs, int | float) and 0 < epochs < math.inf):
        raise UserError(f"epochs={epochs!r}: give a number above 0")
    if run is not None and not isinstance(run, str | Path):
        raise UserError(f"run={run!r}: give the path of a folder")
    run = None if run is None else Path(os.path.expanduser(run))
    if not isinstance(schedule, str | Mapping):
        raise UserError(
            f"schedule={schedule!r}: give a name such as 'cosine', or a dict such as {{'name': 'step', ...}}"
        )
    if init_map is not None and not isinstance(init_map, Mapping):
        raise UserError(f"init_map={init_map!r}: give a dict such as {{'backbone.': ''}}")
    if log is not None and not isinstance(log, Mapping):
        raise UserError(f"log={log!r}: give a dict such as {{'evaluate_every': 100}}")
    _refuse_modes(net)
    watch = watcher(show)
    with speaking_python(), _frozen(net, freeze):
        loss = _as_loss(loss)
        given = None if isinstance(sampling, str | Mapping) else sampling
        taught = dict(teacher) if isinstance(teacher, Mapping) else {} if teacher is None else {"answers": teacher}
        answers = taught.get("answers")
        if taught and answers is None:
            raise UserError(f"teacher={taught!r} has no answers: give probabilities [N, C] under this name")
        known = loss.name in LOSSES  # a loss of the user's own is kept as it is, not imported again
        own = {"name": f"__main__:{loss.name}", "args": loss.options}
        arrays: dict[str, Any] = {
            "problem": problem, "normalize": normalize, "scale": scale, "pad": pad, "mirror": mirror,
        }  # fmt: skip
        data = datasets.from_arrays(
            train, test, classes=classes, validation=validation, hold_out=seed, weights=weights, **arrays
        )
        sizes = all(isinstance(size, int | float) and size > 0 for size in (batch_size, accumulate))  # or refused below
        if epochs is not None and sizes:
            iterations = max(1, math.ceil(epochs * len(data.train) / (batch_size * accumulate)))
        iterations = 1000 if iterations is None else iterations
        usable = isinstance(iterations, int | float) and math.isfinite(iterations)  # or refused below
        few = int(iterations) if usable else 1000
        log = {"evaluate_every": max(1, few // 10), "every": max(1, min(50, few // 20)), **(log or {})}
        config = configs.validate(
            {
                "model": net.network_path,
                "model_args": net.network_args,
                "members": net.num_members,
                "split": net.spec,
                "init_map": dict(init_map or {}),
                "freeze": list(net.frozen),
                "sampling": "array" if given is not None else sampling,
                "loss": {
                    **({"name": loss.name, **loss.options} if known else own),
                    "base_loss": base_loss.name_base_loss(loss.base_loss_function),
                    "scale_rate": scale_rate,
                },
                "teacher": taught | {"answers": "array"} if taught else {},
                "pretrain": pretrain,
                "data": {"name": "arrays", "validation": validation, **arrays},
                "engine": {"workers": workers, "micro_batches": micro_batches},
                "optim": {
                    "name": optimizer,
                    "lr": lr,
                    "momentum": momentum,
                    "nesterov": nesterov,
                    "caffe_momentum": caffe_momentum,
                    "momentum2": momentum2,
                    "rms_decay": rms_decay,
                    "delta": delta,
                    "weight_decay": weight_decay,
                    "regularization": regularization,
                    "clip": clip,
                    "batch_size": batch_size,
                    "accumulate": accumulate,
                    "iterations": iterations,
                    "schedule": schedule,
                },
                "log": log,
                "device": device,
                "seed": seed,
            },
            "fit",
        )
        if run is None or not RunFolder(run).exists():  # one that an older version began goes on
            given_keys = schema.differing(config, schema.Config())
            refuse_idle_keys(
                config, [key for key in given_keys if not key.startswith("loss.")]
            )  # of a loss that is made
        # Only now: a call that is refused for what it asks has changed nothing.
        config = config.model_copy(update={"init": _initialise(net, init, run, watch, init_map)})
        _refuse_failed(net, run)
        experiment = assemble_experiment(config, net, loss, data, array=given, answers=answers)
        return _train(experiment, run, watch)


def _train(experiment: Experiment, run: str | Path | None, watch: Watcher) -> Run:
    net, config = experiment.net, experiment.config
    temporary = Temporary() if run is None else None
    folder = RunFolder(Path(run) if run is not None else temporary.path / "run")  # type: ignore[union-attr]
    if experiment.data.held_out is not None:
        watch.say(f"holding out {experiment.data.held_out}")
    before = 0 if folder.exists() else net.trained
    if before:
        watch.say(f"going on from the weights that {before:,} iterations of an earlier fit left in this net")
    start = _start_of(net, folder)
    try:
        summary = train_config(config, folder, watch, lambda config: replace(experiment, start=start))
        net.trained = before + summary["iterations"]
        return open_run(folder, config, net, watch.warn, temporary)
    except KeyboardInterrupt:  # before the first step, or for the second time
        raise Interrupted("interrupted outside of a step: nothing was saved by it", None) from None
    except Stopped as stop:
        net.trained = before + stop.iteration
        so_far = open_run(folder, config, net, lambda message: None, temporary)
        raise Interrupted(f"{stop} after iteration {stop.iteration}", so_far) from None
    except UserError:
        net.failed = start != fingerprint.weights(net.state_dict())
        raise
    finally:
        _leave(net, folder, start, config.init)


@contextmanager
def _frozen(net: TreeNet, names: Sequence[str] | None) -> Iterator[None]:
    """Inside, these stages and layers do not learn, or those of the net itself; afterwards those again."""
    before = net.frozen
    try:
        net.freeze(before if names is None else names)
        yield
    finally:
        net.freeze(before)


def _refuse_modes(net: TreeNet) -> None:
    """Refuses to run in contexts that the caller may have forgotten, and that fit could not honour."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise UserError("fit is called under torch.no_grad() or inference_mode(), but has to learn: call it outside")
    if any(tensor.is_inference() for tensor in net.state_dict().values()):
        raise UserError("the net was built or copied under torch.inference_mode(), and cannot learn: build it outside")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UserError("fit is called under torch.autocast, which does not reach its threads: call it outside")


def _initialise(
    net: TreeNet, init: Any, run: str | Path | None, watch: Watcher, renamed: Mapping[str, str | None] | None = None
) -> str:
    """Gives the net its first weights, and says where they come from as a config does."""
    if renamed and (init is None or isinstance(init, Run | TreeNet)):
        raise UserError("init_map renames what is in a file of weights or a state dict: give one of these as init")
    if init is None:
        _, starts = _left.get(net, ("", {}))
        _, known = starts.get(Path(run).resolve(), (None, net.init)) if run is not None else (None, net.init)
        return known
    net.trained, net.failed = 0, False
    if isinstance(init, Run):
        init = init.net
    if isinstance(init, TreeNet):
        net.copy_weights(init)
        return f"{schema.GIVEN}{fingerprint.weights(init.state_dict())}"
    if isinstance(init, Mapping):
        found = check_state_dict(init, "init")
        name = f"{schema.GIVEN}{fingerprint.weights(found)}"
        said = str(load_into(net, found, "init", renamed))
    elif isinstance(init, str | Path) and init not in ("random", "same"):
        name = str(Path(os.path.expanduser(init)).absolute())
        said = load_init(net, name, renamed)
    else:
        raise UserError(
            f"init={short(init)}: give a file of weights, a state dict, the folder of a run, a run or a TreeNet; "
            "TreeNet(..., init='same') draws one network for all members"
        )
    if said:
        watch.say(said)
    return name


def _as_loss(loss: Any) -> Loss:
    if loss is None:
        return independent()
    if isinstance(loss, Loss):
        return loss
    known = ", ".join(f"mheads.losses.{name}()" for name in LOSSES)
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise UserError(f"loss={loss!r} is not a loss; there are {', '.join(LOSSES)}")
        return LOSSES[loss]()
    if loss in LOSSES.values():
        raise UserError(f"loss is the function {loss.__name__} itself: call it, mheads.losses.{loss.__name__}()")
    if callable(loss) and not type(loss).__module__.startswith("torch."):
        return Loss(getattr(loss, "__name__", type(loss).__name__), loss)
    raise UserError(
        f"fit needs a loss over all members, not {type(loss).__name__}: {known}, or a function of outputs [M, B, C] "
        "and labels [B] that gives losses [M, B]. The cross-entropy of each member by itself, torch's "
        "CrossEntropyLoss, is mheads.losses.independent()"
    )


# For each net, a digest of the weights that fit or load left in it; and for each of its folders the weights that
# training started from there, as a digest and as the config's `init`.
_left: WeakKeyDictionary[TreeNet, tuple[str, dict[Path, tuple[str | None, str]]]] = WeakKeyDictionary()


def _start_of(net: TreeNet, folder: RunFolder) -> str | None:
    """A digest of the weights that training in this folder starts from: the net's, unless it has started already."""
    now = fingerprint.weights(net.state_dict())
    left, starts = _left.get(net, ("", {}))
    resumes = _resumes(folder)
    return starts.get(folder.path.resolve(), (now, ""))[0] if now == left and resumes else now


def _resumes(folder: RunFolder) -> bool:
    """Whether training goes on from a checkpoint there; without one it starts from what the net holds."""
    return folder.exists() and bool(Checkpoints(folder.checkpoints).steps())


def _refuse_failed(net: TreeNet, run: str | Path | None) -> None:
    """Refuses a net whose weights an earlier fit has ruined, before anything is tried with them."""
    if net.failed and (run is None or not _resumes(RunFolder(Path(run)))):
        raise UserError(
            "an earlier fit of this net failed after it had changed the weights: build it anew, or give init="
        )


def _leave(net: TreeNet, folder: RunFolder, start: str | None, init: str) -> None:
    _, starts = _left.get(net, ("", {}))
    _left[net] = fingerprint.weights(net.state_dict()), {**starts, folder.path.resolve(): (start, init)}


def evaluate(
    models: Run | TreeNet | nn.Module | Callable[[Tensor], Tensor] | Sequence[Callable[[Tensor], Tensor]],
    test: Any,
    *,
    classes: Sequence[str] | None = None,
    problem: str = "auto",
    batch_size: int = 100,
) -> Any:
    """Measures an ensemble on labelled examples: a tree, one model, or a list of models that give logits [B, C].

    `test` is (inputs, labels), a list of pairs, a Dataset or a DataLoader; `classes` number labels that are names, and
    `problem` says what is learned where the labels alone do not decide.
    Inputs are given to the models as they are, in float; members from `run.member(m)` bring the preprocessing of their
    run, and `run.evaluate(x, y)` measures a whole run. Modules are in eval mode meanwhile.
    """
    if isinstance(models, Run):
        return models.evaluate(test)
    batch_size = as_plain(batch_size)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(f"batch_size={batch_size!r}: give how many examples are answered at a time, at least 1")
    # A Sequential is one model, not its layers; a ModuleList cannot be called.
    several = isinstance(models, nn.ModuleList) or (isinstance(models, Iterable) and not callable(models))
    members: list[Callable[[Tensor], Tensor]] = list(models) if several else [models]  # type: ignore[list-item,arg-type]
    if not members:
        raise UserError("evaluate needs at least one model")
    if wrong := [model for model in members if not callable(model)]:
        raise UserError(f"evaluate takes a TreeNet, a model or a list of models that give logits, not {wrong[0]!r}")
    for model in members:
        if done := getattr(model, "preprocessing", ""):
            told(
                f"the network was trained on examples {done}, and gets these as they are: "
                "run.evaluate(x, y) and run.member(m) bring the preprocessing of the run"
            )
    modules = [model for model in members if isinstance(model, nn.Module)]

    def forward(batch: Batch) -> Value:
        return outputs_of_one(models, batch) if isinstance(models, TreeNet) else outputs_of_all(members, batch)

    split, solved = make_labelled_split(test, "the test examples", classes=classes, name=problem)
    if problem == "auto":
        datasets.warn_of_flags(split.targets, solved)
    engine, plain = Models(forward), Preprocess()
    with in_eval_mode(modules):
        found, _, _ = next(answers(engine, split, plain, solved, rows=batch_size))
        if found.dim() != 1 + solved.answer_dims:
            raise UserError(f"each model must give {solved.output_form}, not {tuple(found.shape[1:])}")
        if classes is None:
            solved = solved.for_scores(found.shape[2])
        solved.check_output(found[0], "a model", "the test set")
        if is_single_label(solved) and are_probabilities(found):
            told(f"the models give {PROBABILITIES}")
        return measure(engine, split, plain, solved, rows=batch_size)


def load(
    run: str | Path | Run,
    network_factory: Callable[[], nn.Module] | None = None,
    *,
    trust: bool = False,
    warn: Callable[[str], None] | None = None,
) -> Run:
    """Loads a run with its newest weights, finished or not.

    A network that is not built in is made by `network_factory`, or, with `trust`, by the factory that the folder names:
    that runs its code. The result of an unfinished run is its newest evaluation. `warn` is called with messages about
    this; without it, Python warns.
    """
    folder = RunFolder(run.folder if isinstance(run, Run) else Path(run))
    config = folder.read_config()
    with torch.inference_mode(False):  # a service may be in it, and what is loaded may learn later
        net = build_net_of_run(folder, config, warn or Silent().warn, network_factory, trust)
        loaded = open_run(folder, config, net, warn or Silent().warn)
    _leave(net, folder, folder.read_identity().get("start"), config.init)  # fit may go on with it in this folder
    return loaded
