import os
import subprocess
import sys

import hypothesis
import pytest
from commands import HERE, PYTHONPATH, TINY, Finished

# A busy machine is not a defect: no example is judged by the clock.
hypothesis.settings.register_profile("mheads", deadline=None)
hypothesis.settings.load_profile("mheads")


@pytest.fixture
def mheads(capsys, monkeypatch):
    """The command line in this process: `mheads("train", "digits")` gives its code, out and err."""
    from mheads.cli import main

    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["mheads", *map(str, args)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The tiny run, trained without disturbance in a process of its own with one worker."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    command = [sys.executable, "-m", "mheads", "train", "digits", *TINY, "engine.workers=1", "--run", str(run)]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return run
