"""Recipes and configs as people look at them before they train."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel
from rich import box
from rich.table import Table

from mheads.config import schema as configs
from mheads.config.schema import Config

COMMENTS_AT = 40  # where comments begin, unless a value is longer


def recipe_table() -> Table:
    """The table of `mheads recipes`: what comes with the package."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("name", no_wrap=True)
    table.add_column("what it trains")
    for title in ("data", "members", "iterations"):
        table.add_column(title, justify="left" if title == "data" else "right", no_wrap=True)
    for name in configs.recipes():
        config = configs.load(name)
        table.add_row(
            name, configs.summary(name), config.data.name, f"{config.members}", f"{config.optim.iterations:,}"
        )
    return table


def annotated(config: Config) -> str:
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
