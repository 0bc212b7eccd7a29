"""Randomness is explicit and keyed.

Every random draw has a key that says what it is for, such as `(seed, "dropout", step, micro_batch, stage)`.
It never depends on the worker, the rank or what was drawn before, so results do not depend on them either.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def derive(*key: int | str) -> int:
    """A 63-bit seed from a key; other keys give unrelated seeds."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key: int | str) -> torch.Generator:
    """A fresh CPU generator for this key alone."""
    import torch

    return torch.Generator().manual_seed(derive(*key))


def numpy_generator(*key: int | str) -> np.random.Generator:
    """The same for numpy; Philox, because its stream is the same in every numpy version."""
    import numpy as np

    return np.random.Generator(np.random.Philox(derive(*key)))
