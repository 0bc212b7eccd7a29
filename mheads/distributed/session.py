"""A command on one or several ranks, from the first line to the exit code. Imports torch only if there are several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mheads.distributed.launch import detect, hint
from mheads.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    # When a rank is lost, torch's own warnings are pages of addresses in its libraries.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from mheads.distributed.world import World


@contextmanager
def session(console: Console) -> Iterator[World | None]:
    """The world that a launcher started, None for a process of its own.

    Whatever ends this rank inside is told to the others. A mistake that all ranks find is printed once; what one rank
    alone meets is printed with its number.
    """
    launch = detect()
    if launch is None and (advice := hint()):
        console.print(advice, style="yellow", soft_wrap=True)
    if launch is None or launch.size == 1:
        yield None
        return
    # When a rank is lost, torch's own warnings are pages of addresses in its libraries.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from mheads.distributed.world import EXIT_CODE, RankFailure, World, leave

    world = World(launch)
    try:
        yield world
        world.close()
    except BaseException as error:
        code = getattr(error, "exit_code", None)
        if code is not None:
            # A signal that all ranks heard of: all is saved, and all leave together.
            world.close()
            if world.lead:
                raise
            leave(code)
        _say(console, world, error, world.abort(error))
        world.farewell(error)
        leave(EXIT_CODE if isinstance(error, RankFailure) else 2 if isinstance(error, UserError) else 1)


def _say(console: Console, world: World, error: BaseException, aloud: bool) -> None:
    from rich.markup import escape

    name = "" if world.lead else f"[bold]rank {world.rank}[/] "
    if not isinstance(error, UserError | KeyboardInterrupt | SystemExit):
        import traceback

        console.print(f"{name}[red]failed:[/]\n{escape(traceback.format_exc())}", soft_wrap=True)
    elif aloud:
        console.print(f"{name}[red]error:[/] {escape(str(error))}", soft_wrap=True)
