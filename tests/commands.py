"""Running commands, and comparing the run folders they leave."""

import json
import multiprocessing
import os
import resource
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
# Digits, small and with everything that carries state: a tree, MCL, bagging, dropout, evaluations, checkpoints.
TINY = [
    "model=networks:with_dropout", "members=3", "split=conv", "loss=mcl", "sampling=bagging", "data.limit=150",
    "optim.batch_size=32", "optim.iterations=24", "optim.lr=0.01", "optim.weight_decay=0.0005",
    "engine.micro_batches=4",
    "log.every=1", "log.evaluate_every=8", "log.checkpoint_every=6",
]  # fmt: skip


class Finished:
    """What a command left: its exit code (minus a signal that killed it), out and err."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


# A process of its own for each command, forked from one that has imported what takes seconds and started no thread.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["mheads.cli", "mheads.evaluation", "sklearn.datasets", "torch._dynamo"])


def process(*args, stop=None, max_file_bytes=None):
    """The command in a process of its own.

    `stop` = (signal, event, text): it sends itself the signal just before the first file operation (audit event: open,
    os.rename, ...) whose arguments contain the text, on whichever thread. No file may grow past `max_file_bytes`.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("out", "err")]
        for path in streams:
            path.touch()
        child = _context.Process(target=_command, args=([str(arg) for arg in args], streams, stop, max_file_bytes))
        child.start()
        child.join(300)
        return Finished(child.exitcode, *(path.read_text() for path in streams))


def _command(args, streams, stop, max_file_bytes):
    for path, number in zip(streams, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY), number)
    os.environ["COLUMNS"] = "200"
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    if stop is not None:
        sys.addaudithook(_stopper(*stop))
    sys.path.insert(0, str(HERE))
    sys.argv = ["mheads", *args]
    from mheads.cli import main

    main()


def _stopper(signum, event, text):
    done = False

    def watch(name, args):
        nonlocal done
        if not done and name == event and any(text in str(arg) for arg in args):
            done = True
            os.kill(os.getpid(), signum)

    return watch


def weights(run):
    return (run / "model.safetensors").read_bytes()


def log_lines(run):
    """metrics.jsonl without what a clock says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in lines]


def ownership(run):
    with np.load(run / "assignments.npz") as file:
        return {name: file[name].tolist() for name in file}


def result(run):
    found = json.loads((run / "result.json").read_text())
    return {k: v for k, v in found.items() if k != "seconds"}


def assert_same_run(run, other):
    """Every bit that does not come from a clock."""
    assert weights(run) == weights(other)
    assert log_lines(run) == log_lines(other)
    assert ownership(run) == ownership(other)
    assert result(run) == result(other)
