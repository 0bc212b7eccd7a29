"""`python -m killing ARGS`: mheads, in which rank r kills itself at its 8th step of attempt r."""

import os
import signal
import sys
from pathlib import Path

from mheads.cli import main
from mheads.distributed.ranks import RanksEngine

step = RanksEngine.step
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
count = 0


def step_and_die(self, *args, **kwargs):
    global count
    count += 1
    if count == 8 and rank == attempt:
        Path(os.environ["KILLED"], rank).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)


RanksEngine.step = step_and_die
sys.argv[0] = "mheads"
main()
