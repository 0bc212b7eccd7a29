"""One network over several processes.

`Broadcast` and `Gather` are layers for networks of a user's own. Names are imported when they are first used, so that
nothing here needs torch.distributed before it is wanted.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mheads.distributed.layers.communication_layers import Broadcast, Gather

__all__ = ["Broadcast", "Gather"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from mheads.distributed.layers import communication_layers

        return getattr(communication_layers, name)
    raise AttributeError(f"module 'mheads.distributed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
