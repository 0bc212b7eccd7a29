"""Runs a command on one or several ranks, from the first line to the exit code. Imports torch only for several."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mheads.common.errors import UserError, as_user_error
from mheads.distributed.launcher import detect

if TYPE_CHECKING:
    from mheads.common.console import Console
    from mheads.config.schema import Config
    from mheads.distributed.process_group import World
    from mheads.training.experiment import Experiment


@dataclass(frozen=True)
class ThisRank:
    """This process: one rank of a world, or the only one there is."""

    world: World | None = None

    @property
    def is_main(self) -> bool:
        return self.world is None or self.world.is_main

    @property
    def cores(self) -> int | None:
        """Those that a new run is made for: all, or two if ranks, which may have different numbers, share the work."""
        return None if self.world is None else 2

    def build_experiment(self, config: Config) -> Experiment:
        if self.world is None:
            from mheads.training.experiment import build_experiment

            return build_experiment(config)
        from mheads.training.experiment_on_ranks import build_experiment_on_rank

        return build_experiment_on_rank(config, self.world)


@contextmanager
def join_ranks(console: Console, timeout: float | None = None) -> Iterator[ThisRank]:
    """Gives the only process, or this rank of the world that a launcher started; ranks meet within `timeout` seconds.

    An error inside ends this rank, and the others hear of it. An error that all ranks find is printed once; one that a
    single rank meets is printed with its number.
    """
    launch = detect()
    if launch is None and (advice := advise_srun(os.environ)):
        console.print(advice, style="yellow", soft_wrap=True)
    if launch is None or launch.size == 1:
        yield ThisRank()
        return
    if not _has_viewer():
        os.environ.setdefault("TTY_COMPATIBLE", "0")  # rich: no bar
    from mheads.distributed.lost_ranks import EXIT_CODE, TIMEOUT, RankFailure, leave
    from mheads.distributed.process_group import World

    try:
        world = World(launch, TIMEOUT if timeout is None else timeout)
    except UserError as error:
        # Threads of torch that still wait for an answer would abort a process that ends in the ordinary way.
        console.complain(str(error), who=f"rank {launch.rank}")
        leave(2)
    stopped = None
    try:
        try:
            world.watch.check()
            yield ThisRank(world)
        except OSError as error:
            raise as_user_error(error) from error
        except BaseException as error:  # Stopped is no Exception
            if getattr(error, "exit_code", None) is None:
                raise
            stopped = error  # by a signal that all ranks heard of: all is saved, and all leave together
        world.close()
    except BaseException as error:
        _print_error(console, world, error, world.abort(error))
        world.farewell()
        leave(EXIT_CODE if isinstance(error, RankFailure) else _exit_code(error))
    if stopped is not None:
        if world.is_main:
            raise stopped
        leave(stopped.exit_code)  # type: ignore[attr-defined]


def advise_srun(environ: Mapping[str, str]) -> str | None:
    """What a process that nobody launched should tell its user: several tasks were reserved, and one is used."""
    tasks = environ.get("SLURM_NTASKS", "")
    if not tasks.isdecimal() or int(tasks) < 2:
        return None
    return f"SLURM_NTASKS={tasks}, but this command was not started by srun: one process; srun starts {tasks}"


def _has_viewer() -> bool:
    """Whether somebody sees the terminal: Open MPI gives every rank one, without a size if mpirun writes to a file."""
    try:
        return os.get_terminal_size(1).columns > 0
    except OSError:
        return True  # no terminal: rich knows


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 2 if isinstance(error, UserError) else 1


def _print_error(console: Console, world: World, error: BaseException, aloud: bool) -> None:
    who = "" if world.is_main else f"rank {world.rank}"
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return  # whoever asked for it knows
    if not isinstance(error, UserError):
        import traceback

        console.complain(f"\n{traceback.format_exc()}", "failed:", who)
    elif aloud:
        console.complain(str(error), who=who)
