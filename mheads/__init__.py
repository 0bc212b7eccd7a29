"""Train diverse ensembles of deep networks.

    net = mheads.TreeNet(my_factory, members=4, split="layer2")
    run = mheads.fit(net, mheads.losses.mcl(k=1), train=(x, y), test=(xt, yt), iterations=1000)
    run.result.oracle

Names are imported when they are first used, so that `mheads --help` need not wait for torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mheads import data, distributed, dropout, losses, saliency
    from mheads.api import Interrupted, evaluate, fit, load
    from mheads.dropout import Dropout
    from mheads.errors import UserError
    from mheads.evaluation import outputs_of
    from mheads.run import Run
    from mheads.scores import with_scores
    from mheads.treenet import TreeNet

__all__ = [
    "Dropout",
    "Interrupted",
    "Run",
    "TreeNet",
    "UserError",
    "__version__",
    "data",
    "distributed",
    "dropout",
    "evaluate",
    "fit",
    "load",
    "losses",
    "outputs_of",
    "saliency",
    "with_scores",
]

_MODULES = ("data", "distributed", "dropout", "losses", "saliency")
_HOMES = {
    "Dropout": "mheads.dropout",
    "Interrupted": "mheads.api",
    "Run": "mheads.run",
    "TreeNet": "mheads.treenet",
    "UserError": "mheads.errors",
    "evaluate": "mheads.api",
    "fit": "mheads.api",
    "load": "mheads.api",
    "outputs_of": "mheads.evaluation",
    "with_scores": "mheads.scores",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"mheads.{name}")
    raise AttributeError(f"module 'mheads' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
