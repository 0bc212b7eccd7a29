"""The video of ownership: what its frames show, and what a player gets from the file."""

import re
import subprocess

import numpy as np
import pytest
from PIL import Image

from mheads.common.progress import Silent
from mheads.config import read as configs
from mheads.report.charts.outcomes import share_out
from mheads.report.class_pictures import picture_classes, plain_colours
from mheads.report.figures import video_frames as video
from mheads.report.figures.video_frames import BAR, ownership_frames
from mheads.runs.folder import RunFolder
from mheads.training.loop import train_config

CLASSES = ["cat", "dog", "owl"]
WHITE = np.full((3, 8, 8, 3), 255, np.uint8)
COUNTS = np.array([[[4, 0, 5], [0, 8, 5]], [[4, 4, 0], [0, 4, 0]]], float)  # [T, M, C]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("video") / "run"
    quick = ["loss.name=mcl", "optim.iterations=8", "optim.batch_size=20", "data.limit=200", "log.every=1"]
    train_config(configs.load("digits", quick), RunFolder(folder), Silent())
    return folder


def cells(frame, members, classes):
    """Mean brightness of the middle of each cell: [M, C]."""
    cell = video.CELL
    top = frame.shape[0] - video.MARGIN - video.FOOT - members * cell
    top -= top % 2 and 1
    left = video.MARGIN + video.NAMES
    middle = slice(cell // 2 - 4, cell // 2 + 4)
    return np.array(
        [
            [frame[top + m * cell :, left + c * cell :][middle, middle].mean() for c in range(classes)]
            for m in range(members)
        ]
    )


def test_a_picture_is_as_bright_as_the_member_owns_the_class():
    first, between, last = ownership_frames(np.array([10, 20]), COUNTS, WHITE, CLASSES, 3)
    shares = share_out(COUNTS, lasting=True)
    for frame, share in ((first, shares[0]), (between, shares.mean(0)), (last, shares[1])):
        assert frame.shape[0] % 2 == frame.shape[1] % 2 == 0  # as video players want
        bright = video.DARKEST + (1 - video.DARKEST) * share
        expected = np.mean(video.BACKGROUND) * (1 - bright) + 255 * bright
        np.testing.assert_allclose(cells(frame, 2, 3), expected, atol=1.5)


def test_a_class_that_did_not_occur_keeps_its_owner():
    assert share_out(COUNTS, lasting=True)[:, :, 2].tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_of_very_many_classes_the_contested_ones_are_shown():
    counts = np.zeros((2, 2, 500))
    counts[:, 0] = 1
    counts[1, :, 7], counts[1, :, 400] = (0, 1), (0, 1)
    pictures = plain_colours(500)
    frames = list(ownership_frames(np.array([1, 2]), counts, pictures, [f"class {c}" for c in range(500)], 2))
    assert frames[0].shape[1] < 1300
    assert not np.array_equal(*frames)


def test_each_tenfold_of_the_iterations_takes_as_long():
    counts = np.zeros((3, 2, 1))
    counts[[0, 2], 0], counts[1, 1] = 1, 1  # the class is member 0's, then member 1's, then member 0's again
    drawn = [*ownership_frames(np.array([1, 10, 100]), counts, plain_colours(1), ["a"], 5)]
    top, bottom = (np.stack([frame[rows].sum() for frame in drawn]) for rows in (slice(30, 94), slice(94, 158)))
    assert top.argmin() == bottom.argmax() == 2
    bars = [(frame[158:] == BAR).all(2).sum() for frame in drawn]
    np.testing.assert_allclose(np.diff(bars), bars[-1] / 4, rtol=0.1)


def test_an_mp4_plays_and_shows_the_frames(mheads, run, tmp_path):
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="the extra 'video' is not installed")
    file = tmp_path / "run.mp4"
    done = mheads("video", run, "-o", file, "--seconds", 2)
    assert (done.code, done.out.strip()) == (0, str(file)), done.err
    assert file.stat().st_size < 5e6
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", file, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    player = subprocess.run(command, capture_output=True, check=True)
    assert re.search(rb"Video: h264 .*yuv420p.* 25 fps", player.stderr)
    from mheads.runs.read_run import Record

    record = Record.read(run)
    found = record.read_assignments()
    pictures = picture_classes(record, "typical")
    made = list(ownership_frames(found["moments"], found["steps"], pictures, record.data.problem.groups, 50))
    assert len(made) == 50
    decoded = np.frombuffer(player.stdout, np.uint8).reshape(50, *made[0].shape)
    for shown, frame in zip(decoded, made, strict=True):
        assert np.abs(shown.astype(float) - frame).mean() < 3
    assert np.abs(made[0].astype(float) - made[-1]).mean() > 0.1


def test_a_gif_needs_nothing_else(mheads, run, tmp_path):
    file = tmp_path / "run.gif"
    assert mheads("video", run, "-o", file, "--pictures", "mean", "--seconds", 1).code == 0
    frames = list(ownership_frames(np.array([10, 20]), COUNTS, WHITE, ["new\nline", "ünï 🐱", 200 * "long "], 8))
    assert frames[0].shape[0] < 400  # names are cut
    video.write_video(tmp_path / "few.GIF", iter(frames), 8, lambda n: None)
    for place, last in ((file, None), (tmp_path / "few.GIF", frames[-1])):
        with Image.open(place) as gif:
            assert gif.n_frames > 1
            assert gif.info["loop"] == 0
            gif.seek(gif.n_frames - 1)
            assert gif.info["duration"] >= video.END
            if last is not None:  # it ends where training does
                assert np.abs(np.asarray(gif.convert("RGB")).astype(float) - last).mean() < 3


def test_pictures_are_examples_of_their_class_or_their_mean(run):
    from mheads.data import load
    from mheads.runs.read_run import Record

    record, data = Record.read(run), load("digits")
    means = picture_classes(record, "mean")
    typical = picture_classes(record, "typical")
    examples = data.train.read(np.arange(200), None).numpy()
    for label in range(10):
        own = examples[data.train.targets[:200] == label].astype(float)
        np.testing.assert_allclose(means[label, :, :, 0], own.mean(0)[..., 0] * 255 / own.max(), atol=1)
        nearest = own[np.square(own - own.mean(0)).sum((1, 2, 3)).argmin()]
        np.testing.assert_allclose(typical[label, :, :, 0], nearest[..., 0] * 255 / own.max(), atol=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "x.avi"), "give a file that ends in .mp4 or .gif"),
        (("-o", "nowhere/x.gif"), "there is no folder nowhere"),
        (("-o", "folder.gif"), "cannot write folder.gif: it is a folder"),
        (("--pictures", "best"), "--pictures best: there are typical and mean"),
    ],
)
def test_what_cannot_be_made_is_said(mheads, run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.gif").mkdir()
    done = mheads("video", run, *arguments)
    assert done.code == 2
    assert message in done.err


def test_without_ffmpeg_the_message_names_the_extra(mheads, run, monkeypatch):
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda name: None)
    done = mheads("video", run)
    assert done.code == 2
    assert "mheads[video]" in done.err
    assert "ownership.gif" in done.err


@pytest.mark.parametrize("shape", [(3,), (1, 8, 8)])
def test_vectors_and_data_that_are_gone_are_shown_as_colours(mheads, tmp_path, shape):
    data = tmp_path / "data.npz"
    x, y = np.random.default_rng(0).normal(size=(60, *shape)).astype(np.float32), np.arange(60) % 3
    np.savez(data, x_train=x, y_train=y, x_test=x, y_test=y)
    options = (
        ["model=mlp", "model_args.features=3", "model_args.outputs=3"] if len(shape) == 1 else ["model_args.classes=3"]
    )
    folder, few = tmp_path / "run", ["optim.iterations=4", "optim.batch_size=20", "log.every=1"]
    done = mheads("train", "digits", *options, "data.name=npz", f"data.path={data}", "loss=mcl", *few, "-f", folder)
    assert done.code == 0, done.err
    data.unlink()
    made = mheads("video", folder, "-o", tmp_path / "v.gif", "--seconds", 1)
    assert made.code == 0
    assert "shown as colours" in made.out
    assert ("data.npz does not exist" in made.out) == (len(shape) == 3)


def test_a_run_of_numbers_has_one_colour_and_no_classes(mheads, tmp_path):
    folder = tmp_path / "run"
    done = mheads("train", "hypotheses", "optim.iterations=4", "log.every=1", "-f", folder)
    assert done.code == 0, done.err
    made = mheads("video", folder, "-o", tmp_path / "v.gif", "--seconds", 1)
    assert made.code == 0
    words = " ".join(made.out.split())
    assert f"{folder} learned no classes: all its examples together are shown as one colour" in words
    assert "the classes of" not in words
