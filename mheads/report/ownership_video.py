"""`mheads video`: how the members of a run came to own their classes."""

from __future__ import annotations

from pathlib import Path

from mheads.common.errors import UserError
from mheads.common.progress import Watcher
from mheads.report.class_pictures import picture_classes, plain_colours
from mheads.report.figures.video_frames import RATE, check_file, ownership_frames, write_video
from mheads.runs.read_run import Record

PICTURES = ("typical", "mean")


def make_video(path: Path, output: Path | None, pictures: str, seconds: float, watch: Watcher) -> Path:
    """Writes the video of a run, by default ownership.mp4 in its folder; returns where it is."""
    if pictures not in PICTURES:
        raise UserError(f"--pictures {pictures}: there are {' and '.join(PICTURES)}")
    record = Record.read(path)
    output = output or path / "ownership.mp4"
    check_file(output)
    if not record.finished:
        watch.warn(f"{path} is not finished: this shows it up to iteration {record.iteration:,}")
    moments, counts = record.read_learning()
    count, classes = max(2, round(seconds * RATE)), record.data.problem.groups
    if not len(moments):
        raise UserError(f"{path} has recorded nothing of its classes yet: let it train on")
    try:
        shown = picture_classes(record, pictures)
    except UserError as error:  # who owned which class is known without the data
        if len(classes) == 1:  # such as of numbers
            watch.warn(f"{path} learned no classes: all its examples together are shown as one colour")
        else:
            watch.warn(f"the classes of {path} are shown as colours: {error}")
        shown = plain_colours(len(classes))
    frames = ownership_frames(moments, counts, shown, classes, count)
    with watch.evaluating(count) as advance:
        write_video(output, frames, count, advance)
    return output
