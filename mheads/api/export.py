"""One file for anywhere: an ensemble and the preprocessing of its run, for torch.export (.pt2) and ONNX (.onnx).

What is in the file takes raw examples, as many as one likes: uint8 or float images [B, C, H, W], vectors [B, F], or
tokens int64 [B, T]. It gives one of
    answer        the ensemble's answer [B, ...], as `run.answer` gives it: scored where members have scores, else mean
    mean          class probabilities averaged over members (of members trained on the mean of their outputs, those of
                  it), or the mean of numbers
    scored        the same weighted by the members' scores
    members       the outputs of all members [M, B, ...]
    hypotheses    the answer of each member, class probabilities or numbers [M, B, ...], and how probable it is [M, B]:
                  by the scores, 1 / M without
    member:N      the outputs of member N [B, ...]
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mheads.api.run import load
from mheads.caffe import weights as blobs
from mheads.common import atomic_files, nested_values
from mheads.common.errors import UserError, describe_error
from mheads.common.nested_values import Value
from mheads.common.progress import Watcher
from mheads.data.catalog import names_examples
from mheads.data.preprocessing import centre
from mheads.data.views import View, average_views, stack_views
from mheads.runs.data_facts import DataFacts
from mheads.training.build_from_config import load_data
from mheads.trees import member_scores
from mheads.trees.treenet import TreeNet

if TYPE_CHECKING:
    from mheads.api.run import Run

Answers = Callable[[Tensor], Value]

WHAT = ("answer", "mean", "scored", "members", "hypotheses", "member:N")
SUFFIXES = (".pt2", ".onnx")
TOLERANCE = 1e-5  # of the largest output, and in half precision a few of its steps
EXAMPLES = 64  # that a file is compared on
BATCHES = (1, 2, 7)  # and in these numbers of rows, then the rest


class Exported(nn.Module):
    """Raw examples to answers, in operations that torch.export can follow: nothing here looks at values."""

    mean: Tensor | None
    std: Tensor | None

    def __init__(self, net: TreeNet, data: DataFacts, what: str, views: Sequence[View] = ()) -> None:
        super().__init__()
        # A copy, since what is exported is on the CPU, in eval mode and without gradients.
        net = copy.deepcopy(net).cpu().eval().requires_grad_(False)
        self.problem, self.what, self.views = data.problem, what, views
        self.network = net.member(_member(what, net.num_members)) if what.startswith("member:") else net
        self.dtype = net.dtype
        self.preprocess = data.preprocess
        mean, std = data.preprocess.mean, data.preprocess.std
        # As in Preprocess: half precision is rounded once, at the end, and a mean in float64 is subtracted there.
        exact = self.dtype if self.dtype.itemsize >= 4 else torch.float32
        self.exact = torch.float64 if mean is not None and mean.dtype == torch.float64 else exact
        if mean is not None and len(data.shape) == 3:
            mean = centre(mean, torch.empty((1, *data.shape[1:], data.shape[0]), device="meta"))
        for name, tensor in (("mean", mean), ("std", std)):
            self.register_buffer(name, None if tensor is None else tensor.to(self.exact).contiguous())

    def forward(self, examples: Tensor) -> Value:
        x = examples if examples.dtype == torch.int64 else stack_views(self.prepare(examples), self.views)
        return self.answer(nested_values.map_leaves(self.average, self.network(x)))

    def average(self, outputs: Tensor) -> Tensor:
        return average_views(outputs, self.views, dim=0 if self.what.startswith("member:") else 1)

    def prepare(self, examples: Tensor) -> Tensor:
        x = examples.to(self.exact)
        if self.preprocess.scale != 1.0:
            x = x * self.preprocess.scale
        if self.mean is not None:
            x = x - self.mean
        if self.std is not None:
            x = x / self.std
        return (x.flip(1) if self.preprocess.bgr else x).to(self.dtype)

    def answer(self, outputs: Value) -> Value:
        if self.what.startswith("member:"):
            return self.problem.answer(nested_values.map_leaves(lambda t: t[None], outputs))[0]
        answers = self.problem.answer(outputs)
        if self.what == "members":
            return answers
        if self.dtype.itemsize < 4:
            answers = answers.float()  # in half precision the mean would be rounded once more
        if self.what == "mean":
            return self.problem.mean(answers)
        weights = member_scores.weights(outputs)
        if self.what == "scored":
            return self.problem.mean(answers, weights)
        each = torch.stack([self.problem.mean(answer[None]) for answer in answers])
        equal = each.new_full(each.shape[:2], 1 / len(answers))
        return each, equal if weights is None else weights.to(each.dtype)


def export(run: Run, path: Path, what: str = "answer", examples: Any = None) -> tuple[str, float]:
    """Writes the file, after what is in it was loaded again and compared with what the run gives.

    On `examples`, raw ones as `run.predict` takes them; by default those that the run was evaluated on, or, where they
    are not to be had, some drawn from the range of training. Returns what is in the file, mean or scored for the
    ensemble's answer, and the largest difference, relative to the largest output.
    """
    what = str(what)
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file in it, such as {path / 'ensemble.pt2'}")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: the suffix says what is written, .pt2 (torch.export) or .onnx; give one of these")
    atomic_files.check_place(path)
    if path.suffix == ".onnx" and (lacking := [name for name in _ONNX if importlib.util.find_spec(name) is None]):
        raise UserError(
            f"{path}: writing and checking ONNX needs {', '.join(lacking)}: pip install 'mheads[onnx]'; .pt2 needs none"
        )
    net, data = run.net, run.data
    if sided := [type(m).__name__ for m in net.modules() if hasattr(m, "takes")]:
        raise UserError(
            f"a {sided[0]} takes side inputs, and an exported file takes examples alone: export a network without it"
        )
    if what not in WHAT[:-1]:
        _member(what, net.num_members)
    raw = _as_given(run, examples)
    what, expected = _answer_of_run(run, raw, what)
    hidden = path.with_name(f".{path.stem}.new{path.suffix}")  # the suffix says how it is read again
    with atomic_files.replacing(path, hidden), _quietly():
        program = _trace(
            Exported(net, data, what, run.config.eval.views), raw[:2] if len(raw) > 1 else raw.repeat_interleave(2, 0)
        )
        write = _write_onnx if path.suffix == ".onnx" else _write_pt2
        answers = _answer_in_batches(write(program, hidden, _facts(run, raw, what)), raw, what)
        steps = 0.0 if net.dtype.itemsize >= 4 else 4 * torch.finfo(net.dtype).eps
        return what, _compare(answers, expected, path, max(TOLERANCE, steps))


def export_run(path: Path, file: Path, what: str, watch: Watcher, trust: bool = False) -> None:
    """Writes a run to one file that needs no mheads, and says what it takes and gives: see `api/export.py`."""
    run = load(path, trust=trust, warn=watch.warn)
    if file.suffix in blobs.SUFFIXES:
        number = int(what.removeprefix("member:")) if re.fullmatch(r"member:\d+", what) else 0
        if run.net.num_members > 1 and what != f"member:{number}":
            raise UserError(
                f"--what {what}: a {file.suffix} holds the weights of one member: give --what member:0, say"
            )
        blobs.write(atomic_files.check_place(file), run.net.member(number))
        watch.say(f"{file}: the weights of member {number}, as Caffe keeps them")
        return
    what, difference = export(run, file, what)
    watch.say(f"{file}: {what}; the run itself gives the same within {difference:.1g}")


def _member(what: str, members: int) -> int:
    match = re.fullmatch(r"member:(\d+)", what)
    if match is None:
        raise UserError(f"what={what!r}: an exported file gives one of {', '.join(WHAT)}")
    if int(match[1]) >= members:
        raise UserError(f"what={what!r}: there are {members} members, counted from 0 to {members - 1}")
    return int(match[1])


def _as_given(run: Run, examples: Any) -> Tensor:
    """Raw examples [N, C, H, W] or [N, F] of the type that the file will take: that of training."""
    from mheads.api.raw_examples import as_raw_examples

    if examples is not None:
        raw = as_raw_examples(examples, run.data)
    else:
        raw = _own_examples(run)
    raw = raw[:EXAMPLES].cpu()
    if raw.dtype == torch.int64:
        return raw.contiguous()
    pixels = run.data.seen is not None and run.data.seen.kind == "uint8"
    if not raw.is_floating_point() and raw.dim() == 4:
        raw = raw.permute(0, 3, 1, 2)
    if not pixels and not raw.is_floating_point():
        raw = raw / 255  # as ValueRange.convert does
    mean = run.data.preprocess.mean
    exact = run.net.dtype == torch.float64 or (mean is not None and mean.dtype == torch.float64)
    floats = torch.float64 if exact else torch.float32
    return raw.to(torch.uint8 if pixels else floats).contiguous()


def _own_examples(run: Run) -> Tensor:
    """Those that the run was evaluated on, if its config can name them, else drawn from the range of training."""
    with contextlib.suppress(UserError, OSError):
        if names_examples(run.config.data):
            test = load_data(run.config).test
            if tuple(test.shape) == run.data.shape and len(test):
                return test.read(np.arange(min(len(test), EXAMPLES)), None)
    seen = run.data.seen
    low, high = (0.0, 1.0) if seen is None else (seen.low, seen.high)
    if seen is not None and seen.kind == "tokens":
        return torch.from_numpy(np.random.default_rng(0).integers(0, int(high) + 1, (EXAMPLES, *run.data.shape)))
    drawn = np.random.default_rng(0).uniform(low, high, (EXAMPLES, *run.data.shape))
    if seen is not None and seen.kind == "uint8":
        pixels = torch.from_numpy(drawn.round().astype(np.uint8))
        return pixels.permute(0, 2, 3, 1) if pixels.dim() == 4 else pixels
    return torch.from_numpy(drawn)


def _answer_of_run(run: Run, raw: Tensor, what: str) -> tuple[str, list[Tensor]]:
    """What the run itself gives, from its engine, in the precision of the weights: what is in a file computes in that.

    Its answer is called scored or mean, as the members have scores or not.
    """
    exact = replace(run, config=run.config.model_copy(update={"precision": "float32"}))
    outputs, weights = exact.outputs(raw)
    if what == "answer":
        what = "mean" if weights is None else "scored"
    if what == "scored" and weights is None:
        raise UserError(f"what={what!r}: {run.folder} has no scores: train it with loss=scored or loss.scores")
    if what == "hypotheses":
        return what, [part.transpose(0, 1) for part in exact.hypotheses(raw)]
    if what in ("mean", "scored"):
        return what, [run.data.problem.mean(outputs.double(), weights if what == "scored" else None)]
    return what, [outputs if what == "members" else outputs[_member(what, len(outputs))]]


def _facts(run: Run, raw: Tensor, what: str) -> str:
    """What whoever opens the file may want to know, as JSON."""
    kind = str(raw.dtype).removeprefix("torch.")
    facts = {"what": what, "input": [kind, *run.data.shape], "problem": run.data.problem.to_dict()}
    seen = run.data.seen  # image files are scaled to it by `predict`, and by nobody on their way into an exported file
    return json.dumps(facts if seen is None else facts | {"range": [seen.low, seen.high]})


def _trace(module: nn.Module, examples: Tensor) -> Any:
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # where it shows how far it came before it failed
            return torch.export.export(module, (examples,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:  # of the user's network: it may do anything
        raise UserError(
            f"torch.export cannot trace the network for every batch size: {_first_line(error)}; avoid control flow "
            "that depends on values, sizes written as numbers, and len(x) (use x.shape[0])"
        ) from error


def _write_pt2(program: Any, path: Path, facts: str) -> Answers:
    content = io.BytesIO()  # torch ends the process where a disk is full
    torch.export.save(program, content, extra_files={"mheads.json": facts})
    path.write_bytes(content.getvalue())
    return torch.export.load(path).module()


_ONNX = ("onnx", "onnxscript", "onnxruntime")


def _write_onnx(program: Any, path: Path, facts: str) -> Answers:
    import onnxruntime

    try:
        names = ["answers", "probabilities"][: len(program.graph_signature.user_outputs)]
        converted = torch.onnx.export(program, input_names=["examples"], output_names=names, dynamo=True, verbose=False)
        assert converted is not None
        converted.model.metadata_props["mheads"] = facts
        converted.save(path, external_data=False)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except OSError:
        raise
    except Exception as error:  # of another library: it may raise anything
        raise UserError(f"the network cannot be written as ONNX: {_first_line(error)}; .pt2 may hold it") from error
    return lambda x: [torch.from_numpy(found) for found in session.run(None, {"examples": x.numpy()})]


def _answer_in_batches(answers: Answers, raw: Tensor, what: str) -> list[Tensor]:
    """Answers to all examples, asked for in several sizes of batch."""
    sizes = [size for i, size in enumerate(BATCHES) if sum(BATCHES[: i + 1]) < len(raw)]
    parts = raw.split([*sizes, len(raw) - sum(sizes)])
    try:
        outputs = [nested_values.leaves(answers(part)) for part in parts]
    except Exception as error:  # of what was loaded: it may raise anything
        raise UserError(f"the exported file does not run for every batch size: {_first_line(error)}") from error
    dim = 1 if what in ("members", "hypotheses") else 0
    return [torch.cat(found, dim).detach() for found in zip(*outputs, strict=True)]


def _compare(answers: Sequence[Tensor], expected: Sequence[Tensor], path: Path, tolerance: float) -> float:
    differences = []
    for found, own in zip(answers, expected, strict=True):
        scale = own.abs().max().item()
        largest = (found.double() - own.double()).abs().max().item()
        differences.append(largest / max(scale, 1e-30))
        if not differences[-1] <= tolerance:  # NaN as well
            raise UserError(
                f"{path} was not written: the outputs of the exported network differ from the run's by {largest:.2g}, "
                f"where the largest output is {scale:.2g}. Does the network use random numbers, or keep state between "
                "calls?"
            )
    return max(differences)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or describe_error(error)).split("\n")[0]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Exporters talk of their inner life."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
