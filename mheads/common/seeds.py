"""Randomness is explicit and keyed.

Every random draw has a key that says what it is for, such as `(seed, "dropout", step, micro_batch, stage)`.
It never depends on the worker, the rank or what was drawn before, so results do not depend on them either.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch


GENERATORS = threading.RLock()  # those of torch, numpy and `random`, which belong to the whole process


def derive(*key: int | str) -> int:
    """A 63-bit seed from a key; other keys give unrelated seeds."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key: int | str) -> torch.Generator:
    """A fresh CPU generator for this key alone."""
    import torch

    return torch.Generator().manual_seed(derive(*key))


def numpy_generator(*key: int | str) -> np.random.Generator:
    """A fresh numpy generator for this key alone; Philox, whose stream is the same in every numpy version."""
    import numpy as np

    return np.random.Generator(np.random.Philox(derive(*key)))


@contextmanager
def seed_generators(*key: int | str) -> Iterator[None]:
    """Inside, the global generators of torch, numpy and `random` start from this key; then they are put back.

    For code that is not ours and draws from them, such as factories of networks. Other threads wait for their turn.
    """
    import numpy as np
    import torch

    seed = derive(*key)
    with GENERATORS:
        ours, theirs = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                np.random.seed(seed % 2**32)
                random.seed(seed)
                yield
        finally:
            random.setstate(ours)
            np.random.set_state(theirs)


def global_states() -> tuple[Any, ...]:
    """The states of these generators: equal as long as nobody draws from them."""
    import numpy as np
    import torch

    state: Any = np.random.get_state(legacy=False)
    numpys = state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"]
    return torch.get_rng_state().numpy().tobytes(), numpys, random.getstate()
