"""Keywords of `fit`: which of them are keys of the config, what other libraries call them, and messages that name them.

`ConfigKeywords` is the one list of the keywords that are config keys: `fit` unpacks it for type checkers, and its
signature for `help` is made of it and of the config's defaults.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypedDict, TypeVar, cast, get_type_hints

from mheads.common.errors import UserError, speaking
from mheads.common.options import Section
from mheads.config import schema
from mheads.config.unknown_keys import EPOCHS, meaning
from mheads.losses import LOSSES
from mheads.runs.check_resume import without_force

F = TypeVar("F", bound=Callable[..., Any])


class ConfigKeywords(TypedDict, total=False):
    """Keywords of `fit` that are keys of the config (docs/configuration.md); defaults are the config's."""

    optimizer: str
    lr: float
    momentum: float
    nesterov: bool
    caffe_momentum: bool
    momentum2: float
    rms_decay: float
    delta: float
    sgd_momentum: float
    newton_schulz: int
    weight_decay: float
    parameter_groups: dict[str, Any]
    regularization: str
    shared_gradients: str
    clip: float | None
    batch_size: int
    accumulate: int
    schedule: str | dict[str, Any]
    scale_rate: bool
    pretrain: int
    problem: str
    normalize: str
    normalize_targets: bool
    scale: float | str
    pad: int
    padding: str
    mirror: bool | str
    validation: int
    calibration: int
    views: list[dict[str, Any]]
    workers: int | str
    micro_batches: int | str
    shared_micro_batches: int | str
    stack: str
    cores: int | str
    device: str
    precision: str
    seed: int


def _find_key(keyword: str) -> str:
    if keyword == "optimizer" or keyword in schema.Config.model_fields:
        return {"optimizer": "optim.name"}.get(keyword, keyword)
    sections = ("optim", "data", "engine", "eval", "loss")  # data.normalize before loss.normalize
    return next(f"{name}.{keyword}" for name in sections if hasattr(getattr(schema.Config(), name), keyword))


def _find_default(key: str) -> Any:
    value: Any = schema.Config()
    for name in key.split("."):
        value = getattr(value, name)
    return getattr(value, "name", None) if isinstance(value, Section) else value


CONFIG_KEYS = {keyword: _find_key(keyword) for keyword in ConfigKeywords.__annotations__}
DEFAULTS = {keyword: _find_default(key) for keyword, key in CONFIG_KEYS.items()}


def list_config_keywords(function: F) -> F:
    """Lets `help` and notebooks show the keywords that the function unpacks, with their defaults."""
    signature, hints = inspect.signature(function), get_type_hints(ConfigKeywords)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in DEFAULTS.items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
    return function


def refuse_positional_examples(function: F) -> F:
    """Has the function raise for examples after the net, where scikit-learn takes them: there it takes a loss."""

    @wraps(function)
    def call(*given: Any, **keywords: Any) -> Any:
        loss = given[1] if len(given) > 1 else None
        is_loss = loss is None or isinstance(loss, str) or callable(loss) or "train" in keywords
        if len(given) > 2 or not is_loss:
            kinds, name = ", ".join(type(value).__name__ for value in given[1:]), function.__name__
            raise UserError(
                f"{name}(net, {kinds}): after the net there may be a loss, and examples come by name: "
                f"{name}(net, loss, train=(x, y))"
            )
        return function(*given, **keywords)

    return cast(F, call)


# Keywords of fit, and what scikit-learn, Keras, Lightning and our own config call them, where that is not what
# `config/unknown_keys.py` says of a config key.
ALIASES = {
    "train=(inputs, labels)": "x y X inputs labels targets data dataset datamodule train_data train_dataset "
    "train_dataloader train_dataloaders train_loader X_train x_train y_train train_ds",
    "test=(inputs, labels)": "val val_data validation_data valid eval_set test_data val_dataset eval_dataset "
    "test_dataset val_dataloader val_dataloaders test_dataloaders val_loader X_val X_test x_test y_val y_test",
    "validation": "validation_split validation_fraction val_split val_size test_size holdout",
    "weights": "sample_weight sample_weights class_weight class_weights example_weights",
    "optimizer": "name optimiser optimizers solver",
    "schedule": "schedule_name lr_schedule lr_scheduler scheduler lr_scheduler_type learning_rate_schedule",
    "schedule={'warmup': ...}": "warmup",
    "delta": "eps epsilon",
    "device": "gpu gpus cuda",
    "normalize": "preprocess preprocessing standardize scaler normalization",
    "classes": "class_names target_names labels_names",
    "sampling='bagging'": "bagging bootstrap",
    "sampling={'name': 'subset', 'fraction': ...}": "subsample max_samples",
    "show": "verbose progress verbosity enable_progress_bar progress_bar",
    "folder": "run run_folder output_dir default_root_dir save_dir log_dir out path checkpoint_dir",
    "init": "pretrained checkpoint ckpt_path warm_start resume_from_checkpoint init_weights",
    "log={'checkpoint_every': ...}": "checkpoint_every",
    "log={'tensorboard': True}": "tensorboard logger",
    "loss": "criterion objective loss_fn loss_function",
    "teacher": "teacher_answers soft_targets",
    "the first argument, TreeNet(factory, ...)": "model network module net_factory hidden_layer_sizes",
    "TreeNet(factory, members=...)": "members n_estimators num_members ensemble_size num_models",
    "TreeNet(factory, split=...)": "split tree",
}
MEANT = {alias: keyword for keyword, aliases in ALIASES.items() for alias in aliases.split()}
# What fit does without being asked, or not at all.
ABSENT = {
    "early_stopping patience callbacks n_iter_no_change tol": "training goes on to its last iteration; "
    "log={'evaluate_every': ...} shows how it goes, and Ctrl-C saves and returns the run so far",
    "metrics compile scoring": "all that the problem has is measured, and in run.result",
    "shuffle drop_last": "examples are always drawn anew for each batch, by the seed",
    "amp fp16 bf16": "precision='bf16' computes in bfloat16",
    "dropout": "dropout is a layer of the network",
    "deterministic": "the same call always gives the same bits",
}
NEAR = 0.75  # from here on words are spelt alike: preprocess and epochs are not
_KEYS = re.compile(
    r"(?<![\w./])(?:(?:eval\.views|optim\.parameter_groups)(?=\.\w)"  # and what is in them
    r"|(?:optim|data|engine|eval|log|sampling|teacher)(?:\.schedule)?\.\w+(?![\w/]|\.\w))"
)


CONSTANTS = {"true": "True", "false": "False", "null": "None"}
_ASSIGNED = re.compile(r"((?<![\w./])(?:optim|data|engine|eval|loss)\.\w+=)(true|false|null)\b")
_LOSS = re.compile(rf"(?<![\w.])loss(?:\.name)?=({'|'.join(LOSSES)})\b((?: loss\.\w+=[\w.+-]*\w)*)")


def check_keywords(options: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raises for a keyword that the function does not have, and names the one that is meant."""
    keywords = list(inspect.signature(function).parameters)
    for name in options:
        if name in keywords:
            continue
        meant = "epochs" if meaning(name) == EPOCHS else MEANT.get(name) or translate_keys(meaning(name) or "")
        near = [meant] if meant else difflib.get_close_matches(name, [*keywords, *MEANT], 1, NEAR)
        hint = f"did you mean {MEANT.get(near[0], near[0])}?" if near else f"there are {', '.join(keywords)}"
        hint = next((reason for words, reason in ABSENT.items() if name in words.split()), hint)
        raise UserError(f"{function.__name__} has no keyword {name!r}: {hint}")


def translate_keys(message: str) -> str:
    """A message about config keys, with the keywords of fit in their place."""

    def translate(match: re.Match[str]) -> str:
        section, _, name = match[0].rpartition(".")
        if match[0] not in schema.all_keys():
            return match[0]
        if section in ("optim.schedule", "log", "sampling", "teacher"):
            keyword = section.removeprefix("optim.")
            return keyword if name == "name" else f"{keyword}={{{name!r}: ...}}"
        return "optimizer" if match[0] == "optim.name" else name

    def call(match: re.Match[str]) -> str:
        options = (option.removeprefix("loss.").partition("=") for option in match[2].split())
        given = ", ".join(f"{name}={CONSTANTS.get(value, value)}" for name, _, value in options)
        return f"mheads.losses.{match[1]}({given})"

    message = _ASSIGNED.sub(lambda match: match[1] + CONSTANTS[match[2]], _LOSS.sub(call, message))
    return _KEYS.sub(translate, message).replace("model_args.", "the factory's ")


@contextmanager
def speaking_python() -> Iterator[None]:
    """Inside, messages about a user's mistakes name keywords of Python instead of config keys."""
    try:
        with without_force(), speaking(translate_keys):
            yield
    except UserError as error:
        error.args, error.hint = (translate_keys(str(error)),), None
        raise
