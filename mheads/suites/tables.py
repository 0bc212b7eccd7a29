"""Tables of suites, and how the terminal shows them. `markdown.py` writes them to files, `page.py` to a page."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from mheads.common.table import Cell, Head, Table, text_rows
from mheads.common.terminal_table import CLOSE, terminal_table
from mheads.problems.metric_text import label
from mheads.suites import findings
from mheads.suites.findings import Document
from mheads.suites.verdicts import describe_test, verdicts

STYLES = {"holds": "green", "holds so far": "green", "within noise": "yellow", "does not hold": "red", "open": "dim"}
SHORT = {"difference": "diff.", "trials": "n", "Ensemble-Mean": "Ens.-Mean"}


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


def suite_table(document: Document) -> Table:
    """A row for each row of the suite: our figures, and the paper's where it gives any."""
    columns = _columns(document)
    texts = {
        "ours": findings.format_ours,
        "paper": findings.format_paper,
        "difference": findings.format_difference,
    }
    rows = []
    for row in findings.rows_run(document):
        figures = [texts[kind](document, row, metric) for metric, kind in columns]
        rows.append([row, str(findings.num_trials(document, row)), *figures])
    # The paper's single members, of one trial, are left out where there is no room for them.
    heads = [
        _head(label(metric) if kind == "ours" else kind, metric != "members", (metric, kind) == ("members", "paper"))
        for metric, kind in columns
    ]
    head = [Head("row", whole=True), _head("trials", True), *heads]
    why = findings.why_no_paper(document)
    notes = (why, findings.describe_chance(document), findings.describe_machines(document), findings.not_run(document))
    title = "Our runs" if why else "Our runs and the paper's figures"
    return Table(title, head, text_rows(rows), note=" ".join(filter(None, notes)))


def _columns(document: Document) -> list[tuple[str, str]]:
    """(metric, kind) of each column after the first two: those with a figure, and the paper's where it gives one."""
    columns, run = [], findings.rows_run(document)
    for metric in document["metrics"]:
        if run and not any(findings.has_value(document, row, metric) for row in run):
            continue
        columns.append((metric, "ours"))
        if findings.has_paper(document, metric):
            columns += [(metric, "paper"), *([(metric, "difference")] if metric != "members" else [])]
    return columns


def _head(text: str, right: bool, optional: bool = False) -> Head:
    short = SHORT.get(text, text).replace("-", "-\n").replace(" ", "\n", 1)
    return Head(text, right=right, short=short, optional=optional)


def claims_table(document: Document) -> Table | None:
    """A row for each claim of the suite, and what our runs say of it; None if it claims nothing."""
    claims = verdicts(document)
    if not claims:
        return None
    rows = [[claim.claim, claim.word, claim.figures] for claim in claims]
    caption = "What is claimed, and what our runs say of it"
    return Table(caption, ["claim", "here", "figures"], text_rows(rows), note=describe_test(document, claims))


def show_document(document: Document) -> RenderableType:
    """The table and the claims, as the terminal shows them."""
    table, claims = suite_table(document), claims_table(document)
    narrow = [[Cell(cell.text.replace(" ± ", " ±")) for cell in row] for row in table.rows]
    parts: list[RenderableType] = [
        Text(title(document), style="bold"),
        terminal_table(replace(table, rows=narrow), padding=CLOSE),
    ]
    if table.note:
        parts.append(Text(table.note, style="dim"))
    for claim, word, figures in claims.rows if claims else ():
        text = Text(f"{word.text}: ", style=STYLES.get(word.text, "cyan"))  # which is that of one seed
        parts.append(text.append(f"{claim.text} ({figures.text})", style="default"))
    if claims and claims.note:
        parts.append(Text(claims.note, style="dim"))
    return Group(*parts)
