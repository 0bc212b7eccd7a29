"""Other names of keys: accepted wherever a config is read; `schema.py` has the names that are written."""

from __future__ import annotations

from typing import Any

# From another name of a key, dotted, to its name in the schema, in the same section.
ALIASES: dict[str, str] = {"loss.of": "loss.base_loss"}
# Keys of earlier versions that decided no bit, by section: files of these, such as the config of a run, are still read.
GONE = {"data": ["reader"]}


def rename_key(key: str) -> str:
    """The name in the schema of a dotted key, which may be an alias or lie inside of one."""
    for alias, name in ALIASES.items():
        if key == alias or key.startswith(f"{alias}."):
            return f"{name}{key.removeprefix(alias)}"
    return key


def rename_keys(value: Any, section: str = "") -> Any:
    """What a section holds, under the names of the schema; raises ValueError if a key is there under two names."""
    if not isinstance(value, dict):
        return value
    renamed: dict[Any, Any] = {}
    for name, part in value.items():
        prefix = f"{section}." if section else ""
        key = rename_key(f"{prefix}{name}")
        last = key.removeprefix(prefix)
        if last in renamed:
            raise ValueError(f"{key} is there under two names: leave one out")
        renamed[last] = rename_keys(part, key)
    return renamed
