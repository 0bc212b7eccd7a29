"""What a network and a loss are: their structure and their code, so that a run is not taken for another's.

A description is plain data, kept readable in the run folder:

    structure(network)   {"conv2": "Conv2d(16, 32, kernel_size=(3, 3), stride=(1, 1)); weight float32[32, 16, 3, 3]"}
    code(factory)        {"my_nets:small": {"source": ["def small():", ...], "values": {"K": "16"}}}

`code` follows what the user's own functions and classes use: other functions and classes of theirs, global constants,
what closures and partials hold. Each is its source without comments and docstrings, or the digest of its instructions
where there is no source (`"code": "3.11 9f86d081884c7d65"`). Torch, mheads and installed packages are not followed.
"""

from __future__ import annotations

import ast
import difflib
import dis
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
import textwrap
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Code = dict[str, dict[str, Any]]
_PARSER = threading.Lock()  # Python 3.11 counts the depth of its parser for all threads together
_ARGUMENTS = "arguments of "  # of a partial
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def structure(network: nn.Module) -> dict[str, str]:
    """A line for each module of a network: its type, what it says of itself, its parameters and buffers."""
    return {name or "itself": _module(module) for name, module in network.named_modules(remove_duplicate=False)}


def _module(module: nn.Module) -> str:
    try:
        options = re.sub(r"0x[0-9a-f]+", "0x", module.extra_repr())  # addresses differ from process to process
    except Exception as error:  # the user's module may raise anything, and need not be printed
        options = type(error).__name__
    parts = [f"{type(module).__name__}({options})"]
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            shape = "" if is_lazy(tensor) else list(tensor.shape)
            fixed = " fixed" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
            parts.append(f"{name} {str(tensor.dtype).removeprefix('torch.')}{shape}{fixed}")
    if _own(type(module).__module__):
        own = {name: value for name, value in vars(module).items() if name[0] != "_" and name != "training"}
        parts += [f"{name}={value}" for name, value in _values(own).items()]
    return "; ".join(parts)


def code(*roots: Any) -> Code:
    """Describes functions, classes, modules and partials, and the user's code that they use."""
    entries: Code = {}
    seen: list[Any] = []  # keeps objects alive, so that no id is used twice

    def walk(thing: Any) -> None:
        if any(thing is other for other in seen):
            return
        seen.append(thing)
        if isinstance(thing, types.FunctionType | functools._lru_cache_wrapper):
            walk(inspect.unwrap(thing))  # before its wrapper, which has the same name
        name, entry, used = _describe(thing)
        if entry is not None:
            numbered = (name if n == 1 else f"{name} ({n})" for n in range(1, len(entries) + 2))
            entries[next(key for key in numbered if key not in entries)] = {k: v for k, v in entry.items() if v}
        for part in used:
            walk(part)

    for root in roots:
        walk(root)
    return entries


def _describe(thing: Any) -> tuple[str, dict[str, Any] | None, list[Any]]:
    """The name and the entry of something, None if it is not the user's own, and what it uses."""
    if isinstance(thing, functools.partial):
        held = {str(i): value for i, value in enumerate(thing.args)} | thing.keywords
        return f"{_ARGUMENTS}{_name(thing.func)}", {"values": _values(held, mutable=True)}, [thing.func, *held.values()]
    if isinstance(thing, types.MethodType):
        return "", None, [thing.__func__, thing.__self__]
    if isinstance(thing, types.FunctionType) and _own(thing.__module__):
        values, used = _surroundings(thing)
        return _name(thing), {**_text_of(thing, [thing]), "values": values}, used
    if isinstance(thing, type) and _own(thing.__module__):
        methods = _methods(thing)
        values, used = _values({k: v for k, v in vars(thing).items() if not k.startswith("__")}), [*thing.__bases__]
        for values_of_method, used_by_method in map(_surroundings, methods):
            values |= values_of_method
            used += used_by_method
        return _name(thing), {**_text_of(thing, methods), "values": values}, used
    if isinstance(thing, nn.Module):
        return "", None, list(dict.fromkeys(type(module) for module in thing.modules()))
    if _own(type(thing).__module__) and not isinstance(thing, types.ModuleType | type):
        fixed = {k: v for k, v in getattr(thing, "__dict__", {}).items() if k not in _changing_attributes(type(thing))}
        return f"a {_name(type(thing))}", {"values": _values(fixed)}, [type(thing), *fixed.values()]
    return "", None, []


def is_partial(description: Code) -> bool:
    """Whether what was described is a partial, and not a function that uses one."""
    return next(iter(description), "").startswith(_ARGUMENTS)


def modules(*roots: Any) -> dict[str, str]:
    """What modules hold that are functions, or are held by partials: a line for each inside, and their tensors.

    Of a network the seed decides that; of a loss nothing else does.
    """
    lines: dict[str, str] = {}
    usual = set(vars(nn.Module()))
    waiting = list(reversed(roots))
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, functools.partial):
            waiting += reversed((thing.func, *thing.args, *thing.keywords.values()))
        elif isinstance(thing, nn.Module):
            kind = type(thing).__name__
            for name, module in thing.named_modules():
                held = _values({k: v for k, v in vars(module).items() if k not in usual}, mutable=True)
                options = ", ".join(f"{key}={value}" for key, value in held.items())
                lines[f"{kind}.{name}" if name else kind] = f"{type(module).__name__}({options})"
            if tensors := {**dict(thing.named_parameters()), **dict(thing.named_buffers())}:
                lines[f"tensors of {kind}"] = weights(tensors)
    return lines


def weights(tensors: Mapping[str, Tensor]) -> str:
    """A digest of tensors by name."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()[:16]


def place(name: str) -> str | None:
    """The folder on the path that the imported `package.module:factory` was found in."""
    module_name = name.partition(":")[0]
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if file is None or not _own(module_name):
        return None
    depth = module_name.count(".") + (Path(file).name == "__init__.py")
    return str(Path(file).absolute().parents[depth])


# What is the user's own, and what it holds.


def _own(module_name: str | None) -> bool:
    """Whether a module is neither torch, mheads, Python's own, nor installed."""
    name = module_name or ""
    if name.partition(".")[0] in ("torch", "mheads", "builtins"):
        return False
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        return name == "__main__" or module is None  # typed in, or made by exec
    return not str(Path(file).absolute()).startswith(_INSTALLED)


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}:{getattr(thing, '__qualname__', type(thing).__name__)}"


def _methods(kind: type) -> list[types.FunctionType]:
    """The functions in the body of a class, as written."""
    inner = (f for v in vars(kind).values() for f in ((v.fget, v.fset) if isinstance(v, property) else (v,)))
    plain = (getattr(f, "__func__", f) for f in inner)
    return [f for f in plain if isinstance(f, types.FunctionType) and f.__module__ == kind.__module__]


def _changing_attributes(kind: type) -> set[str]:
    """Attributes that change while an object is used: those assigned in methods other than `__init__`."""
    methods = [m for k in kind.__mro__ if _own(k.__module__) for m in _methods(k) if m.__name__ != "__init__"]
    return {i.argval for m in methods for i in _instructions(m.__code__) if i.opname == "STORE_ATTR"}


def _surroundings(function: types.FunctionType) -> tuple[dict[str, str], list[Any]]:
    """Constants that a function holds or uses, and the functions, classes and objects that it may call."""
    instructions = list(_instructions(function.__code__))
    names = sorted({i.argval for i in instructions if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")})
    attributes = sorted({i.argval for i in instructions if i.opname in ("LOAD_ATTR", "LOAD_METHOD")})
    changed = {i.argval for i in instructions if i.opname in ("STORE_DEREF", "STORE_GLOBAL")}  # a counter, say
    held: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    defaults = inspect.signature(function, follow_wrapped=False).parameters.values()
    held |= {p.name: p.default for p in defaults if p.default is not p.empty}
    used = {name: function.__globals__[name] for name in names if name in function.__globals__ and name[:2] != "__"}
    for module in [m for m in used.values() if isinstance(m, types.ModuleType) and _own(m.__name__)]:
        used |= {f"{module.__name__}.{name}": vars(module)[name] for name in attributes if name in vars(module)}
    # A list or dict may grow while it is used, unless its name says that it does not.
    constants = {name: value for name, value in used.items() if name.rpartition(".")[2].isupper()}
    values = _values(held) | _values(used) | _values(constants, mutable=True)
    kept = {name: value for name, value in values.items() if name not in changed}
    return kept, [value for value in (held | used).values() if not isinstance(value, types.ModuleType)]


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """The instructions of a function and of the functions inside it."""
    for instruction in dis.get_instructions(code):
        yield instruction
        if isinstance(instruction.argval, types.CodeType):
            yield from _instructions(instruction.argval)


def _text_of(thing: Any, functions: list[types.FunctionType]) -> dict[str, Any]:
    """The source of a function or class; where there is none, the digest of the instructions of its functions."""
    if source := _source(thing):
        return {"source": source}
    lines = []
    for function in sorted(functions, key=lambda f: f.__qualname__):
        lines.append(function.__qualname__)
        for i in _instructions(function.__code__):
            value = i.argval
            if isinstance(value, types.CodeType):
                value = value.co_name
            elif isinstance(value, frozenset):
                value = sorted(map(repr, value))  # whose order differs from process to process
            lines.append(f"{i.opname} {value!r}")
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return {"code": f"{sys.version_info.major}.{sys.version_info.minor} {digest}"}


def _source(thing: Any) -> list[str]:
    """The lines of its source without comments and docstrings; empty where there is no source."""
    try:
        with _PARSER:
            tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return []
    if getattr(thing, "__name__", "") == "<lambda>":
        lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        return ast.unparse(lambdas[0]).splitlines() if len(lambdas) == 1 else []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).splitlines()


def _values(held: Mapping[str, Any], mutable: bool = False) -> dict[str, str]:
    return {name: value for name, v in held.items() if (value := _value(v, mutable)) is not None}


def _value(value: Any, mutable: bool = False) -> str | None:
    """A plain value as text, or the digest of an array; None for others, and for lists and dicts unless `mutable`."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype):
        return repr(value)
    if isinstance(value, tuple) or (mutable and isinstance(value, list)):
        parts = [_value(part, mutable) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if mutable and isinstance(value, dict):
        return _value(tuple(value.items()), mutable)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return f"{value.dtype}{list(value.shape)} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    if isinstance(value, Tensor) and not is_lazy(value):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {weights({'': value})}"
    return None


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


# What differs between two descriptions.


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line or a short diff for each part that differs between {"network", "loss", "start", ...} there and now."""
    lines = []
    for what in ("network", "loss"):
        then, now = old[what], new[what]
        before, after = ({key: part.get(key) for key in ("seed", "init", "name")} for part in (then, now))
        lines += _changes(f"{{}} of the {what}", before, after)
        if then.get("iterations") != now.get("iterations"):
            lengths = [f"{part.get('iterations', 'no')} iterations" for part in (then, now)]
            lines.append(f"the {what} follows a schedule of {lengths[0]} there, of {lengths[1]} now")
        lines += _changes("layer {}", then.get("layers", {}), now.get("layers", {}), "nothing")
        lines += _code_differences(then["code"], now["code"])
    if old.get("start") != new.get("start"):
        lines.append("the weights that training starts from differ")
    if not same_sampling(old, new):
        lines += _changes("{}", old.get("sampling") or {}, new.get("sampling") or {})
    return lines


def _changes(what: str, old: Mapping[str, Any], new: Mapping[str, Any], absent: str | None = None) -> list[str]:
    """A line for each key whose value differs; `what` is a form for the key."""
    pairs = {key: (old.get(key, absent), new.get(key, absent)) for key in [*old, *new]}
    return [f"{what.format(key)}: {a} there, {b} now" for key, (a, b) in pairs.items() if a != b]


def same_sampling(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether sample weights came from the same weights, groups or file, which may be called by another path."""
    return list((old.get("sampling") or {}).values()) == list((new.get("sampling") or {}).values())


def _code_differences(old: Code, new: Code) -> list[str]:
    lines = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if before is None or after is None:
            lines.append(f"{name} is {'used now, and was not' if before is None else 'used there, and not now'}")
            continue
        lines += _changes(f"{{}} in {name}", before.get("values", {}), after.get("values", {}))
        if not _same_code(before, after):
            diff = difflib.unified_diff(before.get("source", []), after.get("source", []), lineterm="", n=0)
            shown = [line for line in diff if not line.startswith(("---", "+++", "@@"))]
            more = [f"... {len(shown) - 8} more lines"] if len(shown) > 8 else []
            lines.append("\n    ".join([f"source of {name} changed" + (":" if shown else ""), *shown[:8], *more]))
    return lines


def _same_code(before: dict[str, Any], after: dict[str, Any]) -> bool:
    if "source" in before and "source" in after:
        return bool(before["source"] == after["source"])
    if "code" in before and "code" in after:
        versions = [entry["code"].partition(" ")[0] for entry in (before, after)]
        return bool(before["code"] == after["code"]) or versions[0] != versions[1]  # which cannot be compared
    return not {"source", "code"} & (before.keys() | after.keys())  # of a partial or an object only values count
