"""A command on one or several ranks, from the first line to the exit code. Imports torch only if there are several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mheads.common.errors import UserError, of_the_system
from mheads.distributed.launcher import detect, hint

if TYPE_CHECKING:
    from mheads.common.console import Console
    from mheads.config.schema import Config
    from mheads.distributed.world import World
    from mheads.training.experiment import Experiment


class Alone:
    """A world of one process."""

    is_main = True

    def build(self, config: Config) -> Experiment:
        from mheads.training.experiment import build

        return build(config)


@dataclass(frozen=True)
class Among:
    """This process among those of a world."""

    world: World

    @property
    def is_main(self) -> bool:
        return self.world.is_main

    def build(self, config: Config) -> Experiment:
        from mheads.training.rank_experiment import build

        return build(config, self.world)


@contextmanager
def session(console: Console, timeout: float | None = None) -> Iterator[Alone | Among]:
    """Gives a world of one process, or this rank of the world that a launcher started; ranks meet in `timeout` seconds.

    An error inside ends this rank, and the others are told of it. An error that all ranks find is printed once; one
    that a single rank meets is printed with its number.
    """
    launch = detect()
    if launch is None and (advice := hint()):
        console.print(advice, style="yellow", soft_wrap=True)
    if launch is None or launch.size == 1:
        yield Alone()
        return
    if not _seen_by_somebody():
        os.environ.setdefault("TTY_COMPATIBLE", "0")  # rich: no bar
    from mheads.distributed.lost_ranks import EXIT_CODE, TIMEOUT, RankFailure, leave
    from mheads.distributed.world import World

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
            yield Among(world)
        except OSError as error:
            raise of_the_system(error) from error
        except BaseException as error:  # Stopped is no Exception
            if getattr(error, "exit_code", None) is None:
                raise
            stopped = error  # by a signal that all ranks heard of: all is saved, and all leave together
        world.close()
    except BaseException as error:
        _say(console, world, error, world.abort(error))
        world.farewell(error)
        leave(EXIT_CODE if isinstance(error, RankFailure) else _exit_code(error))
    if stopped is not None:
        if world.is_main:
            raise stopped
        leave(stopped.exit_code)  # type: ignore[attr-defined]


def _seen_by_somebody() -> bool:
    """Open MPI gives every rank a terminal; it has no size if mpirun itself writes to a file."""
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


def _say(console: Console, world: World, error: BaseException, aloud: bool) -> None:
    who = "" if world.is_main else f"rank {world.rank}"
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return  # whoever asked for it knows
    if not isinstance(error, UserError):
        import traceback

        console.complain(f"\n{traceback.format_exc()}", "failed:", who)
    elif aloud:
        console.complain(str(error), who=who)
