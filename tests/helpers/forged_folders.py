"""Run folders as somebody might forge them: one file has other contents, and all checksums are right. Each by a number.

Every key of every file has its turn, each time with another value, or without one.
"""

import copy
import hashlib
import io
import json
import math
import random

import numpy as np
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save

from mheads.runs.manifest import Manifest

ODD = [
    None, "", "text", "0", "\0", "../..", -1, 0, 1, 3, 2.5, 10**20, 10**400, -(10**9), math.nan, math.inf, 1e308, True,
    [], {}, [[]], [1, 2, 3], ["a", None], [None], {"a": 1}, {"a": {"b": None}}, [[1], [2, 3]], "x" * 3000,
]  # fmt: skip
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
FILES = (
    "config.yaml", "identity.json", "result.json", "manifest.json", "metrics.jsonl", "assignments.npz",
    "data.safetensors", "facts", "model.safetensors", "state.json", "tensors.safetensors",
)  # fmt: skip


def forge(run, number):
    """Forges a file of the run; the same number does the same. Returns its name and what was done."""
    rng = random.Random(number)
    name = FILES[number % len(FILES)]
    turn = number // len(FILES)
    if name in ("state.json", "tensors.safetensors"):
        return name, _forge_checkpoint(run, name, turn, rng)
    path = run / ("data.safetensors" if name == "facts" else name)
    content, done = _forged(path, name, turn, rng)
    if name == "manifest.json":
        path.write_bytes(content)
    else:
        Manifest(run).expect(path, content)
        path.write_bytes(content)
    return path.name, done


def _forged(path, name, turn, rng):
    if rng.random() < 0.03:
        return rng.choice([b"", b"null", b"[]", b"{", b"\xff\xfe\0", b"PK\x03\x04", b"1e999"]), "another file"
    if name == "config.yaml":
        tree, done = _odd(yaml.safe_load(path.read_text()), turn, rng)
        return yaml.safe_dump(tree).encode(), done
    if name == "manifest.json":
        tree, done = _odd(json.loads(path.read_text()), turn, rng)
        if isinstance(tree, dict) and rng.random() < 0.7:
            tree["sha256"] = hashlib.sha256(json.dumps(tree.get("files"), sort_keys=True).encode()).hexdigest()
        return json.dumps(tree).encode(), done
    if name == "metrics.jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        i = rng.randrange(len(lines))
        lines[i], done = _odd(lines[i], turn, rng)
        return "".join(f"{json.dumps(line)}\n" for line in lines).encode(), f"line {i + 1}: {done}"
    if name == "assignments.npz":
        with np.load(path) as file:
            return _forge_arrays({key: file[key] for key in file}, turn, rng)
    if name == "facts":
        with safe_open(path, "pt") as file:
            tensors, facts = {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["facts"])  # noqa: SIM118
        facts, done = _odd(facts, turn, rng)
        return save(tensors, {"facts": json.dumps(facts)}), done
    if name.endswith(".safetensors"):
        with safe_open(path, "pt") as file:
            tensors, facts = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
        done = _forge_tensors(tensors, turn, rng)
        return save(tensors, facts if rng.random() < 0.95 else None), done
    tree, done = _odd(json.loads(path.read_text()), turn, rng)
    return json.dumps(tree).encode(), done


def _forge_checkpoint(run, name, turn, rng):
    """Forges the newest one."""
    path = max((run / "checkpoints").iterdir())
    state = json.loads((path / "state.json").read_text())["state"]
    if name == "state.json":
        state, done = _odd(state, turn, rng)
    else:
        with safe_open(path / name, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        done = _forge_tensors(tensors, turn, rng)
        (path / name).write_bytes(save(tensors))
    digest = hashlib.sha256((path / "tensors.safetensors").read_bytes()).hexdigest()
    sha256 = hashlib.sha256(f"{digest} {json.dumps(state, sort_keys=True)}".encode()).hexdigest()
    (path / "state.json").write_text(json.dumps({"sha256": sha256, "state": state}))
    return done


def _places(tree, before=()):
    """Where something stands in nested dicts and lists."""
    found = [before] if before else []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        found += _places(value, (*before, key))
    return found


def _odd(tree, turn, rng):
    """A copy with an odd value in one place, or without it."""
    tree = copy.deepcopy(tree)
    places = _places(tree)
    random.Random(0).shuffle(places)
    *way, last = places[turn % len(places)]
    inside = tree
    for key in way:
        inside = inside[key]
    if rng.random() < 0.2:
        del inside[last]
        return tree, f"without {(*way, last)}"
    inside[last] = value = rng.choice(ODD)
    return tree, f"{(*way, last)} = {str(value)[:40]!r}"


def _forge_tensors(tensors, turn, rng):
    name = sorted(tensors)[turn % len(tensors)] if tensors else "none"
    kind = rng.randrange(6)
    if kind == 0 or not tensors:
        tensors.pop(name, None)
        return f"without {name}"
    tensor = tensors[name]
    if kind == 1:
        tensors[name] = tensor[None].contiguous()
    elif kind == 2:
        tensors[name] = torch.zeros(rng.choice([(), (0,), (1,), (3, 1), (2, 3, 4, 5, 1)]))
    elif kind == 3:
        tensors[name] = tensor.to(rng.choice(DTYPES))
    elif kind == 4:
        tensors[name] = torch.full_like(tensor.float(), rng.choice([math.nan, math.inf, -1.0, 1e30]))
    else:
        tensors[f"other.{name}"] = tensors.pop(name)
    return f"{name}: {list(tensor.shape)} {tensor.dtype} changed ({kind})"


def _forge_arrays(arrays, turn, rng):
    name = sorted(arrays)[turn % len(arrays)]
    array = arrays[name]
    kind = rng.randrange(8)
    if kind == 0:
        del arrays[name]
    else:
        arrays[name] = [
            array[None],
            np.array([None, {"a": 1}], dtype=object),
            array.astype(str),
            np.full(array.shape, math.nan),
            -array - 1,
            array.astype(complex),
            np.zeros((0,)),
        ][kind - 1]
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue(), f"{name} changed ({kind})"
