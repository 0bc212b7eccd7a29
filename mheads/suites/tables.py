"""Tables of suites: in the terminal, and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mheads.problems.metric_text import label
from mheads.suites import findings
from mheads.suites.verdicts import TEST, how_tested, verdicts

Document = dict[str, Any]
STYLES = {"holds": "green", "holds so far": "green", "within noise": "yellow", "does not hold": "red", "open": "dim"}


def title(document: Document) -> str:
    """The suite, the recipe and how it was run, in one line."""
    parts = [f"{document['suite']}: {document['recipe']} x{document['members']}"]
    if document["scale"] != 1:
        parts.append(f"{document['scale']:g} of the iterations")
    if document["validation"] and document.get("test"):
        parts.append(f"without {document['validation']:,} validation examples, on the test set")
    elif document["validation"]:
        parts.append(f"on {document['validation']:,} validation examples")
    return ", ".join([*parts, *document["overrides"]])


def columns(document: Document) -> list[tuple[str, str]]:
    """(metric, kind) of each column after the first two; the paper's only where it gives a figure."""
    found = []
    for metric in document["metrics"]:
        found.append((metric, "ours"))
        if findings.has_paper(document, metric):
            found.append((metric, "paper"))
            if metric != "members":
                found.append((metric, "difference"))
    return found


def cells(document: Document, row: str) -> list[str]:
    texts = {"ours": findings.ours, "paper": findings.theirs, "difference": findings.apart}
    return [texts[kind](document, row, metric) for metric, kind in columns(document)]


def heads(document: Document) -> list[str]:
    return [label(metric) if kind == "ours" else kind for metric, kind in columns(document)]


def shown(document: Document) -> RenderableType:
    """The table and the claims, as the terminal shows them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    narrow = {"difference": "diff.", "trials": "n", "Ensemble-Mean": "Ens.-Mean"}
    # The paper's single members, of one trial, are left to the page: there is no room for them.
    kept = [i for i, column in enumerate(columns(document)) if column != ("members", "paper")]
    for head in ("row", "trials", *(heads(document)[i] for i in kept)):
        lines = narrow.get(head, head).replace("-", "-\n").replace(" ", "\n", 1)
        table.add_column(lines, justify="left" if head in ("row", "members") else "right", no_wrap=head == "row")
    for entry in document["rows"]:
        row = entry["name"]
        count = findings.num_trials(document, row)
        found = [cells(document, row)[i].replace(" ± ", " ±") for i in kept]
        table.add_row(row, str(count) if count else "", *found)
    parts: list[RenderableType] = [Text(title(document), style="bold"), table]
    if why := findings.why_no_paper(document):
        parts.append(Text(why, style="dim"))
    found_of_claims = verdicts(document)
    for verdict in found_of_claims:
        text = Text(f"{verdict.word}: ", style=STYLES.get(verdict.word, "cyan"))  # which is that of one seed
        parts.append(text.append(f"{verdict.claim} ({verdict.figures})", style="default"))
    if tested := how_tested(found_of_claims):
        parts.append(Text(tested, style="dim"))
    return Group(*parts)


def markdown(document: Document, picture: str | None = None) -> str:
    """A section with the table, the claims, and how to make it."""
    header = ["row", "trials", *heads(document)]
    lines = [f"## {title(document)}", ""]
    if document.get("about"):
        lines += [document["about"], ""]
    lines += [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    for entry in document["rows"]:
        row = entry["name"]
        count = findings.num_trials(document, row)
        lines.append(f"| {' | '.join([row, str(count) if count else '', *cells(document, row)])} |")
    if why := findings.why_no_paper(document):
        lines += ["", why]
    if found := verdicts(document):
        lines += ["", "| claim | here | figures |", "| --- | --- | --- |"]
        lines += [f"| {_cell(verdict.claim)} | {verdict.word} | {_cell(verdict.figures)} |" for verdict in found]
        if tested := how_tested(found):
            lines += ["", tested]
    lines += ["", f"    {document['command']}", "", *made_with(document)]
    if picture:
        lines += ["", f"![{title(document)}]({picture})"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """A text as a cell of a table, which a line break or a bar would end."""
    return " ".join(text.split()).replace("|", "\\|")


def made_with(document: Document) -> list[str]:
    """Versions, machines, seeds and time of the runs."""
    runs = [run for found in document["runs"].values() for run in found]
    if not runs:
        return ["Nothing has been run yet."]
    versions = {", ".join(f"{name} {version}" for name, version in run["versions"].items()) for run in runs}
    machines = {run["machine"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    hours = sum(run["result"].get("seconds", 0) for run in runs) / 3600
    several = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    return [
        f"{several} with seeds {', '.join(map(str, seeds))}, {hours:.1f} hours of training; "
        f"{'; '.join(sorted(versions))}; {'; '.join(sorted(machines))}."
    ]


HEAD = f"""# Results

Made by `mheads reproduce` from the JSON files in this folder, which hold every run with its command; `mheads reproduce --tables` makes this page anew. Accuracies are in percent on the test set unless a title says otherwise; ± is the standard deviation over trials (n - 1), and the difference is ours minus the paper's, for runs like the paper's alone. top-M is how often the truth is among as many best classes of one answer as there are members: the Oracle of M members compares with the top-M of one network. Runs from before it was kept have none. Rows that have not been run say so. The training loss is the mean of the last tenth of the iterations; evenness is the entropy of the members' shares of the test examples that they own, 1 if all own as many.

{TEST}
"""  # noqa: E501


def readme(documents: dict[Path, Document]) -> str:
    sections = [markdown(found, path.with_suffix(".png").name) for path, found in documents.items()]
    return "\n".join([HEAD, *sections])
