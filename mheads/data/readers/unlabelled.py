"""Examples without labels in one .npz file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mheads.common.errors import UserError
from mheads.data.readers.npz import open_arrays


def read_array(path: Path, names: Sequence[str]) -> np.ndarray:
    """The first array of these names in a .npz file, or its only one."""
    with open_arrays(path) as file:
        name = next((name for name in names if name in file), None)
        if name is None and len(file) != 1:
            raise UserError(
                f"{path} has the arrays {', '.join(file) or 'none'}; call the one with the examples {names[0]}"
            )
        return file[next(iter(file)) if name is None else name]
