"""Loads a run: `mheads.load`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from mheads.api.fit_start import remember_start
from mheads.api.run import Run, open_run
from mheads.common.progress import Silent
from mheads.runs.folder import RunFolder
from mheads.training.build_from_config import build_net_of_run


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
    remember_start(net, folder, folder.read_identity().get("start"), config.init)  # fit may resume with it there
    return loaded
