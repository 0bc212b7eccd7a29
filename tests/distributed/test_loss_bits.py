"""Losses that change over training, or see more than answers, keep their bits: killed, and resumed on three ranks."""

import signal

import pytest
from helpers.commands import TINY, assert_same_run, process, ranks

LOSSES = {
    "annealed": ["loss=annealed", "loss.until=0.5", "loss.temperature=0.5", "pretrain=3"],
    "scored": ["loss=scored"],
    "wins": ["loss=mcl", "loss.normalize=wins", "engine.micro_batches=1"],
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_run_killed_in_one_process_and_resumed_on_three_ranks_keeps_its_bits(name, tmp_path, mheads):
    settings = [*TINY, *LOSSES[name], "optim.iterations=12", "log.checkpoint_every=4", "log.evaluate_every=6"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = mheads("train", "digits", *settings, "engine.workers=1", "--run", whole)
    assert done.code == 0, done.err
    stop = (signal.SIGKILL, "os.rename", ".step-00000008")
    assert process("train", "digits", *settings, "--run", killed, stop=stop).code == -signal.SIGKILL
    for rank in ranks(3, "train", "digits", *settings, "--run", killed):
        assert rank.code == 0, rank.err
    assert_same_run(killed, whole)
