"""A trained ensemble in Python, and `mheads.load`, which reads one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize

import numpy as np
import torch
from torch import Tensor, nn

from mheads import data as datasets
from mheads.api.raw_examples import PreprocessingNetwork, as_raw_examples, check_side_inputs, read_side_inputs
from mheads.common import fingerprint
from mheads.common.errors import UserError, warn
from mheads.common.progress import Silent
from mheads.config.schema import Config
from mheads.data import ArraySplit
from mheads.data.arrays import Unlabelled
from mheads.data.assembly import side_shapes
from mheads.data.splits import SelfTargetSplit, Split
from mheads.data.torch_dataset import DatasetSplit
from mheads.engine.measure import all_answers, in_eval_mode, measure
from mheads.problems import Problem, is_single_label
from mheads.runs.data_facts import DataFacts
from mheads.runs.folder import RunFolder
from mheads.runs.metrics_log import Log
from mheads.runs.read_run import Record
from mheads.training.build_from_config import build_net_of_run, make_engine
from mheads.trees.treenet import TreeNet

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Temporary:
    """A folder on disk that is removed with the last run that lives in it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="mheads-"))
        finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Temporary:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a pickled run is read elsewhere: what it needs is in memory


class Hypotheses(NamedTuple):
    """M answers to each of N examples, [N, M, ...] in float64, and their probabilities [N, M]: by the members' scores,
    1 / M without scores."""

    values: Tensor
    probabilities: Tensor


@dataclass(frozen=True, repr=False, eq=False)
class Run:
    """A trained ensemble with its result, history and folder.

    `history.steps` and `history.evaluations` are lists of plain dicts, as pandas.DataFrame takes them.
    """

    folder: Path
    config: Config
    net: TreeNet
    data: DataFacts
    result: Any  # metrics.ClassificationResult, or the result of another problem
    summary: dict[str, Any]
    history: Log = field(default_factory=Log)
    _temporary: Temporary | None = field(default=None, compare=False)
    _versions: list[int] = field(init=False, compare=False)
    _weights: str = field(init=False, compare=False)

    def __repr__(self) -> str:
        config, result = self.config, self.result
        members = f"{config.members} member{'s' if config.members > 1 else ''}"
        split = f", tree {config.split}" if config.is_split else ""
        loss = ", ".join([config.loss.name, *(f"{key}={value}" for key, value in config.loss.summary.items())])
        trained = f"{self.summary['iterations']:,} iterations in {self.summary['seconds']:.1f} s"
        measured = ", ".join(f"{name} {text}" for name, text in result.headline().items())
        measured += f" ({self.data.problem.unit or 'RMSE'} of {result.examples:,} examples)"
        return (
            f"Run: {members} of {config.model}{split}; {loss}; {trained}\n"
            f"  {measured if result.examples else 'not evaluated yet'}\n"
            f"  {'in memory, gone with this object' if self.in_memory else self.folder}"
        )

    @property
    def in_memory(self) -> bool:
        """Whether nothing on disk outlives this object."""
        return self._temporary is not None or not self.folder.exists()

    def __post_init__(self) -> None:
        # `evaluate` warns of it, since the net alone does not preprocess.
        self.net.history.data = self.data
        object.__setattr__(self, "_versions", self._versions_now())
        object.__setattr__(self, "_weights", fingerprint.weights(self.net.state_dict()))

    def _versions_now(self) -> list[int]:
        tensors = (*self.net.parameters(), *self.net.buffers())  # which statistics of batches change as well
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

    def _check_weights(self) -> TreeNet:
        """The net; warns if its weights are no longer those of this run."""
        # How often weights were written is known at once; whether others are there now takes reading them all.
        if self._versions_now() != self._versions and fingerprint.weights(self.net.state_dict()) != self._weights:
            warn(
                "the weights of this net have changed since the run, perhaps by another fit, and what it answers now "
                "is not what run.result measured: mheads.load(run.folder, factory) brings back those of the run"
            )
        return self.net

    def predict(self, x: Any, side: Mapping[str, Any] | None = None) -> Tensor:
        """Outputs (logits) [M, N, C] of raw examples, preprocessed as in training: images [N, C, H, W] or vectors.

        `side` holds the side inputs of layers that take some, by name.
        """
        return self.outputs(x, side)[0]

    def answer(self, x: Any, side: Mapping[str, Any] | None = None) -> Tensor:
        """What the members answer together to raw examples: the mean of their probabilities [N, C] or numbers [N, D].

        If they have scores, they are weighted by these; members trained on the mean of their outputs answer with it.
        """
        outputs, weights = self.outputs(x, side)
        return self.data.problem.mean(outputs.double(), weights)

    def hypotheses(self, x: Any, side: Mapping[str, Any] | None = None) -> Hypotheses:
        """What each member answers to raw examples, and how probable it is: probabilities or numbers [N, M, ...]."""
        outputs, weights = self.outputs(x, side)
        values = torch.stack([self.data.problem.mean(answer[None].double()) for answer in outputs], 1)
        equal = values.new_full(values.shape[:2], 1 / len(outputs))
        return Hypotheses(values, equal if weights is None else weights.T.contiguous())

    @torch.no_grad()  # what comes out of inference_mode could not be learned from
    def outputs(self, x: Any, side: Mapping[str, Any] | None = None) -> tuple[Tensor, Tensor | None]:
        """Outputs [M, N, C] of raw examples, and weights [M, N] if members have scores."""
        raw = as_raw_examples(x, self.data)
        examples, net = Unlabelled(raw, side=read_side_inputs(side, len(raw), self.data)), self._check_weights()
        with closing(make_engine(self.config, net)) as engine, in_eval_mode([net]):
            return all_answers(engine, examples, self.data.inputs, self.data.problem)[:2]

    def evaluate(self, x: Any, y: Any = None, side: Mapping[str, Any] | None = None) -> Any:
        """All metrics on raw examples and labels, preprocessed as in training.

        x and y are arrays as `fit` takes them, with side inputs by name; without y, x is a pair of them, a list of
        pairs, a Dataset or a DataLoader.
        """
        split, net = self.split_of(x, y, side), self._check_weights()
        with closing(make_engine(self.config, net)) as engine, in_eval_mode([net]):
            return measure(engine, split, self.data.inputs, self.data.problem.calibrated(self.summary))

    def split_of(self, x: Any, y: Any = None, side: Mapping[str, Any] | None = None) -> Split:
        """Raw examples and targets as `evaluate` takes them; raises if they are not like those of training."""
        if y is None and side is not None:
            raise UserError("side goes with arrays: give evaluate(x, y, side), or (x, y, side) as one")
        examples = x if y is None else (x, y) if side is None else (x, y, side)
        own_targets = self.config.data.problem == "examples"  # which learned its examples, whatever targets they had
        if own_targets:
            split = datasets.as_source(examples, "given")
            split = replace(split, targets=np.zeros(len(split), np.int64))
        else:
            split, _ = make_labelled_split(examples, "given", self.data.problem)
        if tuple(split.shape) != self.data.shape:
            raise UserError(f"the examples have shape {split.shape}, but the run was trained on {self.data.shape}")
        self.data.check(split.survey("the examples"), "the examples")
        check_side_inputs(side_shapes(split), self.data)
        return SelfTargetSplit(split, self.data.preprocess) if own_targets else split

    def member(self, m: int) -> PreprocessingNetwork:
        """Member m as a module that takes raw examples: it brings the run's preprocessing, and shares the weights."""
        return PreprocessingNetwork(self._check_weights().member(m), self.data, self.config.eval.views).eval()

    def export(self, path: str | Path, what: str = "answer", examples: Any = None) -> Path:
        """Writes the ensemble and its preprocessing to one .pt2 or .onnx file that needs no mheads: see `export.py`.

        `what` is in it: the answer as `answer` gives it, the mean or the scored one, the outputs of all members or of
        member:N, or hypotheses. It is compared with what the run gives on `examples`, by default those that the run was
        evaluated on, before there is a file.
        """
        from mheads.api.export import export

        self._check_weights()
        export(self, Path(path), what, examples)
        return Path(path)

    def record(self, title: str | None = None) -> Record:
        """The run as figures and tables show it."""
        finished = self.summary["iterations"] >= self.config.pretrain + self.config.optim.iterations
        result = self.summary if self.result.examples else None
        folder = RunFolder(self.folder)
        name = title or self.folder.name
        return Record(name, folder, self.config, self.data, self.history, result, finished, self.in_memory)

    def plot(self, name: str, x: Any = None, y: Any = None) -> Figure:
        """Draws a figure that `mheads plot` knows by this name.

        `reliability` and `hypotheses` ask the net about examples, x and y as `evaluate` takes them; by default those
        that the run was evaluated on, where its config can name them.
        """
        from mheads.report.plot import draw_figure, find_figure
        from mheads.report.shown_run import ShownRun

        examples = None if x is None else self.split_of(x, y)
        if find_figure(name).asks_net:
            self._check_weights()
        return draw_figure(name, [ShownRun(self.record(), run=self, examples=examples)])

    def report(self, path: str | Path = "report.html", x: Any = None, y: Any = None) -> Path:
        """Writes the HTML page of the run; returns where it is.

        x and y are the examples, as `evaluate` takes them, that the page asks the net about; by default those that the
        run was evaluated on, where its config can name them.
        """
        from mheads.report.page.report import report_run
        from mheads.report.shown_run import ShownRun

        examples = None if x is None else self.split_of(x, y)
        self._check_weights()
        return report_run(ShownRun(self.record(), run=self, examples=examples), Path(path))

    def plot_ownership(self) -> Figure:
        """Draws who owns which class of the test set."""
        return self.plot("ownership")

    def plot_history(self) -> Figure:
        """Draws the losses of training and the accuracies of the evaluations."""
        return self.plot("history")


def open_run(
    folder: RunFolder,
    config: Config,
    net: TreeNet,
    warn: Callable[[str], None],
    temporary: Temporary | None = None,
) -> Run:
    """The run in a folder, with its newest weights in the net; warns if it is unfinished."""
    weights = folder.load_weights(net, warn)
    net.eval()
    data = folder.read_data()
    log = folder.read_log(weights.log)
    if weights.final:
        summary = folder.read_result()
    else:
        summary = {"problem": data.problem.name, "iterations": weights.iteration, "seconds": weights.seconds}
        if log.evaluations:
            newest = log.evaluations[-1]
            warn(f"run.result is the evaluation at iteration {newest['iteration']}, on the {newest['split']} set")
            summary = {key: value for key, value in newest.items() if key != "iteration"} | summary
        else:
            warn("run.result is NaN throughout: there was no evaluation yet; evaluate the run to have one")
            summary |= data.problem.unknown(net.num_members).to_dict()
    result = data.problem.result_type.from_dict(summary)
    # A relative path would be another folder's after a change of the current one.
    return Run(folder.path.absolute(), config, net, data, result, summary, log, temporary)


def make_labelled_split(
    examples: Any, where: str, problem: Problem | None = None, classes: Sequence[Any] | None = None, name: str = "auto"
) -> tuple[ArraySplit | DatasetSplit, Problem]:
    """Examples with targets of the problem, or of the one with this name, or that they look like.

    Labels that are names need a problem that knows them, since a test set may lack some.
    """
    split = datasets.as_source(examples, where)
    if not len(split):
        raise UserError(f"{where}: there are no examples; give at least one")
    if split.targets.dtype.kind == "U" and problem is None and classes is None:
        raise UserError(f"{where}: labels are names; say which number each class has, classes=[...] in that order")
    split.survey(where)
    if problem is not None:
        # Targets of a problem that is made from another are read as those of the other.
        name = next(
            (n for kind in type(problem).__mro__ if (n := getattr(kind, "name", "")) in datasets.TARGET_KINDS), name
        )
        classes = problem.names if is_single_label(problem) else None
    if name == "classification" and split.targets.dtype.kind == "f" and split.targets.shape[1:] == (1,):
        raise UserError(
            f"{where}: labels are floats, such as {split.targets[0, 0]!s}, and name no classes: give class numbers as "
            "integers, y.astype(int), or names"
        )
    splits, posed = datasets.pose_targets({where: split}, classes, name)
    problem = problem or posed
    if (given := getattr(posed, "shape", ())) and given != (wanted := getattr(problem, "shape", ())):
        wanted = wanted or (problem.num_values,)  # type: ignore[attr-defined]  # it learns numbers, as posed does
        raise UserError(
            f"{where}: targets of shape {[len(split), *given]}, but the network learns {[len(split), *wanted]}"
        )
    problem.check_targets(splits[where].targets, where)
    return splits[where], problem


def remember_start(net: TreeNet, folder: RunFolder, start: str | None, init: str) -> None:
    """Remembers which weights training in this folder started from, so that `fit` may resume with the net there."""
    net.history.weights = fingerprint.weights(net.state_dict())
    net.history.starts[folder.path.resolve()] = start, init


def load(
    run: str | Path | Run,
    network_factory: Callable[[], nn.Module] | None = None,
    *,
    trust: bool = False,
    warn: Callable[[str], None] | None = None,
) -> Run:
    """Loads a run with its newest weights, finished or not.

    A network that is not built in is made by `network_factory`, or, with `trust`, by the factory that the folder names:
    that runs its code. The result of an unfinished run is its newest evaluation. `warn` is called with messages about
    this; without it, Python warns.
    """
    folder = RunFolder(run.folder if isinstance(run, Run) else Path(run))
    config = folder.read_config()
    with torch.inference_mode(False):  # a service may be in it, and what is loaded may learn later
        net = build_net_of_run(folder, config, warn or Silent().warn, network_factory, trust)
        loaded = open_run(folder, config, net, warn or Silent().warn)
    remember_start(net, folder, folder.read_identity().get("start"), config.init)
    return loaded
