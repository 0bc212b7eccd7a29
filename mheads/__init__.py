"""Train diverse ensembles of deep networks.

    net = mheads.TreeNet(my_factory, members=4, split="layer2")
    run = mheads.fit(net, mheads.losses.mcl(k=1), train=(x, y), test=(xt, yt), iterations=1000)
    run.result.oracle

Names are imported when they are first used, so that `mheads --help` need not wait for torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mheads import data, distributed, losses, networks
    from mheads.api.evaluate import evaluate, outputs_of
    from mheads.api.fit import Interrupted, fit
    from mheads.api.run import Run, load
    from mheads.common.errors import UserError
    from mheads.networks import dropout
    from mheads.networks.dropout import Dropout
    from mheads.report import saliency
    from mheads.report.compare import compare
    from mheads.trees.member_scores import with_scores
    from mheads.trees.treenet import TreeNet

__all__ = [
    "Dropout",
    "Interrupted",
    "Run",
    "TreeNet",
    "UserError",
    "__version__",
    "compare",
    "data",
    "distributed",
    "dropout",
    "evaluate",
    "fit",
    "load",
    "losses",
    "networks",
    "outputs_of",
    "saliency",
    "with_scores",
]

_MODULES = {
    "data": "mheads.data",
    "distributed": "mheads.distributed",
    "dropout": "mheads.networks.dropout",
    "losses": "mheads.losses",
    "networks": "mheads.networks",
    "saliency": "mheads.report.saliency",
}
_HOMES = {
    "Dropout": "mheads.networks.dropout",
    "Interrupted": "mheads.api.fit",
    "Run": "mheads.api.run",
    "TreeNet": "mheads.trees.treenet",
    "UserError": "mheads.common.errors",
    "compare": "mheads.report.compare",
    "evaluate": "mheads.api.evaluate",
    "fit": "mheads.api.fit",
    "load": "mheads.api.run",
    "outputs_of": "mheads.api.evaluate",
    "with_scores": "mheads.trees.member_scores",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'mheads' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
