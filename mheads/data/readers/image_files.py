"""Image files and Pillow images as pixels of eight bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from mheads.common.atomic_files import open_file
from mheads.common.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}  # what the last bytes of a whole file hold
TAIL = 65536
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class UnreadableError(UserError):
    """A file that is no image, a broken one, or missing."""

    def __init__(self, path: Path, error: Exception) -> None:
        missing = isinstance(error, FileNotFoundError)
        cause = "it is no image of a known format" if isinstance(error, UnidentifiedImageError) else error
        reason = f"{path} cannot be read as an image ({cause}); replace it or take it out"
        reason += "; arrays are given as .npz" * (path.suffix == ".npy")
        super().__init__(f"there is no image {path}" if missing else reason)


def eight_bits(image: Image.Image, grey: bool) -> Image.Image:
    """The image in L or RGB; 16-bit levels are scaled to 0..255, not clipped at 255."""
    _check_range(image)
    if image.mode == "I" or image.mode.startswith("I;"):
        levels = np.asarray(image).astype(np.int64)
        if levels.min() < 0 or levels.max() > 65535:
            raise ValueError(f"its levels go from {levels.min()} to {levels.max()}: save it with 8 or 16 bits")
        image = Image.fromarray(((levels + 128) // 257).astype(np.uint8))
    return image.convert("L" if grey else "RGB")


def _check_range(image: Image.Image) -> None:
    """Raises a ValueError for pixels whose levels have no known range."""
    # Some versions of Pillow give PNGs of 16 bits as integers of 32.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", None)):
        kind = "floats" if image.mode == "F" else "integers of 32 bits"
        raise ValueError(f"its pixels are {kind} of no known range: save it with 8 or 16 bits")


@contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """The image in a file, while it is open; raises an UnreadableError if it cannot be decoded."""
    try:
        with open_file(path) as file, Image.open(file) as image:
            yield image
    except UNREADABLE as error:
        raise UnreadableError(path, error) from error


def check_whole(path: Path) -> None:
    """Raises an error if a file is no image, or ends too early; one that ends as it should is not decoded for it."""
    with open_image(path) as image:
        _check_range(image)
        if (end := ENDS.get(image.format or "")) is not None:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL))
                if end in file.read():
                    return
        image.load()


def pixels_of(image: Image.Image) -> np.ndarray:
    """A Pillow image as uint8 [C, H, W]: grey if it is, else RGB."""
    pixels = np.asarray(eight_bits(image, grey=image.mode in ("1", "L", "I") or image.mode.startswith("I;")))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def read_crop(
    path: Path, resize: int, crop: int, chance: tuple[float, float] | None = None, grey: bool = False
) -> np.ndarray:
    """Pixels uint8 [crop, crop, 3 or 1] of the image resized so that its shorter side is `resize`.

    chance: down and right in [0, 1), which place the crop among the whole-pixel places that it has; None: the centre.
    """
    with open_image(path) as image:
        ratio = resize / min(image.size)
        width, height = (max(resize, round(side * ratio)) for side in image.size)
        # JPEGs are decoded at the nearest larger eighth. The last reduced pixel may reach beyond the image: the box
        # says how many reduced pixels, not always whole ones, the image has.
        reduced = image.draft("L" if grey else "RGB", (width, height))
        covered = image.size if reduced is None else reduced[1][2:]
        places = (width - crop, height - crop)
        if chance is None:
            x, y = (most // 2 for most in places)  # as Caffe does
        else:
            x, y = (int(where * (most + 1)) for where, most in zip(reversed(chance), places, strict=True))
        across, along = covered[0] / width, covered[1] / height
        # Only the crop is resized, not the rest of the image; the filter still sees beyond its edges.
        box = (x * across, y * along, (x + crop) * across, (y + crop) * along)
        resized = eight_bits(image, grey).resize((crop, crop), Image.Resampling.BILINEAR, box=box)
        return np.asarray(resized).reshape(crop, crop, -1)


def read_sized(file: Path, shape: tuple[int, ...], stretch: bool, where: str, levels: int = 255) -> np.ndarray:
    """An image as an example of this shape, uint8 [C, H, W] from 0 to `levels`; `stretch` scales images of other sizes.

    In messages, `where` names what was trained on this shape.
    """
    channels, height, width = shape
    picture = read_whole(file, channels == 1)
    if picture.size != (width, height):
        if not stretch:
            raise UserError(
                f"{file} is {picture.width} x {picture.height}, but {where} was trained on {width} x {height}: "
                "give --resize to scale it"
            )
        picture = picture.resize((width, height), Image.Resampling.BOX)
    pixels = np.asarray(picture).reshape(height, width, channels).transpose(2, 0, 1)
    return pixels if levels == 255 else (pixels.astype(np.uint16) * levels // 255).astype(np.uint8)


def read_whole(path: Path, grey: bool) -> Image.Image:
    """The image of a file in L or RGB, at its own size."""
    with open_image(path) as image:
        return eight_bits(image, grey)
