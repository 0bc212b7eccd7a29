"""Measures ensembles: models from anywhere (`mheads.evaluate`), and runs on their own examples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mheads import data as datasets
from mheads.api.examples_of_run import check_overrides, class_names, load_examples_of_run, refuse_own_data
from mheads.api.raw_examples import PreprocessingNetwork
from mheads.api.run import Run, load, make_labelled_split
from mheads.common import nested_values
from mheads.common.atomic_files import check_output, check_place, write_atomically
from mheads.common.errors import UserError, warn
from mheads.common.nested_values import Value
from mheads.common.progress import Watcher, forward_warnings
from mheads.common.safe_yaml import as_plain, short
from mheads.config import read as configs
from mheads.data import Preprocess
from mheads.data.batches import Batch
from mheads.engine.measure import (
    GivesOutputs,
    Models,
    all_answers,
    answers,
    calibrate,
    in_eval_mode,
    join_answers,
    measure,
)
from mheads.problems import PROBABILITIES, are_probabilities, is_single_label
from mheads.problems.uncertainty import (
    EnsembleOutputs,
    fit_temperatures,
    measure_other_data,
    measure_scaled,
    measure_shifted,
)
from mheads.runs.data_facts import DataFacts
from mheads.runs.folder import RunFolder
from mheads.training.build_from_config import build_net_of_run, make_engine
from mheads.training.check_experiment import check_views
from mheads.training.log_and_checkpoint import summary
from mheads.trees.treenet import TreeNet

VIEWS = "eval.views="
BATCH_SIZE = 100
Model = Callable[[Tensor], Any]
TARGETS = ("labels", "box_targets", "regions", "images")  # the names of what targets hold; most hold labels alone


def evaluate(
    models: Run | TreeNet | nn.Module | Model | Sequence[Model],
    test: Any,
    *,
    classes: Sequence[str] | None = None,
    problem: str = "auto",
    batch_size: int = BATCH_SIZE,
) -> Any:
    """Measures an ensemble on labelled examples: a tree, one model, or a list of models that give logits [B, C].

    `test` is (inputs, labels), a list of pairs, a Dataset or a DataLoader; `classes` number labels that are names, and
    `problem` says what is learned where the labels alone do not decide.
    Inputs are given to the models as they are, in float; members from `run.member(m)` bring the preprocessing of their
    run, and `run.evaluate(x, y)` measures a whole run. Modules are in eval mode meanwhile.
    """
    if isinstance(models, Run):
        if (classes, problem, batch_size) != (None, "auto", BATCH_SIZE):
            raise UserError("a run knows its classes, problem and batches: leave classes, problem and batch_size out")
        return models.evaluate(test)
    batch_size = as_plain(batch_size)
    members = _list_models(models, batch_size)

    def forward(batch: Batch) -> Value:
        if isinstance(models, TreeNet):
            return _refuse_complex(_outputs_of_one(models, batch), models.network_name)
        return _outputs_of_all(members, batch)

    split, solved = make_labelled_split(test, "test", classes=classes, name=problem)
    if problem == "auto":
        datasets.warn_of_flags(split.targets, solved)
        datasets.warn_of_shares(split.targets, solved)
    engine, plain = Models(forward), Preprocess()
    with in_eval_mode([model for model in members if isinstance(model, nn.Module)]):
        outputs, _, _ = next(answers(engine, split, plain, solved, rows=batch_size))
        if outputs.dim() != 1 + solved.answer_dims:
            raise UserError(f"each model must give {solved.output_form}, not {tuple(outputs.shape[1:])}")
        if classes is None:
            solved = solved.for_scores(outputs.shape[2])
        solved.check_output(outputs[0], "a model", "the test set")
        if is_single_label(solved) and are_probabilities(outputs):
            warn(f"the models give {PROBABILITIES}")
        return measure(engine, split, plain, solved, rows=batch_size)


def _list_models(models: Any, batch_size: Any) -> list[Model]:
    """One or several models as a list; warns of networks that come without their preprocessing."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(f"batch_size={batch_size!r}: give how many examples are answered at a time, at least 1")
    # A Sequential is one model, not its layers; a ModuleList cannot be called.
    several = isinstance(models, nn.ModuleList) or (isinstance(models, Iterable) and not callable(models))
    members: list[Model] = list(models) if several else [models]
    if not members:
        raise UserError("evaluate needs at least one model")
    if wrong := [model for model in members if not callable(model)]:
        raise UserError(f"evaluate takes a TreeNet, a model or a list of models that give logits, not {wrong[0]!r}")
    for model in members:
        data = model.history.data if isinstance(model, TreeNet) else None
        if data is not None and (preprocessing := data.describe_preprocessing()):
            warn(
                f"the network was trained on preprocessed data ({preprocessing}), but these are raw: "
                "run.evaluate(x, y) and run.member(m) include the preprocessing of the run"
            )
    return members


def _outputs_of_all(models: Sequence[Model], batch: Batch) -> Value:
    """What the models give for a batch, the models first."""
    outputs = [_try_model(model, f"model {m} ({_name(model)})", batch) for m, model in enumerate(models)]
    forms = [_form(each) for each in outputs]
    if other := [m for m, form in enumerate(forms) if form != forms[0]]:
        differing = ", ".join(f"model {m} gives {forms[m]}" for m in (0, other[0]))
        raise UserError(f"all models must give outputs of one shape: {differing} for {len(batch)} examples")
    return nested_values.map_leaves(lambda *parts: torch.stack([part.to(parts[0]) for part in parts]), *outputs)


def _form(outputs: Value) -> Any:
    """The shapes of outputs, in dicts and lists as they are."""
    if isinstance(outputs, Tensor):
        return tuple(outputs.shape)
    if isinstance(outputs, dict):
        return {key: _form(value) for key, value in outputs.items()}
    return [_form(part) for part in outputs]


def _outputs_of_one(model: Any, batch: Batch) -> Any:
    """What a model gives for a batch, on its device, in its precision, and with side inputs where it takes some."""
    parameter = next(model.parameters() if isinstance(model, nn.Module) else iter(()), torch.empty(0))
    raw, side = batch.inputs.to(parameter.device), batch.side_inputs()
    if isinstance(model, TreeNet):
        return model(batch.preprocess(raw, parameter.dtype), side)
    if isinstance(model, PreprocessingNetwork):  # it brings its preprocessing: raw images, channels first
        x = raw if raw.is_floating_point() or raw.dim() == 2 else raw.permute(0, 3, 1, 2)
        return model(x, side) if side else model(x)
    return model(batch.preprocess(raw, parameter.dtype).clone())  # it may write into its input, which others get too


def _try_model(model: Model, name: str, batch: Batch) -> Value:
    try:
        outputs = _outputs_of_one(model, batch)
    except UserError:
        raise
    except Exception as error:  # the user's model may raise anything
        shape = list(batch.inputs.shape)
        raise UserError(f"{name} fails on examples of shape {shape} with {type(error).__name__}: {error}") from error
    outputs = torch.from_numpy(outputs) if isinstance(outputs, np.ndarray) else outputs
    try:
        leaves = nested_values.leaves(outputs)
    except TypeError:
        leaves = []
    if not leaves:
        raise UserError(
            f"{name} gives {short(outputs)}: each model must give logits as a tensor or an array, or several tensors"
        )
    return _refuse_complex(outputs, name)


def _refuse_complex(outputs: Value, name: str) -> Value:
    for leaf in nested_values.leaves(outputs):
        if leaf.is_complex():
            kind = str(leaf.dtype).removeprefix("torch.")
            raise UserError(f"{name} gives {kind}, but outputs are real numbers: let it give their .real or .abs()")
    return outputs


def _name(model: Model) -> str:
    return getattr(model, "__name__", type(model).__name__)


@dataclass(frozen=True)
class FurtherExamples:
    """The split that temperatures are fitted on, and data keys of other examples (`data.path=other.npz`): of other
    classes (`ood`), and of the same classes from another source (`shifted`)."""

    temperature_from: str | None = None
    ood: Sequence[str] = ()
    shifted: Sequence[str] = ()

    def __bool__(self) -> bool:
        return self.temperature_from is not None or bool(self.ood or self.shifted)

    def check(self, folder: RunFolder, data: DataFacts, split: str, overrides: Sequence[str] = ()) -> None:
        """Raises an error before anything is computed; the run is measured on a split of the data with `overrides`."""
        if not is_single_label(data.problem):
            raise UserError(
                f"{folder.path} was trained for {data.problem.name}: temperatures and other data are for runs whose "
                "examples have one class each"
            )
        if self.temperature_from == "train":
            raise UserError(
                "--temperature-from train: the run has learned these examples, and is surer of them than of others; "
                "give --temperature-from validation, of a run with data.validation"
            )
        if self.temperature_from == "validation" and not folder.read_config().data.validation:
            none = f"{folder.path} held no examples out (data.validation is 0)"
            raise UserError(f"--temperature-from validation: {none}: train a run with data.validation=N")
        fitted, measured = (_name_source(configs.read(folder.config, k).data, split) for k in ((), overrides))
        if self.temperature_from == split and fitted == measured:
            raise UserError(
                f"--temperature-from {split}: the run is measured on these examples, and would look better than it is; "
                "give --split test with --temperature-from validation"
            )
        for option, keys in (("ood", self.ood), ("shifted", self.shifted)):
            check_overrides(keys)
            refuse_own_data(option, keys, folder.read_config(), configs.read(folder.config, keys))

    def measure(
        self,
        folder: RunFolder,
        engine: GivesOutputs,
        data: DataFacts,
        kept: tuple[Tensor, Tensor | None, Any],
        watch: Watcher,
    ) -> dict[str, Any]:
        """The fields that a result gains; `kept` are outputs, weights and targets of what it was measured on."""
        of_scores = getattr(data.problem, "of_scores", False)
        measures: dict[str, Any] = {}

        def answer(overrides: Sequence[str], split: str | None, unlike: bool) -> tuple[EnsembleOutputs, Any]:
            with forward_warnings(watch):
                _, examples, _ = load_examples_of_run(folder, overrides, split, unlike)
            outputs, weights, targets = all_answers(engine, examples, data.inputs, data.problem, watch)
            return EnsembleOutputs(outputs, weights, of_scores), targets

        outputs, y = EnsembleOutputs(kept[0], kept[1], of_scores), self._labels(data, kept[2])
        temperatures = None
        if self.temperature_from is not None:
            held_out, targets = answer((), self.temperature_from, unlike=False)
            temperatures = fit_temperatures(held_out, self._labels(data, targets))
            measures |= measure_scaled(outputs, y, held_out, self._labels(data, targets))
        if self.shifted:
            shifted, targets = answer(self.shifted, "test", unlike=False)
            measures |= measure_shifted(shifted, self._labels(data, targets), temperatures)
        if self.ood:
            measures |= measure_other_data(outputs, answer(self.ood, "test", unlike=True)[0])
        return measures

    @staticmethod
    def _labels(data: DataFacts, targets: Any) -> Tensor:
        labels: Tensor = data.problem.group(nested_values.leaves(targets)[0])
        return labels


def _name_source(data: Any, split: str) -> tuple[Any, ...]:
    """What a split is read from, by the data keys."""
    return data.name, data.table, data.test_path if split == "test" and data.test_path else data.path


def evaluate_run(
    path: Path,
    outputs_file: Path | None,
    watch: Watcher,
    overrides: Sequence[str] = (),
    split: str | None = None,
    trust: bool = False,
    further: FurtherExamples = FurtherExamples(),
    calibrate_from: str | None = None,
) -> dict[str, Any]:
    """Computes the metrics of a run anew; optionally saves the outputs [M, N, C] and labels [N] behind them, and the
    weights [M, N] by the scores of the members, if they have some.

    The examples are those that training evaluated on, another `split`, or other data: `overrides` of the
    config's data keys. Inputs are preprocessed as in training. `eval.views` can be overridden too. `further` examples
    give a run with classes the measures of `problems/uncertainty.py`. `calibrate_from` is a split that chooses the
    kernels of hypotheses (`problems/densities.py`) for a run that has none.
    """
    folder, config = RunFolder(path), RunFolder(path).read_config()
    if views := [given for given in overrides if given.startswith(VIEWS)]:
        config = configs.read(folder.config, views)
        overrides = [given for given in overrides if given not in views]
    if outputs_file is not None:
        check_output(check_place(outputs_file), (".npz",))
    net = build_net_of_run(folder, config, watch.warn, trust=trust)
    weights = folder.load_weights(net, watch.warn)
    with forward_warnings(watch):
        data, examples, split = load_examples_of_run(folder, overrides, split)
    check_views(config, data.shape, data.problem, data.side)
    if further:
        further.check(folder, data, split, overrides)
    parts: list[tuple[Tensor, Tensor | None, Value]] = []

    def keep(outputs: Tensor, weights: Tensor | None, targets: Value) -> None:
        if outputs_file is not None or further:
            parts.append((outputs.cpu(), None if weights is None else weights.cpu(), targets))

    with closing(make_engine(config, net)) as engine:
        problem = data.problem.calibrated(folder.read_result() if weights.final else {})
        if calibrate_from is not None and problem is data.problem:
            _, held_out, _ = load_examples_of_run(folder, (), calibrate_from)
            problem = calibrate(engine, held_out, data.inputs, problem)
        result: Any = measure(engine, examples, data.inputs, problem, watch, keep)
        assert result is not None  # there are examples
        if parts:
            kept = join_answers(parts)
        if further:
            result = replace(result, **further.measure(folder, engine, data, kept, watch))
    if outputs_file is not None:
        arrays = name_outputs(*kept) | {"classes": np.array(class_names(data.problem))}
        write_atomically(outputs_file, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
    return summary(result, net, split, weights.iteration, weights.seconds)


def name_outputs(outputs: Tensor, weights: Tensor | None, targets: Value) -> dict[str, np.ndarray]:
    """Outputs, weights by the scores of members and targets under the names that they have in an .npz file."""
    tensors = {
        "outputs": outputs,
        **dict(zip(TARGETS, nested_values.leaves(targets), strict=False)),
        "weights": weights,
    }
    return {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}


def outputs_of(run: Run | str | Path, split: str | None = None, **data: Any) -> tuple[torch.Tensor, Value]:
    """Outputs [M, N, C] and targets of a run on its training, validation or test examples, in their order.

    By default on those that training evaluated on. `data` are other data keys than the run's: `path="other.npz"`. A run
    that `fit` trained on arrays does not keep them: `run.predict(x)` gives its outputs.
    """
    outputs, _, targets = outputs_and_weights_of(run, split, **data)
    return outputs, targets


def outputs_and_weights_of(
    run: Run | str | Path, split: str | None = None, **data: Any
) -> tuple[torch.Tensor, torch.Tensor | None, Value]:
    """As `outputs_of`, with the weights [M, N] by the scores of the members between them, if they have some."""
    run = run if isinstance(run, Run) else load(run)
    overrides = [f"data.{key}={json.dumps(value, default=str)}" for key, value in data.items()]
    facts, examples, _ = load_examples_of_run(RunFolder(run.folder), overrides, split)
    with closing(make_engine(run.config, run.net)) as engine, in_eval_mode([run.net]):
        return all_answers(engine, examples, facts.inputs, facts.problem)
