"""`mheads saliency`: the figure of a run, and who responds how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from mheads.api.run import load
from mheads.common.atomic_files import check_output
from mheads.common.progress import Watcher, forward_warnings
from mheads.report.figures.figure import SUFFIXES, save
from mheads.report.saliency.members import SAMPLE, Energy, explain, explain_files


def saliency(
    path: Path,
    images: Sequence[Path],
    watch: Watcher,
    *,
    output: Path | None = None,
    beside: Path | None = None,
    layer: str | None = None,
    count: int = 6,
    by: str = "ensemble",
    sample: int = SAMPLE,
    resize: bool = False,
    trust: bool = False,
) -> Path:
    """Writes the figure, by default saliency.png in the run folder, and reports the owners' energy."""
    if output is not None:
        check_output(output, SUFFIXES)
    run = load(path, trust=trust, warn=watch.warn)
    other = None if beside is None else load(beside, trust=trust, warn=watch.warn)
    with forward_warnings(watch):
        if images:
            result = explain_files(run, images, layer, other, resize)
        else:
            result = explain(run, None, count, by, layer, other, sample, watch)
    output = output or path / "saliency.png"
    save(result.figure(), output)
    if not result.guided:
        where = f"no ReLU comes before {layer}" if layer else "there is a network without ReLU"
        watch.say(f"{where}: its maps are plain gradients")
    if result.energy is not None:
        count = result.energy.examples
        watch.say(describe_energy(result.energy, "the image shown" if count == 1 else f"the {count} images shown"))
    if result.sample is not None:
        watch.say(describe_energy(result.sample, f"{result.sample.examples:,} examples that training evaluated on"))
    return output


def describe_energy(energy: Energy, where: str) -> str:
    """The energy in a sentence."""
    if math.isfinite(energy.ratio):
        return f"owner {energy.ratio:.2f} times the energy of the others, on {where}"
    return f"energy of the owner {energy.owner:.3g}, of the others {energy.others:.3g}, on {where}"
