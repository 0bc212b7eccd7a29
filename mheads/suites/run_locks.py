"""Who trains which run, where several processes, of one machine or many, share the folder of a suite's runs.

A claim is a file beside the run folder, `.<run>.claim`, which only one process can make. Its owner touches it while it
lives and holds a lock on it. A claim is stale if its owner is dead, which the lock tells on the same machine at once,
or if it has not been touched for a while by the clock of the process that looks: no two clocks are compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from mheads.common.atomic_files import saving

BEAT = 20.0  # seconds between two touches
STALE = 300.0  # seconds without one


class Claim:
    """The right to train a run, until the block ends. `lost`: another process took it over, since it seemed stale."""

    def __init__(self, file: Path) -> None:
        """Raises FileExistsError if there is a claim."""
        self.file, self.lost = file, False
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        _try_lock(self._descriptor, fcntl.LOCK_EX)
        os.write(self._descriptor, _machine().encode())  # after the lock: a claim without an owner's name is a new one
        self._end = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()

    def _beat(self) -> None:
        while not self._end.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)
            self.check()

    def check(self) -> None:
        with contextlib.suppress(OSError):
            self.lost = self.lost or not self._is_own()

    def _is_own(self) -> bool:
        """Raises FileNotFoundError if there is no claim: another process may be about to put it back."""
        return os.path.samestat(os.fstat(self._descriptor), os.stat(self.file, follow_symlinks=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._beats.join()
        with contextlib.suppress(OSError):
            if self._is_own():
                self.file.unlink()
        os.close(self._descriptor)


class Claims:
    """Takes claims, and remembers since when those of others have not been touched."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[tuple[int, int], float]] = {}  # inode and time of the last touch, seen since

    def take(self, run: Path) -> Claim | None:
        """The claim of a run; None if another process has it."""
        file = run.with_name(f".{run.name}.claim")
        with saving(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    return Claim(file)
                except FileExistsError:
                    stale = self._find_stale(file)
                if stale is None:
                    return None
                _remove(file, stale)

    def _find_stale(self, file: Path) -> int | None:
        """The inode of a claim whose owner is dead."""
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return -1  # it has just been given back
        try:
            facts = os.fstat(descriptor)
            now, touch = time.monotonic(), (facts.st_ino, facts.st_mtime_ns)
            known, since = self._seen.get(file, (None, now))
            self._seen[file] = touch, since if known == touch else now
            owner = os.read(descriptor, 1000).decode(errors="replace")
            dead = owner == _machine() and _try_lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return facts.st_ino if dead or now - self._seen[file][1] >= STALE else None
        finally:
            os.close(descriptor)


def _remove(file: Path, inode: int) -> None:
    """Removes a stale claim. If another process was faster and its new claim is there, that one is put back."""
    aside = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    try:
        os.rename(file, aside)
    except FileNotFoundError:
        return
    if os.stat(aside).st_ino != inode:
        with contextlib.suppress(FileExistsError):
            os.link(aside, file)
    os.unlink(aside)


def _try_lock(descriptor: int, how: int) -> bool:
    """Whether the lock is held now; not if another process has it, or the file system has none."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True


def _machine() -> str:
    """This machine, since it was started."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "?"
    return f"{socket.gethostname()} {boot}"
