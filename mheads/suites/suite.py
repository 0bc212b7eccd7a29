"""A suite as its YAML file has it: rows of runs as data, what the paper found for them, and what it claims.

suite = read_suite("standard")    # a suite by name, or the path of a YAML file
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from mheads.common import atomic_files, safe_yaml
from mheads.common.errors import UserError, did_you_mean
from mheads.config import read as configs
from mheads.suites.claims import STRICT, Claim, Each
from mheads.suites.metric_names import check_metric, check_shown, read_figure

# By name, in the order in which they are shown: the paper's tables (table1_standard.yaml), then others and ours.
SUITES = {
    re.sub(r"^table\d+_", "", file.name.removesuffix(".yaml")): file
    for file in sorted(
        resources.files("mheads.suites").iterdir(), key=lambda file: (file.name[:5] != "table", file.name)
    )
    if file.name.endswith(".yaml")
}


class SuiteError(UserError):
    """A mistake in a suite, whose name or file (`key`) the message begins with."""

    def __init__(self, source: str, text: str) -> None:
        super().__init__(f"{source}: {text}", key=source)


class SuiteRow(BaseModel):
    """A run, or (`from`) what another row's run shows in another light, or (`best_of`) the best run of several rows."""

    model_config = STRICT
    name: str = Field(pattern=r"^[\w.<>+-]+$")
    set: list[str] = []
    from_: str | None = Field(None, alias="from")
    metrics: dict[str, str] = {}  # what is shown as a metric -> the metric of the run that it is
    each: Each = {}
    rounds: int | None = Field(None, ge=1)  # of classical MCL, instead of one run
    best_of: list[str] = []  # rows: of each seed the run that is best `by` a metric on the validation examples
    by: str = "ensemble_mean"

    @model_validator(mode="after")
    def _check_source(self) -> SuiteRow:
        if self.from_ is not None and (self.set or self.rounds):
            raise ValueError("`from` takes the run of another row, so nothing can be `set`")
        if self.best_of and (self.set or self.rounds or self.from_ is not None):
            raise ValueError("`best_of` takes runs of other rows, so neither `set` nor `from` goes with it")
        return self


class RecipeChanges(BaseModel):
    """What is different about a recipe in a suite."""

    model_config = STRICT
    base: str | None = None  # the recipe that `set` makes this one of, where it is none by itself
    set: list[str] = []
    trials: Annotated[int | None, Field(ge=1)] = None  # at most: a table may have few splits
    test_share: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the examples, if a trial is a split of the same data set
    validation: Annotated[int, Field(ge=0)] = 0  # training examples that are held out unless the command says how many
    folder: Annotated[str | None, Field(pattern=r"^[\w-]+$")] = (
        None  # of its runs, since they are not those of other suites
    )


class Suite(BaseModel):
    model_config = STRICT
    name: str
    source: str
    about: str = ""
    recipe: str | list[str] = "cifar10_quick"  # what is trained, unless the command says otherwise
    metrics: list[str] = ["single", "ensemble_mean", "oracle", "top_m"]
    rows: list[SuiteRow] = Field(min_length=1)
    independent: str | None = None  # the row of independent members, by which `dee` counts
    cost_figure: list[str] = []  # the metrics that the figure shows against what a row costs, instead of row by row
    ood: list[str] = []  # data keys of other examples, which confidence should tell apart (`auroc`, `fpr95`)
    shifted: list[str] = []  # data keys of examples of the same classes from another source (`accuracy_shifted`)
    recipes: dict[str, RecipeChanges] = {}
    paper: dict[str, dict[str, dict[str, Any]]] = {}  # recipe -> row -> metric -> figure, see read_figure
    claims: list[Claim] = []

    @property
    def own_recipes(self) -> list[str]:
        return [self.recipe] if isinstance(self.recipe, str) else self.recipe


def read_suite(name: str) -> Suite:
    """The suite of a name, or in the YAML file at a path."""
    if name in SUITES:
        return _parse(SUITES[name].read_text(), name, name)
    if not configs.is_file(name):
        raise UserError(
            f"there is no suite and no file {safe_yaml.short(name)}{did_you_mean(name, [*SUITES])}: give one of "
            f"{', '.join(SUITES)}, or the path of a YAML file"
        )
    path = Path(name)
    try:
        text = atomic_files.read_text(path, most=safe_yaml.MAX_TEXT + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a YAML file: {error}") from error
    return _parse(text, path.stem, str(path))


def _parse(text: str, name: str, source: str) -> Suite:
    try:
        tree = safe_yaml.from_yaml(text)
    except ValueError as error:
        raise SuiteError(source, str(error)) from error
    if not isinstance(tree, dict):
        raise UserError(f"{source} must hold a mapping with `rows`, not {safe_yaml.short(tree)}")
    first = text.partition("\n")[0]
    outside = {"name": name, "source": source, "about": first[2:] if first.startswith("# ") else ""}
    if taken := [key for key in outside if key in tree]:
        raise SuiteError(source, _unknown(taken[0], ()))
    try:
        suite = Suite.model_validate(outside | tree)
        _check_metrics(suite)
    except ValidationError as error:
        raise UserError("\n".join(f"{source}: {_explain(tree, problem)}" for problem in error.errors())) from None
    except ValueError as error:
        raise SuiteError(source, str(error)) from error
    return suite


def _check_metrics(suite: Suite) -> None:
    for key, metrics in (("metrics", suite.metrics), ("cost_figure", suite.cost_figure)):
        for metric in metrics:
            check_metric(metric, f"{suite.source}: {key}")
    for row in suite.rows:
        check_shown(row.metrics, f"row {row.name!r}: metrics")
        check_metric(row.by, f"{suite.source}: row {row.name!r}: by")
        if row.by in ("members", "dee", "dee_scaled"):
            raise ValueError(
                f"row {row.name!r}: by = {row.by} is not one number of a run by itself: give another metric"
            )
    for recipe, rows in suite.paper.items():
        for name, figures in rows.items():
            for metric, figure in figures.items():
                check_metric(metric, f"{suite.source}: paper.{recipe}.{name}")
                read_figure(metric, figure, f"paper.{recipe}.{name}.{metric}")


def _explain(tree: dict[str, Any], problem: Any) -> str:
    """One line for a mistake: the row or claim, the key and what is wrong."""
    where, place = list(problem["loc"]), ""
    if len(where) > 1 and where[0] in ("rows", "claims") and isinstance(where[1], int):
        kind, title = ("row", "name") if where[0] == "rows" else ("claim", "say")
        part = tree[where[0]][where[1]]
        name = part.get(title) if isinstance(part, dict) else None
        place = f"{kind} {safe_yaml.short(name) if name else f'number {where[1] + 1}'}: "
        where = where[2:]
    key = ".".join(map(str, where))
    if problem["type"] == "extra_forbidden":
        return place + _unknown(key, problem["loc"])
    if problem["type"] == "missing":
        return f"{place}{key} is missing"
    message = explain_value(problem)
    value = f"{key} = {safe_yaml.short(problem['input'])}: " if key else ""
    return f"{place}{value}{message[0].lower()}{message[1:]}"


def explain_value(problem: Any) -> str:
    """Pydantic's message without its words on who raised it."""
    return str(problem["msg"]).removeprefix("Value error, ")


def _unknown(key: str, where: tuple[Any, ...]) -> str:
    parts: dict[str, type[BaseModel]] = {"rows": SuiteRow, "claims": Claim, "recipes": RecipeChanges}
    kind = parts.get(where[0], Suite) if len(where) > 1 else Suite
    known = [field.alias or name for name, field in kind.model_fields.items()]
    known = known[3:] if kind is Suite else known  # a file does not say its own name
    return f"unknown key {key!r}; there are {', '.join(known)}"
