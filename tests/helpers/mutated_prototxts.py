# ruff: noqa: E501
"""Configs as nobody would write them: recipes mutated as text and as trees, each by a number."""

import random
from functools import cache
from typing import Any

import yaml

from mheads.config import read as configs
from mheads.config import schema
from mheads.config.schema import Config

DEEP = 3000
KEYS = schema.all_keys()
ODD = [
    "0", "-1", "1", "2", "0.5", "1e-320", "1e308", "1e400", "-1e400", ".inf", "-.inf", ".nan", "0x10", "0o17", "1_000",
    "1:30", "9" * 25, "9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, "0." + "1" * 5000, "1e" + "9" * 400, "2147483648",
    "9223372036854775808", "yes", "null", "''", "' '", "text", "conv1", "mcl", "auto", "random", "same", "x" * 10000,
    '"\\ud800"', '"\\0"', '"\\e[2J"', '"a\\nb"', "é", "2020-01-01", "2020-01-01 10:00:00", "!!binary aGVsbG8=",
    "!!set {a, b}", "!!omap [a: 1]", "!!python/object/apply:os.getcwd []", "!unknown 1", "[]", "{}", "[1, 2]", "[[0], [1]]",
    "{a: 1}", "{1: 2}", "{null: 1}", "{[1]: 2}", "{? {a: b} : c}", "[" * DEEP + "]" * DEEP, "{a: " * DEEP + "}" * DEEP,
    "[" * 90 + "]" * 90, "{conv1: " * 90 + "2" + "}" * 90, "&a [*a]", "&a {a: *a}", "*nowhere", "{<<: {a: 1}}", "{<<: 1}",
    "[&a [1,1,1,1,1,1,1,1,1], &b [*a,*a,*a,*a,*a,*a,*a,*a,*a], &c [*b,*b,*b,*b,*b,*b,*b,*b,*b], "
    "&d [*c,*c,*c,*c,*c,*c,*c,*c,*c], &e [*d,*d,*d,*d,*d,*d,*d,*d,*d], &f [*e,*e,*e,*e,*e,*e,*e,*e,*e], "
    "&g [*f,*f,*f,*f,*f,*f,*f,*f,*f], &h [*g,*g,*g,*g,*g,*g,*g,*g,*g], [*h,*h,*h,*h,*h,*h,*h,*h,*h]]",
    "os:abort", "sys:exit", "builtins:exec", "json:loads", "nowhere:factory", ":", "a:", ":b", "..:x", "a..b:c", "mheads.networks:digits",
    "torch.nn:Identity", "builtins:int", "builtins:print", "{conv1: [{conv2: 2}, 2]}", "{conv1: 4}", "{conv1: -1}", "{conv1: 0}",
    "{conv1: 1000000000}", "[2, 2]", "[[[4]]]", "{trunk: 0}", "{conv1/0: 99}", "100000", "1000000000", "99999999999999999999",
    "{name: mcl}", "{name: {name: mcl}}", "[a, b", "{a", "'", "- 1", "%", "@", "`", "\t1",
]  # fmt: skip
# What the type allows, and nobody tried.
LIKELY = {
    bool: ["true", "false"],
    int: ["0", "1", "2", "3", "7", "99", "1000", "65536", "1000000", "2147483648", "1000000000000", "9223372036854775807",
          "9223372036854775808", "1" + "0" * 30],
    float: ["0.0", "5e-324", "1.0e-30", "1.0e-8", "0.5", "0.9999999", "1.0", "1000.0", "1.0e+30", "1.0e+308"],
    str: ["random", "same", "auto", "cpu", "cuda:7", "adamw", "mcl", "bagging", "subset", "specialists", "score_averaged",
          "prob_averaged", "mean_image", "mean_std", "cosine", "plateau", "step", "multistep", "cifar10", "folder", "npz",
          "caffenet", "sys:exit", "builtins:int", "torch.nn:Identity", "torch:zeros", "../..", "/", "/dev/null"],
    list: ["[0]", "[-1]", "[3, 1, 2]", "[1, 1]", "[" + "9, " * 200 + "]", "[[0, 1], [2], [3], [4]]", "[[], [], [], []]"],
    dict: ["{classes: 0}", "{classes: -1}", "{channels: 0}", "{channels: 3}", "{classes: 10, channels: 1}", "{classes: 1.5}",
           "{channels: 1000000000000}", "{channels: 100000}", "{classes: 10, x: 1}", "{classes: '10'}"],
    type(None): ["conv1", "conv2", "ip1", "1", "99", "{conv1: [{conv2: 2}, 2]}", "[2, 2]", "[{conv2: 3}, 1]", "[[2, 1], 1]",
                 "{conv1: {conv2: {ip1: 4}}}", "{conv1: " * 40 + "2" + "}" * 40, "nowhere.npz", "."],
}  # fmt: skip


def mutated(number: int) -> str:
    """The text of a config file. The same number gives the same text."""
    rng = random.Random(number)
    name = rng.choice(["digits", "digits", "digits", *configs.recipes()])
    keys, values = _recipe(name)
    values = dict(values)
    if rng.random() < 0.8:
        for key in rng.sample(sorted(keys), rng.choice([1, 1, 1, 2, 3])):
            values[key] = rng.choice(LIKELY[type(keys[key])] if rng.random() < 0.6 else ODD)
    if rng.random() < 0.1:  # a section, or an argument
        values[rng.choice(["loss", "optim", "data", "optim.schedule", "model_args.classes", "x", "log.x.y"])] = (
            rng.choice(ODD)
        )
    text = _render(values)
    if rng.random() < 0.25:
        for _ in range(rng.randint(1, 4)):
            text = _mutate_characters(text, rng)
    return text


@cache
def _recipe(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """All keys with their values, and as YAML those that the recipe sets."""
    usual, keys = schema.flatten(Config()), schema.flatten(configs.load(name))
    own = {key: value for key, value in keys.items() if value != usual[key]}
    return keys, {k: yaml.safe_dump({"x": v}, default_flow_style=True, width=1e9)[4:-2] for k, v in own.items()}


def _render(values: dict[str, str]) -> str:
    """Dotted keys as sections; what does not fit together stays wrong."""
    lines, open_sections = [], []
    order = {key: number for number, key in enumerate(KEYS)}
    for key, value in sorted(values.items(), key=lambda item: order.get(item[0], 0)):
        *sections, last = key.split(".")
        for depth, section in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                lines.append("  " * depth + f"{section}:")
        open_sections = sections
        lines.append("  " * len(sections) + f"{last}: {value}")
    return "\n".join(lines) + "\n"


def _mutate_characters(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    kind = rng.randrange(5)
    if kind == 0:
        return text[:at] + text[at + rng.randint(1, 5) :]
    if kind == 1:
        return text[:at] + rng.choice("\0\t\n :{}[]&*!|>%@`'\"#-,?\x1b\x85\ufeff\u2028é0123456789eE.") + text[at:]
    if kind == 2:
        return text[:at]
    if kind == 3:
        return text[:at] + text[at : at + 40] * rng.randint(2, 4) + text[at + 40 :]
    line = text[:at].count("\n")
    lines = text.splitlines(keepends=True)
    return "".join(lines[:line] + lines[line + 1 :])
