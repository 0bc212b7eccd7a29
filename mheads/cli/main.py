"""The command line: the commands and their panels in the help, errors and exit codes.

A command is a function in a file of its own, and a name in `COMMANDS`. It parses, calls and prints, and has no logic.
It imports torch, and whatever imports torch, inside the function: `mheads --help` waits for none of it.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
from importlib import import_module
from typing import Annotated

import typer

from mheads.cli.shared import console, errors
from mheads.common.errors import UserError, as_user_error

# By panel of the help: `mheads NAME` is NAME in NAME_command.py, a function or the Typer of a group of commands.
COMMANDS = {
    "Start here": "demo recipes data",
    "Train and look": "train convert classical distil config eval predict compare plot video saliency report export "
    "reproduce tree cuts detect",
    "Measure": "plan",
}

TRAINING = {"train", "classical", "distil", "reproduce", "demo"}  # commands that go on where they were stopped
INTERRUPTED = 128 + signal.SIGINT

app = typer.Typer(
    name="mheads",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, names in COMMANDS.items():
    for name in names.split():
        command = getattr(import_module(f"mheads.cli.{name}_command"), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(command)


def _version(wanted: bool) -> None:
    if wanted:
        import platform
        from importlib.metadata import version

        import mheads

        console.print(f"mheads {mheads.__version__}, torch {version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Versions of mheads, torch and Python.")
    ] = False,
) -> None:
    """Train diverse ensembles of deep networks: TreeNets, ensemble-aware losses, Multiple Choice Learning."""


def main() -> None:
    """Runs the command line: a user's mistake gives a message and exit code 2, a signal its own code."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and codecs.lookup(out.encoding).name != "utf-8":
        # A letter that it cannot show ends no command.
        out.reconfigure(errors="backslashreplace")
    try:
        _require_current_folder()
        from mheads.distributed import launcher

        launch = launcher.detect()
        if launch is not None:
            # When a rank is lost, torch's own warnings are pages of addresses in its libraries. It reads this only when
            # it is imported, below.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        trains = sys.argv[1:2] == ["train"] or sys.argv[1:3] == ["detect", "train"]
        shares_rows = sys.argv[1:2] == ["reproduce"] and not {"--dry-run", "--tables", "--merge"} & {*sys.argv}
        if launch is not None and launch.rank > 0 and not (trains or shares_rows):
            return  # one rank is enough for any other command
        app()
    except UserError as error:
        errors.complain(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        _say_interrupted()
        sys.exit(INTERRUPTED)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # what typer makes of a KeyboardInterrupt inside a command
            _say_interrupted()
        # Rich and click, which print the help, exit with 1 when nobody reads it (`mheads --help | head -1`); our own
        # console exits as a process does that SIGPIPE ends.
        if isinstance(stop.__context__, BrokenPipeError):
            sys.exit(128 + signal.SIGPIPE)
        raise
    except OSError as error:
        mistake = as_user_error(error)
        if mistake is error:
            raise
        errors.complain(str(mistake))
        sys.exit(2)
    except BaseException as error:
        code = getattr(error, "exit_code", None)  # of training.loop.Stopped: saved, and stopped by a signal
        if code is None:
            raise
        errors.print(f"stopped by {error}; saved. The same command resumes from here.")
        sys.exit(code)


def _say_interrupted() -> None:
    """Says what a Ctrl-C left that no step waited for: before the first one, or the second Ctrl-C in one."""
    trains = TRAINING & {*sys.argv[1:2]} or sys.argv[1:3] == ["detect", "train"]
    goes_on = ": nothing was saved by it. The same command goes on from the newest checkpoint, if there is one."
    errors.print(f"interrupted{goes_on if trains else ''}", soft_wrap=True)


def _require_current_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(f"the current folder is gone ({error.strerror}): change to one that is there") from error
