"""What reaches the terminal: our text and rich's styles, never commands that came with the data."""

import io
import os

import numpy as np
import pytest
from PIL import Image
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from mheads.cli.printing.detector_tables import object_table
from mheads.common.console import Console, clean
from mheads.common.progress import Terminal

EVIL = "a\x1b[2J\x1b]0;title\x07\x9b31m\u202eb[red]:boom:"


def test_clean_keeps_lines_and_letters():
    assert clean(EVIL) == "a[2J]0;title31mb[red]:boom:"
    assert clean("two\nlines\tand é 漢字 😀") == "two\nlines\tand é 漢字 😀"
    assert clean(os.fsdecode(b"not utf-8 \xff")) == "not utf-8 ?"


@pytest.mark.parametrize("form", ["text", "markup", "table", "soft"])
def test_whatever_is_printed_is_cleaned_and_styles_stay(form, monkeypatch):
    things = {"text": Text(EVIL), "markup": f"[bold]{escape(EVIL)}[/]", "soft": escape(EVIL), "table": Table(EVIL)}
    things["table"].add_row(EVIL)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TERM", "xterm")
    console = Console()
    console.file = io.StringIO()
    console.print(things[form], soft_wrap=form == "soft", markup=form in ("markup", "soft"))
    out = console.file.getvalue()
    assert "a[2J" in out
    assert ("\x1b[1m" in out) is (form in ("markup", "table"))
    rest = out.replace("\x1b[1m", "").replace("\x1b[0m", "")  # bold, and its end
    assert clean(rest) == rest


def test_names_are_no_markup_wherever_they_are_printed(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console, name = Console(), "[red]:boom:[/red]"
    console.file = io.StringIO()
    table = Table(name)
    table.add_row(name)
    drawing = Tree(name)
    drawing.add(name)
    terminal = Terminal(console, label=name)
    things = [name, table, drawing, Group(name, table), object_table({name: [(name, 0.5, [1, 2, 3, 4])]}, 0.1)]
    for thing in things:
        console.print(thing)
    terminal.say(name)
    terminal.warn(name)
    console.complain(name, who=name)
    with terminal.training(2, 0):
        terminal.step(1, 0.5, 0.1, 10, [1.0])
    out = console.file.getvalue()
    assert "\N{COLLISION SYMBOL}" not in out
    assert out.count(name) >= 15  # 14 times printed, and beside the bar


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
        assert "[red]:boom:" in one.out + one.err or one is done[4]  # nor are they markup; eval names nothing
    assert "a[2J]0;title31mb[red]:boom:" in done[3].out
