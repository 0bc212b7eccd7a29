"""The video of how ownership of classes comes about: each class's picture, as bright as the member owns the class."""

from __future__ import annotations

import errno
import importlib.util
import itertools
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mheads.common.atomic_files import check_output, replacing
from mheads.common.errors import UserError
from mheads.report.charts.chart import shorten
from mheads.report.charts.outcomes import share_out

RATE = 25  # frames per second
END = 1500  # milliseconds that a GIF shows its last frame before it begins anew
MARGIN, NAMES, FOOT = 8, 112, 34  # pixels: around all, for the members' names, below the grid
CELL, LEAST = 64, 14  # of a class, and the least one where there are many
MOST_CLASSES = 60  # with more, the ones that are contested most are shown
BACKGROUND, INK, DIM, BAR = (17, 19, 24), (230, 232, 236), (130, 136, 148), (0, 114, 178)
DARKEST = 0.06  # brightness of a picture that a member does not own at all


def ownership_frames(
    moments: np.ndarray, counts: np.ndarray, pictures: np.ndarray, classes: Sequence[str], frames: int
) -> Iterator[np.ndarray]:
    """Frames [h, w, 3] uint8 of a run.

    moments: iterations [T]; counts: assignment [T, M, C] at each; pictures: uint8 [C, H, W, 3] of the classes.
    Each doubling of the iterations takes as long, since most changes hands early; between moments shares are blended.
    """
    shares = np.nan_to_num(share_out(counts, lasting=True))
    shares = shares / max(shares.max(), 1e-12)  # with k members for each example none has more than a k-th
    if shares.shape[2] > MOST_CLASSES:
        moved = np.sort(np.argsort(-np.ptp(shares, axis=0).max(0), kind="stable")[:MOST_CLASSES])
        shares, pictures, classes = shares[:, :, moved], pictures[moved], [classes[c] for c in moved]
    cell = int(max(LEAST, min(CELL, 1100 // shares.shape[2], 620 // shares.shape[1])))
    tiles = np.stack([_tile(picture, cell) for picture in pictures]).astype(np.float32)  # [C, cell, cell, 3]
    canvas = _canvas(shares.shape[1], [shorten(name) for name in classes], cell)
    times = np.log(np.maximum(moments, 1))
    for played, time in zip(np.linspace(0, 1, frames), np.linspace(times[0], times[-1], frames), strict=True):
        at = np.interp(time, times, np.arange(len(times)))
        before, after = int(at), min(int(at) + 1, len(moments) - 1)
        share = shares[before] + (at - before) * (shares[after] - shares[before])
        iteration = moments[before] + (at - before) * (moments[after] - moments[before])
        yield _frame(canvas, tiles, share, cell, round(iteration), played)


def write_video(path: Path, frames: Iterator[np.ndarray], count: int, advance: Callable[[int], None]) -> None:
    """Writes frames to an .mp4 or a .gif; an older file there stays whole until it is done."""
    with replacing(path) as hidden:
        if path.suffix.lower() == ".mp4":
            _mp4(hidden, frames, advance)
        else:
            _gif(hidden, frames, count, advance)


def check_file(path: Path) -> None:
    """Raises for a kind of file that cannot be written, before any work is done."""
    check_output(path, (".mp4", ".gif"))
    if path.suffix.lower() == ".mp4" and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise UserError(
            f"{path}: an .mp4 needs ffmpeg, pip install 'mheads[video]'; a .gif does not: -o {path.stem}.gif"
        )


def _mp4(path: Path, frames: Iterator[np.ndarray], advance: Callable[[int], None]) -> None:
    from imageio_ffmpeg import get_ffmpeg_exe

    first = next(frames)
    size = f"{first.shape[1]}x{first.shape[0]}"
    # H.264 in yuv420p with its index first: what browsers and phones play.
    raw = f"-f rawvideo -pix_fmt rgb24 -s {size} -r {RATE} -i -".split()
    encoding = ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "23", "-movflags", "+faststart", "-f", "mp4"]
    command = [get_ffmpeg_exe(), "-y", "-loglevel", "error", *raw, *encoding, str(path)]
    with tempfile.TemporaryFile() as messages:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=messages, stderr=messages) as ffmpeg:
            assert ffmpeg.stdin is not None
            try:
                for frame in itertools.chain([first], frames):
                    ffmpeg.stdin.write(frame.tobytes())
                    advance(1)
            except BrokenPipeError:
                pass  # its messages are raised below
        if ffmpeg.returncode:
            messages.seek(0)
            raise OSError(errno.EIO, f"ffmpeg ended with {messages.read().decode(errors='replace').strip()!r}")


def _gif(path: Path, frames: Iterator[np.ndarray], count: int, advance: Callable[[int], None]) -> None:
    def pages() -> Iterator[Image.Image]:
        for left, frame in zip(reversed(range(count)), frames, strict=True):
            advance(1)
            if left % 2 == 0:  # half the rate, for GIFs are large; the last is shown
                yield Image.fromarray(frame).quantize(128, dither=Image.Dither.NONE)

    rest = pages()
    first = next(rest)
    each = [2000 // RATE] * (-(-count // 2) - 1)
    first.save(path, format="GIF", save_all=True, append_images=rest, duration=[*each, END], loop=0)


def _tile(picture: np.ndarray, cell: int) -> np.ndarray:
    size = cell - max(1, cell // 16)
    height, width = picture.shape[:2]
    scale = size / max(height, width)
    least = size // 4  # a signal of one row is stretched until it can be seen
    shape = (max(least, round(width * scale)), max(least, round(height * scale)))
    resample = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.LANCZOS
    small = np.asarray(Image.fromarray(picture).resize(shape, resample))
    tile = np.full((cell, cell, 3), BACKGROUND, np.uint8)
    top, left = (cell - small.shape[0]) // 2, (cell - small.shape[1]) // 2
    tile[top : top + small.shape[0], left : left + small.shape[1]] = small
    return tile


def _font(size: int) -> ImageFont.FreeTypeFont:
    """Matplotlib's own font, which has more letters than that of pillow."""
    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), size)


def _canvas(members: int, classes: Sequence[str], cell: int) -> Image.Image:
    """What stays the same: names of members and, written upwards, of classes."""
    font = _font(max(9, min(13, cell // 4)))
    longest = max(font.getlength(name) for name in classes)
    upwards = longest > cell - 4
    height = int(longest) + 10 if upwards else 22
    width = NAMES + len(classes) * cell + 2 * MARGIN
    size = (width + width % 2, height + members * cell + FOOT + 2 * MARGIN)
    canvas = Image.new("RGB", (size[0], size[1] + size[1] % 2), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    for c, name in enumerate(classes):
        x = MARGIN + NAMES + c * cell
        if upwards:
            strip = Image.new("RGB", (height, cell), BACKGROUND)
            ImageDraw.Draw(strip).text((4, cell / 2), name, INK, font, anchor="lm")
            canvas.paste(strip.rotate(90, expand=True), (x, MARGIN))
        else:
            draw.text((x + cell / 2, MARGIN + height / 2), name, INK, font, anchor="mm")
    for m in range(members):
        draw.text((MARGIN, MARGIN + height + (m + 0.5) * cell), f"member {m}", INK, _font(13), anchor="lm")
    canvas.info["top"] = MARGIN + height
    return canvas


def _frame(
    canvas: Image.Image, tiles: np.ndarray, share: np.ndarray, cell: int, iteration: int, played: float
) -> np.ndarray:
    members, num_classes = share.shape
    bright = (DARKEST + (1 - DARKEST) * share.astype(np.float32))[:, :, None, None, None]
    grid = np.array(BACKGROUND, np.float32) * (1 - bright) + tiles[None] * bright  # [M, C, cell, cell, 3]
    picture = grid.transpose(0, 2, 1, 3, 4).reshape(members * cell, num_classes * cell, 3)
    frame = canvas.copy()
    top, left = canvas.info["top"], MARGIN + NAMES
    frame.paste(Image.fromarray(picture.round().clip(0, 255).astype(np.uint8)), (left, top))
    draw = ImageDraw.Draw(frame)
    below = top + members * cell
    draw.text((MARGIN, below + FOOT / 2), f"iteration {iteration:,}", INK, _font(13), anchor="lm")
    right = frame.width - MARGIN
    middle = below + FOOT // 2
    draw.rectangle((left, middle - 2, right, middle + 2), (44, 48, 58))
    draw.rectangle((left, middle - 2, left + int((right - left) * played), middle + 2), BAR)
    return np.asarray(frame)
