"""The command line: parse, build, call; no logic. Torch is imported only by the commands that need it."""

from __future__ import annotations

import codecs
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mheads.cli.detect import app as detect_app
from mheads.common.console import Console
from mheads.common.errors import UserError, of_the_system

app = typer.Typer(
    name="mheads",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Fetch, verify and list datasets.", no_args_is_help=True)
app.add_typer(data_app, name="data", rich_help_panel="Start here")
app.add_typer(detect_app, name="detect", rich_help_panel="Train and look")
console = Console()
errors = Console(stderr=True)

Recipe = Annotated[str, typer.Argument(help="A recipe's name (digits, ...) or the path of a YAML file that you trust.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys to change, dotted: loss.k=2.")
]
# torchrun reads the whole command and takes --run for its own --run-path: hence --folder, with the old name beside it.
FOLDER = ("--folder", "-f", "--run", "-r")
RunPath = Annotated[Path, typer.Argument(help="A run folder.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the code that the run folder names, if its network is not built in.")
]


def _version(wanted: bool) -> None:
    if wanted:
        import platform
        from importlib.metadata import version

        import mheads

        console.print(f"mheads {mheads.__version__}, torch {version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Versions of mheads, torch and Python.")
    ] = False,
) -> None:
    """Train diverse ensembles of deep networks: TreeNets, ensemble-aware losses, Multiple Choice Learning."""


@app.command(rich_help_panel="Start here")
def demo(
    run: Annotated[Path, typer.Option(*FOLDER, help="Where the runs go.")] = Path("runs/demo"),
) -> None:
    """Compare four ways to use four networks on real digits: a table and a picture in about a minute, no download.

    Example: mheads demo
    """
    from mheads.cli.demo import run_demo

    run_demo(run, console)


@app.command(rich_help_panel="Train and look")
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe's name (digits, ...), the path of a YAML file, or of a Caffe net or solver (.prototxt)."
        ),
    ],
    overrides: Overrides = None,
    solver: Annotated[
        Path | None,
        typer.Option(
            help="With a Caffe net: its solver (.prototxt), which may follow the net without this; a solver that names "
            "its net will do alone."
        ),
    ] = None,
    run: Annotated[Path | None, typer.Option(*FOLDER, help="The run folder; by default runs/RECIPE-DIGEST.")] = None,
    force: Annotated[bool, typer.Option(help="Start afresh in a new folder beside the one that exists.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress bar.")] = False,
) -> None:
    """Train; the same command again resumes, or says that the run is finished.

    Example: mheads train cifar10_quick loss.name=mcl loss.k=1 --folder runs/mcl
    """
    from mheads.cli.train import train_recipe

    train_recipe(recipe, overrides or [], run, console, errors, solver=solver, force=force, quiet=quiet)


@app.command(rich_help_panel="Train and look")
def convert(
    net: Annotated[Path, typer.Argument(help="A Caffe net, or a solver that names one (.prototxt).")],
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SOLVER] [KEY=VALUE]...", help="Its solver (.prototxt), and config keys to change."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the recipe to this .yaml file instead of printing it.")
    ] = None,
) -> None:
    """Turn a Caffe or MPI-Caffe net and its solver into a recipe.

    Example: mheads convert net.prototxt solver.prototxt data=cifar10 -o mine.yaml
    """
    from mheads.caffe.convert import convert_files

    text = convert_files(net, more or [], output)
    if text is not None:
        console.print(text.rstrip(), markup=False, highlight=False, soft_wrap=True)


@app.command(rich_help_panel="Train and look")
def classical(
    recipe: Recipe,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(min=1, help="At most so many rounds, of optim.iterations each.")] = 10,
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="Stop when a smaller share of the examples changes its member.")
    ] = 0.001,
    folder: Annotated[
        Path | None, typer.Option(*FOLDER, help="Where the rounds go; by default runs/classical-RECIPE-DIGEST.")
    ] = None,
    quiet: Annotated[bool, typer.Option(help="No progress bar.")] = False,
) -> None:
    """Classical MCL: k-means on the inputs, then rounds of training on one's own examples and sharing them out anew.

    Example: mheads classical digits optim.iterations=100 --rounds 5 --folder runs/classical
    """
    from mheads.config import schema as configs

    config = configs.load(recipe, overrides or [])
    from mheads.api.classical import train_rounds
    from mheads.cli.printing.classical import RoundTerminal, rounds_table
    from mheads.config.options_without_effect import refuse_idle

    path = folder.expanduser() if folder else Path("runs") / f"classical-{Path(recipe).stem}-{config.digest()}"
    if not path.exists():
        refuse_idle(config, overrides or [])
    found = train_rounds(config, path, lambda label: RoundTerminal(console, label, bar=not quiet), rounds, tolerance)
    console.print(rounds_table(found))


@app.command(rich_help_panel="Train and look")
def distil(
    run: RunPath,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="What is other than in the run: model=..., teacher.weight=0.5."),
    ] = None,
    folder: Annotated[Path | None, typer.Option(*FOLDER, help="The run folder; by default RUN-distilled.")] = None,
    quiet: Annotated[bool, typer.Option(help="No progress bar.")] = False,
    trust: Trust = False,
) -> None:
    """One network from many: it learns what the run's ensemble answers to the training examples.

    Example: mheads distil runs/mcl --folder runs/small
    """
    from mheads.api.distil import distil as learn
    from mheads.cli.printing.tables import comparison_table
    from mheads.common.progress import Terminal

    run = run.expanduser()
    run = run if run.name not in ("", "..") else run.resolve()
    path = folder.expanduser() if folder else run.with_name(f"{run.name}-distilled")
    console.print(comparison_table(learn(run, overrides or [], path, Terminal(console, bar=not quiet), trust)))


@app.command(rich_help_panel="Start here")
def recipes() -> None:
    """List the recipes that come with mheads: what each trains, on what, and for how long.

    Example: mheads recipes
    """
    from mheads.cli.printing.recipes import recipe_table

    console.print(recipe_table())


@app.command(name="config", rich_help_panel="Train and look")
def show_config(
    recipe: Recipe,
    overrides: Overrides = None,
    describe: Annotated[bool, typer.Option(help="Say in a comment what each key means.")] = True,
) -> None:
    """Print a recipe's config as YAML with all values filled in: what training would take, or a file to start from.

    Example: mheads config digits loss=mcl > mine.yaml
    """
    from mheads.config import schema as configs

    config = configs.load(recipe, overrides or [])
    from mheads.cli.printing.recipes import annotated
    from mheads.config.options_without_effect import refuse_idle

    refuse_idle(config, overrides or [])

    console.print(annotated(config) if describe else config.to_yaml().rstrip(), markup=False, soft_wrap=True)


@app.command(name="eval", rich_help_panel="Train and look")
def evaluate(
    run: RunPath,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Other data: data.path=other.npz.")
    ] = None,
    outputs: Annotated[
        Path | None, typer.Option(help="Also save outputs [M, N, C] and labels [N] to this .npz file.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="train, validation or test; by default what training evaluated on.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Compute the metrics of a run anew: on its test set, on another split, on other data.

    Example: mheads eval runs/mcl --outputs outputs.npz
    """
    from mheads.api.evaluate import evaluate_run
    from mheads.common.progress import Terminal

    show_result(evaluate_run(run, outputs, Terminal(console), overrides or [], split, trust))


@app.command(rich_help_panel="Train and look")
def predict(
    run: RunPath,
    files: Annotated[list[Path], typer.Argument(help="Images, folders of images, or .npz and .csv files of examples.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the answers to this .csv, or outputs [M, N, ...] to this .npz."),
    ] = None,
    resize: Annotated[bool, typer.Option(help="Scale images of another size to the one trained on.")] = False,
    trust: Trust = False,
) -> None:
    """Show every member's answer to an image, the ensemble's, and how far they agree.

    Example: mheads predict runs/mcl pictures -o answers.csv
    """
    from mheads.api.predict import predict_files
    from mheads.cli.printing.answers import tables
    from mheads.common.progress import Terminal

    left_out: list[str] = []
    watch = Terminal(console)
    for predicted in predict_files(run, files, resize, watch, trust, output, left_out):
        for table in tables(predicted, watch):
            console.print(table)
    if left_out:
        raise typer.Exit(1)


@app.command(rich_help_panel="Train and look")
def plot(
    what: Annotated[
        str, typer.Argument(help="ownership, history, wins, k, splits, answers, disagreement or reliability.")
    ],
    runs: Annotated[list[Path], typer.Argument(help="Run folders; history and wins take one.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The .png, .svg or .pdf; by default in the folder of the first run."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Draw a figure of a run or of several side by side; unfinished runs are drawn as far as they are.

    Example: mheads plot ownership runs/mcl_k1 runs/mcl_k2 -o owners.png
    """
    from mheads.common.progress import Terminal
    from mheads.report.plot import plot as draw

    console.print(str(draw(what, runs, output, Terminal(console), trust)), markup=False, soft_wrap=True)


@app.command(rich_help_panel="Train and look")
def video(
    run: RunPath,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The .mp4 or .gif; by default ownership.mp4 in the run folder."),
    ] = None,
    pictures: Annotated[
        str, typer.Option(help="Of the classes: typical (an example near the mean) or mean.")
    ] = "typical",
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long it plays.")] = 12,
) -> None:
    """Show how members came to own their classes: each class's picture, as bright as the member learns from it.

    Example: mheads video runs/mcl -o mcl.gif
    """
    from mheads.common.progress import Terminal
    from mheads.report.video import video as make

    console.print(str(make(run, output, pictures, seconds, Terminal(console))), markup=False, soft_wrap=True)


@app.command(rich_help_panel="Train and look")
def saliency(
    run: RunPath,
    images: Annotated[
        list[Path] | None, typer.Argument(help="Images of your own; by default some that the run was evaluated on.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The .png, .svg or .pdf; by default saliency.png in the run folder."),
    ] = None,
    beside: Annotated[
        Path | None, typer.Option(help="Also show member 0 of this run, such as a standard ensemble.")
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="Show what the strongest unit of this layer responds to, not the class score.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=100, help="How many images.")] = 6,
    by: Annotated[
        str, typer.Option(help="Whose highest correct response chooses the images: ensemble, or member (any one's).")
    ] = "ensemble",
    sample: Annotated[int, typer.Option(min=0, help="Measure energies on this many examples.")] = 500,
    resize: Annotated[bool, typer.Option(help="Scale images of another size to the one trained on.")] = False,
    trust: Trust = False,
) -> None:
    """Show what of an image each member responds to (guided backprop), and how much owners do more than others.

    Example: mheads saliency runs/mcl --beside runs/standard --layer conv2
    """
    from mheads.common.progress import Terminal
    from mheads.report.saliency.command import saliency as show

    given: dict[str, Any] = {"beside": beside, "layer": layer, "count": count, "by": by, "sample": sample}
    file = show(run, images or [], Terminal(console), output=output, **given, resize=resize, trust=trust)
    console.print(str(file), markup=False, soft_wrap=True)


@app.command(rich_help_panel="Train and look")
def report(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders; several are set side by side.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The .html; by default report.html in the run folder, or beside several."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--watch", help="Write it anew while training goes on; the open page loads itself again.")
    ] = False,
    suite: Annotated[str | None, typer.Option(help="Instead of runs: those of `mheads reproduce SUITE`.")] = None,
    recipe: Annotated[str | None, typer.Option(help="With --suite: the recipe; by default the suite's own.")] = None,
    scale: Annotated[float, typer.Option(help="With --suite: the part of the iterations.")] = 1,
    validation: Annotated[int, typer.Option(help="With --suite: how many training examples were held out.")] = 0,
    folder: Annotated[Path, typer.Option(*FOLDER, help="With --suite: where its runs are.")] = Path("runs/reproduce"),
    trust: Trust = False,
) -> None:
    """Write a page to open in a browser: results, curves, ownership over time, the hardest images, in one HTML file.

    Example: mheads report runs/mcl
    """
    from mheads.common.progress import Terminal
    from mheads.report.page import report as pages
    from mheads.suites.jobs import Options
    from mheads.suites.page import report_suite
    from mheads.suites.paper_rows import paper_figures
    from mheads.suites.suite import read

    if bool(runs) == bool(suite):
        raise UserError("give run folders, or --suite SUITE for the runs of mheads reproduce")
    watch = Terminal(console)
    if suite is not None:
        if follow:
            raise UserError("--watch follows runs: give their folders instead of --suite")
        options = Options(recipe or read(suite).recipe, scale=scale, validation=validation)
        made = report_suite(suite, options, output, watch, folder)
    else:
        made = (pages.follow if follow else pages.report)(runs or [], output, watch, trust, paper=paper_figures)
    console.print(str(made), markup=False, soft_wrap=True)


@app.command(rich_help_panel="Train and look")
def export(
    run: RunPath,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="The file: .pt2 (torch.export), .onnx, or .caffemodel and .h5 for weights."
        ),
    ],
    what: Annotated[
        str,
        typer.Option(
            help="mean, or scored: the ensemble's answer; members: outputs [M, B, ...]; member:N: those of one."
        ),
    ] = "mean",
    trust: Trust = False,
) -> None:
    """One file for anywhere: the ensemble and its preprocessing, raw examples in, checked against the run's answers.

    Example: mheads export runs/mcl -o mcl.onnx
    """
    from mheads.api.evaluate import export_run
    from mheads.common.progress import Terminal

    export_run(run, output, what, Terminal(console), trust)


@app.command(rich_help_panel="Train and look")
def reproduce(
    suite: Annotated[
        str | None, typer.Argument(help="A suite's name (standard, mcl, ...) or the path of a YAML file.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys to change in all rows.")
    ] = None,
    *,
    recipe: Annotated[
        str | None, typer.Option(help="What is trained: a recipe's name or a YAML file; by default the suite's own.")
    ] = None,
    trials: Annotated[int, typer.Option(help="Runs of each row, with seeds that follow one another.")] = 1,
    seed: Annotated[int, typer.Option(help="The seed of the first trial.")] = 0,
    scale: Annotated[float, typer.Option(help="Train for this part of the iterations, with the schedule scaled.")] = 1,
    validation: Annotated[
        int, typer.Option(help="Hold out the last n training examples and evaluate on them: to choose, not to report.")
    ] = 0,
    test: Annotated[
        bool, typer.Option("--test", help="With --validation: show the same runs on the test set, to report a choice.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help="Train this row alone; may be given several times.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and the time that they will take; train nothing.")
    ] = False,
    only_tables: Annotated[
        bool, typer.Option("--tables", help="Train nothing: make the tables anew, without a suite all of them.")
    ] = False,
    folder: Annotated[Path, typer.Option(*FOLDER, help="Where the runs go.")] = Path("runs/reproduce"),
    output: Annotated[Path, typer.Option("--output", "-o", help="Where tables, figures and JSON files go.")] = Path(
        "results"
    ),
) -> None:
    """Run a table of the paper and set it beside ours; finished runs are reused, and the same command goes on.

    Example: mheads reproduce standard --recipe cifar10_quick --trials 3
    """
    from mheads.suites import reproduce as suites
    from mheads.suites.jobs import Options

    if suite is None:
        if not only_tables:
            raise UserError(f"give a suite: {', '.join(suites.SUITES)}, or the path of a YAML file")
        for path in suites.write_tables(output, console):
            console.print(f"{path} read", markup=False, soft_wrap=True)
        return
    options = Options(recipe or suites.read(suite).recipe, seed, scale, validation, tuple(overrides or ()), test)
    given: dict[str, Any] = {"trials": trials, "only": only or (), "folder": folder, "output": output}
    if dry_run:
        suites.dry_run(suite, options, console, **given)
    else:
        suites.reproduce(suite, options, console, **given, train=not only_tables)


@app.command(rich_help_panel="Train and look")
def tree(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Also show what each of this many ranks holds, and what they send.")
    ] = None,
) -> None:
    """Draw the tree of a recipe: which layers are shared by which members, and what that saves.

    Example: mheads tree cifar10_quick split=conv2 --ranks 4
    """
    from mheads.config import schema as configs

    config = configs.load(recipe, overrides or [])
    from mheads.cli.printing.tree import draw

    console.print(draw(config, ranks))


@app.command(rich_help_panel="Train and look")
def cuts(
    model: Annotated[str, typer.Argument(help="A network's name, or your own as package.module:factory.")],
    model_args: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Arguments of the factory: depth=20.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Of an example: 3,32,32. Built-in networks know theirs.")] = None,
) -> None:
    """Where a network can be split, what lies above and below, and what four members would cost at each place.

    Example: mheads cuts cifar10_quick --shape 3,32,32
    """
    from mheads.cli.printing.cuts import cuts_table
    from mheads.training.find_cuts import cuts_of

    console.print(cuts_table(cuts_of(model, model_args or [], shape)))


@app.command(rich_help_panel="Measure")
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks there would be.")],
    bandwidth: Annotated[float, typer.Option(help="GB/s that a rank sends, and receives at the same time.")] = 1.25,
    latency: Annotated[float, typer.Option(help="Microseconds that a message is under way.")] = 50,
    workers: Annotated[int, typer.Option(min=1, help="Worker threads per rank.")] = 1,
    flops: Annotated[
        float | None, typer.Option(help="TFLOP/s that a rank sustains; by default measured on this machine.")
    ] = None,
    placement: Annotated[
        str | None, typer.Option(help="default or auto; without it, both the recipe's and auto.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Predict the training speed on ranks: time per step, idle cores, waiting for messages, who holds what.

    Example: mheads plan cifar10_quick split=conv2 --ranks 16 --bandwidth 10 --flops 2
    """
    from mheads.config import schema as configs

    config = configs.load(recipe, overrides or [])
    from mheads.cli.printing.plan import show
    from mheads.distributed.planning.job import Cluster
    from mheads.training.predict_speed import make_plan, write_json

    cluster = Cluster(ranks, workers, bandwidth * 1e9, latency / 1e6)
    made = make_plan(config, cluster, None if flops is None else flops * 1e12, placement, recipe)
    console.print(show(made))
    if json_file is not None:
        write_json(made, json_file)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="A dataset that is fetched, such as cifar10.")],
    force: Annotated[bool, typer.Option(help="Fetch again even if it is there.")] = False,
) -> None:
    """Fetch a dataset, verify it, and keep it in the cache.

    Example: mheads data get cifar10
    """
    from mheads import data
    from mheads.common.progress import fetching

    with fetching(console, name) as progress:
        path = data.get(name, progress=progress, force=force)
    console.print(f"{name} is in {path}", markup=False, soft_wrap=True)


@data_app.command("list")
def data_list() -> None:
    """List the datasets, and say which are here."""
    from mheads.cli.printing.tables import dataset_table

    console.print(dataset_table())
    from mheads.data.catalog import DATASETS

    for name, place in ((entry.name, entry.cached_at) for entry in DATASETS.values() if entry.available):
        if place is not None:
            console.print(f"{name} is in {place}", markup=False, soft_wrap=True)  # a path is not broken into lines


def show_result(result: dict[str, Any]) -> None:
    from mheads.cli.printing.tables import result_table

    console.print(result_table(result))


def main() -> None:
    """Runs the command line: a user's mistake gives a message and exit code 2, a signal its own code."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and codecs.lookup(out.encoding).name != "utf-8":
        # A letter that it cannot show ends no command.
        out.reconfigure(errors="backslashreplace")
    try:
        _require_current_folder()
        from mheads.distributed.launcher import detect

        launch = detect()
        if launch is not None:
            # When a rank is lost, torch's own warnings are pages of addresses in its libraries. It reads this only when
            # it is imported, below.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        trains = sys.argv[1:2] == ["train"] or sys.argv[1:3] == ["detect", "train"]
        if launch is not None and launch.rank > 0 and not trains:
            return  # only training is spread over ranks: one rank is enough for any other command
        app()
    except UserError as error:
        errors.complain(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        told = of_the_system(error)
        if told is error:
            raise
        errors.complain(str(told))
        sys.exit(2)
    except BaseException as error:
        code = getattr(error, "exit_code", None)  # train.Stopped: saved and stopped by a signal
        if code is None:
            raise
        errors.print(f"stopped by {error}; saved. The same command goes on from here.")
        sys.exit(code)


def _require_current_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(f"the current folder is gone ({error.strerror}): change to one that is there") from error
