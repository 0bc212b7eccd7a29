"""A terminal that shows text but obeys none of it: class names and paths come from files that others made."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from contextlib import suppress

import rich.console
from rich.console import ConsoleDimensions
from rich.segment import Segment
from rich.text import Text

from mheads.common.signals import output_closed

# Control characters but for newlines and tabs, marks that turn the direction of text, and halves of surrogate pairs,
# which is how Python shows the bytes of a path that is not UTF-8.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
UNLIMITED = 10_000
_HALVES = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """Text without what a terminal would obey, or could not show."""
    return _HALVES.sub("?", _COMMANDS.sub("", text))


class Console(rich.console.Console):
    """Rich's console with all printed text cleaned: only rich's own styles and movements reach the terminal.

    Text is shown as it is: `[red]` and `:boom:` in a name are no markup. Our own styles are in rich's `Text`.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def complain(self, message: str, what: str = "error:", who: str = "") -> None:
        """Prints what went wrong, in red what that is, and who says it."""
        self.print(Text.assemble((who, "bold"), " " if who else "", (what, "red"), f" {message}"), soft_wrap=True)

    @property  # type: ignore[misc]  # its width may be set, the whole is not
    def size(self) -> ConsoleDimensions:
        """Of the terminal; a file has no right edge, and a table loses nothing there."""
        size = super().size
        if self.is_terminal or self.is_jupyter or self._width is not None or "COLUMNS" in os.environ:
            return size
        return ConsoleDimensions(UNLIMITED, size.height)

    def _check_buffer(self) -> None:
        """Writes what is to be written; not to a terminal that is gone, which a signal tells (signals.py)."""
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO:
                raise

    def on_broken_pipe(self) -> None:
        """Writes no more to a pipe whose other end is closed, as `| head -1` does; for want of stderr nothing ends."""
        self.quiet = True
        with suppress(OSError, ValueError):  # it may be no file of the system
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())  # what Python still holds goes there in the end
            os.close(nowhere)
        if not self.stderr:
            output_closed()

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(clean(segment.text), segment.style)
