"""Real processes, each with an environment of its own, and worlds of them that talk through gloo on loopback."""

import os
import socket
import sys
import tempfile
import time
import traceback
import uuid
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.commands import _context

from mheads.common.errors import UserError
from mheads.distributed import launcher


class WorldError(Exception):
    """A process failed, or came to no end in time."""


def run_each(function, environs, *args, timeout=60):
    """What `function(i, *args)` returns, or the message of its UserError, in a process for each environment.

    A function of a module's own, importable by its name. All processes are ended before this returns.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(i)) for i in range(len(environs))]
        children = [
            _context.Process(target=_child, args=(i, paths[i], environ, function, args), daemon=True)
            for i, environ in enumerate(environs)
        ]
        for child in children:
            child.start()
        end = time.monotonic() + timeout
        try:
            for child in children:
                child.join(max(0, end - time.monotonic()))
        finally:
            for child in children:
                child.kill()
                child.join()
        failures = [f"process {path.name}:\n{path.read_text()}" for path in Path(folder).glob("*.error")]
        failures += [
            f"process {i} ended with {child.exitcode} and without a result (-9: after {timeout} s)"
            for i, child in enumerate(children)
            if not paths[i].exists() and not paths[i].with_suffix(".error").exists()
        ]
        if failures:
            raise WorldError("\n".join(failures))
        return [torch.load(path, weights_only=False) for path in paths]


def run_world(size, function, *args):
    """What `function(rank, *args)` returns on each of `size` ranks, which have a default group."""
    with tempfile.TemporaryDirectory() as folder:
        environs = [{"GLOO_SOCKET_IFNAME": "lo"}] * size
        return run_each(_in_world, environs, Path(folder, "store"), size, function, args)


def _child(i, path, environ, function, args):
    os.environ.update(environ)
    tempfile.tempdir = None  # it may have been looked up before TMPDIR was set
    torch.set_num_threads(1)
    try:
        result = function(i, *args)
    except UserError as error:
        result = str(error)
    except BaseException:
        path.with_suffix(".error").write_text(traceback.format_exc())
        sys.exit(1)
    torch.save(result, path)


def _in_world(rank, store, size, function, args):
    store = dist.FileStore(str(store), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=50))
    return function(rank, *args)


def by_mpirun(size, **more):
    """The environments of Open MPI's ranks on one host."""
    row = launcher.OPEN_MPI
    more |= {"PMIX_NAMESPACE": uuid.uuid4().hex}
    return [dict(zip(row.needed, map(str, (rank, size, rank, size)), strict=True)) | more for rank in range(size)]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def by_hand(size):
    there = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    return [{**there, "RANK": str(rank)} for rank in range(size)]


def impatient():
    """Has a rank wait for others for a moment only."""
    from mheads.distributed import process_group

    process_group.TIMEOUT = process_group.TIMEOUT_TO_START = 1.5
