"""A suite: rows of runs as data, with what the paper found for them and what it claims.

suite = read("standard")          # a suite by name, or the path of a YAML file
table = suite.on("cifar10_quick", configs.load("cifar10_quick"))    # its rows for a recipe
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mheads.common import atomic_files, safe_yaml
from mheads.common.errors import UserError
from mheads.config.schema import Config
from mheads.problems.base import ANSWERS
from mheads.problems.detection import DetectionResult
from mheads.problems.metrics import Result
from mheads.problems.multilabel import MultiLabelResult
from mheads.problems.regression import RegressionResult
from mheads.problems.segmentation import SegmentationResult
from mheads.suites.placeholders import Words

# As they are shown: those of the paper in the order in which it asks its questions.
SUITES = (
    "standard",
    "tree",
    "averaged",
    "mcl",
    "pretrain",
    "finetune",
    "mixture",
    "specialists",
    "classical",
    "modern",
    "detection",
)
TERM = re.compile(
    r"^(?:(?P<factor>[\d.]+) *\* *)?(?P<row>[^ *]+)\.(?P<metric>\w+)"
    r"(?: - (?P<less>[^ *]+\.(?:[^\W\d]\w*)))?(?: *(?P<added>[+-] *[\d.]+))?$"
)
NUMBER = re.compile(r"^[+-]?\d+(\.\d+)?$")
MEMBER = re.compile(r"^member_(\d+)$")  # the metric of one member by its number


Relation = Literal["better", "no worse", "worse", "no better", "above", "below", "about"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


Each = dict[str, list[Any] | str]


class Row(_Part):
    """A run, or (`from`) what another row's run shows in another light."""

    name: str = Field(pattern=r"^[\w.<>+-]+$")
    set: list[str] = []
    from_: str | None = Field(None, alias="from")
    metrics: dict[str, str] = {}  # what is shown as a metric -> the metric of the run that it is
    each: Each = {}
    rounds: int | None = Field(None, ge=1)  # of classical MCL, instead of one run

    @model_validator(mode="after")
    def _run_or_from(self) -> Row:
        if self.from_ is not None and (self.set or self.rounds):
            raise ValueError("`from` takes the run of another row, so nothing can be `set`")
        return self

    def may_be(self, name: str, layers: bool = True) -> bool:
        """Whether a network with more members has a row of this name, or with `layers` one with any other layers."""

        def pattern(given: list[Any] | str) -> str:
            if isinstance(given, list):
                return "|".join(re.escape(str(value)) for value in given)
            return r"\d+" if ".." in given else ".+" if layers else "(?!)"

        words = {key: pattern(given) for key, given in self.each.items()}
        parts = re.split(r"<([^<>]+)>", self.name)
        found = [f"(?:{words.get(part, pattern('..'))})" if i % 2 else re.escape(part) for i, part in enumerate(parts)]
        return re.fullmatch("".join(found), name) is not None


class Term(NamedTuple):
    """factor * row.metric - less + added, or a number alone"""

    factor: float
    row: str  # "" for a number
    metric: str
    added: float
    less: tuple[str, str] | None = None  # the row and the metric of what is taken away

    @property
    def parts(self) -> list[tuple[str, str]]:
        """(row, metric) of what it is made of."""
        return [(self.row, self.metric), *([self.less] if self.less else [])] if self.row else []

    def value(self, found: Sequence[float]) -> float:
        """With these values of its parts."""
        return self.factor * sum(found[:1]) - sum(found[1:]) + self.added

    @staticmethod
    def of(text: str) -> Term:
        if NUMBER.match(text):
            return Term(0.0, "", "", float(text))
        found = TERM.match(text)
        if found is None:
            raise ValueError(f"{text!r} is not row.metric, for example 2 * bagging.oracle + 1")
        added = float((found["added"] or "0").replace(" ", ""))
        row, _, metric = (found["less"] or "").rpartition(".")
        less = (row, metric) if row else None
        return Term(float(found["factor"] or 1), found["row"], found["metric"], added, less)


def _number_or_term(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class Claim(_Part):
    """An order of rows from best to worst by a metric, or a relation of two terms."""

    say: str = ""
    order: list[str] | None = Field(None, min_length=1)
    by: str | None = None
    left: str | None = None
    is_: Relation | None = Field(None, alias="is")
    right: Annotated[str | None, BeforeValidator(_number_or_term)] = None
    within: float = Field(0.25, gt=0)  # about: this part of the right side
    recipes: list[str] | None = None
    except_: list[str] = Field([], alias="except")  # recipes that it is not made for
    each: Each = {}

    @model_validator(mode="after")
    def _whole(self) -> Claim:
        ordered, related = (self.order, self.by), (self.left, self.is_, self.right)
        whole, other = (ordered, related) if self.order is not None else (related, ordered)
        if None in whole or other != (None,) * len(other):
            raise ValueError("give `order` and `by`, or `left`, `is` and `right`")
        for text in (self.left, self.right):
            if text is not None:
                Term.of(text)
        if self.left is not None and not Term.of(self.left).row:
            raise ValueError(f"left is {self.left}: give row.metric there, and the number on the right")
        return self

    def places(self) -> Iterator[tuple[str, str, str]]:
        """(key, row, metric) of everything that it names."""
        for row in self.order or ():
            yield "order", row, str(self.by)
        for key, text in (("left", self.left), ("right", self.right)):
            for row, metric in Term.of(text).parts if text is not None else ():
                yield key, row, metric


class ForRecipe(_Part):
    """What is different about a recipe in this suite."""

    set: list[str] = []
    folder: str | None = Field(None, pattern=r"^[\w-]+$")  # of its runs, since they are not those of other suites


class Suite(_Part):
    name: str
    source: str
    about: str = ""
    recipe: str = "cifar10_quick"  # what is trained, unless the command says otherwise
    metrics: list[str] = ["single", "ensemble_mean", "oracle"]
    rows: list[Row] = Field(min_length=1)
    recipes: dict[str, ForRecipe] = {}
    paper: dict[str, dict[str, dict[str, Any]]] = {}  # recipe -> row -> metric -> figure, see read_figure
    claims: list[Claim] = []

    def on(self, recipe: str, config: Config) -> Table:
        """The rows and claims for a recipe by its short name, whose config (with the suite's keys) is this."""
        words = Words(config)
        rows = list(self._filled(self.rows, words))
        names = [row.name for row in rows]
        if not rows:
            raise UserError(
                f"{self.source}: no row is left on {recipe} with {_count(words.members, 'member')}, since `each` gives "
                "no value: give another recipe, or more members"
            )
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(
                f"{self.source}: there are two rows {twice[0]!r}; give each a name of its own", key=self.source
            )
        for row in rows:
            for metric in (*row.metrics, *row.metrics.values()):
                _check_metric(metric, f"{self.source}: row {row.name!r}: metrics")
        claims = []
        for claim in self._filled(self.claims, words):
            self._check_claim(claim, names)
            made = recipe not in claim.except_ and (claim.recipes is None or recipe in claim.recipes)
            if made and (kept := self._for_rows(claim, names)):
                claims.append(kept)
        return Table(self, rows, claims, self.paper.get(recipe, {}))

    def _check_claim(self, claim: Claim, names: list[str]) -> None:
        """Refuses a claim of a row that no network has, or of a metric that nothing has."""
        where = f"{self.source}: claim {safe_yaml.short(claim.say)}" if claim.say else f"{self.source}: a claim"
        for key, row, metric in claim.places():
            if row not in names and not any(part.may_be(row) for part in self.rows):
                near = difflib.get_close_matches(row, names, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise UserError(
                    f"{where}: {key} names {row!r}{hint}, and there is no such row; there are {_list(names)}"
                )
            _check_metric(metric, f"{where}: {'by' if key == 'order' else key}")

    def _for_rows(self, claim: Claim, names: list[str]) -> Claim | None:
        """What a claim says without rows that need more members. Those of other layers stay: they may be misspelt."""

        def lacking(row: str) -> bool:
            return row not in names and any(part.may_be(row, layers=False) for part in self.rows)

        if claim.order is not None:
            kept = [row for row in claim.order if not lacking(row)]
            return claim.model_copy(update={"order": kept}) if len(kept) > 1 else None
        return None if any(lacking(row) for _, row, _ in claim.places()) else claim

    def _filled(self, parts: list[Any], words: Words) -> Iterator[Any]:
        """Rows or claims, each as often as `each` says, with words filled in; without those that this network lacks."""
        for part in parts:
            what = f"{self.source}: row {part.name!r}" if isinstance(part, Row) else f"{self.source}: a claim"
            try:
                keys = list(part.each)
                for chosen in itertools.product(*(words.values(part.each[key]) for key in keys)):
                    fill = words.filler(dict(zip(keys, map(str, chosen), strict=True)))
                    tree = _map_text(part.model_dump(by_alias=True, exclude={"each"}), fill)
                    if isinstance(part, Claim) and tree["order"] is not None:
                        tree["order"] = [name for item in tree["order"] for name in words.names(item)]
                        if len(tree["order"]) < 2:  # with so few members there is nothing to put in order
                            continue
                    if (filled := type(part).model_validate(tree)) and not words.lacking(tree):
                        yield filled
            except ValueError as error:
                raise UserError(f"{what}: {_told(error)}") from error


@dataclass(frozen=True)
class Table:
    """The rows of a suite for one recipe."""

    suite: Suite
    rows: list[Row]
    claims: list[Claim]
    paper: dict[str, dict[str, Any]]

    @cached_property
    def names(self) -> list[str]:
        return [row.name for row in self.rows]

    def row(self, name: str) -> Row:
        found = next((row for row in self.rows if row.name == name), None)
        if found is None:
            near = difflib.get_close_matches(name, self.names, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"{self.suite.name} has no row {name!r}{hint}; it has {', '.join(self.names)}")
        return found


def read(name: str) -> Suite:
    """The suite of a name, or in the YAML file at a path."""
    if name in SUITES:
        return _parse((resources.files("mheads.suites") / f"{name}.yaml").read_text(), name, name)
    path = Path(name)
    try:
        known = path.is_file()
    except OSError:
        known = False
    if not known:
        near = difflib.get_close_matches(name, SUITES, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(
            f"there is no suite and no file {safe_yaml.short(name)}{hint}: give one of {', '.join(SUITES)}, or the "
            "path of a YAML file"
        )
    try:
        text = atomic_files.read_text(path, most=safe_yaml.MAX_TEXT + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a YAML file: {error}") from error
    return _parse(text, path.stem, str(path))


def _parse(text: str, name: str, source: str) -> Suite:
    try:
        tree = safe_yaml.from_yaml(text)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{source} must hold a mapping with `rows`, not {safe_yaml.short(tree)}")
    first = text.partition("\n")[0]
    about = first.removeprefix("# ") if first.startswith("# ") else ""
    given = {"name": name, "source": source, "about": about}
    if taken := [key for key in given if key in tree]:
        raise UserError(f"{source}: unknown key {taken[0]!r}; there are {', '.join(_keys(()))}")
    try:
        suite = Suite.model_validate(given | tree)
        for metric in suite.metrics:
            _check_metric(metric, f"{source}: metrics")
        for entry in suite.rows:
            check_shown(entry.metrics, f"row {entry.name!r}: metrics")
        for recipe, row, metric, figure in _figures(suite.paper):
            _check_metric(metric, f"{source}: paper.{recipe}.{row}")
            read_figure(metric, figure, f"paper.{recipe}.{row}.{metric}")
    except ValidationError as error:
        raise UserError("\n".join(_explain(source, tree, problem) for problem in error.errors())) from None
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error
    return suite


@cache
def known_metrics() -> tuple[str, ...]:
    """What a column or a claim may name: numbers of results of all kinds, and what `results.measures` adds."""
    names = [
        "members",
        "top_m",
        "top_m_single",
        "train_loss",
        "member_train_loss",
        "evenness",
        "iterations",
        "parameters",
        "seconds",
    ]
    names += ["peak_memory", "learning_entropy"]  # the rest of `learning` is lists
    for kind in (Result, RegressionResult, MultiLabelResult, SegmentationResult, DetectionResult):
        hints = get_type_hints(kind)
        for field in fields(kind):
            group = "dict" in str(hints[field.name])
            if group and field.name not in ("further", "classes"):  # whose parts are groups again
                names += [f"{field.name}_{part}" for part in ("single", *ANSWERS, "oracle")]
            elif not group and "list" not in str(hints[field.name]):
                names.append(field.name)
    return tuple(dict.fromkeys(name for name in names if not name.startswith("top_k_")))  # which are lists


def check_shown(metrics: Mapping[str, str], where: str) -> None:
    """Refuses members in the place of a number, or a number in theirs."""
    if mixed := [pair for pair in metrics.items() if "members" in pair and len(set(pair)) > 1]:
        column, shown = mixed[0]
        raise ValueError(f"{where}: {column}: {shown}: members are several numbers, and stand for themselves")


def _check_metric(metric: str, where: str) -> None:
    if metric not in known_metrics() and not MEMBER.match(metric):
        near = difflib.get_close_matches(metric, known_metrics(), 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"{where} names {metric!r}{hint}, and no result has it; there are {_list(known_metrics())}")


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _figures(paper: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[tuple[str, str, str, Any]]:
    for recipe, rows in paper.items():
        for row, metrics in rows.items():
            for metric, figure in metrics.items():
                yield recipe, row, metric, figure


def read_figure(metric: str, figure: Any, where: str = "the paper's figure") -> dict[str, Any]:
    """A figure of the paper as {"mean", "std", "min", "max"}, or {"members": [...]} for one of each member."""

    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    if metric == "members" and isinstance(figure, list) and all(map(number, figure)):
        return {"members": figure}
    if number(figure):
        return {"mean": figure}
    if isinstance(figure, list) and len(figure) == 2 and number(figure[0]) and (figure[1] is None or number(figure[1])):
        return {"mean": figure[0], "std": figure[1]}
    if isinstance(figure, dict) and figure.keys() == {"mean", "min", "max"} and all(map(number, figure.values())):
        return dict(figure)
    raise ValueError(
        f"{where} = {safe_yaml.short(figure)}: give a number, [mean, deviation] or {{mean: , min: , max: }}"
    )


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_text(part, change) for part in value]
    return {key: _map_text(part, change) for key, part in value.items()} if isinstance(value, dict) else value


def _told(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())
    return str(error)


def _explain(source: str, tree: dict[str, Any], problem: Any) -> str:
    """One line for a mistake: the file, the row or claim, the key and what is wrong."""
    where = list(problem["loc"])
    place = source
    if len(where) > 1 and where[0] in ("rows", "claims") and isinstance(where[1], int):
        kind = "row" if where[0] == "rows" else "claim"
        part = tree[where[0]][where[1]]
        named = part.get("name" if kind == "row" else "say") if isinstance(part, dict) else None
        place += f": {kind} {safe_yaml.short(named) if named else f'number {where[1] + 1}'}"
        where = where[2:]
    key = ".".join(str(part) for part in where)
    if problem["type"] == "extra_forbidden":
        return f"{place}: unknown key {key!r}; there are {', '.join(_keys(problem['loc']))}"
    if problem["type"] == "missing":
        return f"{place}: {key} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    given = f"{key} = {safe_yaml.short(problem['input'])}: " if key else ""
    return f"{place}: {given}{message[0].lower()}{message[1:]}"


def _keys(where: Any) -> list[str]:
    parts: dict[str, type[BaseModel]] = {"rows": Row, "claims": Claim, "recipes": ForRecipe}
    kind = parts.get(where[0], Suite) if len(where) > 1 else Suite
    known = [field.alias or name for name, field in kind.model_fields.items()]
    return known[3:] if kind is Suite else known  # a file does not say its own name
