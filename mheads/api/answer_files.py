"""What a run answers, in a .csv or an .npz file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import IO

import numpy as np
import torch
from torch import Tensor

from mheads.api.run import Run
from mheads.common.errors import UserError
from mheads.problems import Classification, MultiLabel

Answers = tuple[list[tuple[str, str]], Tensor, Tensor | None]  # of a batch: names, [M, b, ...], and weights [M, b]


def write_csv(run: Run, batches: Iterator[Answers], file: IO[bytes]) -> None:
    """A line for each example, written as they come: memory does not grow with their number."""
    problem = run.data.problem
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="", write_through=True)
    writer = csv.writer(text)
    for number, (names, found, weights) in enumerate(batches):
        found = found.double()
        if found.dim() != 3:
            raise UserError(
                f"a row of a .csv has no room for outputs of shape {tuple(found.shape[2:])} per example: write an .npz"
            )
        mean = problem.mean(found)
        together = [mean] if weights is None else [mean, problem.mean(found, weights)]
        members = [f"member_{m}" for m in range(len(found))]
        if isinstance(problem, Classification):
            votes, best = found.argmax(-1), [p.max(-1) for p in together]
            scored = [] if weights is None else ["scored_answer", "scored_probability"]
            columns = ["answer", "probability", *scored, "agreement", *members]
            agreement = (votes == best[0].indices).double().mean(0)
            lines = [
                [text for b in best for text in (problem.classes[b.indices[i]], f"{b.values[i]:.6g}")]
                + [f"{agreement[i]:.6g}"]
                + [problem.classes[vote] for vote in votes[:, i]]
                for i in range(len(names))
            ]
        else:
            labels = problem.classes if isinstance(problem, MultiLabel) else range(found.shape[2])
            several, who = len(labels) > 1, ["mean", "scored"][: len(together)] + members
            columns = [f"{one}_{label}" if several else one for one in who for label in labels]
            said = found.sigmoid() if isinstance(problem, MultiLabel) else found  # probabilities, as their mean is
            numbers = torch.cat([torch.stack(together), said]).permute(1, 0, 2).flatten(1)  # [b, answers x D]
            lines = [[f"{x:.9g}" for x in row] for row in numbers]
        if number == 0:
            writer.writerow(map(_cell, ["file", "row", *columns]))
        writer.writerows(map(_cell, [*name, *line]) for name, line in zip(names, lines, strict=True))
    text.detach()


def _cell(text: str) -> str:
    """Text that a spreadsheet would take for a formula, behind a quote; numbers are as they are."""
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def write_npz(run: Run, batches: Iterator[Answers], file: IO[bytes]) -> None:
    """outputs [M, N, ...], names [N]; of classes and labels also probabilities [N, C] of the ensemble, and their names.

    Members with scores add weights [M, N], and of classes and labels scored_probabilities [N, C].
    """
    names: list[str] = []
    parts: list[Tensor] = []
    counted: list[Tensor] = []
    for found_names, found, weights in batches:
        names += [f"{name}:{row}" if row else name for name, row in found_names]
        parts.append(found)
        counted += [] if weights is None else [weights]
    outputs = torch.cat(parts, 1)
    arrays = {"outputs": outputs.numpy(), "names": np.array(names)}
    problem = run.data.problem
    if counted:
        arrays["weights"] = torch.cat(counted, 1).numpy()
    if isinstance(problem, Classification | MultiLabel):
        means = torch.cat([problem.mean(part.double()) for part in parts])
        arrays |= {"probabilities": means.numpy(), "classes": np.array(problem.classes)}
        if counted:
            scored = [problem.mean(part.double(), weights) for part, weights in zip(parts, counted, strict=True)]
            arrays["scored_probabilities"] = torch.cat(scored).numpy()
    np.savez(file, **arrays)  # type: ignore[arg-type]
