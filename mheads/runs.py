"""Run folders: one training, one folder on disk. Nothing in it can run code when it is opened.

config.yaml        the resolved config                    metrics.jsonl      a line per log step and evaluation
data.safetensors   preprocessing, class names             assignments.npz    who owns which class, over training
checkpoints/       to resume from                         model.safetensors, result.json   at the end
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mheads import config as configs
from mheads.checkpoint import saving, write_atomically, write_text_atomically
from mheads.config import Config
from mheads.data import Data, Preprocess
from mheads.errors import UserError
from mheads.metrics import Result
from mheads.plain import from_json
from mheads.tree import TreeNet


@dataclass(frozen=True)
class DataFacts:
    """What a run remembers of its data: enough to predict, and to notice that the data changed."""

    name: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    preprocess: Preprocess
    fingerprint: str

    @staticmethod
    def of(data: Data) -> DataFacts:
        return DataFacts(data.name, tuple(data.train.shape), data.classes, data.preprocess, data.fingerprint)


class RunFolder:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        if str(path).encode("utf-8", "replace") != os.fsencode(path):  # safetensors opens no such file
            raise UserError(f"the run folder {path}: its name is not UTF-8; give another --folder")
        self.path = path
        self.config = path / "config.yaml"
        self.data = path / "data.safetensors"
        self.metrics = path / "metrics.jsonl"
        self.assignments = path / "assignments.npz"
        self.model = path / "model.safetensors"
        self.result = path / "result.json"
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None

    # Opening it for training.

    def prepare(self, config: Config, data: DataFacts) -> bool:
        """Makes the folder, or makes sure that it holds this very experiment. True if there is one to resume."""
        if not self.exists():
            # A process that was killed here may have left some of what is written before the config.
            begun = {".lock", self.data.name, f".{self.data.name}", f".{self.config.name}"}
            if self.path.is_dir() and any(entry.name not in begun for entry in self.path.iterdir()):
                raise UserError(f"{self.path} is not empty and not a run folder: give another --folder")
            new = not self.path.exists()
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise self._unwritable(error) from error
            self._acquire()
            try:
                self._write_facts(data)
                self.write_config(config)
            except UserError:
                if new:
                    shutil.rmtree(self.path, ignore_errors=True)
                raise
            return False
        self._acquire()
        self._refuse_differences(config, data)
        return True

    def _acquire(self) -> None:
        """Two processes must not train into one folder; the lock goes away with the process, however it ends."""
        try:
            self._lock = (self.path / ".lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is training in {self.path}: wait for it, or give another --folder"
            ) from None
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"cannot write the run folder {self.path}: {error.strerror}; give another --folder")

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _refuse_differences(self, config: Config, data: DataFacts) -> None:
        old, new = configs.flatten(self.read_config()), configs.flatten(config)
        keys = [k for k in new if old[k] != new[k] and not configs.is_free(k, config)]
        if new["optim.iterations"] < old["optim.iterations"] and "optim.iterations" not in keys:
            keys.append("optim.iterations")
        if keys:
            lines = "\n".join(f"  {k}: {old[k]!r} in the folder, {new[k]!r} now" for k in keys)
            raise UserError(
                f"{self.path} holds a run of another config:\n{lines}\n"
                "give another --folder, or --force to start afresh beside it"
            )
        before = self.read_data().fingerprint
        if before != data.fingerprint:
            raise UserError(
                f"{self.path} was trained on other data: checksum {before} there, {data.fingerprint} now; "
                "give another --folder, or --force to start afresh beside it"
            )

    def beside(self) -> RunFolder:
        """The first free name beside this one."""
        number = 2
        while (path := self.path.with_name(f"{self.path.name}-{number}")).exists():
            number += 1
        return RunFolder(path)

    # Reading and writing its files.

    def exists(self) -> bool:
        return self.config.is_file()

    def finished(self, iterations: int) -> bool:
        """Whether it was trained so far; a run that is given more iterations keeps its old result until the end."""
        return self.result.is_file() and self.model.is_file() and self.read_result()["iterations"] == iterations

    def read_config(self) -> Config:
        self.require()
        return configs.read(self.config)

    def write_config(self, config: Config) -> None:
        text = config.to_yaml()
        write_text_atomically(self.config, text)

    def require(self) -> None:
        if not self.exists():
            raise UserError(f"{self.path} is not a run folder: it has no {self.config.name}")

    def _write_facts(self, data: DataFacts) -> None:
        facts = {
            "name": data.name,
            "shape": list(data.shape),
            "classes": list(data.classes),
            "scale": data.preprocess.scale,
            "fingerprint": data.fingerprint,
        }
        tensors = data.preprocess.tensors()
        write_atomically(self.data, lambda path: save_file(tensors, path, metadata={"facts": json.dumps(facts)}))

    def read_data(self) -> DataFacts:
        try:
            with safe_open(self.data, "pt") as file:
                facts = from_json(file.metadata()["facts"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.data} cannot be read ({error}): the run folder is damaged; train afresh with --folder"
            ) from error
        preprocess = Preprocess.from_tensors(tensors, facts["scale"])
        return DataFacts(
            facts["name"], tuple(facts["shape"]), tuple(facts["classes"]), preprocess, facts["fingerprint"]
        )

    def write_result(self, result: dict[str, Any]) -> None:
        write_text_atomically(self.result, json.dumps(result, indent=1) + "\n")

    def read_result(self) -> dict[str, Any]:
        try:
            result = from_json(self.result.read_text())
            Result.from_dict(result)
            return {**result, "iterations": int(result["iterations"]), "seconds": float(result["seconds"])}
        except FileNotFoundError:
            raise UserError(f"{self.path} has no {self.result.name}: train the run to its end first") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.result} is damaged ({type(error).__name__}: {error}): "
                "remove it, and the command that trained the run writes it anew"
            ) from error

    def write_model(self, weights: dict[str, Tensor]) -> None:
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}
        write_atomically(self.model, lambda path: save_file(tensors, path))

    def load_weights(self, net: TreeNet) -> None:
        """The final weights into a net of the run's tree."""
        if not self.model.is_file():
            raise UserError(
                f"{self.path} has no {self.model.name}: the run is not finished; "
                "give the command that trained it again, and it goes on to the end"
            )
        try:
            # Copied in place: the strides of the net's own tensors decide bits.
            net.load_state_dict(load_file(self.model))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise UserError(f"{self.model} does not fit the network, or is damaged: {error}") from error

    def write_assignments(self, history: History) -> None:
        def write(path: Path) -> None:
            with path.open("wb") as file:
                np.savez_compressed(file, **history.arrays())  # type: ignore[arg-type]

        write_atomically(self.assignments, write)


class MetricsLog:
    """metrics.jsonl: appended line by line, and cut back to the checkpoint on resuming."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        with saving(path):
            self._file = path.open("a+b", buffering=0)  # what does not fit on the disk is an error here, not at close
            self._file.truncate(min(size, self._file.seek(0, os.SEEK_END)))

    def write(self, line: dict[str, Any]) -> None:
        rest = json.dumps(line).encode() + b"\n"
        with saving(self._path):
            while rest:  # half a line on a full disk is cut off on resuming
                rest = rest[self._file.write(rest) or 0 :]

    @property
    def size(self) -> int:
        """Bytes so far, safely on the disk."""
        with saving(self._path):
            os.fsync(self._file.fileno())
            return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


class History:
    """Who owned which class at each evaluation.

    `test` [T, M, C]: owned examples of the test set; `train` [T, M, C]: assignment since the evaluation before.
    """

    def __init__(self, members: int, classes: int) -> None:
        self.iterations = np.zeros(0, np.int64)
        self.test = np.zeros((0, members, classes))
        self.train = np.zeros((0, members, classes))

    def append(self, iteration: int, test: np.ndarray, train: np.ndarray) -> None:
        self.iterations = np.append(self.iterations, iteration)
        self.test = np.concatenate([self.test, test[None]])
        self.train = np.concatenate([self.train, train[None]])

    def arrays(self) -> dict[str, np.ndarray]:
        return {"iterations": self.iterations, "test": self.test, "train": self.train}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        self.iterations, self.test, self.train = (arrays[key] for key in ("iterations", "test", "train"))
