"""Compares this code with that of an earlier commit, bit for bit: `make bits`, or for another commit

    python tests/bits/run.py --base COMMIT [--only NAME]

Each case of `cases.py` is trained by both; some say themselves since which commit they have their bits. Their weights
must be equal, and so must the outputs of the earlier version's runs when this code evaluates them. Runs that the
earlier version began and lost to SIGKILL are finished by this code, and must end with the weights of an undisturbed
run. Bits depend on the machine and on torch, so nothing is committed: what the earlier version made is kept in .bits/,
for this machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]

import data  # noqa: E402
from cases import CASES, Case  # noqa: E402
from helpers.painted_scenes import paint  # noqa: E402

BASE = (HERE / "BASE").read_text().split()[0]
DATA = ROOT / ".bits/data"  # one place for all versions: a run is resumed with the paths that it began with
UNSTACKED = "engine.stack=never"  # a key that the earlier version has not: it stacks nothing
SECONDS = 300  # after which a command is taken to hang


class Version:
    """Code of the package, and the folder of what it trains."""

    def __init__(self, code: Path, folder: Path) -> None:
        self.code, self.folder = code, folder

    def start(self, case: Case, run: Path, *more: str) -> subprocess.Popen:
        """Trains a case into a run folder, or goes on with it; `more` are further keys."""
        if case.command == "fit":
            return self._python(HERE / "fit.py", run, *more)
        names = {"data": DATA, "runs": self.folder / "runs"}
        args = [*(_filled(arg, names) for arg in case.args), *more]
        trust = ["--trust"] if case.command == "distil" else []
        return self._mheads(case.ranks, case.command, *args, "--folder", run, "--quiet", *trust)

    def outputs(self, case: Case, run: Path) -> str:
        """The digest of what a run answers to its test set, which is kept in a file."""
        file = self.folder / f"{case.name}.npz"
        if case.command == "fit":
            _finish(self._python(HERE / "fit.py", run, f"--outputs={file}"))
        else:
            _finish(self._mheads(1, "eval", run, "--outputs", file, "--trust"))
        with np.load(file) as arrays:
            return _digest({name: arrays[name] for name in arrays.files})

    def _mheads(self, ranks: int, *args: object) -> subprocess.Popen:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        return self._python(*launcher, "-m", "mheads", *args)

    def _python(self, *args: object) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": f"{self.code}{os.pathsep}{HERE}", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.Popen(
            [sys.executable, *map(str, args)], env=environment, cwd=self.folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=BASE, help="the commit that is compared with (default: %(default)s)")
    parser.add_argument("--only", action="append", help="a case; may be repeated")
    options = parser.parse_args()
    needed = {case.equals for case in CASES if options.only and case.name in options.only}
    cases = [case for case in CASES if not options.only or case.name in {*options.only, *needed}]
    before = {commit: _earlier(commit) for commit in {case.since or options.base for case in cases}}
    after = _now()
    if not DATA.exists():
        data.write(DATA)
        paint(DATA / "scenes")
    with ThreadPoolExecutor(2) as pool:
        for stage in _in_order(cases):
            list(pool.map(lambda case: _record(before[case.since or options.base], case), stage))
        wrong = 0
        for stage in _in_order(cases):
            compared = list(pool.map(lambda case: _compare(before[case.since or options.base], after, case), stage))
            for case, lines in zip(stage, compared, strict=True):
                if case.equals:
                    runs = after.folder / "runs"
                    lines.append(f"as {case.equals}: {_same(_weights(runs / case.equals), _weights(runs / case.name))}")
                bad = [line for line in lines if not line.endswith("same")]
                wrong += bool(bad)
                print(f"{case.name:16} {'; '.join(lines)}", flush=True)
    print(f"{len(cases) - wrong} of {len(cases)} cases have the bits of {options.base}, or of where they began")
    return int(wrong > 0)


def _in_order(cases: list[Case]) -> list[list[Case]]:
    """Cases that need no other run, then those that start from one."""
    later = [case for case in cases if any("{runs}" in key for key in case.keys)]
    return [[case for case in cases if case not in later], later]


def _earlier(commit: str) -> Version:
    machine = hashlib.sha256(f"{platform.processor()} {_flags()} {torch.__version__}".encode()).hexdigest()[:8]
    there = ROOT / ".bits" / f"{machine}-{commit[:12]}"
    code = there / "code"
    if not code.exists():
        archive = subprocess.run(["git", "archive", commit, "mheads"], cwd=ROOT, capture_output=True, check=True).stdout
        code.mkdir(parents=True)
        subprocess.run(["tar", "x"], cwd=code, input=archive, check=True)
    return Version(code, there)


def _now() -> Version:
    now = ROOT / ".bits/now"
    shutil.rmtree(now, ignore_errors=True)
    now.mkdir(parents=True)
    return Version(ROOT, now)


def _flags() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line for line in lines if line.startswith("flags")), "")


def _record(version: Version, case: Case) -> None:
    """What the earlier version makes of a case, unless that is there: a finished run, and one that was killed."""
    run = version.folder / "runs" / case.name
    if not (run.with_suffix(".done")).exists():
        shutil.rmtree(run, ignore_errors=True)
        _finish(version.start(case, run))
        digest = version.outputs(case, _copy(run, version.folder / "read" / case.name)) if case.has_outputs else ""
        run.with_suffix(".done").write_text(digest)
    killed = version.folder / "killed" / case.name
    if case.cut and not killed.with_suffix(".done").exists():
        shutil.rmtree(killed, ignore_errors=True)
        _kill_after_checkpoint(version.start(case, killed), killed)
        killed.with_suffix(".done").touch()


def _compare(before: Version, after: Version, case: Case) -> list[str]:
    """What is the same and what is not, in words."""
    reference, run = before.folder / "runs" / case.name, after.folder / "runs" / case.name
    _finish(after.start(case, run, UNSTACKED))
    expected = _weights(reference)
    lines = [f"{expected} -> {_weights(run)}: {_same(expected, _weights(run))}"]
    if case.has_outputs:
        outputs = after.outputs(case, _copy(reference, after.folder / "read" / case.name))
        lines.append(f"outputs: {_same(reference.with_suffix('.done').read_text(), outputs)}")
    if case.cut:
        resumed = _copy(before.folder / "killed" / case.name, after.folder / "resumed" / case.name)
        assert not (resumed / "result.json").exists(), f"{case.name} was finished before it was killed"
        _finish(after.start(case, resumed))
        lines.append(f"resumed: {_same(expected, _weights(resumed))}")
    return lines


def _kill_after_checkpoint(process: subprocess.Popen, run: Path) -> None:
    """SIGKILL to all its processes once a checkpoint is there, and before training ends."""
    while process.poll() is None:
        if list((run / "checkpoints").glob("step-*")):
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return
        time.sleep(0.002)
    raise SystemExit(f"{run.name} ended before it could be killed:\n{process.communicate()[0]}")


def _finish(process: subprocess.Popen) -> None:
    out = process.communicate(timeout=SECONDS)[0]
    if process.returncode:
        raise SystemExit(f"{' '.join(process.args)} ended with {process.returncode}:\n{out}")


def _weights(run: Path) -> str:
    """The digest of a run's weights; of several in one folder, of all."""
    found = {}
    for file in sorted(run.rglob("model.safetensors")):
        found |= {f"{file.relative_to(run)} {name}": value for name, value in load_file(file).items()}
    assert found, f"{run} has no weights"
    return _digest(found)


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode() + arrays[name].tobytes())
    return digest.hexdigest()[:12]


def _same(expected: str, digest: str) -> str:
    return "same" if digest == expected else "DIFFERENT"


def _copy(run: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(run, to)
    return to


def _filled(arg: str, names: dict[str, Path]) -> str:
    for name, value in names.items():
        arg = arg.replace(f"{{{name}}}", str(value))
    return arg


if __name__ == "__main__":
    sys.exit(main())
