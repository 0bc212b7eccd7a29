"""Checks the other data of a suite, `ood` and `shifted`, before anything is trained."""

from __future__ import annotations

from mheads.api.examples_of_run import load_other_data, load_own_data, refuse_own_data
from mheads.common.errors import UserError
from mheads.config.schema import Config
from mheads.problems import is_single_label
from mheads.suites.suite import Suite


def check_other_data(suite: Suite, config: Config) -> None:
    """Raises an error for other data that a run of this config could not be measured on."""
    for option, keys in (("ood", suite.ood), ("shifted", suite.shifted)):
        if not keys:
            continue
        other, data = load_other_data(config, keys)
        refuse_own_data(option, keys, config, other)
        try:
            own = load_own_data(config)
        except UserError:  # which its training tells
            return
        if not is_single_label(own.problem):
            raise UserError(
                f"--{option} {' '.join(keys)}: other data are for runs whose examples have one class each, and "
                f"{own.name} is {own.problem.name}; leave it out"
            )
        if tuple(data.test.shape) != tuple(own.test.shape):
            raise UserError(
                f"--{option} {' '.join(keys)}: {data.name} has examples of shape {tuple(data.test.shape)}, and "
                f"{own.name} of {tuple(own.test.shape)}: give examples of that shape (data.resize and data.crop "
                "scale images in files)"
            )
