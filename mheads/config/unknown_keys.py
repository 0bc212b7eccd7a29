"""Names that other libraries use, and what they are called here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from mheads.optim.optimizers import OPTIMIZERS
from mheads.optim.schedules import SCHEDULES

EPOCHS = "optim.iterations, where iterations = epochs x examples / optim.batch_size"

OTHER_NAMES = {
    EPOCHS: "epochs epoch num_epochs max_epochs n_epochs",
    "optim.iterations": "steps max_steps num_steps max_iter iters num_iterations total_steps max_iterations "
    "steps_per_epoch",
    f"optim.name: {', '.join(OPTIMIZERS)}": "optimizer optimiser solver",
    "optim.clip": "clip_gradients gradient_clip_val max_grad_norm clipnorm clipvalue grad_clip clip_grad_norm",
    "optim.accumulate": "iter_size gradient_accumulation accumulate_grad_batches gradient_accumulation_steps",
    "optim.lr": "learning_rate base_lr rate learning_rate_init eta",
    f"optim.schedule.name: {', '.join(SCHEDULES)}": "lr_schedule lr_scheduler scheduler lr_policy",
    "optim.schedule.every": "stepsize step_size",
    "optim.schedule.at": "milestones",
    "optim.schedule.warmup": "warmup_steps warmup_ratio",
    "optim.weight_decay": "wd decay l2 alpha",
    "optim.batch_size": "batch bs batchsize minibatch_size per_device_train_batch_size",
    "members": "num_members ensemble_size num_models n_estimators num_heads heads",
    "split": "tree branch",
    "model": "network net arch architecture backbone",
    "data.name (and data.path for files of your own)": "dataset",
    "data.path": "data_dir",
    "data.path, or the option --folder for the run folder": "folder",
    "data.validation": "val",
    "data.mirror": "flip hflip",
    "data.normalize": "normalise",
    "engine.workers": "threads num_threads num_workers n_jobs",
    "sampling.name=bagging": "bagging bootstrap",
    "loss.name": "criterion objective",
    "sampling=file, with sampling.path: how much each member learns from each example": "sample_weight class_weight",
    "optim.momentum and optim.momentum2, of optim.name=adam": "betas",
    "optim.momentum": "beta_1 beta1",
    "optim.momentum2": "beta_2 beta2",
    "optim.regularization": "penalty regularizer",
    "optim.delta, of optim.name=adam": "eps",
    "optim.schedule.warmup, in iterations": "warmup_epochs",
    "data.validation, a number of examples": "validation_split validation_fraction val_split",
    "data.normalize and data.scale": "preprocess preprocessing",
    "data.pad and data.mirror": "augment augmentation augmentations transform transforms",
    "log.evaluate_every, to see how training goes: nothing else stops it, but Ctrl-C saves": "early_stopping patience "
    "callbacks",
    "log.evaluate_every: all that the problem has is measured": "metrics",
    "seed: examples are always drawn anew for each batch, by it": "shuffle",
    "device": "accelerator devices",
    "the option --folder": "output_dir run out output",
    "loss.base_loss={name: cross_entropy, smoothing: 0.1}": "label_smoothing",
    "data.problem": "task objective_type",
    "seed": "random_state random_seed",
    "device=cuda": "gpu cuda",
    "model_args, if the network's factory has such an argument: dropout is a layer of the network": "dropout",
    "model_args.classes": "classes num_classes",
    "log.every": "log_every log_every_n_steps logging_steps",
    "log.checkpoint_every": "save_every save_steps",
    "log.evaluate_every": "eval_every check_val_every_n_epoch val_check_interval eval_steps validation_freq",
    "init, the folder of a run to start from": "pretrained checkpoint",
}
MEANINGS = {name: meaning for meaning, names in OTHER_NAMES.items() for name in names.split()}


def meaning(name: str) -> str | None:
    """What a key of another library is called here; None if it is not known."""
    return MEANINGS.get(name.lower().replace("-", "_"))


def suggest(where: Sequence[str], known: Sequence[str]) -> str:
    """What is meant by an unknown key: one of that name in another section, of that meaning, or spelt alike."""
    section, last = ".".join(where[:-1]), where[-1]
    best = [key for key in known if key.rpartition(".")[2] == last]
    if not best and (meant := meaning(last)):
        return f"here it is {meant}"
    beside = [key for key in known if key.startswith(f"{section}.")] if section else []
    sections = sorted({key.rpartition(".")[0] for key in known if "." in key})
    best = best or difflib.get_close_matches(".".join(where), beside or [*known, *sections], 1, 0.8 if beside else 0.4)
    return f"did you mean {' or '.join(map(repr, best))}?" if best else f"there are {', '.join(beside or known)}"
