"""Puts small bugs into a copy of the package, one at a time, and asks whether the nearest tests notice.

    python tests/mutants/run.py                       all of bugs.py, two at a time
    python tests/mutants/run.py --only momentum       those whose file or name contains the text
    python tests/mutants/run.py --check               only whether each can be put in; takes no time

First the tests run without a bug, and must pass. A mutant is caught if a test then fails, or does not end in ten times
as long; it has survived if all pass. Those that no test can catch say why (`equivalent`) and do not count.

Exit code 1: fewer than 95 % were caught, or the list does not fit the code any more.
"""

import argparse
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from bugs import AREAS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("mheads", "tests", "pyproject.toml")  # what tests need beside the environment
WANTED = 0.95
CAUGHT, SURVIVED, EQUIVALENT, ERROR = "caught", "survived", "equivalent", "error"


@dataclass(frozen=True)
class Mutant:
    """One bug: `old`, which the file has exactly once, becomes `new`."""

    area: str
    path: str
    name: str
    old: str
    new: str
    tests: tuple[str, ...]  # arguments of pytest
    equivalent: str | None = None

    def problem(self, root: Path) -> str | None:
        """Why it cannot be put in, if it cannot."""
        file = root / self.path
        if not file.is_file():
            return f"there is no {self.path}"
        count = file.read_text().count(self.old)
        if count != 1:
            return f"its old text stands {count} times in {self.path}, not once"
        files = [arg.partition("::")[0] for arg in self.tests if arg.startswith("tests/")]
        missing = [name for name in files if not (root / name).is_file()]
        if missing or not files:
            return f"there is no test file {missing[0]}" if missing else "it has no tests"
        return "old and new are the same" if self.old == self.new else None


def read_list() -> list[Mutant]:
    return [
        Mutant(area, file.path, bug.name, bug.old, bug.new, tuple(shlex.split(bug.tests or file.tests)), bug.equivalent)
        for area, files in AREAS.items()
        for file in files
        for bug in file.bugs
    ]


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant, why, in how many seconds, and what pytest wrote."""

    result: str
    why: str
    seconds: float
    text: str

    def show(self, mutant: Mutant, verbose: bool) -> None:
        why = f" ({self.why})" if self.why else ""
        print(f"{self.result:10}  {self.seconds:5.0f} s  {mutant.path}: {mutant.name}{why}", flush=True)
        if verbose or self.result == ERROR:
            print(self.text, flush=True)


class Copy:
    """A copy of the package and its tests, in which one bug at a time lives."""

    def __init__(self, folder: Path, stopped: threading.Event) -> None:
        self.root, self.stopped = folder, stopped
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, folder / name)

    def run(self, tests: tuple[str, ...], limit: float) -> tuple[int | None, float, str]:
        """The exit code of pytest (None: it was ended after `limit` seconds), its seconds, and its last words."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
        command += [f"--basetemp={self.root / 'tmp'}", *tests]
        env = {**os.environ, "PYTHONPATH": str(self.root)}
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as out:
            child = subprocess.Popen(
                command, cwd=self.root, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            while (code := child.poll()) is None and time.monotonic() - began < limit and not self.stopped.is_set():
                time.sleep(0.1)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # also what a test has started and, having failed, not ended
            child.wait()
            out.seek(0)
            return code, time.monotonic() - began, out.read()

    def run_with(self, mutant: Mutant, limit: float) -> Outcome:
        file = self.root / mutant.path
        content = file.read_text()
        try:
            self._write(file, content.replace(mutant.old, mutant.new))
            return judge(mutant, *self.run(mutant.tests, limit))
        finally:
            self._write(file, content)

    def _write(self, file: Path, content: str) -> None:
        file.write_text(content)
        # Python compiles a file anew if its time, in seconds, or its size has changed: perhaps neither has.
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def judge(mutant: Mutant, code: int | None, seconds: float, text: str) -> Outcome:
    """What pytest's exit code says about a mutant."""
    if code in (1, None):
        if mutant.equivalent:
            return Outcome(ERROR, "a test catches it, so it is not equivalent", seconds, text)
        return Outcome(CAUGHT, "" if code else "the tests did not end", seconds, text)
    if code == 0:
        return Outcome(EQUIVALENT if mutant.equivalent else SURVIVED, mutant.equivalent or "", seconds, text)
    return Outcome(ERROR, f"pytest ended with {code}", seconds, text)


def run_all(mutants: list[Mutant], jobs: int, verbose: bool) -> dict[Mutant, Outcome]:
    """What became of each; prints a line as soon as it is known."""
    found: dict[Mutant, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        stopped = threading.Event()
        copies: Queue[Copy] = Queue()
        for i in range(jobs):
            copies.put(Copy(Path(folder, str(i)), stopped))

        def run_group(tests: tuple[str, ...], group: list[Mutant]) -> None:
            copy = copies.get()
            try:
                code, usual, said = copy.run(tests, 600)
                for mutant in group:
                    if code == 0:
                        outcome = copy.run_with(mutant, 30 + 10 * usual)
                    else:
                        outcome = Outcome(ERROR, f"{shlex.join(tests)} does not pass without it", usual, said)
                    if stopped.is_set():
                        return
                    found[mutant] = outcome
                    outcome.show(mutant, verbose)
            finally:
                copies.put(copy)

        groups: dict[tuple[str, ...], list[Mutant]] = defaultdict(list)
        for mutant in mutants:
            groups[mutant.tests].append(mutant)
        tasks = [pool.submit(run_group, tests, group) for tests, group in groups.items()]
        try:
            for task in tasks:
                task.result()
        except BaseException:  # Ctrl-C
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    return found


def summarise(found: dict[Mutant, Outcome]) -> bool:
    """Prints the table; whether all is well."""
    areas: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, outcome in found.items():
        areas[mutant.area][outcome.result] += 1
    areas["all"] = sum(areas.values(), Counter())
    kinds = (CAUGHT, SURVIVED, EQUIVALENT, ERROR)
    print("\n" + " ".join(f"{text:>12}" for text in ("", "mutants", *kinds)))
    for area, counts in areas.items():
        print(" ".join(f"{text!s:>12}" for text in (area, counts.total(), *(counts[kind] for kind in kinds))))
    counts = areas["all"]
    rate = counts[CAUGHT] / max(1, counts[CAUGHT] + counts[SURVIVED])
    print(f"\n{100 * rate:.1f} % of those that can be caught were ({100 * WANTED:g} % are wanted)")
    for kind in kinds[1:]:
        for mutant, outcome in found.items():
            if outcome.result == kind:
                print(f"  {kind}: {mutant.path}: {mutant.name}" + (f": {outcome.why}" if outcome.why else ""))
    return rate >= WANTED and not counts[ERROR]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", action="append", help="those whose file or name contains it")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--check", action="store_true", help="only whether each can be put in")
    parser.add_argument("--verbose", action="store_true", help="what pytest said about each")
    args = parser.parse_args()
    mutants = read_list()
    if args.only:
        mutants = [m for m in mutants if any(text in f"{m.area} {m.path}: {m.name}" for text in args.only)]
    problems = [f"{m.path}: {m.name}: {problem}" for m in mutants if (problem := m.problem(ROOT))]
    twice = [name for name, count in Counter((m.path, m.name) for m in mutants).items() if count > 1]
    problems += [f"{path}: {name}: stands twice in the list" for path, name in twice]
    if problems or not mutants:
        print("\n".join(problems or ["no mutant of this name"]), file=sys.stderr)
        return 1
    if args.check:
        print(f"{len(mutants)} mutants can be put in")
        return 0
    return 0 if summarise(run_all(mutants, args.jobs, args.verbose)) else 1


if __name__ == "__main__":
    sys.exit(main())
