"""Runs commands, and compares the run folders that they leave."""

import json
import multiprocessing.forkserver
import os
import resource
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np

HERE = Path(__file__).parents[1]
PYTHONPATH = f"{HERE}{os.pathsep}{HERE.parent}"  # of processes: the networks of the tests, and this package
# Digits, small and with everything that carries state: a tree, MCL, bagging, dropout, evaluations, checkpoints.
TINY = [
    "model=user_networks:with_dropout", "members=3", "split=conv", "loss=mcl", "sampling=bagging", "data.limit=150",
    "optim.batch_size=32", "optim.iterations=24", "optim.lr=0.01", "optim.weight_decay=0.0005",
    "engine.micro_batches=4", "engine.stack=never",
    "log.every=1", "log.evaluate_every=8", "log.checkpoint_every=6",
]  # fmt: skip


class Finished:
    """What a command left: its exit code (minus a signal that killed it), out and err."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


# A process of its own for each command, forked from one that has imported what takes seconds and started no thread.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "mheads.cli.main",
        "mheads.api.evaluate",
        "mheads.training.experiment_on_ranks",
        "sklearn.datasets",
        "sklearn.cluster",
        "torch._dynamo",
    ]
)


def start_server():
    """Has the server begin its imports now, in the current environment."""
    multiprocessing.forkserver.ensure_running()


def process(*args, stop=None, max_file_bytes=None, before=None):
    """The command in a process of its own.

    `stop` = (signal, event, text): it sends itself the signal just before the first file operation (audit event: open,
    os.rename, ...) whose arguments contain the text, on whichever thread. No file may grow past `max_file_bytes`.
    `before` is called first.
    """
    return Running(*args, stop=stop, max_file_bytes=max_file_bytes, before=before).finish()


class Running:
    """A command that has been started, with these variables in its environment."""

    def __init__(self, *args, stop=None, max_file_bytes=None, env=None, before=None):
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name, name) for name in ("out", "err")]
        for path in self._streams:
            path.touch()
        args = ([str(arg) for arg in args], self._streams, stop, max_file_bytes, env or {}, before)
        self._child = _context.Process(target=_command, args=args)
        self._child.start()
        self.pid = self._child.pid

    def finish(self, seconds=300):
        self._child.join(seconds)
        if self._child.is_alive():
            self._child.kill()
            self._child.join()
        found = Finished(self._child.exitcode, *(path.read_text() for path in self._streams))
        self._folder.cleanup()
        return found


def start_ranks(size, *args, stop=None, each=None, before=None, only=None):
    """The command on several ranks, or `only` some of them, as mpirun starts it on one host.

    By rank: `each` gives further arguments, `stop` the stop (see `process`), `before` a function to call first.
    """
    job = uuid.uuid4().hex
    return [
        Running(
            *args,
            *(each or {}).get(rank, ()),
            stop=(stop or {}).get(rank),
            before=(before or {}).get(rank),
            env={
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": str(size),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
                "PMIX_NAMESPACE": job,
            },
        )
        for rank in (range(size) if only is None else only)
    ]


def ranks(size, *args, **options):
    return [running.finish() for running in start_ranks(size, *args, **options)]


def _command(args, streams, stop, max_file_bytes, env, before):
    os.environ |= env
    # Whoever started the tests may ignore these, as nohup and a shell's `&` do, and all their processes would too.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path, number in zip(streams, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY), number)
    os.environ["COLUMNS"] = "200"
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    if stop is not None:
        sys.addaudithook(_stopper(*stop))
    sys.path.insert(0, str(HERE))
    if before is not None:
        before()
    sys.argv = ["mheads", *args]
    from mheads.cli.main import main

    main()


def _stopper(signum, event, text):
    done = False

    def watch(name, args):
        nonlocal done
        if not done and name == event and any(text in str(arg) for arg in args):
            done = True
            os.kill(os.getpid(), signum)

    return watch


def stop_at_iteration_8():
    """This rank alone is sent a signal, in the middle of iteration 8: no checkpoint is due there."""
    from mheads.distributed.ranks_engine import RanksEngine

    step = RanksEngine.step

    def stopped(self, number, *args):
        if number == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, number, *args)

    RanksEngine.step = stopped


def weights(run):
    return (run / "model.safetensors").read_bytes()


def log_lines(run):
    """The lines of metrics.jsonl without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in lines]


def ownership(run):
    with np.load(run / "assignments.npz") as file:
        return {name: file[name].tolist() for name in file}


def result(run):
    found = json.loads((run / "result.json").read_text())
    return {k: v for k, v in found.items() if k not in ("seconds", "peak_memory")}


def assert_same_run(run, other):
    """Compares every bit that does not come from a clock."""
    assert weights(run) == weights(other)
    assert log_lines(run) == log_lines(other)
    assert ownership(run) == ownership(other)
    assert result(run) == result(other)


def logged(run):
    """How many steps training has logged."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def when_logged(run, lines):
    deadline = time.monotonic() + 60
    while logged(run) < lines:
        assert time.monotonic() < deadline, "training does not get on"
        time.sleep(0.01)
