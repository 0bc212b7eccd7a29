"""Python's front door: fit, evaluate, load."""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mheads import config as configs
from mheads import data as datasets
from mheads import experiment as experiments
from mheads.config import Config
from mheads.data import ArraySplit, Preprocess, Split
from mheads.data.assemble import check_labels
from mheads.data.dataset import DatasetSplit
from mheads.distributed.launch import detect
from mheads.errors import UserError
from mheads.losses import Loss, independent
from mheads.metrics import Metrics, Result
from mheads.prepared import Prepared, check, raw_examples
from mheads.progress import Silent, Terminal, Watcher
from mheads.runs import DataFacts, RunFolder
from mheads.train import EVALUATION_ROWS, train
from mheads.tree import TreeNet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Examples = Any  # (inputs, labels) as arrays or tensors, a list of pairs, a torch Dataset or DataLoader
_temporary: list[tempfile.TemporaryDirectory[str]] = []  # runs without a folder live as long as the process


@dataclass(frozen=True)
class Run:
    """A trained ensemble and its folder."""

    folder: Path
    config: Config
    net: TreeNet
    data: DataFacts
    result: Result
    summary: dict[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        # What `evaluate` warns of, since the net alone does not do it.
        self.net.__dict__["preprocessing"] = str(self.data.preprocess)

    @torch.inference_mode()
    def predict(self, x: Any) -> Tensor:
        """Outputs (logits) [M, N, C] of raw examples, preprocessed as in training: images [N, C, H, W] or vectors."""
        raw = raw_examples(x, self.data)
        check(raw, self.data)
        self.net.eval()
        prepared = Prepared(self.net, self.data)
        return torch.cat([prepared.run(part).cpu() for part in raw.split(EVALUATION_ROWS)], 1)

    def evaluate(self, x: Any, y: Any = None) -> Result:
        """All metrics on raw examples and labels, preprocessed as in training.

        x and y are arrays as `fit` takes them; without y, x is a pair of them, a list of pairs, a Dataset or a
        DataLoader.
        """
        split = _labelled(x if y is None else (x, y), self.data.classes, "the examples")
        if tuple(split.shape) != self.data.shape:
            raise UserError(f"the examples have shape {split.shape}, but the run was trained on {self.data.shape}")
        self.data.check(split.survey("the examples"), "the examples")
        return _measure([self.net], Prepared(self.net, self.data).run, split, EVALUATION_ROWS)

    def member(self, m: int) -> Prepared:
        """Member m as a module that takes raw examples: it brings the run's preprocessing, and shares the weights."""
        return Prepared(self.net.member(m), self.data).eval()

    def plot_ownership(self) -> Figure:
        """Who owns which class of the test set."""
        from mheads.report.figures import ownership_figure

        return ownership_figure(np.asarray(self.result.ownership), self.data.classes)


def fit(
    net: TreeNet | nn.Module,
    loss: Loss | None = None,
    *,
    train: Examples,
    test: Examples | None = None,
    iterations: int = 1000,
    run: str | Path | None = None,
    show: bool | None = None,
    sampling: str | dict[str, Any] = "full",
    normalize: str = "none",
    scale: float | str = "auto",
    pad: int = 0,
    mirror: bool = False,
    validation: int = 0,
    classes: Sequence[str] | None = None,
    weights: Any = None,
    pretrain: int = 0,
    scale_rate: bool = True,
    workers: int | str = "auto",
    micro_batches: int | str = "auto",
    device: str = "auto",
    seed: int = 0,
    log: dict[str, Any] | None = None,
    **optim: Any,
) -> Run:
    """Trains a tree of members on labelled examples.

    `train` and `test` are (inputs, labels), lists of pairs, torch Datasets or DataLoaders; labels are class numbers or
    names. Without a test set a tenth of the training set is held out, of each class its share, drawn by the seed; with
    `validation` the last so many examples are. `scale` multiplies the inputs; auto brings uint8 to 0..1 and leaves
    floats alone. `weights` [N] say how much each training example counts.
    `run` is a folder, and the same call on the same folder resumes; without it nothing is kept. `scale_rate`
    multiplies the rate by the number of members for averaged losses. Further keywords are those of the config's
    `optim` section: lr, momentum, batch_size, schedule, ...
    """
    if not isinstance(net, TreeNet):
        raise UserError(f"fit trains a TreeNet, not a {type(net).__name__}: mheads.TreeNet(factory, members=...)")
    launch = detect()
    if launch is not None and launch.size > 1:
        raise UserError(
            f"fit trains in one process, but {launch.launcher} started {launch.size}: write a recipe with your network "
            "(model: package.module:factory) and start mheads train with it"
        )
    loss = loss or independent()
    known = loss.name in configs.LOSS_NAMES  # one of the user's own is remembered, not imported again
    named = {"name": loss.name, **loss.options} if known else {"name": f"__main__:{loss.name}", "args": loss.options}
    arrays: dict[str, Any] = {"normalize": normalize, "scale": scale, "pad": pad, "mirror": mirror}
    data = datasets.from_arrays(
        train, test, classes=classes, validation=validation, hold_out=seed, weights=weights, **arrays
    )
    config = configs.validate(
        {
            "model": net.network_path,
            "members": net.num_members,
            "split": net.spec,
            "sampling": sampling,
            "loss": {**named, "scale_rate": scale_rate},
            "pretrain": pretrain,
            "data": {"name": "arrays", "validation": validation, **arrays},
            "engine": {"workers": workers, "micro_batches": micro_batches},
            "optim": {"iterations": iterations, **optim},
            "log": {"evaluate_every": max(1, iterations // 10), **(log or {})},
            "device": device,
            "seed": seed,
        },
        "fit",
    )
    experiment = experiments.assemble(config, net, loss, data)
    if run is None:
        _temporary.append(tempfile.TemporaryDirectory(prefix="mheads-"))
        run = Path(_temporary[-1].name) / "run"
    folder = RunFolder(Path(run))
    watcher = _watcher(show)
    if data.held_out is not None:
        watcher.note(f"holding out {data.held_out}")
    summary = _train(experiment, folder, watcher)
    return Run(folder.path, config, net, DataFacts.of(data), Result.from_dict(summary), summary)


def _train(experiment: experiments.Experiment, folder: RunFolder, watcher: Watcher) -> dict[str, Any]:
    summary = train(experiment, folder, watcher)
    folder.load_weights(experiment.net)  # a finished run is not trained again, and its weights are in the folder
    experiment.net.eval()
    return summary


def _watcher(show: bool | None) -> Watcher:
    from rich.console import Console

    wanted = sys.stderr.isatty() if show is None else show
    return Terminal(Console(stderr=True)) if wanted else Silent()


def evaluate(
    models: Run | TreeNet | nn.Module | Callable[[Tensor], Tensor] | Sequence[Callable[[Tensor], Tensor]],
    test: Any,
    *,
    classes: Sequence[str] | None = None,
    batch_size: int = 100,
) -> Result:
    """All metrics of an ensemble on labelled examples: a tree, one model, or a list of models that give logits [B, C].

    `test` is (inputs, labels), a list of pairs, a Dataset or a DataLoader; `classes` number labels that are names.
    Inputs are given to the models as they are, in float; members from `run.member(m)` bring the preprocessing of their
    run, and `run.evaluate(x, y)` measures a whole run. Modules are put in eval mode for it and back.
    """
    if isinstance(models, Run):
        return models.evaluate(test)
    # A Sequential is one model, not its layers; a ModuleList cannot be called.
    several = isinstance(models, nn.ModuleList) or (isinstance(models, Iterable) and not callable(models))
    members: list[Callable[[Tensor], Tensor]] = list(models) if several else [models]  # type: ignore[list-item,arg-type]
    if not members:
        raise UserError("evaluate needs at least one model")
    if wrong := [model for model in members if not callable(model)]:
        raise UserError(f"evaluate takes a TreeNet, a model or a list of models that give logits, not {wrong[0]!r}")
    for model in members:
        if done := getattr(model, "preprocessing", ""):
            warnings.warn(
                f"the network was trained on examples {done}, and gets these as they are: "
                "run.evaluate(x, y) and run.member(m) bring the preprocessing of the run",
                stacklevel=2,
            )
    modules = [model for model in members if isinstance(model, nn.Module)]
    parameter = next((p for module in modules for p in module.parameters()), torch.empty(0))

    def forward(raw: Tensor) -> Tensor:
        raw = raw.to(parameter.device)
        x = Preprocess()(raw, parameter.dtype)
        if isinstance(models, TreeNet):
            return models(x)
        # What brings its preprocessing takes raw images, channels first.
        first = raw if raw.is_floating_point() or raw.dim() == 2 else raw.permute(0, 3, 1, 2)
        return torch.stack([model(first if isinstance(model, Prepared) else x) for model in members])

    return _measure(modules, forward, _labelled(test, classes, "the test examples"), batch_size)


def _labelled(given: Any, classes: Sequence[str] | None, where: str) -> ArraySplit | DatasetSplit:
    """Examples with class numbers; labels that are names need `classes`, since a test set may lack some."""
    split = datasets.as_source(given, where)
    if not len(split):
        raise UserError(f"{where}: there are no examples; give at least one")
    if split.labels.dtype.kind == "U" and classes is None:
        raise UserError(f"{where}: labels are names; say which number each class has, classes=[...] in that order")
    split.survey(where)
    split = datasets.numbered({where: split}, classes)[0][where]
    check_labels(split, int(split.labels.max()) + 1 if classes is None else len(classes), where)
    return split


def _measure(
    modules: Sequence[nn.Module], forward: Callable[[Tensor], Tensor], split: Split, batch_size: int
) -> Result:
    """The metrics of `forward`, raw examples to outputs [M, b, C], with the modules in eval mode."""
    modes = [(m, m.training) for module in modules for m in module.modules()]
    for module in modules:
        module.eval()
    metrics: Metrics | None = None
    try:
        with torch.inference_mode():
            for start in range(0, len(split), batch_size):
                rows = np.arange(start, min(start + batch_size, len(split)))
                outputs, targets = forward(split.read(rows, None)), torch.from_numpy(split.labels[rows])
                if outputs.dim() != 3:
                    raise UserError(f"each model must give logits [B, C], not {tuple(outputs.shape[1:])}")
                if int(targets.max()) >= outputs.shape[2]:
                    raise UserError(f"label {int(targets.max())}, but the models give {outputs.shape[2]} scores")
                metrics = metrics or Metrics(outputs.shape[0], outputs.shape[2])
                metrics.update(outputs, targets)
    finally:
        for module, mode in modes:
            module.training = mode
    assert metrics is not None  # there is at least one example
    return metrics.result()


def load(run: str | Path, network_factory: Callable[[], nn.Module] | None = None) -> Run:
    """A finished run. `network_factory` is needed for runs of `fit` whose network only Python knows."""
    folder = RunFolder(Path(run))
    config = folder.read_config()
    if network_factory is not None:
        net = TreeNet(network_factory, config.members, config.split)
    elif config.model.startswith("__main__:"):
        raise UserError(
            f"{folder.path} was trained on {config.model}, which only that script knows: "
            "give its factory, mheads.load(run, factory)"
        )
    else:
        net = experiments.build_net(config, weights=False)
    folder.load_weights(net)
    net.eval()
    summary = folder.read_result()
    return Run(folder.path, config, net, folder.read_data(), Result.from_dict(summary), summary)
