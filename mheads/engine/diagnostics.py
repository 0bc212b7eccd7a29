"""What each member learns from, step by step: the lines of metrics.jsonl, and members that win nothing any more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mheads.common.device import widen
from mheads.data.batches import Batch
from mheads.engine.interface import Engine
from mheads.engine.step_results import StepReport

LEARNING = ("wins", "entropy", "effective_batch", "gradient_norm")  # of a line of the log, also kept in result.json


class Diagnostics:
    """Means since the last line of the log, and for how many iterations each member has won nothing.

    A member wins an example if none learns more from it, its sample weight left aside: that says what the example
    weighs for a member, who may have many, not who is best. Under MCL these are the k best; members that learn from
    everything that they may all win.
    """

    def __init__(self, members: int) -> None:
        self.idle = np.zeros(members, np.int64)
        self.learning: dict[str, Any] = {}  # what the last line says of it
        self._start_window()

    def _start_window(self) -> None:
        members = len(self.idle)
        self.loss, self.count, self.examples, self.seconds, self.rows = 0.0, 0, 0, 0.0, 0
        self.member_losses, self.seen, self.assigned, self.wins, self.effective = (np.zeros(members) for _ in range(5))

    def add(self, report: StepReport, batch: Batch, seconds: float) -> None:
        assignment = report.assignment.cpu().double()  # [M, B]
        sample_weights = (
            torch.ones_like(assignment) if batch.sample_weights is None else batch.sample_weights.cpu().double()
        )
        learned = assignment / sample_weights.where(sample_weights > 0, 1.0)
        most = learned.amax(0)
        won = ((learned >= most * (1 - 1e-6)) & (most > 0)).sum(1).numpy()  # equal but for the rounding of the product
        self.idle = np.where(won > 0, 0, self.idle + 1)
        self.wins += won
        self.assigned += assignment.sum(1).numpy()
        self.effective += effective_examples(assignment).numpy()
        # Of the examples that a member may learn from: the others were not computed for it.
        seen = (sample_weights > 0).double()
        self.member_losses += (report.losses.cpu().double() * seen).sum(1).numpy()
        self.seen += seen.sum(1).numpy()
        self.loss += report.loss
        self.count += 1
        self.examples += len(batch)
        self.rows += assignment.shape[1]  # of examples with several each, such as regions, more than examples
        self.seconds += seconds

    def winners(self) -> list[float]:
        """Each member's part of all that was won since the last line of the log."""
        parts: list[float] = (self.wins / max(self.wins.sum(), 1)).tolist()
        return parts

    def find_idle(self, after: int) -> list[int]:
        """The members that have now won nothing for exactly so many iterations."""
        return np.flatnonzero(self.idle == after).tolist()

    def line(self, step: int, rate: float, norms: Sequence[float]) -> dict[str, Any]:
        """The line of the log; begins new means. `norms`: those of the members' own gradients in this step."""
        share = self.assigned / max(self.assigned.sum(), 1e-12)
        line = {
            "iteration": step,
            "loss": self.loss / self.count,
            "rate": rate,
            "member_losses": [round(x, 6) for x in (self.member_losses / np.maximum(1, self.seen)).tolist()],
            "share": [round(x, 4) for x in share.tolist()],
            "wins": [round(x, 4) for x in (self.wins / max(1, self.rows)).tolist()],
            "entropy": round(entropy(self.winners()), 4),
            "effective_batch": [round(x, 1) for x in (self.effective / self.count).tolist()],
            "gradient_norm": [float(f"{x:.4g}") for x in norms],
            "images_per_second": round(self.examples / self.seconds, 1),
        }
        self.learning = {key: line[key] for key in LEARNING}
        self._start_window()
        return line

    # In a checkpoint.

    def arrays(self) -> dict[str, np.ndarray]:
        names = ("idle", "member_losses", "seen", "assigned", "wins", "effective")
        return {name: getattr(self, name) for name in names}

    def state(self) -> dict[str, Any]:
        window = [self.loss, self.count, self.examples, self.seconds, self.rows]
        return {"window": window, "learning": self.learning}

    def load(self, arrays: dict[str, np.ndarray], state: dict[str, Any]) -> None:
        if "learning" not in state:
            return  # a checkpoint of an older version
        self.loss, self.count, self.examples, self.seconds, *rows = state["window"]
        self.rows = rows[0] if rows else self.examples  # which an older version took them for
        self.learning = state["learning"]
        for name in self.arrays():
            # An older version added means of batches: each counts as one example of what follows.
            before = arrays[name] if name in arrays else np.full(len(self.idle), float(self.count))
            setattr(self, name, before.copy())


def effective_examples(assignment: Tensor) -> Tensor:
    """How many equally weighted examples would say as much as these: (sum of a)^2 / (sum of a^2), [M, B] -> [M]."""
    squares = assignment.square().sum(1)
    return assignment.sum(1).square() / squares.where(squares > 0, torch.ones_like(squares))


def entropy(parts: Sequence[float]) -> float:
    """In bits: 0 if one member wins everything, log2 M if all win alike."""
    bits: float = abs(sum(p * np.log2(p) for p in parts if p > 0))
    return bits


def gradient_norms(engine: Engine) -> dict[str, Tensor]:
    """The norm of the last step's gradient for each stage, on the main rank; called by all processes."""
    norms: dict[str, Tensor] = {}

    def measure(stage: str, gradients: list[Tensor]) -> None:
        if stage in engine.stacks:
            rows = [widen(gradient).square().flatten(1).sum(1) for gradient in gradients]
            each = torch.stack(rows).sum(0).sqrt() if rows else torch.zeros(len(engine.stacks[stage]))
            norms.update(zip(engine.stacks[stage].names, each.cpu().double(), strict=True))
            return
        squares = [widen(gradient).square().sum() for gradient in gradients]
        norms[stage] = torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)

    engine.update(measure)  # by the workers: a sum on more threads would have other bits
    elsewhere = [stage for stage, norm in norms.items() if norm.device.type != "cpu"]
    if elsewhere:  # one copy for all
        together = torch.stack([norms[stage] for stage in elsewhere]).cpu().double()
        norms |= zip(elsewhere, together.unbind(), strict=True)
    return engine.gather(norms)


def clip_scale(engine: Engine, most: float, share: Callable[[str], float]) -> float:
    """What gradients are multiplied by, so that the norm of all together is at most this; the same on all processes.

    `share` is what those of a stage are multiplied by anyway.
    """
    norms = gradient_norms(engine)

    def decide() -> tuple[float, None]:
        squares = sum((share(name) * norms[name].item()) ** 2 for name in engine.net.tree.nodes if name in norms)
        norm = squares**0.5
        return (most / norm if norm > most else 1.0), None

    factor: float = engine.agree(decide)[0]
    return factor


def learning_rows(learning: dict[str, Any]) -> list[tuple[str, str]]:
    """What the members learned from at the end of training, where some learn from more than others."""
    if not learning or len(set(learning["wins"])) == 1:
        return []
    most = math.log2(len(learning["wins"]))
    wins = " ".join(f"{100 * w:.1f}" for w in learning["wins"])
    return [
        ("wins", f"{wins} % of the last examples (entropy {learning['entropy']:.2f} of {most:.2f} bits)"),
        ("effective batch", " ".join(f"{n:.0f}" for n in learning["effective_batch"])),
        ("gradient norms", " ".join(f"{n:.3g}" for n in learning["gradient_norm"])),
    ]
