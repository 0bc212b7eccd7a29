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
from mheads.problems import gives_probabilities

Answers = tuple[list[tuple[str, str]], Tensor, Tensor | None]  # of a batch: names, [M, b, ...], and weights [M, b]


def write_csv(run: Run, batches: Iterator[Answers], file: IO[bytes]) -> None:
    """A line for each example, written as they come: memory does not grow with their number."""
    problem = run.data.problem
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="", write_through=True)
    writer = csv.writer(text)
    for number, (names, members, weights) in enumerate(batches):
        members = members.double()
        ensemble = [problem.mean(members)] + ([] if weights is None else [problem.mean(members, weights)])
        answers = problem.answer_columns(members, ensemble)
        if number == 0:
            writer.writerow(map(_cell, ["file", "row", *answers.names]))
        writer.writerows(map(_cell, [*name, *line]) for name, line in zip(names, answers.lines, strict=True))
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
    scores: list[Tensor] = []
    for places, outputs, weights in batches:
        names += [f"{name}:{row}" if row else name for name, row in places]
        parts.append(outputs)
        scores += [] if weights is None else [weights]
    arrays = {"outputs": torch.cat(parts, 1).numpy(), "names": np.array(names)}
    problem = run.data.problem
    if scores:
        arrays["weights"] = torch.cat(scores, 1).numpy()
    if gives_probabilities(problem):
        means = torch.cat([problem.mean(part.double()) for part in parts])
        arrays |= {"probabilities": means.numpy(), "classes": np.array(problem.classes)}
        if scores:
            scored = [problem.mean(part.double(), weights) for part, weights in zip(parts, scores, strict=True)]
            arrays["scored_probabilities"] = torch.cat(scored).numpy()
    np.savez(file, **arrays)  # type: ignore[arg-type]
