"""What reaches the terminal: our text and rich's styles, never commands that came with the data."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from mheads.console import Console, clean

EVIL = "a\x1b[2J\x1b]0;title\x07\x9b31m\u202eb"


def test_clean_keeps_lines_and_letters():
    assert clean(EVIL) == "a[2J]0;title31mb"
    assert clean("two\nlines\tand é 漢字 😀") == "two\nlines\tand é 漢字 😀"
    assert clean(os.fsdecode(b"not utf-8 \xff")) == "not utf-8 ?"


@pytest.mark.parametrize("form", ["text", "markup", "table", "soft"])
def test_whatever_is_printed_is_cleaned_and_styles_stay(form, monkeypatch):
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    things = {"text": Text(EVIL), "markup": f"[bold]{escape(EVIL)}[/]", "soft": escape(EVIL), "table": Table(EVIL)}
    things["table"].add_row(EVIL)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TERM", "xterm")
    console = Console()
    console.file = io.StringIO()
    console.print(things[form], soft_wrap=form == "soft")
    out = console.file.getvalue()
    assert "a[2J" in out
    assert ("\x1b[1m" in out) is (form in ("markup", "table"))
    rest = out.replace("\x1b[1m", "").replace("\x1b[0m", "")  # bold, and its end
    assert clean(rest) == rest


def test_class_names_file_names_and_run_names_cannot_command_the_terminal(mheads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in (EVIL, "plain"):
            (tmp_path / "pictures" / split / name).mkdir(parents=True)
            for i in range(4):
                Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(
                    tmp_path / "pictures" / split / name / f"{i}.png"
                )
    run, image = f"run{EVIL}", f"picture{EVIL}.png"
    Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(tmp_path / image)
    train = ["train", "digits", "data={name: folder, path: pictures, resize: 8, crop: 8}", "optim.iterations=2"]
    train += ["model_args={channels: 3, classes: 2}", "optim.batch_size=4", "optim.lr=0.0001"]
    done = [
        mheads(*train, "--folder", run),
        mheads(*train, "--folder", run),  # it is finished
        mheads(*train, "seed=1", "--folder", run),  # it is another
        mheads("predict", run, image),
        mheads("eval", run),
        mheads("predict", run, f"nowhere{EVIL}"),
        mheads("train", EVIL),
    ]
    assert [one.code for one in done] == [0, 0, 2, 0, 0, 2, 2], "\n".join(one.out + one.err for one in done)
    for one in done:
        assert clean(one.out + one.err) == one.out + one.err
    assert "a[2J]0;title31mb" in done[3].out
