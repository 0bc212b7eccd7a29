"""Tables of suites as Markdown: a section for each suite, and the page of all results."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from mheads.common.markdown_table import table_lines
from mheads.common.number_words import count
from mheads.suites.compute import compute_table
from mheads.suites.findings import Document
from mheads.suites.tables import claims_table, suite_table, title
from mheads.suites.verdicts import TEST


def markdown(document: Document, picture: str | None = None) -> str:
    """A section with the table, the claims, and how to make it."""
    lines = [f"## {title(document)}", ""]
    if document.get("about"):
        lines += [document["about"], ""]
    for table in (suite_table(document), claims_table(document), compute_table(document)):
        if table is not None:
            lines += [*table_lines(table), ""]
    lines += [f"    {document['command']}", "", *list_runs(document)]
    if picture:
        lines += ["", f"![{title(document)}]({quote(picture)})"]
    return "\n".join(lines) + "\n"


def list_runs(document: Document) -> list[str]:
    """Versions, machines, seeds and time of the runs."""
    runs = [run for runs in document["runs"].values() for run in runs]
    if not runs:
        return ["Nothing has been run yet."]
    versions = {", ".join(f"{name} {version}" for name, version in run["versions"].items()) for run in runs}
    machines = {run["machine"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    hours = sum(run["result"].get("seconds", 0) for run in runs) / 3600
    return [
        f"{count(len(runs), 'run')} with seeds {', '.join(map(str, seeds))}, {hours:.1f} hours of training; "
        f"{'; '.join(sorted(versions))}; {'; '.join(sorted(machines))}."
    ]


HEAD = f"""# Results

Made by `mheads reproduce` from the JSON files in this folder, which hold every run with its command; `mheads reproduce --tables` makes this page anew. Accuracies are in percent on the test set unless a title says otherwise; ± is the standard deviation over trials (n - 1), and the difference is ours minus the paper's, for runs like the paper's alone. top-M is how often the truth is among as many best classes of one answer as there are members: the Oracle of M members compares with the top-M of one network. Runs from before it was kept have none, and a mean over fewer runs than the row has says over how many (n). Rows that have not been run are named below their table. Hours are wall-clock time as it was, also beside other work; FLOP are counted from the network's shapes, 2 for a multiply-add, and those of an answer are of all members on one example. The training loss is the mean of the last tenth of the iterations; evenness is the entropy of the members' shares of the test examples that they own, 1 if all own as many.

{TEST}
"""  # noqa: E501


def readme(documents: dict[Path, Document]) -> str:
    sections = [markdown(document, path.with_suffix(".png").name) for path, document in documents.items()]
    return "\n".join([HEAD, *sections])
