"""Sections of a config: typed keys with limits, each with the sentence that documents it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def option(default: Any, description: str, **limits: Any) -> Any:
    """A key of a section: its default, what it means, and limits as pydantic has them."""
    return Field(default, description=description, **limits)


def named_section(value: Any) -> Any:
    """Turns `bagging` into `{name: bagging}`, which it is short for."""
    return {"name": value} if isinstance(value, str) else value


class Section(BaseModel):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
