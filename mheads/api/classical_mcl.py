"""Classical Multiple Choice Learning: rounds of ordinary runs, in which each member trains on examples of its own.

The first examples of each member are a cluster of the inputs. After each round every training example goes to the
member with the lowest loss on it, and the next round starts from the weights of the one before. A folder holds

    classical.json           a line of figures for each round
    round0.npz, round0/      the sample weights that a round trains on, and its run; then round1.npz, round1/, ...

Everything follows from the config and is written whole or not at all: the same command resumes where it was killed.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mheads.common import atomic_files, seeds
from mheads.common.errors import UserError
from mheads.common.progress import Mute, Watcher, forward_warnings
from mheads.common.safe_yaml import seal, unseal
from mheads.common.signals import handling
from mheads.config import schema
from mheads.config.schema import Config, Sampling
from mheads.data import Data, read_sample_weights
from mheads.data.batches import evaluation_batches
from mheads.data.clusters import input_distances
from mheads.engine.measure import EVALUATION_ROWS
from mheads.losses.winners import assign
from mheads.problems.baselines import top
from mheads.runs.folder import RunFolder
from mheads.training.build_from_config import build_loss, build_net, load_data
from mheads.training.experiment import Experiment, assemble_experiment, build_experiment
from mheads.training.init_weights import digest_init
from mheads.training.loop import stop_at_once, train

ROUNDS, TOLERANCE = 10, 0.001
SUMMARY = "classical.json"
Watching = Callable[[str], Watcher]  # who watches, by what it is called


def train_rounds(
    config: Config,
    folder: Path,
    watching: Watching,
    rounds: int = ROUNDS,
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """Trains until fewer than a share `tolerance` of the examples change their member, or for so many rounds.

    Returns what classical.json holds. A folder that has it resumes from there.
    """
    _check_config(config)
    known = read_rounds(folder, config)
    if not known and not RunFolder(folder / "round0").exists():
        atomic_files.remove(folder / "round0.npz")  # perhaps of another config
    with handling(stop_at_once, (signal.SIGTERM,)):  # nothing is lost between runs
        data = load_data(config)
        _check_data(config, data)
        watching("start").say(f"rounds in {folder}")
        first = folder / "round0.npz"
        if not first.exists():
            watching("start").say(f"clustering {len(data.train):,} inputs by k-means")
            owners = _assign_clusters(config, data)
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder, config, [])
            _write_owners(first, owners, config.members)
        entries: list[dict[str, Any]] = []
        for number in range(rounds):
            watch = watching(f"round {number}")
            with forward_warnings(Mute() if number else watch):
                experiment = build_experiment(_make_round_config(config, folder, number), data)
            run = RunFolder(folder / f"round{number}")
            result = train(experiment, run, watch)
            following = folder / f"round{number + 1}.npz"
            if number < len(known) and following.exists():
                entry = known[number]
            else:
                run.load_weights(experiment.net, watch.warn, final=True)
                entry = _reassign(experiment, folder, number, result, watch)
                _write(folder, config, [*entries, entry])
            entries.append(entry)
            watch.say(_describe(entry))
            if is_stable(entry, tolerance):
                break
    return _summary(config, entries)


def is_stable(entry: dict[str, Any], tolerance: float = TOLERANCE) -> bool:
    """Whether so few examples changed their member after this round that it was the last."""
    changed: int = entry["changed"]
    total: int = sum(entry["examples"])
    return changed == 0 or changed < tolerance * total


def share_out(losses: Tensor, ties: Tensor, least: int) -> Tensor:
    """The member of each example, int64 [N]: the one of the lowest loss [M, N]; equal losses are ordered by `ties`.

    A member that would have fewer than `least` examples also takes those on which the lowest loss is largest, from
    members that have more than that.
    """
    owners = assign(losses, 1, ties=ties).argmax(0)
    counts = owners.bincount(minlength=len(losses)).tolist()
    hardest = iter(losses.min(0).values.argsort(descending=True, stable=True).tolist())
    for m in range(len(losses)):
        while counts[m] < least:
            i = next(hardest)
            if counts[owners[i]] > least:
                counts[owners[i]] -= 1
                counts[m] += 1
                owners[i] = m
    return owners


def _check_config(config: Config) -> None:
    """Raises for what has no meaning where each member trains by itself on examples of its own."""
    for key, value, wanted in (
        ("loss.name", config.loss.name, "independent"),
        ("sampling.name", config.sampling.name, "full"),
        ("pretrain", config.pretrain, 0),
    ):
        if value != wanted:
            raise UserError(
                f"{key} = {value}: in classical MCL each member trains by itself on the examples that it was given; "
                f"leave {key} at {wanted}"
                + (", and start from a trained run with init=RUN" if key == "pretrain" else "")
            )
    if config.members < 2:
        raise UserError("members = 1: there is nothing to choose from; give 2 members or more")


def _check_data(config: Config, data: Data) -> None:
    if len(data.train) < config.members:
        raise UserError(f"{data.name} has {len(data.train)} training examples for {config.members} members: too few")
    if data.train.read_targets(np.arange(1), None).counts is not None:
        raise UserError(f"{data.name} has examples of several rows each: these cannot go to one member or another")


def _make_round_config(config: Config, folder: Path, number: int) -> Config:
    """The config of a round: an ordinary run on sample weights from a file, from the weights of the round before."""
    folder = folder.absolute()
    update: dict[str, Any] = {
        "sampling": Sampling.model_validate({"name": "file", "path": folder / f"round{number}.npz"})
    }
    if number:
        update |= {"init": str(folder / f"round{number - 1}"), "init_map": {}, "init_members": None}
        update["seed"] = seeds.derive(config.seed, "round", number) % 2**31  # another order of the examples
    return config.model_copy(update=update)


# Who gets which example.


def _assign_clusters(config: Config, data: Data) -> Tensor:
    """The first assignment. Parts that do not fit each other raise here, before anything is written."""
    net, loss = build_net(config), build_loss(config)
    distances = input_distances(data.train, data.preprocess, config.members, config.seed)
    owners = share_out(distances, _ties(config, -1, distances), _least(config, distances.shape[1]))
    trial = config.model_copy(update={"sampling": Sampling(name="array")})
    with forward_warnings(Mute()):  # the first round gives them again
        assemble_experiment(trial, net, loss, data, array=_one_hot(owners, config.members))
    return owners


def _reassign(
    experiment: Experiment, folder: Path, number: int, result: dict[str, Any], watch: Watcher
) -> dict[str, Any]:
    """Writes the sample weights of the next round, and returns the entry of this one in classical.json."""
    config = experiment.config
    before = torch.from_numpy(read_sample_weights(folder / f"round{number}.npz").argmax(0))
    losses = train_losses(experiment, watch)
    after = share_out(losses, _ties(config, number, losses), _least(config, len(before)))
    _write_owners(folder / f"round{number + 1}.npz", after, len(losses))
    return {
        "round": number,
        **{key: result[key] for key in ("problem", "split", "members", "single", "ensemble_mean", "oracle")},
        "top_m": top(result, config.members),
        "examples": before.bincount(minlength=len(losses)).tolist(),
        "objective": losses.double().min(0).values.sum().item(),
        "changed": int((before != after).sum()),
        "iterations": result["iterations"],
        "seconds": result["seconds"],
    }


def train_losses(experiment: Experiment, watch: Watcher) -> Tensor:
    """The losses [M, N] of all members on all training examples, which are read without chance."""
    data, parts = experiment.data, []
    readers = evaluation_batches(data.train, data.preprocess, EVALUATION_ROWS)
    with closing(experiment.make_engine()) as engine, watch.evaluating(len(data.train)) as advance:
        for outputs, targets in engine.outputs(readers):
            with torch.no_grad():
                parts.append(experiment.loss(outputs, targets).losses.cpu())
            advance(parts[-1].shape[1])
    losses = torch.cat(parts, 1)
    if not losses.isfinite().all():
        raise UserError("losses on the training examples became infinite or NaN: try a lower optim.lr")
    return losses


def _ties(config: Config, number: int, losses: Tensor) -> Tensor:
    return torch.rand(losses.shape, generator=seeds.generator(config.seed, "reassign", number))


def _least(config: Config, num_examples: int) -> int:
    """How many examples a member keeps, so that on average one of every batch is its own.

    Sample weights have mean 1: the fewer examples a member has, the more each weighs. With this many, none weighs more
    than a whole batch, and the learning rate keeps its meaning.
    """
    rows = config.optim.batch_size * config.optim.accumulate
    return max(1, min(math.ceil(num_examples / rows), num_examples // config.members))


# The folder.


def _one_hot(owners: Tensor, members: int) -> np.ndarray:
    return (owners == torch.arange(members)[:, None]).numpy()


def _write_owners(path: Path, owners: Tensor, members: int) -> None:
    sample_weights = _one_hot(owners, members)
    atomic_files.write_atomically(path, lambda file: np.savez_compressed(file, sample_weights=sample_weights))


def read_rounds(folder: Path, config: Config) -> list[dict[str, Any]]:
    """The rounds that classical.json holds; raises for a folder of anything else."""
    path = folder / SUMMARY
    if not path.exists():
        begun = (atomic_files.hidden_name(path).name,)
        if folder.exists() and not (folder.is_dir() and all(entry.name in begun for entry in folder.iterdir())):
            raise UserError(f"{folder} is not empty and has no {SUMMARY}: give another --folder")
        return []
    try:
        content = unseal(atomic_files.read(path))
        known, old = list(content["rounds"]), dict(content["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): bring it back, or give another --folder") from error
    new, default = schema.flatten(config), schema.flatten(Config())
    lines = [
        f"  {k}: {old.get(k, default[k])!r} in the folder, {new[k]!r} now"
        for k in new
        if not schema.same(k, old.get(k, default[k]), new[k]) and schema.decides_result(k, config)
        if k != "init" or not _same_start(folder, config)
    ]
    if lines and not RunFolder(folder / "round0").exists():  # it failed before there was anything to keep
        return []
    if lines:
        raise UserError("\n".join([f"{folder} holds rounds of another config:", *lines, "give another --folder"]))
    return known


def _same_start(folder: Path, config: Config) -> bool:
    """Whether the first round started from the very weights that `init` names, wherever they lay then."""
    run, init = RunFolder(folder / "round0"), Path(config.init)
    if not run.exists() or not init.exists():
        return False
    return run.read_identity().get("start") == digest_init(config.init)


def _summary(config: Config, entries: list[dict[str, Any]]) -> dict[str, Any]:
    decisive = {k: v for k, v in schema.flatten(config).items() if schema.decides_result(k, config)}
    return {"config": decisive, "rounds": entries}


def _write(folder: Path, config: Config, entries: list[dict[str, Any]]) -> None:
    atomic_files.write_atomically(folder / SUMMARY, seal(_summary(config, entries), indent=1))


def _describe(entry: dict[str, Any]) -> str:
    changed = f"{entry['changed']:,} of {sum(entry['examples']):,} examples change their member"
    return f"round {entry['round']}: objective {entry['objective']:,.6g}; {changed}"
