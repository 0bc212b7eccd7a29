import os
import sys

import hypothesis
import pytest
from helpers.commands import HERE, TINY, Finished, process, start_server

# A busy machine is not a defect: no example is judged by the clock.
hypothesis.settings.register_profile("mheads", deadline=None)
hypothesis.settings.load_profile("mheads")
# Torch's threads that wait for work sleep instead of spinning, which would take the core from an engine's worker. (Read
# when torch is first imported, here and in every process that a test starts; no number of threads changes.)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Ranks that are lost on purpose leave no pages of addresses; commands see to that themselves (test_launch.py).
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COLUMNS", None)  # which it has set: tables are as wide as each test says


def pytest_collection_finish(session):
    """Where processes will be wanted, their server imports torch while the first tests run, and before any of them
    changes the environment that all processes would have."""
    if any("undisturbed" in item.fixturenames or hasattr(item.module, "Running") for item in session.items):
        start_server()


@pytest.fixture
def mheads(capsys, monkeypatch):
    """The command line in this process: `mheads("train", "digits")` gives its code, out and err."""
    from mheads.cli.main import main

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
    done = process("train", "digits", *TINY, "engine.workers=1", "--run", run)
    assert done.code == 0, done.err
    return run
