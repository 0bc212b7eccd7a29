"""Solvers as the `optim`, `log` and `seed` of a config."""

from __future__ import annotations

from typing import Any

from mheads.caffe.prototxt import Solver

TYPES = ("SGD", "Nesterov", "Adam", "AdaGrad", "RMSProp", "AdaDelta")
POLICIES = ("fixed", "step", "exp", "inv", "multistep", "poly", "sigmoid")
ADAPTIVE = {"Adam": "adam", "AdaGrad": "adagrad", "RMSProp": "rmsprop", "AdaDelta": "adadelta"}


def optim_of(solver: Solver) -> dict[str, Any]:
    """The `optim` section, without the size of a batch, which the net says."""
    s, kind = solver.message, _type(solver)
    _need(solver, "base_lr", s.base_lr > 0, "give a learning rate above 0")
    _need(solver, "max_iter", s.max_iter > 0, "give the number of iterations, above 0")
    for key in ("momentum", "momentum2", "rms_decay"):
        _check(solver, key, 0 <= getattr(s, key) < 1, "give 0 or more, below 1")
    _check(solver, "weight_decay", s.weight_decay >= 0, "give 0 or more")
    _check(solver, "delta", s.delta > 0, "give a number above 0")
    _check(solver, "iter_size", s.iter_size > 0, "give 1 or more")
    section: dict[str, Any] = {"lr": s.base_lr, "momentum": s.momentum, "weight_decay": s.weight_decay}
    if kind in ADAPTIVE:
        section = {"name": ADAPTIVE[kind], **section, "delta": s.delta}
        if kind == "Adam":
            section["momentum2"] = s.momentum2
        elif kind == "RMSProp":
            section["rms_decay"] = s.rms_decay
        if kind in ("AdaGrad", "RMSProp") and s.momentum:
            raise solver.refuse("momentum", f"{s.momentum:g}: {kind} has none: leave it out")
    else:
        section["caffe_momentum"] = True
        if kind == "Nesterov" and s.momentum:  # without momentum it is plain SGD
            section["nesterov"] = True
    if s.regularization_type not in ("L1", "L2"):
        raise solver.refuse("regularization_type", f"{s.regularization_type!r}: it is L1 or L2")
    if s.regularization_type == "L1":
        section["regularization"] = "l1"
    if s.iter_size > 1:
        section["accumulate"] = s.iter_size
    if s.clip_gradients >= 0:
        _check(
            solver, "clip_gradients", s.clip_gradients > 0, "0 would leave no gradient: give a norm, or leave it out"
        )
        section["clip"] = s.clip_gradients / s.iter_size  # Caffe clips the sum over iter_size batches, before its mean
    return {**section, "iterations": s.max_iter, "schedule": _schedule(solver)}


def _type(solver: Solver) -> str:
    s = solver.message
    if s.HasField("solver_type"):  # as it was said once
        if s.HasField("type"):
            raise solver.refuse("solver_type", "type is given too: leave solver_type out")
        return TYPES[(0, 1, 3, 4, 5, 2)[s.solver_type]]
    kind = next((known for known in TYPES if known.lower() == s.type.lower()), None)
    if kind is None:
        raise solver.refuse("type", f"there is no solver {s.type!r}: it is one of {', '.join(TYPES)}")
    return kind


def _schedule(solver: Solver) -> dict[str, Any]:
    s = solver.message
    policy = s.lr_policy
    if policy not in POLICIES:
        problem = f"there is no policy {policy!r}" if policy else "it is missing"
        raise solver.refuse("lr_policy", f"{problem}: give one of {', '.join(POLICIES)}")
    if policy == "fixed":
        return {"name": "constant"}
    if policy in ("step", "exp", "inv", "multistep", "sigmoid"):
        _need(solver, "gamma", policy == "sigmoid" or s.gamma > 0, f"lr_policy {policy} takes one above 0")
    if policy in ("step", "sigmoid"):
        _need(solver, "stepsize", s.stepsize > 0, f"lr_policy {policy} takes one of 1 or more")
    if policy in ("inv", "poly"):
        _need(solver, "power", True, f"lr_policy {policy} takes one")
    if policy == "multistep":
        _need(solver, "stepvalue", bool(s.stepvalue), "lr_policy multistep takes one or more")
        if list(s.stepvalue) != sorted(s.stepvalue):
            raise solver.refuse("stepvalue", f"{list(s.stepvalue)} must rise")
    return {
        "name": policy,
        **{
            "step": {"every": s.stepsize, "gamma": s.gamma},
            "exp": {"gamma": s.gamma},
            "inv": {"gamma": s.gamma, "power": s.power},
            "multistep": {"at": list(s.stepvalue), "gamma": s.gamma},
            "poly": {"power": s.power},
            "sigmoid": {"every": s.stepsize, "slope": s.gamma},
        }[policy],
    }


def log_of(solver: Solver) -> dict[str, Any]:
    """The `log` section. A display, snapshot or test_interval of 0 means none, and there is one at the end."""
    s = solver.message
    for key in ("display", "test_interval", "snapshot"):
        _check(solver, key, getattr(s, key) >= 0, "give 0 or more")
    section = {"evaluate_every": s.test_interval, "checkpoint_every": s.snapshot}
    return {"every": s.display, **section} if s.display else section


def seed_of(solver: Solver) -> int | None:
    seed = solver.message.random_seed
    return seed if seed >= 0 else None


def _need(solver: Solver, key: str, fine: bool, what: str) -> None:
    value = getattr(solver.message, key)
    given = bool(value) if key == "stepvalue" else solver.message.HasField(key)
    if not given:
        raise solver.refuse(key, f"it is missing: {what}")
    _check(solver, key, fine, what)


def _check(solver: Solver, key: str, fine: bool, what: str) -> None:
    value = getattr(solver.message, key)
    if not fine or (isinstance(value, float) and abs(value) == float("inf")):
        raise solver.refuse(key, f"{value}: {what}")
