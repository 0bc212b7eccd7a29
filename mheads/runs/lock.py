"""A folder that one process at a time works in."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from mheads.common import atomic_files

LOCK = ".lock"


class Lock:
    """Keeps two processes out of one folder; it ends with the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> None:
        """Raises BlockingIOError if another process has it."""
        self._descriptor = atomic_files.open_in_place(self.path)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_lost(self) -> bool:
        """Whether the folder is gone, or another one stands in its place: its lock is then not the one that is held."""
        if self._descriptor is None:
            return False
        try:
            on_disk = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return not self.path.parent.is_dir()
        return not os.path.samestat(os.fstat(self._descriptor), on_disk)
