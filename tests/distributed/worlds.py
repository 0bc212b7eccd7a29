"""Worlds of real processes that talk through gloo on the loopback interface."""

import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from commands import _context


class WorldError(Exception):
    """A rank failed, or none came to an end in time."""


def run_world(num_ranks, function, *args, timeout=60):
    """What `function(rank, *args)` returns on each rank, which has a process and a default group of its own.

    A function of a module's own, importable by its name. All processes are ended before this returns.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = [
            _context.Process(target=_rank, args=(rank, num_ranks, folder, function, args), daemon=True)
            for rank in range(num_ranks)
        ]
        for child in children:
            child.start()
        try:
            end = time.monotonic() + timeout
            for child in children:
                child.join(max(0, end - time.monotonic()))
            late = [rank for rank, child in enumerate(children) if child.is_alive()]
        finally:
            for child in children:
                child.kill()
                child.join()
        failures = [f"rank {rank}:\n{path.read_text()}" for rank, path in _files(folder, num_ranks, "error")]
        if late:
            failures.append(f"ranks {late} were still running after {timeout} s")
        if failures:
            raise WorldError("\n".join(failures))
        results = dict(_files(folder, num_ranks, "result"))
        silent = [(rank, child.exitcode) for rank, child in enumerate(children) if rank not in results]
        if silent:
            raise WorldError(f"(rank, exit code) without a result: {silent}")
        return [torch.load(results[rank], weights_only=False) for rank in range(num_ranks)]


def until(condition, seconds=20):
    """Waits for what must come soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.001)


def _files(folder, num_ranks, kind):
    paths = [(rank, Path(folder, f"{kind}{rank}")) for rank in range(num_ranks)]
    return [(rank, path) for rank, path in paths if path.exists()]


def _rank(rank, num_ranks, folder, function, args):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder, "store")), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=50))
        torch.save(function(rank, *args), Path(folder, f"result{rank}"))
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        sys.exit(1)
