"""Python's front door: fit, evaluate, load."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
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
from mheads.data.batch import evaluation_batches
from mheads.distributed.launch import detect
from mheads.errors import UserError
from mheads.losses import Loss, independent
from mheads.metrics import Metrics, Result
from mheads.progress import Silent, Terminal, Watcher
from mheads.runs import DataFacts, RunFolder
from mheads.train import EVALUATION_ROWS, train
from mheads.tree import TreeNet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Examples = tuple[Any, Any]  # (inputs, labels): numpy arrays or torch tensors
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

    @torch.inference_mode()
    def predict(self, x: Any) -> Tensor:
        """Outputs (logits) [M, N, C] of raw examples, preprocessed as in training: images [N, C, H, W] or vectors."""
        raw = torch.as_tensor(x)
        if tuple(raw.shape[1:]) != self.data.shape:
            raise UserError(
                f"examples of shape {tuple(raw.shape[1:])}, but {self.folder} was trained on {self.data.shape}"
            )
        if raw.dim() == 4 and not raw.is_floating_point():
            raw = raw.permute(0, 2, 3, 1)
        self.net.eval()
        parts = [self.data.preprocess(part, experiments.input_dtype(self.net)) for part in raw.split(EVALUATION_ROWS)]
        device = next(self.net.parameters()).device
        return torch.cat([self.net(part.to(device)).cpu() for part in parts], 1)

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
    scale: float = 1.0,
    pad: int = 0,
    mirror: bool = False,
    validation: int = 0,
    classes: Sequence[str] | None = None,
    pretrain: int = 0,
    scale_rate: bool = True,
    workers: int | str = "auto",
    micro_batches: int | str = "auto",
    device: str = "auto",
    seed: int = 0,
    log: dict[str, Any] | None = None,
    **optim: Any,
) -> Run:
    """Trains a tree of members on arrays in memory.

    `train` and `test` are (inputs, labels); without a test set the last tenth of the training set is held out.
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
    if test is None and not validation:
        validation = max(1, len(train[1]) // 10)
    data = datasets.from_arrays(train, test, classes=classes, validation=validation, **arrays)
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
    summary = _train(experiment, folder, _watcher(show))
    return Run(folder.path, config, net, DataFacts.of(data), Result.from_dict(summary), summary)


def _train(experiment: experiments.Experiment, folder: RunFolder, watcher: Watcher) -> dict[str, Any]:
    summary = train(experiment, folder, watcher)
    folder.load_weights(experiment.net)  # a finished run is not trained again, and its weights are in the folder
    experiment.net.eval()
    return summary


def _watcher(show: bool | None) -> Watcher:
    from mheads.console import Console

    wanted = sys.stderr.isatty() if show is None else show
    return Terminal(Console(stderr=True)) if wanted else Silent()


def evaluate(
    models: TreeNet | Sequence[Callable[[Tensor], Tensor]], test: Examples, *, batch_size: int = 100
) -> Result:
    """All metrics of an ensemble on (inputs, labels): a tree, or any list of models that give logits [B, C].

    Inputs are given to the models as they are, in float; modules are put in eval mode for it and back.
    """
    members: Sequence[Callable[[Tensor], Tensor]] = [models] if isinstance(models, TreeNet) else list(models)
    if not members:
        raise UserError("evaluate needs at least one model")
    modules = [model for model in members if isinstance(model, nn.Module)]
    parameter = next((p for module in modules for p in module.parameters()), torch.empty(0))
    data = datasets.from_arrays(test, test)
    modes = [(m, m.training) for module in modules for m in module.modules()]
    for module in modules:
        module.eval()
    metrics: Metrics | None = None
    try:
        with torch.inference_mode():
            for read in evaluation_batches(data.test, data.preprocess, batch_size):
                batch = read().to(parameter.device)
                x = batch.network_inputs(parameter.dtype)
                outputs = models(x) if isinstance(models, TreeNet) else torch.stack([model(x) for model in members])
                if outputs.dim() != 3:
                    raise UserError(f"each model must give logits [B, C], not {tuple(outputs.shape[1:])}")
                if int(batch.targets.max()) >= outputs.shape[2]:
                    raise UserError(f"label {int(batch.targets.max())}, but the models give {outputs.shape[2]} scores")
                metrics = metrics or Metrics(outputs.shape[0], outputs.shape[2])
                metrics.update(outputs, batch.targets)
    finally:
        for module, mode in modes:
            module.training = mode
    assert metrics is not None
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
