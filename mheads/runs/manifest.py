"""manifest.json: the digests of the files of a run, so that damage to one of them is noticed.

    {"files": {"config.yaml": ["9f86..."], ...}, "sha256": "of the rest"}

A file and the manifest cannot be replaced at once. So the manifest is written first, with both the old and the new
digest until the next time: if the process is killed between the two, the file that is there is still known.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path

from mheads.common import atomic_files
from mheads.common.errors import DamageError
from mheads.common.safe_yaml import from_json
from mheads.common.schemas import Digests, check

AGAIN = "the command that trained the run, given again, makes it anew from the newest checkpoint"


class Manifest:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "manifest.json"

    @cached_property
    def digests(self) -> dict[str, list[str]]:
        """The digests that each file may have."""
        try:
            content = from_json(atomic_files.read(self.path))
            check(Digests, content)
            digests: dict[str, list[str]] = content["files"]
            sha256 = content["sha256"]
        except FileNotFoundError:
            raise DamageError(self.path, "is missing, so no file of the run can be checked", hint=AGAIN) from None
        except (OSError, ValueError, RecursionError) as error:
            raise DamageError(self.path, f"is damaged ({error})", hint=AGAIN) from error
        if sha256 != _sha256(digests):
            raise DamageError(self.path, "is damaged: its checksum does not match", hint=AGAIN)
        return digests

    def renew(self) -> None:
        """Starts afresh, with no files."""
        self.digests = {}

    def expect(self, path: Path, content: bytes) -> None:
        """Notes that the file is about to be replaced by one with this content."""
        known = self.digests.get(path.name, [])
        now = atomic_files.digest(path) if known and path.is_file() else None
        old = [digest for digest in known if digest == now]
        self._write({**self.digests, path.name: [*old, hashlib.sha256(content).hexdigest()]})

    def forget(self, path: Path) -> None:
        """Drops a file that is about to be changed in place."""
        if path.name in self.digests:
            self._write({name: known for name, known in self.digests.items() if name != path.name})

    def _write(self, digests: dict[str, list[str]]) -> None:
        atomic_files.write_atomically(
            self.path, json.dumps({"files": digests, "sha256": _sha256(digests)}, indent=1) + "\n"
        )
        self.digests = digests

    def problem(self, path: Path) -> str | None:
        """What is wrong with a file, if anything."""
        try:
            digest = atomic_files.digest(path)
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        if path.name not in self.digests:
            return f"is not listed in {self.path.name}"
        return (
            None if digest in self.digests[path.name] else f"is damaged: {self.path.name} has another checksum for it"
        )

    def check(self, path: Path) -> None:
        if self.problem(path):
            self.__dict__.pop("digests", None)  # a process that trains may have replaced both since it was read
        if problem := self.problem(path):
            raise DamageError(path, problem, hint=AGAIN)


def _sha256(digests: dict[str, list[str]]) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
