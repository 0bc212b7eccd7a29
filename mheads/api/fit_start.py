"""The weights that `fit` starts from: those that `init` names, or those that the net holds.

A net may be trained again, in the same run folder or in another. So that the same call on the same folder resumes, it
is remembered for each net which weights training in a folder started from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mheads.api.run import Run
from mheads.common import fingerprint
from mheads.common.errors import UserError
from mheads.common.progress import Watcher
from mheads.common.safe_yaml import short
from mheads.config.schema import GIVEN
from mheads.runs.checkpoint import Checkpoints
from mheads.runs.folder import RunFolder
from mheads.training.init_weights import check_state_dict, load_init, load_into
from mheads.trees.treenet import TreeNet


def set_init(
    net: TreeNet, init: Any, folder: RunFolder | None, watch: Watcher, renamed: Mapping[str, str | None] | None
) -> str:
    """Gives the net its first weights; returns the config's `init`, which names them."""
    if renamed and (init is None or isinstance(init, Run | TreeNet)):
        raise UserError("init_map renames what is in a file of weights or a state dict: give one of these as init")
    if init is None:
        return net.init if folder is None else net.history.starts.get(folder.path.resolve(), (None, net.init))[1]
    if isinstance(init, Run):
        init = init.net
    data, report = None, ""
    if isinstance(init, TreeNet):
        data, name = init.history.data, f"{GIVEN}{fingerprint.weights(init.state_dict())}"
        net.copy_weights(init)
    elif isinstance(init, Mapping):
        weights = check_state_dict(init, "init")
        name = f"{GIVEN}{fingerprint.weights(weights)}"
        report = str(load_into(net, weights, "init", renamed))
    elif isinstance(init, str | Path) and init not in ("random", "same"):
        name = str(Path(os.path.expanduser(init)).absolute())
        report = load_init(net, name, renamed)
    else:
        raise UserError(
            f"init={short(init)}: give a file of weights, a state dict, the folder of a run, a run or a TreeNet; "
            "TreeNet(..., init='same') draws one network for all members"
        )
    net.history.data, net.history.iterations, net.history.failed = data, 0, False
    if report:
        watch.say(report)
    return name


def digest_start(net: TreeNet, folder: RunFolder) -> str | None:
    """A digest of the weights that training in this folder starts from: the net's, unless it has started already."""
    now = fingerprint.weights(net.state_dict())
    resumes = now == net.history.weights and _resumes(folder)
    return net.history.starts.get(folder.path.resolve(), (now, ""))[0] if resumes else now


def check_not_failed(net: TreeNet, folder: RunFolder | None) -> None:
    """Raises for a net whose weights an earlier fit has ruined, before anything is tried with them."""
    if net.history.failed and (folder is None or not _resumes(folder)):
        raise UserError(
            "an earlier fit of this net failed after it had changed the weights: build it anew, or give init="
        )


def _resumes(folder: RunFolder) -> bool:
    """Whether training resumes from a checkpoint in the folder; without one it starts from what the net holds."""
    return folder.exists() and bool(Checkpoints(folder.checkpoints).steps())
