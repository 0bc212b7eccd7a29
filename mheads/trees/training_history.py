"""What trainings have done with the weights of a net."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class TrainingHistory:
    """A net carries it from one training to the next, since `fit` may be given the same net again.

    Training writes it and reads it; a tree only hands it on to trees that are made of it.
    """

    iterations: int = 0  # that have changed the weights
    failed: bool = False  # whether a training ended by an error after it had changed the weights
    origin: str = ""  # a report on the file of weights that the net starts from
    data: Any = None  # the DataFacts of the run that left these weights, whose preprocessing the net alone does not do
    frozen: tuple[str, ...] = ()  # what did not learn in the last training
    weights: str = ""  # a digest of the weights that the last training left
    starts: dict[Path, tuple[str | None, str]] = field(default_factory=dict)
    """For each run folder the weights that training started from there: a digest, and the config's `init`."""
