"""Whether a run may be resumed: its config, data and code must be those that it was begun with."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mheads.common import fingerprint
from mheads.common.errors import UserError
from mheads.common.safe_yaml import short
from mheads.config import schema
from mheads.config.schema import Config
from mheads.runs.checkpoint import Checkpoints
from mheads.runs.data_facts import DataFacts

if TYPE_CHECKING:
    from mheads.runs.folder import RunFolder

ELSEWHERE = "give another run folder"
ELSEWHERE_OR_FORCE = f"{ELSEWHERE}, or --force to start afresh beside it"


def check_resume(folder: RunFolder, config: Config, data: DataFacts, what: dict[str, Any]) -> None:
    """Raises a UserError if this config, data or identity (`what`) is not that of the run in the folder.

    More iterations, other logging and other workers are the same run.
    """
    before, identity = folder.read_config(), folder.read_identity()
    old, new = schema.flatten(before), schema.flatten(config)
    # What a path leads to is known by its digest: it may lie elsewhere now.
    alike = ["init"] * (what["start"] is not None and identity.get("start") == what["start"])
    if what["sampling"] and fingerprint.same_sampling(identity, what):
        alike += ["sampling.generalist", "sampling.path", "teacher.answers"]
    if before.model.startswith("__main__:<"):  # no name at all, as built-in networks with arguments had once:
        alike += ["model", "model_args"]  # the identity below tells them apart
    lines = [
        _difference(k, old[k], new[k])
        for k in schema.differing(before, config)
        if not schema.is_free(k, config) and k not in alike
    ]
    if lines:
        shown = "\n".join(f"  {line}" for line in lines)
        raise UserError(f"{folder.path} holds a run of another config:\n{shown}", hint=ELSEWHERE_OR_FORCE)
    if identity["data"] != data.fingerprint:
        raise UserError(
            f"{folder.path} was trained on other data: checksum {identity['data']} there, {data.fingerprint} now",
            hint=ELSEWHERE_OR_FORCE,
        )
    learned = folder.read_data().problem
    for key, called in (("classes", "classes"), ("shape", "the shape of targets")):  # targets are only numbers
        there, now = (getattr(problem, key, ()) for problem in (learned, data.problem))
        if there != now:
            raise UserError(
                f"{folder.path} was trained on other data: {called} {short(there)} there, {short(now)} now",
                hint=ELSEWHERE_OR_FORCE,
            )
    if lines := fingerprint.differences(identity, what):
        shown = "\n".join(f"  {line}" for line in lines)
        longer = identity["loss"].get("iterations") != what["loss"].get(
            "iterations"
        )  # of a loss that changes with them
        raise UserError(
            f"{folder.path} holds a run of other code, weights or sample weights:\n{shown}",
            hint=f"{ELSEWHERE}, with init={folder.path} to start from its weights" if longer else ELSEWHERE_OR_FORCE,
        )
    _check_iterations(folder, before, config)


def _check_iterations(folder: RunFolder, before: Config, config: Config) -> None:
    """Fewer iterations are an error if the run is finished, or is past that end and has no checkpoint exactly there."""
    old, new = before.optim.iterations, config.optim.iterations
    if new >= old:
        return
    total = config.pretrain + new
    steps = Checkpoints(folder.checkpoints).steps()
    finished = folder.is_finished(config.pretrain + old)
    if not finished and (not steps or steps[0] <= total or total in steps):
        return
    state = "is finished" if finished else f"has checkpoints of iterations {', '.join(map(str, reversed(steps)))}"
    remedy = "give no fewer" if finished else "end at one of these, or later"
    raise UserError(
        f"{folder.path} holds a run of another config:\n  optim.iterations: {old} in the folder, {new} now\n"
        f"and {state}: {remedy}",
        hint=ELSEWHERE_OR_FORCE,
    )


def _difference(key: str, old: Any, new: Any) -> str:
    """How a key differs: of texts, such as a whole specification, the lines that do."""
    if isinstance(old, dict) and isinstance(new, dict) and len(repr(old)) + len(repr(new)) > 400:
        names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
        return "\n  ".join(_difference(f"{key}.{name}", old.get(name), new.get(name)) for name in names)
    if isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
        diff = difflib.unified_diff(old.splitlines(), new.splitlines(), "in the folder", "now", lineterm="", n=0)
        shown = [line[:200] for line in diff][2:]
        more = [f"... {len(shown) - 12} more lines"] if len(shown) > 12 else []
        return "\n    ".join([f"{key} differs (- in the folder, + now):", *shown[:12], *more])
    return f"{key}: {old!r} in the folder, {new!r} now"


@contextmanager
def without_force() -> Iterator[None]:
    """Inside, no error advises --force, which `mheads train` alone has."""
    try:
        yield
    except UserError as error:
        if error.hint == ELSEWHERE_OR_FORCE:
            error.hint = ELSEWHERE
        raise
