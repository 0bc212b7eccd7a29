"""The log for TensorBoard says what metrics.jsonl says, and changes nothing else."""

import json
import signal

import pytest
from helpers.commands import process, weights

from mheads.runs import tensorboard

QUICK = ("optim.iterations=6", "optim.batch_size=20", "data.limit=100", "log.every=1", "log.evaluate_every=3")
COMMAND = ("train", "digits", *QUICK, "log.checkpoint_every=2", "loss.name=mcl", "-f")


def on_the_board(run):
    """(name, iteration) -> value, and how often each was written."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / tensorboard.FOLDER), size_guidance={"scalars": 0})
    found.Reload()
    return [(name, event.step, event.value) for name in found.Tags()["scalars"] for event in found.Scalars(name)]


@pytest.mark.filterwarnings("ignore")  # of tensorboard's own imports
def test_the_board_shows_the_log_once_also_after_a_kill_and_weights_are_the_same(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra 'tensorboard' is not installed")
    plain, run = tmp_path / "plain", tmp_path / "run"
    assert process(*COMMAND, plain).code == 0
    shown = (*COMMAND, run, "log.tensorboard=true")
    assert process(*shown, stop=(signal.SIGKILL, "open", ".step-00000004.new")).code == -signal.SIGKILL
    done = process(*shown)
    assert done.code == 0, done.err
    assert weights(run) == weights(plain)
    expected = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(line)
        expected |= {(name, line["iteration"]): value for name, value in tensorboard.scalars(line)}
    found = on_the_board(run)
    assert len(found) == len(expected) == len({(name, step) for name, step, _ in found})
    for name, step, value in found:
        assert value == pytest.approx(expected[name, step], rel=1e-6)
    names = {name for name, _, _ in found}
    assert {"training/loss", "wins/member 3", "test/oracle", "test/member 0", "gradient_norm/member 1"} <= names


def test_without_tensorboard_nothing_is_begun(mheads, monkeypatch, tmp_path):
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    done = mheads(*COMMAND, tmp_path / "run", "log.tensorboard=true")
    assert done.code == 2
    assert "mheads[tensorboard]" in done.err
    assert not (tmp_path / "run").exists()
