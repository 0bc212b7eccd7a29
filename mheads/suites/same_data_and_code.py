"""Runs of one table are of the same data and the same code, also where a file has changed since some were finished."""

from __future__ import annotations

import json
from typing import Any

from mheads.common import fingerprint
from mheads.common.errors import DamageError, UserError
from mheads.suites.jobs import Job

Found = dict[str, Any]  # what identity.json holds
NOTHING: Found = {"code": {}}
OTHER = {
    "data": "other data",
    "sampling": "other sample weights or answers of a teacher",
    "start": "other first weights",
}


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
        for what, key in _named(job).items():
            self._known.setdefault(key, (job, _part(found, what)))

    def check(self, job: Job, found: Found) -> None:
        """Refuses a run that means something else than a finished one by what its config says as well."""
        for what, key in _named(job).items():
            now = _part(found, what)
            other, there = self._known.get(key, (job, now))
            if lines := _differences(what, there, now):
                other_one = OTHER.get(what, f"another {what}")
                raise UserError(
                    f"{job.name} has {other_one} than {other.name} had ({lines[0]}), and a table compares like with "
                    f"like: move {other.path} away, and it is trained anew, or give another --folder and another -o"
                )


def _named(job: Job) -> dict[str, str]:
    """How a config names its data, network and loss, and files of sample weights, answers and weights."""
    config = job.config
    data = config.data.model_dump(mode="json")
    teacher = config.teacher.model_dump(mode="json", exclude={"answers"})
    named: dict[str, Any] = {
        "data": data,
        "network": [config.model, config.model_args, config.loss.name == "scored"],
        "loss": [config.loss.model_dump(mode="json"), config.teacher.answers is not None and teacher],
    }
    if job.rounds is None:  # of several rounds each has files of its own
        named["sampling"] = [data, config.members, config.sampling.model_dump(mode="json"), str(config.teacher.answers)]
        named["start"] = config.init
    return {what: json.dumps([what, names], sort_keys=True) for what, names in named.items()}


def _part(found: Found, what: str) -> Any:
    """What is found behind a name. The seed of a network, and how long a loss falls, are the config's to say."""
    if what in ("network", "loss"):
        return {key: found[what].get(key, {}) for key in ("layers", "code")}
    return list((found.get(what) or {}).values()) if what == "sampling" else found.get(what)


def _differences(what: str, there: Any, now: Any) -> list[str]:
    if what not in ("network", "loss"):
        return [] if there == now else [f"checksum {there} there, {now} now"]
    old, new = ({"network": NOTHING, "loss": NOTHING, what: value} for value in (there, now))
    return fingerprint.differences(old, new)
