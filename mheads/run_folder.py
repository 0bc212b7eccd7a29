"""Run folders: one training, one folder on disk. Opening one runs no code; running code that it names needs `trust`.

config.yaml        the resolved config                    metrics.jsonl      a line per log step and evaluation
data.safetensors   preprocessing, class names             assignments.npz    who owns which class, over training
identity.json      what network and loss are              checkpoints/       to resume from
manifest.json      digests of all these                   model.safetensors, result.json   at the end
"""

from __future__ import annotations

import difflib
import fcntl
import io
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from mheads import config as configs
from mheads import files, identity, problems
from mheads.checkpoint import Checkpoint, Checkpoints, to_bytes
from mheads.config import Config
from mheads.data import Data, Preprocess, Seen
from mheads.errors import UserError
from mheads.log import Log, good_lines
from mheads.manifest import AGAIN, DamageError, Manifest
from mheads.plain import from_json
from mheads.problems import Problem
from mheads.treenet import TreeNet
from mheads.values import Value

Warn = Callable[[str], None]
FORCE = ", or --force to start afresh beside it"  # which `mheads train` has
ELSEWHERE = f"give another run folder{FORCE}"


@dataclass(frozen=True)
class DataFacts:
    """What a run remembers of its data: enough to predict, and to notice that the data changed."""

    name: str
    shape: tuple[int, ...]
    problem: Problem
    preprocess: Preprocess
    fingerprint: str
    seen: Seen | None = None
    held_out: str | None = None
    held_out_rows: np.ndarray | None = field(default=None, compare=False)  # of the training examples as they were given
    side: dict[str, tuple[int, ...]] | None = field(default=None, compare=False)  # shapes; None in older runs

    @staticmethod
    def of(data: Data) -> DataFacts:
        shape, problem, held_out = tuple(data.train.shape), data.problem, (data.held_out, data.held_out_rows)
        return DataFacts(data.name, shape, problem, data.preprocess, data.fingerprint, data.seen, *held_out, data.side)

    def check(self, given: Seen | None, what: str) -> None:
        """Refuses other examples that cannot be brought to the range that training saw."""
        if self.seen is not None and given is not None:
            self.seen.check(given, what)

    def inputs(self, raw: Value, dtype: torch.dtype) -> Tensor:
        """Other examples as the network takes them: raw values in the units of training, preprocessed as there."""
        raw, *beside = raw if isinstance(raw, tuple) else (raw,)
        raw = raw if self.seen is None else self.seen.convert(raw)
        return self.preprocess((raw, *beside) if beside else raw, dtype)


@dataclass(frozen=True)
class Weights:
    """The newest weights of a run: the final ones, or those of a checkpoint on the way."""

    tensors: dict[str, Tensor]
    iteration: int
    seconds: float
    final: bool
    log: list[list[Any]] | None  # the parts of metrics.jsonl that a checkpoint knows


class RunFolder:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        path = Path(os.path.expanduser(path))
        if str(path).encode("utf-8", "replace") != os.fsencode(path):  # safetensors opens no such file
            raise UserError(f"the run folder {path}: its name is not UTF-8; give another --folder")
        self.path = path
        self.config = path / "config.yaml"
        self.data = path / "data.safetensors"
        self.identity = path / "identity.json"
        self.metrics = path / "metrics.jsonl"
        self.assignments = path / "assignments.npz"
        self.model = path / "model.safetensors"
        self.result = path / "result.json"
        self.checkpoints = path / "checkpoints"
        self.manifest = Manifest(path)
        self._lock: int | None = None
        self._begun = self._made = False  # whether this process began the run, and made the folder

    # Opening it for training.

    def prepare(self, config: Config, data: DataFacts, what: dict[str, Any], warn: Warn) -> bool:
        """Makes the folder, or checks that it holds this very experiment. True if there is one to resume.

        `what` describes the network and the loss, see `identity.py`. Files that are damaged are mended.
        """
        self._refuse_links()
        if self.exists():
            self._acquire()
            self._mend(data, warn)
            self._refuse_differences(config, data, what)
            return True
        self.refuse_other_content()
        try:
            self.path.mkdir(parents=True)
            self._made = True
        except FileExistsError:
            pass
        except OSError as error:
            raise self._unwritable(error) from error
        self._acquire()
        if self.exists():  # another process made it meanwhile
            self.release()
            self._made = False
            return self.prepare(config, data, what, warn)
        self._begun = True
        self.manifest.renew()
        try:
            self._write_facts(data)
            self._write(self.identity, _json({"run": secrets.token_hex(8), **what}))
            self.write_config(config)
        except UserError:
            self.discard()
            raise
        return False

    def refuse_other_content(self) -> None:
        """Refuses a folder that is neither a run's nor empty, and what is no folder."""
        if self.exists() or not self.path.exists():
            return
        if not self.path.is_dir():
            raise UserError(f"cannot write the run folder {self.path}: it is not a folder; give another one")
        # A process that was killed here may have left files that are written before the config.
        before = (self.manifest.path, self.data, self.identity, self.config)
        begun = {".lock", *(name for path in before for name in (path.name, files.hidden_name(path).name))}
        if any(entry.name not in begun for entry in self.path.iterdir()):
            raise UserError(f"{self.path} is not empty and not a run folder: give another one")

    def discard(self) -> None:
        """Removes what this process began here: a run without a first checkpoint leaves nothing."""
        if not self._begun or self._lock is None:
            return
        for path in (*vars(self).values(), self.manifest.path, self.path / ".lock"):
            if isinstance(path, Path) and path != self.path:
                files.remove(path)
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)

    def _refuse_links(self) -> None:
        """Refuses links inside the run folder; the folder itself may be one."""
        for path in (*vars(self).values(), self.manifest.path, self.path / ".lock"):
            if isinstance(path, Path) and path != self.path and path.is_symlink():
                raise UserError(
                    f"{path} is a symbolic link, and inside a run folder none is followed: put the real file or folder "
                    "there, or link the whole run folder"
                )

    def _acquire(self) -> None:
        """Locks the folder, so that no two processes train into it; the lock ends with the process, however it ends."""
        try:
            self._lock = files.open_in_place(self.path / ".lock")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is training in {self.path}: wait for it, or give another run folder"
            ) from None
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"cannot write the run folder {self.path}: {error.strerror}; give another one")

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _mend(self, data: DataFacts, warn: Warn) -> None:
        """Writes a damaged config or identity anew from a checkpoint, and damaged facts of the data from `data`.

        Other damaged files are written anew at the end of training.
        """
        mended = (self.config, self.identity, self.data)
        try:
            problems = {path: problem for path in mended if (problem := self.manifest.problem(path))}
        except DamageError as error:
            if self.newest_checkpoint(lambda message: None) is None:
                raise DamageError(f"{error}, but there is none; {ELSEWHERE}") from error
            warn(str(error))
            self.manifest.renew()
            problems = dict.fromkeys(mended, "cannot be checked")
        if not problems:
            return
        run = None if self.identity in problems else self.read_identity()["run"]
        checkpoint = self.newest_checkpoint(lambda message: None, run)
        for path, problem in problems.items():
            if checkpoint is None and path != self.data:
                raise DamageError(f"{path} {problem}, and there is no checkpoint to mend it from; {ELSEWHERE}")
            warn(f"{path} {problem}; written anew")
            if path == self.data:
                self._write_facts(data)  # identity.json knows whether it is the same data
            elif checkpoint is not None:
                state = checkpoint.state
                self._write(path, state["config"].encode() if path == self.config else _json(state["identity"]))

    def _refuse_differences(self, config: Config, data: DataFacts, what: dict[str, Any]) -> None:
        before, there = self.read_config(), self.read_identity()
        old, new = configs.flatten(before), configs.flatten(config)
        # What a path leads to is known by its digest: it may lie elsewhere now.
        alike = ["init"] * (what["start"] is not None and there.get("start") == what["start"])
        if what["sampling"] and identity.same_sampling(there, what):
            alike += ["sampling.generalist", "sampling.path", "teacher.answers"]
        if before.model.startswith("__main__:<"):  # no name at all, as built-in networks with arguments had once:
            alike += ["model", "model_args"]  # the identity below tells them apart
        lines = [
            _difference(k, old[k], new[k])
            for k in configs.differing(before, config)
            if not configs.is_free(k, config) and k not in alike
        ]
        if lines:
            shown = "\n".join(f"  {line}" for line in lines)
            raise UserError(f"{self.path} holds a run of another config:\n{shown}\n{ELSEWHERE}")
        if there["data"] != data.fingerprint:
            raise UserError(
                f"{self.path} was trained on other data: checksum {there['data']} there, {data.fingerprint} now; "
                f"{ELSEWHERE}"
            )
        if lines := identity.differences(there, what):
            shown = "\n".join(f"  {line}" for line in lines)
            raise UserError(f"{self.path} holds a run of other code, weights or priors:\n{shown}\n{ELSEWHERE}")
        self._refuse_shortening(before, config)

    def _refuse_shortening(self, before: Config, config: Config) -> None:
        """Refuses fewer iterations if the run is finished, or is past that end and has no checkpoint exactly there."""
        old, new = before.optim.iterations, config.optim.iterations
        if new >= old:
            return
        total = config.pretrain + new
        steps = Checkpoints(self.checkpoints).steps()
        finished = self.finished(config.pretrain + old)
        if not finished and (not steps or steps[0] <= total or total in steps):
            return
        there = "is finished" if finished else f"has checkpoints of iterations {', '.join(map(str, reversed(steps)))}"
        remedy = "give no fewer" if finished else "end at one of these, or later"
        raise UserError(
            f"{self.path} holds a run of another config:\n  optim.iterations: {old} in the folder, {new} now\n"
            f"and {there}: {remedy}; or {ELSEWHERE}"
        )

    def beside(self) -> RunFolder:
        """A run folder of the first free name beside this one."""
        number = 2
        while (path := self.path.with_name(f"{self.path.name}-{number}")).exists():
            number += 1
        return RunFolder(path)

    # Its state.

    def exists(self) -> bool:
        return self.config.is_file()

    def require(self) -> None:
        if not self.exists():
            inside = [RunFolder(path) for path in sorted(self.path.glob("*/"))]
            runs = [str(folder.path) for folder in inside if folder.exists()]
            hint = f"; it holds {len(runs):,} runs, such as {runs[-1]}" if runs else ""
            raise UserError(f"{self.path} is not a run folder: it has no {self.config.name}{hint}")
        self._refuse_links()

    def finished(self, total: int) -> bool:
        """Whether it was trained for `total` iterations; a run that gets more keeps its old result until the end."""
        sound = not any(self.manifest.problem(path) for path in (self.result, self.model))
        return sound and self.read_result()["iterations"] == total

    def problems(self) -> dict[Path, str]:
        """Files that are damaged or missing, and what is wrong with them."""
        paths = (self.path / name for name in self.manifest.digests)
        return {path: problem for path in paths if (problem := self.manifest.problem(path))}

    def newest_checkpoint(self, warn: Warn, run: str | None = None) -> Checkpoint | None:
        return Checkpoints(self.checkpoints, run=run).newest(warn)

    def final_weights(self) -> Weights:
        """The weights of a finished run."""
        self.require()
        if not self.model.is_file() or not self.result.is_file():
            raise UserError(
                f"{self.path} has no {self.model.name}: the run is not finished; "
                "give the command that trained it again, and it goes on to the end"
            )
        result = self.read_result()
        self.manifest.check(self.model)
        try:
            return Weights(load_file(self.model), result["iterations"], result["seconds"], True, None)
        except (OSError, SafetensorError) as error:
            raise DamageError(f"{self.model} cannot be read ({error}); {AGAIN}") from error

    def newest_weights(self, warn: Warn) -> Weights:
        """The final weights, or else those of the newest checkpoint, after telling `warn`."""
        self.require()
        steps = Checkpoints(self.checkpoints).steps()
        ended = self.result.is_file() and self.model.is_file()
        if ended and not (steps and steps[0] > self.read_result()["iterations"]):
            return self.final_weights()
        found = self.newest_checkpoint(warn, self.read_identity()["run"])
        if found is None:
            raise UserError(
                f"{self.path} has no {self.model.name} and no checkpoint yet: give the command that trained it again, "
                "and it goes on"
            )
        config = self.read_config()
        warn(f"{self.path} is not finished: iteration {found.step} of {config.pretrain + config.optim.iterations}")
        weights = {n.removeprefix("model/"): t for n, t in found.tensors.items() if n.startswith("model/")}
        return Weights(weights, found.step, float(found.state["seconds"]), False, found.state["log"])

    def load_weights(self, net: TreeNet, warn: Warn, final: bool = False) -> Weights:
        """The newest weights, or the `final` ones of a finished run, put into a net of the run's tree."""
        found = self.final_weights() if final else self.newest_weights(warn)
        kinds = {(p.dtype, found.tensors[name].dtype) for name, p in net.named_parameters() if name in found.tensors}
        if len(kinds) == 1 and len(set(*kinds)) > 1:
            net.to(dtype=next(iter(kinds))[1])  # there it was converted after it was built
        try:
            net.load_state_dict(found.tensors)  # copied in place: the strides of the net's own tensors decide bits
        except RuntimeError as error:
            raise UserError(f"what {self.path} holds does not fit the network: {error}") from error
        return found

    # Reading and writing its files.

    def _write(self, path: Path, content: bytes) -> None:
        self.manifest.expect(path, content)
        files.write_atomically(path, content)

    def read_config(self) -> Config:
        self.require()
        self.manifest.check(self.config)
        return configs.read(self.config)

    def write_config(self, config: Config) -> None:
        content = config.to_yaml().encode()
        if not self.exists() or files.read(self.config) != content:
            self._write(self.config, content)

    def read_identity(self) -> dict[str, Any]:
        self.manifest.check(self.identity)
        try:
            found = from_json(files.read(self.identity))
            return {**found, **{key: found[key] for key in ("run", "data", "network", "loss")}}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamageError(f"{self.identity} is damaged ({type(error).__name__}: {error}); {AGAIN}") from error

    def _write_facts(self, data: DataFacts) -> None:
        facts = {
            "name": data.name,
            "shape": list(data.shape),
            "problem": data.problem.to_dict(),
            "scale": data.preprocess.scale,
            "bgr": data.preprocess.bgr,
            "fingerprint": data.fingerprint,
            "seen": None if data.seen is None else [data.seen.kind, data.seen.low, data.seen.high],
            "held_out": data.held_out,
            "side": data.side,
        }
        rows = {} if data.held_out_rows is None else {"held_out": torch.from_numpy(data.held_out_rows)}
        self._write(self.data, to_bytes(data.preprocess.tensors() | rows, {"facts": json.dumps(facts)}))

    def read_data(self) -> DataFacts:
        self.manifest.check(self.data)
        try:
            with safe_open(self.data, "pt") as file:
                facts = from_json(file.metadata()["facts"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            preprocess = Preprocess.from_tensors(tensors, facts["scale"], facts.get("bgr", False))
            shape, problem = tuple(facts["shape"]), problems.from_dict(facts["problem"])
            seen = None if facts["seen"] is None else Seen(*facts["seen"])
            held_out = (facts["held_out"], tensors["held_out"].numpy() if "held_out" in tensors else None)
            side = facts.get("side")
            side = None if side is None else {name: tuple(size) for name, size in side.items()}
            return DataFacts(facts["name"], shape, problem, preprocess, facts["fingerprint"], seen, *held_out, side)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise DamageError(f"{self.data} cannot be read ({error}): the run folder is damaged; {AGAIN}") from error

    def write_result(self, result: dict[str, Any]) -> None:
        self._write(self.result, _json(result))

    def read_result(self) -> dict[str, Any]:
        self.manifest.check(self.result)
        try:
            result = from_json(files.read(self.result).decode())
            problems.PROBLEMS[result["problem"]]  # says how to read the rest
            return {**result, "iterations": int(result["iterations"]), "seconds": float(result["seconds"])}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamageError(f"{self.result} is damaged ({type(error).__name__}: {error}); {AGAIN}") from error

    def write_model(self, weights: dict[str, Tensor]) -> None:
        self._write(self.model, to_bytes(weights))

    def read_metrics(self, known: list[list[Any]] | None = None) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: of a finished run all, else those in the parts that a checkpoint knows."""
        if known is None:
            self.manifest.check(self.metrics)
            content = files.read(self.metrics)
        else:
            content, bad = good_lines(self.metrics, known)
            if bad:
                raise DamageError(f"{self.metrics} is damaged; {AGAIN}")
        return [from_json(line) for line in content.splitlines()]

    def read_log(self, known: list[list[Any]] | None = None) -> Log:
        """The content of metrics.jsonl, steps and evaluations apart: see `read_metrics`."""
        return Log.of(self.read_metrics(known))

    def seal_metrics(self) -> None:
        """Enters metrics.jsonl in the manifest at the end of training, when no line will follow."""
        self.manifest.expect(self.metrics, files.read(self.metrics))

    def write_assignments(self, arrays: dict[str, np.ndarray]) -> None:
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
        self._write(self.assignments, content.getvalue())

    def read_assignments(self) -> dict[str, np.ndarray]:
        """iterations [T], test and train [T, M, C]: see History."""
        self.manifest.check(self.assignments)
        with np.load(self.assignments, allow_pickle=False) as file:
            return {name: file[name] for name in file}


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


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
