"""Recipes and configs as people look at them before they train."""

from __future__ import annotations

from typing import Any

import rich.table
import yaml
from pydantic import BaseModel

from mheads.common.table import Head, Table, text_rows
from mheads.common.terminal_table import CLOSE, terminal_table
from mheads.config import read as configs
from mheads.config.schema import Config

COMMENTS_AT = 40  # where comments begin, unless a value is longer


def recipe_table() -> rich.table.Table:
    """The table of `mheads recipes`: what comes with the package."""
    head = [Head("name", whole=True), Head("what it trains"), Head("data", whole=True)]
    head += [Head(title, right=True, whole=True) for title in ("members", "iterations")]
    by_name = {name: configs.load(name) for name in configs.recipes()}
    rows = [
        [name, configs.summary(name), config.data.name, f"{config.members}", f"{config.optim.iterations:,}"]
        for name, config in by_name.items()
    ]
    return terminal_table(Table("Recipes", head, text_rows(rows)), padding=CLOSE)


def annotate(config: Config) -> str:
    """The config as YAML that reads back as itself, each key with its description."""
    return "\n".join(_lines(config, config.model_dump(mode="json"), ""))


def _lines(section: BaseModel, plain: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            lines += [f"{indent}{name}:", *_lines(value, plain[name], f"{indent}  ")]
        else:
            text = indent + yaml.safe_dump({name: plain[name]}, default_flow_style=True, width=float("inf"))[1:-2]
            lines.append(f"{text:<{COMMENTS_AT - 1}} # {field.description}")
    return lines
