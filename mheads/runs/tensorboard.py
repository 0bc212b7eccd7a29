"""The log for TensorBoard, beside metrics.jsonl: `log.tensorboard=true`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mheads.common.errors import UserError

FOLDER = "tensorboard"  # in the run folder
STEP_KEYS = ("loss", "rate", "entropy", "images_per_second")
MEMBER_KEYS = ("member_losses", "share", "wins", "effective_batch", "gradient_norm")


def require() -> None:
    """Refuses the option before anything is written, if it cannot work."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError("log.tensorboard is true, but TensorBoard is not installed: pip install 'mheads[tensorboard]'")


class Board:
    """Writes lines of the log as scalars; a run that is resumed replaces what was written after its checkpoint."""

    def __init__(self, run: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / FOLDER), purge_step=step + 1 if step else None)

    def write(self, line: dict[str, Any]) -> None:
        for name, value in scalars(line):
            self._writer.add_scalar(name, value, line["iteration"])

    def close(self) -> None:
        self._writer.close()


def scalars(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line of metrics.jsonl, by the names that they have on the board."""
    if "result" in line:
        result = line["result"]
        for key, value in result.items():
            if key == "members":
                yield from ((f"{line['split']}/member {m}", float(x)) for m, x in enumerate(value) if x is not None)
            elif isinstance(value, int | float) and key != "examples":
                yield f"{line['split']}/{key}", float(value)
        return
    for key in STEP_KEYS:
        yield f"training/{key}", float(line[key])
    for key in MEMBER_KEYS:
        yield from ((f"{key}/member {m}", float(x)) for m, x in enumerate(line[key]))
