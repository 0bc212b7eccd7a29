"""`mheads detect` trains, measures and shows detectors of objects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mheads.cli.shared import FOLDER, Overrides, Quiet, Split, Trust, console

detect = typer.Typer(help="Find objects in images: Fast R-CNN on a tree.", no_args_is_help=True)

Runs = Annotated[list[Path], typer.Argument(help="Run folders of detectors.")]
Boxes = Annotated[
    Literal["regressed", "proposals"], typer.Option(help="The boxes that members give, or those that were proposed.")
]


@detect.command()
def train(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="A recipe's name or the path of a YAML file.")] = "fast_rcnn",
    start: Annotated[Path | None, typer.Option("--from", help="The run of an image classifier to start from.")] = None,
    voc: Annotated[Path | None, typer.Option(help="The images with their objects: VOCdevkit/VOC2007, say.")] = None,
    proposals: Annotated[
        str | None, typer.Option(help="Regions from an .npz or .mat file, {part} in its name, not by selective search.")
    ] = None,
    strict: Annotated[bool, typer.Option(help="Stop at the first thing that is wrong in the annotations.")] = False,
    folder: Annotated[Path | None, typer.Option(*FOLDER, help="The run folder; by default runs/RECIPE-DIGEST.")] = None,
    quiet: Quiet = False,
) -> None:
    """Train a detector from a trained ensemble; the same command again resumes.

    Example: mheads detect train --from runs/caffenet --voc VOCdevkit/VOC2007 -f runs/detector
    """
    from mheads.api.detector_config import make_detector_overrides
    from mheads.cli.train_command import train_recipe

    keys = [*(["data.regions.strict=true"] if strict else []), *(overrides or [])]
    train_recipe(recipe, make_detector_overrides(start, voc, proposals, keys), folder, quiet=quiet)


@detect.command(name="eval")
def evaluate(
    runs: Runs,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            help="Test whether the difference from these runs is more than chance. May be given several times."
        ),
    ] = None,
    boxes: Boxes = "regressed",
    measure: Annotated[
        Literal["11-point", "all-point"], typer.Option(help="VOC 2007's measure, or that of later years.")
    ] = "11-point",
    split: Split = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--data", metavar="KEY=VALUE", help="Other data: data.path=VOC2012.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Average precision of every class: of a run, or of several with their spread, beside the paper's.

    Example: mheads detect eval runs/tree-0 runs/tree-1 --against runs/ensemble-0 --against runs/ensemble-1
    """
    from mheads.cli.printing.detector_tables import precision_table, verdict
    from mheads.common.progress import Terminal
    from mheads.suites import detectors

    watch = Terminal(console)
    results = detectors.evaluate_detectors(runs, watch, overrides or [], split, trust)
    by_predictor = detectors.precisions(runs, results, boxes, measure)
    ours, several, paper = by_predictor["ensemble_mean"], len(results[0]["members"]) > 1, None
    columns = {detectors.PREDICTORS[who]: each for who, each in by_predictor.items() if several or who == "single"}
    if measure == "11-point" and split is None and not overrides:
        paper = detectors.paper_figures(runs, ours.classes, boxes)
    console.print(precision_table(columns, measure, boxes, paper))
    chances = [result["oracle_chance"] for result in results if result.get("oracle_chance") is not None]
    if several and chances:
        mean = sum(chances) / len(chances)
        console.print(
            "The Oracle looks at the truth to choose a member for each region. Of answers that are dealt to regions "
            f"at random it makes {mean:.2f} (11-point, regressed boxes): only what is above that was learned.",
            soft_wrap=True,
        )
    if against:
        others = detectors.evaluate_detectors(against, watch, overrides or [], split, trust)
        detectors.check_same_images([*runs, *against], [*results, *others])
        theirs = detectors.precisions(against, others, boxes, measure)["ensemble_mean"]
        console.print(verdict(ours, theirs, detectors.compare(ours, theirs)))


@detect.command()
def show(
    run: Annotated[Path, typer.Argument(help="The run folder of a detector.")],
    image: Annotated[Path, typer.Argument(help="An image.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The picture; by default IMAGE-objects.png.")
    ] = None,
    least: Annotated[float, typer.Option(min=0, max=1, help="Show objects from this score on.")] = 0.5,
    boxes: Boxes = "regressed",
    proposals: Annotated[str | None, typer.Option(help="Regions from an .npz file, under the image's name.")] = None,
    trust: Trust = False,
) -> None:
    """Draw what each member and their mean find in an image.

    Example: mheads detect show runs/detector street.jpg -o found.png
    """
    from mheads.cli.printing.detector_tables import object_table
    from mheads.common.atomic_files import check_output
    from mheads.common.progress import Terminal
    from mheads.report.figures.figure import SUFFIXES, save
    from mheads.report.figures.object_boxes import draw_objects
    from mheads.report.find_objects import find_objects

    target = output or image.with_name(f"{image.stem}-objects.png")
    check_output(target, SUFFIXES)
    watch = Terminal(console)
    pixels, objects = find_objects(run, image, watch, proposals=proposals, least=least, boxes=boxes, trust=trust)
    save(draw_objects(pixels, objects), target)
    console.print(object_table(objects, least))
    console.print(f"{target}")
