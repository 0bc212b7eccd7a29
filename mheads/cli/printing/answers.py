"""Tables of what the members of a run answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from mheads.api.predict import Predicted
from mheads.common.progress import Watcher
from mheads.problems import Classification, MultiLabel, Problem, Segmentation

FEW = 10  # images that get a table each
SHOWN = 100  # lines of a table; the rest is for a file


def tables(predicted: Predicted, watch: Watcher) -> Iterator[Group]:
    """A table for each of a few images, else one with a line for each example."""
    found, weights, problem = predicted.outputs, predicted.weights, predicted.run.data.problem
    images, count = predicted.images, found.shape[1]
    if images is not None and count <= FEW:
        for i, image in enumerate(images):
            outputs, count_of = found[:, i : i + 1], None if weights is None else weights[:, i : i + 1]
            if isinstance(problem, Classification):
                together = [problem.mean(outputs)[0]]
                together += [] if count_of is None else [problem.mean(outputs, count_of)[0]]
                yield answers_to_image(image, outputs[:, 0].softmax(-1), problem.classes, together)
            else:
                yield answers(str(image), outputs, problem, weights=count_of)
        return
    title = str(predicted.asked.file) if images is None else f"{count:,} images"
    names = None if images is None else [str(image) for image in images[:SHOWN]]
    yield answers(title, found[:, :SHOWN], problem, names, None if weights is None else weights[:, :SHOWN])
    if count > SHOWN:
        watch.say(f"these are {SHOWN} of {count:,}: -o answers.csv, or .npz, writes all")


def answers(
    title: str,
    outputs: torch.Tensor,
    problem: Problem,
    names: Sequence[str] | None = None,
    weights: torch.Tensor | None = None,
) -> Group:
    """A table of outputs [M, N, ...], with a line for each example; these have names, or are numbered.

    Weights [M, N] are those of the scored answer, where members have scores.
    """
    agree = ["agree"]
    said = [problem.mean(outputs), *([] if weights is None else [problem.mean(outputs, weights)])]
    if isinstance(problem, Segmentation):
        lines = classes_of_pixels(outputs.softmax(2), problem.classes, said)
    elif isinstance(problem, MultiLabel):
        lines = labels_of_rows(outputs.sigmoid(), problem.classes, said)
    elif isinstance(problem, Classification):
        lines = answers_to_rows(outputs.softmax(-1), problem.classes, said)
    else:
        lines, agree = numbers_of_rows(outputs, said), []
    table = Table(box=box.SIMPLE_HEAD)
    members = [f"member {m}" for m in range(len(outputs))]
    together = ["Ensemble-Mean", "Ensemble-Scored"][: len(said)]
    for column in ("row" if names is None else "image", *together, *agree, *members):
        table.add_column(column, no_wrap=not isinstance(problem, Segmentation | MultiLabel))
    for row, line in enumerate(lines):
        table.add_row(str(row) if names is None else names[row], *line)
    return Group(title, table)


# The cells of each line: what the ensemble says `together` (its mean [N, ...] and, where there is one, its scored
# answer), how far members agree with the mean, and what each of them says.

Together = Sequence[torch.Tensor]


def numbers_of_rows(outputs: torch.Tensor, together: Together) -> Iterator[list[str]]:
    """Numbers [M, N, D]; whether members agree is for the reader to see."""
    for row in range(outputs.shape[1]):
        yield [" ".join(f"{x:.4g}" for x in given[row]) for given in (*together, *outputs)]


def answers_to_rows(probabilities: torch.Tensor, classes: Sequence[str], together: Together) -> Iterator[list[str]]:
    """Probabilities [M, N, C] of one class for each example."""
    votes = probabilities.argmax(-1)
    for row, best in enumerate(together[0].argmax(-1)):
        said = [f"{classes[int(p[row].argmax())]} {100 * p[row].max():.1f}%" for p in together]
        agree = f"{int((votes[:, row] == best).sum())} of {len(votes)}"
        yield [*said, agree, *(classes[c] for c in votes[:, row])]


def labels_of_rows(probabilities: torch.Tensor, classes: Sequence[str], together: Together) -> Iterator[list[str]]:
    """Probabilities [M, N, C] of several labels: those above 0.5."""

    def labels(p: torch.Tensor) -> str:
        return ", ".join(f"{classes[c]} {100 * p[c]:.1f}%" for c in (p > 0.5).nonzero()[:, 0]) or "none"

    given = probabilities > 0.5
    for row, p in enumerate(together[0]):
        said = [labels(answer[row]) for answer in together]
        agree = f"{int((given[:, row] == (p > 0.5)).all(-1).sum())} of {len(given)}"
        members = (", ".join(classes[c] for c in one.nonzero()[:, 0]) or "none" for one in given[:, row])
        yield [*said, agree, *members]


def classes_of_pixels(probabilities: torch.Tensor, classes: Sequence[str], together: Together) -> Iterator[list[str]]:
    """Probabilities [M, N, C, H, W]: which part of the pixels has which class."""
    votes, answered = probabilities.argmax(2), [p.argmax(1) for p in together]

    def parts(pixels: torch.Tensor) -> str:
        shares = pixels.flatten().bincount(minlength=len(classes)) / pixels.numel()
        best = shares.topk(min(3, len(classes)))
        pairs = zip(best.values, best.indices, strict=True)
        return ", ".join(f"{classes[c]} {100 * share:.1f}%" for share, c in pairs if share)

    for row, pixels in enumerate(answered[0]):
        same = 100 * (votes[:, row] == pixels).all(0).double().mean()
        said = [parts(answer[row]) for answer in answered]
        yield [*said, f"on {same:.1f}%", *(parts(one) for one in votes[:, row])]


def answers_to_image(image: Path, probabilities: torch.Tensor, classes: Sequence[str], together: Together) -> Group:
    """A table of the probabilities [M, C] of one image, and [C] of what members say together."""
    votes = probabilities.argmax(-1)
    mean = together[0]
    answer = int(mean.argmax())
    agree = int((votes == answer).sum())
    share = f" ({100 * mean[answer]:.1f}%), {agree} of {len(votes)} members agree"
    title = Text.assemble(f"{image}: ", (classes[answer], "bold"), share)
    table = Table(box=box.SIMPLE_HEAD)
    best = min(3, len(classes))
    for name in ("", *(["answer", "second", "third"][:best])):
        table.add_column(name, no_wrap=not name)
    rows = [(Text(f"member {m}"), p) for m, p in enumerate(probabilities)]
    bold = (Text(name, style="bold") for name in ("Ensemble-Mean", "Ensemble-Scored"))
    for who, p in (*rows, *zip(bold, together, strict=False)):
        top = p.topk(best)
        pairs = zip(top.values, top.indices, strict=True)
        table.add_row(who, *(f"{classes[c]} {100 * v:.1f}%" for v, c in pairs))
    return Group(title, table)  # a title of the table's own would be wrapped to its width
