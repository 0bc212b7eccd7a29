"""A panel of a page is an entry: the section that it stands in, and the function that describes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from mheads.common.errors import UserError
from mheads.report.page.html import Missing, PageSection, Part

Shown = TypeVar("Shown")  # a ShownRun, or several


class Panel(NamedTuple, Generic[Shown]):
    """`describe` gives the parts of a panel, none if there is nothing to show. If it raises a UserError, the page shows
    the reason, after `otherwise`."""

    section: str
    describe: Callable[[Shown], Sequence[Part]]
    when: Callable[[Shown], bool] = lambda shown: True  # whether the page has this panel
    otherwise: str = ""


# The sections of all pages in their order, with their titles and leads. A section without panels is left out.
SECTIONS = {
    "runs": ("The runs", "A click on the head of a column sorts by it."),
    "settings": ("What is different", ""),
    "run": ("What was run", ""),
    "results": ("Results", ""),
    "hypotheses": (
        "What members answer",
        "Each member's answer to examples of the set that training evaluates on. Under Multiple Choice Learning these "
        "are hypotheses, of which one is to be right. A percentage is the member's probability by its scores.",
    ),
    "curves": ("Over training", ""),
    "ownership": (
        "Who owns which {groups}",
        "A member owns an example if its loss on it is the lowest; of training examples, all members that learn from "
        "one have equal parts in it. Each cell is the member's share of {shared}, in "
        "percent; a column adds up to 100.",
    ),
    "wins": (
        "Who wins",
        "Under Multiple Choice Learning an example is won by the members that learn from it; in other ensembles all "
        "do.",
    ),
    "agreement": ("Where answers differ", ""),
    "reliability": ("How far to trust it", ""),
    "hardest": (
        "The hardest examples",
        "Those that the ensemble gets wrong, the lowest probability of the true class first, and then those that only "
        "some members do; with everybody's answer and confidence.",
    ),
    "saliency": (
        "What members look at",
        "What in an image raises the score of its class, for each member; grey is nothing, and all maps of an image "
        "have one scale. Under Multiple Choice Learning the owner of an image responds more than the others.",
    ),
    "cost": ("What it cost", ""),
    "repeat": ("How to repeat it", ""),
}


def make_sections(
    panels: Mapping[str, Panel[Shown]], shown: Shown, groups: Sequence[str]
) -> tuple[list[PageSection], dict[str, list[str]]]:
    """The sections that these panels fill, and by reason those that lack a panel.

    `groups` are the classes that members own, or only one of all examples. A reason stands on the page once.
    """
    parts: dict[str, list[Part]] = defaultdict(list)
    lacking: dict[str, list[str]] = {}
    for panel in panels.values():
        try:
            parts[panel.section] += panel.describe(shown) if panel.when(shown) else []
        except UserError as error:
            why = f"{panel.otherwise or 'Not shown: '}the reason is above" if str(error) in lacking else None
            names = lacking.setdefault(str(error), [])
            if panel.section not in names:
                names.append(panel.section)
                parts[panel.section].append(Missing(f"{why or f'{panel.otherwise}{error}'}."))
    titles = (
        {"groups": "class", "shared": "a class"}
        if len(groups) > 1
        else {"groups": "examples", "shared": "all examples"}
    )
    filled = [
        PageSection(name, title.format_map(titles), parts[name], lead.format_map(titles))
        for name, (title, lead) in SECTIONS.items()
        if parts[name]
    ]
    return filled, lacking
