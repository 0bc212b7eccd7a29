"""Run folders: one training, one folder on disk. Opening one runs no code; running code that it names needs `trust`.

`runs/run_files.py` says which files there are.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from mheads.common import atomic_files
from mheads.common.errors import DamageError, UserError
from mheads.config import read as configs
from mheads.config.schema import Config
from mheads.runs.check_resume import ELSEWHERE_OR_FORCE, check_resume
from mheads.runs.checkpoint import Checkpoint, Checkpoints, refuse_misfits
from mheads.runs.data_facts import DataFacts
from mheads.runs.lock import Lock
from mheads.runs.manifest import AGAIN
from mheads.runs.run_files import BEFORE, RunFiles, as_json
from mheads.trees.treenet import TreeNet

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Weights:
    """The newest weights of a run: the final ones, or those of a checkpoint on the way."""

    file: Path
    tensors: dict[str, Tensor]
    iteration: int
    seconds: float
    final: bool
    log: list[list[Any]] | None  # the parts of metrics.jsonl that a checkpoint knows


class RunFolder(RunFiles):
    """The folder of one training: opened to train in it, or for its weights."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.lock = Lock(path)
        self._begun = self._made = False  # whether this process began the run, and made the folder

    # Opening it for training.

    def prepare(self, config: Config, data: DataFacts, what: dict[str, Any], warn: Warn) -> bool:
        """Makes the folder, or checks that it holds this very experiment. True if there is one to resume.

        `what` describes the network and the loss, see `common/fingerprint.py`. Files that are damaged are mended.
        """
        self.refuse_links()
        if self.exists():
            self._acquire()
            self._mend(data, warn)
            check_resume(self, config, data, what)
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
            self.write(self.data, data.to_bytes())
            self.write(self.identity, as_json({"run": secrets.token_hex(8), **what}))
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
        begun = {".lock", *(name for path in before for name in (path.name, atomic_files.hidden_name(path).name))}
        if any(entry.name not in begun for entry in self.path.iterdir()):
            raise UserError(f"{self.path} is not empty and not a run folder: give another one")

    def discard(self) -> None:
        """Removes what this process began here: a run without a first checkpoint leaves nothing."""
        if not self._begun or not self.lock.held or self.lock.is_lost():
            return
        for path in (*vars(self).values(), self.manifest.path, self.lock.path):
            if isinstance(path, Path) and path != self.path:
                atomic_files.remove(path)
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)

    def _acquire(self) -> None:
        """Locks the folder, so that no two processes train into it."""
        try:
            self.lock.acquire()
        except BlockingIOError:
            raise UserError(
                f"another process is training in {self.path}: wait for it, or give another run folder"
            ) from None
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"cannot write the run folder {self.path}: {error.strerror}; give another one")

    def release(self) -> None:
        self.lock.release()

    def refuse_if_gone(self) -> None:
        """Raises UserError if the folder that this process trains in was removed, renamed or replaced meanwhile."""
        if self.lock.is_lost() or not self.exists():
            raise UserError(
                f"the run folder {self.path} is gone: it was removed, renamed or replaced while training went on. "
                "That stops here and writes nothing. If it was renamed, give the same command with its new name to go "
                "on; else the same command begins anew"
            )

    def _mend(self, data: DataFacts, warn: Warn) -> None:
        """Writes a damaged config or identity anew from a checkpoint, and damaged facts of the data from `data`.

        Other damaged files are written anew at the end of training.
        """
        mended = (self.config, self.identity, self.data)
        try:
            problems = {path: problem for path in mended if (problem := self.problem(path))}
        except DamageError as error:
            if self.newest_checkpoint(lambda message: None) is None:
                problem = f"{error.problem}; {error.hint}, but there is none"
                raise DamageError(error.path, problem, hint=ELSEWHERE_OR_FORCE) from error
            warn(str(error))
            self.manifest.renew()
            problems = dict.fromkeys(mended, "cannot be checked")
        if not problems:
            return
        run = None if self.identity in problems else self.read_identity()["run"]
        checkpoint = self.newest_checkpoint(lambda message: None, run)
        for path, problem in problems.items():
            if checkpoint is None and path != self.data:
                problem = f"{problem}, and there is no checkpoint to mend it from"
                raise DamageError(path, problem, hint=ELSEWHERE_OR_FORCE)
            warn(f"{path} {problem}; written anew")
            if path == self.data:
                self.write(self.data, data.to_bytes())  # identity.json knows whether it is the same data
            elif checkpoint is not None:
                state = checkpoint.state
                self.write(path, state["config"].encode() if path == self.config else as_json(state["identity"]))

    def begun_config(self) -> Config | None:
        """The config that the run was begun with, of a checkpoint if its file is damaged; None if there is neither."""
        try:
            return self.read_config()
        except DamageError:
            checkpoint = self.newest_checkpoint(lambda message: None)
            return None if checkpoint is None else configs.parse(checkpoint.state["config"], "config", defaults=BEFORE)

    def beside(self) -> RunFolder:
        """A run folder of the first free name beside this one."""
        number = 2
        while (path := self.path.with_name(f"{self.path.name}-{number}")).exists():
            number += 1
        return RunFolder(path)

    # Its state.

    def is_finished(self, total: int) -> bool:
        """Whether it was trained for `total` iterations; a run that gets more keeps its old result until the end."""
        sound = not any(self.problem(path) for path in (self.result, self.model))
        return sound and self.read_result()["iterations"] == total

    def newest_checkpoint(self, warn: Warn, run: str | None = None) -> Checkpoint | None:
        return Checkpoints(self.checkpoints, run=run).newest(warn)

    def final_weights(self) -> Weights:
        """The weights of a finished run."""
        self.require()
        if not self.result.is_file():
            raise UserError(
                f"{self.path} has no {self.result.name}: the run is not finished; "
                "give the command that trained it again, and it goes on to the end"
            )
        result = self.read_result()
        tensors = self._read_checked(self.model, lambda: load_file(self.model))
        return Weights(self.model, tensors, result["iterations"], result["seconds"], True, None)

    def newest_weights(self, warn: Warn) -> Weights:
        """The final weights, or else those of the newest checkpoint, after telling `warn`."""
        self.require()
        checkpoints = Checkpoints(self.checkpoints, run=self.read_identity()["run"])
        steps = checkpoints.steps()
        missing = [path for path in (self.model, self.result) if not path.is_file()]
        if not missing and not (steps and steps[0] > self.read_result()["iterations"]):
            for path, problem in checkpoints.damages().items():
                warn(describe_damage(path, problem))
            return self.final_weights()
        checkpoints.wanted = lambda name: name.startswith("model/")
        checkpoint = checkpoints.newest(warn)
        if checkpoint is None:
            raise UserError(
                f"{self.path} has no {self.model.name} and no checkpoint yet: give the command that trained it again, "
                "and it goes on"
            )
        config = self.read_config()
        total = config.pretrain + config.optim.iterations
        if missing and (checkpoint.step == total or self.result.is_file()):
            reached = f"iteration {checkpoint.step} of {total}"
            warn(f"{missing[0]} is missing, and this is the checkpoint of {reached}; {AGAIN}")
        else:
            warn(f"{self.path} is not finished: iteration {checkpoint.step} of {total} is its newest checkpoint")
        weights = {name.removeprefix("model/"): tensor for name, tensor in checkpoint.tensors.items()}
        file, seconds = checkpoints.path(checkpoint.step), float(checkpoint.state["seconds"])
        return Weights(file, weights, checkpoint.step, seconds, False, checkpoint.state["log"])

    def load_weights(self, net: TreeNet, warn: Warn, final: bool = False) -> Weights:
        """The newest weights, or the `final` ones of a finished run, put into a net of the run's tree."""
        source = self.final_weights() if final else self.newest_weights(warn)
        kinds = {(p.dtype, source.tensors[name].dtype) for name, p in net.named_parameters() if name in source.tensors}
        if len(kinds) == 1 and len(set(*kinds)) > 1 and next(iter(kinds))[1].is_floating_point:
            net.to(dtype=next(iter(kinds))[1])  # there it was converted after it was built
        try:
            refuse_misfits(net.state_dict(), source.tensors)
            net.load_state_dict(source.tensors)  # copied in place: the strides of the net's own tensors decide bits
        except (RuntimeError, ValueError) as error:
            raise UserError(f"{source.file} does not fit the network: {error}") from error
        return source


def describe_damage(checkpoint: Path, problem: str) -> str:
    """What there is to say of a damaged checkpoint of a run that is finished."""
    return f"checkpoint {checkpoint} is damaged ({problem}): the run is whole without it, but could not go on from it"
