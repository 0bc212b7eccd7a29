"""Runs of one table are of the same data and the same code, also where a file has changed since some were finished."""

from __future__ import annotations

import json
from typing import Any

from mheads.errors import UserError
from mheads.manifest import DamageError
from mheads.suites.jobs import Job


class Alike:
    """What finished runs were trained on and with; configs that say the same must mean the same."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Job, Any]] = {}

    def note(self, job: Job) -> None:
        """Remembers a finished run, and refuses one that is not like those before."""
        try:
            found = job.folder.read_identity()
        except DamageError:  # which is told when it is resumed
            return
        self.check(job, found)
        for key, (_, value) in _parts(job, found).items():
            self._known.setdefault(key, (job, value))

    def check(self, job: Job, identity: dict[str, Any]) -> None:
        """Refuses a run that means something else than a finished one by what its config says as well."""
        for key, (what, value) in _parts(job, identity).items():
            other, known = self._known.get(key, (job, value))
            if value != known:
                raise UserError(
                    f"{job.name} and {other.name} are of different {what}, which have changed since {other.path} was "
                    "trained: a table compares like with like. Move that folder away, and it is trained anew, or give "
                    "another --folder and another -o"
                )


def _parts(job: Job, identity: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """What a config names, as a key, with what it stands for and what that was found to be."""
    config = job.config
    network = {part: identity["network"].get(part) for part in ("layers", "code")}
    return {
        json.dumps([what, *names], sort_keys=True): (what, value)
        for what, names, value in (
            ("data", [config.data.model_dump(mode="json")], identity["data"]),
            ("networks", [config.model, config.model_args, config.loss.name == "scored"], network),
            ("losses", [config.loss.model_dump(mode="json")], identity["loss"]["code"]),
        )
    }
