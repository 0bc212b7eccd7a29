"""Messages in the words of the caller: config keys become keywords of `fit`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mheads import config as configs
from mheads.errors import UserError
from mheads.hints import EPOCHS, meaning
from mheads.run_folder import FORCE

# What has another name in fit than in a config.
MEANT = {
    "name": "optimizer",
    "optimiser": "optimizer",
    "schedule_name": "schedule",
    "validation_data": "test",
    "verbose": "show",
    "progress": "show",
    "folder": "run",
    "members": "TreeNet(factory, members=...)",
    "split": "TreeNet(factory, split=...)",
    "lr_schedule": "schedule",
    "lr_scheduler": "schedule",
    "scheduler": "schedule",
    "criterion": "loss",
    "pretrained": "init",
    "checkpoint": "init",
}
_SECTIONS = re.compile(r"(?<![\w./])(optim|data|engine|log|sampling|teacher)\.(schedule\.)?(\w+)(?![\w/]|\.\w)")


def refuse_unknown(unknown: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Refuses a keyword that the function does not have, and names the one that is meant."""
    for name in unknown:
        keywords = [key for key in function.__annotations__ if key not in ("unknown", "return")]
        meant = "epochs" if meaning(name) == EPOCHS else MEANT.get(name) or in_python(meaning(name) or "")
        near = [meant] if meant else difflib.get_close_matches(name, keywords, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(keywords)}"
        raise UserError(f"{function.__name__} has no keyword {name!r}: {hint}")


def in_python(message: str) -> str:
    """A message about config keys, with the keywords of fit in their place."""

    def keyword(found: re.Match[str]) -> str:
        section, inner, name = found.groups()
        if f"{section}.{inner or ''}{name}" not in configs.known_keys():
            return found[0]
        if inner or section in ("log", "sampling", "teacher"):
            return f"{'schedule' if inner else section}={{{name!r}: ...}}"
        return "optimizer" if (section, name) == ("optim", "name") else name

    message = re.sub(r"^unknown key '(\w+\.)+", "unknown key '", message.replace(FORCE, ""))
    return _SECTIONS.sub(keyword, message)


@contextmanager
def speaking_python() -> Iterator[None]:
    """Inside, messages about a user's mistakes name keywords of Python instead of config keys."""
    try:
        yield
    except UserError as error:
        error.args = (in_python(str(error)),)
        raise
