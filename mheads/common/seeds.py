"""Randomness is explicit and keyed.

Every random draw has a key that says what it is for, such as `(seed, "dropout", step, micro_batch, stage)`.
It never depends on the worker, the rank or what was drawn before, so results do not depend on them either.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch


_GENERATORS = threading.RLock()  # those of torch, numpy and `random`, which belong to the whole process


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
def keep_generators() -> Iterator[Callable[[int], None]]:
    """Inside, a function that seeds the global generators of torch, numpy and `random`; then they are put back.

    For code that is not ours and draws from them. Other threads wait for their turn.
    """
    import numpy as np
    import torch

    def seed(number: int) -> None:
        torch.default_generator.manual_seed(number)
        np.random.seed(number % 2**32)
        random.seed(number)

    with _GENERATORS:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            yield seed
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])


@contextmanager
def seed_generators(*key: int | str) -> Iterator[None]:
    """Inside, the global generators start from this key, on accelerators too: for factories of networks, say."""
    import torch

    with keep_generators() as seed:
        torch.manual_seed(derive(*key))
        seed(derive(*key))
        yield


def global_states() -> tuple[Any, ...]:
    """The states of these generators: equal as long as nobody draws from them."""
    import numpy as np
    import torch

    state: Any = np.random.get_state(legacy=False)
    numpys = state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"]
    return torch.get_rng_state().numpy().tobytes(), numpys, random.getstate()
