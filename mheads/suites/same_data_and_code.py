"""Runs of one table are of the same data and the same code, also where a file has changed since some were finished."""

from __future__ import annotations

import json
from typing import Any

from mheads.common import fingerprint
from mheads.common.errors import DamageError, UserError
from mheads.suites.jobs import SuiteJob

Identity = dict[str, Any]  # what identity.json holds
NOTHING: Identity = {"code": {}}
OTHER = {
    "data": "other data",
    "sampling": "other sample weights or answers of a teacher",
    "start": "other initial weights",
}


class SameDataAndCode:
    """What finished runs were trained on and with; configs that say the same must mean the same."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[SuiteJob, Any]] = {}

    def note(self, job: SuiteJob) -> None:
        """Remembers a finished run, after a check."""
        try:
            identity = job.folder.read_identity()
        except DamageError:  # which is reported when the run is resumed
            return
        self.check(job, identity)
        for part, key in _config_names(job).items():
            self._known.setdefault(key, (job, _select(identity, part)))

    def check(self, job: SuiteJob, identity: Identity) -> None:
        """Raises an error if a run means something else than a finished one by what its config says as well."""
        for part, key in _config_names(job).items():
            new = _select(identity, part)
            other, old = self._known.get(key, (job, new))
            if lines := _differences(part, old, new):
                raise UserError(
                    f"{job.name} has {OTHER.get(part, f'another {part}')} than {other.name} had ({lines[0]}), and a "
                    f"table compares like with like: move {other.path} away, and it is trained anew, or give another "
                    "--folder and another -o"
                )


def _config_names(job: SuiteJob) -> dict[str, str]:
    """How a config names its data, network and loss, and files of sample weights, answers and weights."""
    config = job.config
    data = config.data.model_dump(mode="json")
    teacher = config.teacher.model_dump(mode="json", exclude={"answers"})
    names: dict[str, Any] = {
        "data": data,
        "network": [config.model, config.model_args, config.loss.has_scores],
        "loss": [config.loss.model_dump(mode="json"), config.teacher.answers is not None and teacher],
    }
    if job.rounds is None:  # of several rounds each has files of its own
        names["sampling"] = [data, config.members, config.sampling.model_dump(mode="json"), str(config.teacher.answers)]
        names["start"] = config.init
    return {part: json.dumps([part, value], sort_keys=True) for part, value in names.items()}


def _select(identity: Identity, part: str) -> Any:
    """What an identity says of a part. The seed of a network, and how long a loss falls, are the config's to say."""
    if part in ("network", "loss"):
        return {key: identity[part].get(key, {}) for key in ("layers", "code")}
    return list((identity.get(part) or {}).values()) if part == "sampling" else identity.get(part)


def _differences(part: str, old: Any, new: Any) -> list[str]:
    if part not in ("network", "loss"):
        return [] if old == new else [f"checksum {old} there, {new} now"]
    before, after = ({"network": NOTHING, "loss": NOTHING, part: value} for value in (old, new))
    return fingerprint.differences(before, after)
