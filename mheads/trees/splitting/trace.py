"""A network's forward as a graph of the layers and functions that it calls, found by torch.fx without any data.

Layers of torch stay whole; classes of the user's own are followed inside, or stay whole if that is not possible.
"""

from __future__ import annotations

import copy
import dis
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from mheads.common.modules import is_hooked

TRAINING = "training"  # the attribute of a module that says in which mode it is, read when the graph runs
_FOLLOWED = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, fx.GraphModule, object)
_WHOLE = (
    "torch",
    "mheads.networks.dropout",
    "mheads.networks.member_scaling",
    "mheads.distributed",
    "mheads.caffe.layers",
)
_MAKERS = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros")
_PATCHES = threading.RLock()  # fx puts its own functions into modules of the whole process while it looks


@dataclass(frozen=True)
class Traced:
    """The nodes of a forward, and (path, node) for each call of a module: the last node that it made."""

    graph: fx.Graph
    ends: list[tuple[str, fx.Node]]
    constants: dict[str, torch.Tensor]  # made by the forward itself, by the name that nodes have for them


class CannotFollowError(Exception):
    """Where and why fx could not follow a forward."""


def trace(network: nn.Module, inside: bool = True) -> Traced:
    """The graph of a network; with `inside`, that of the classes in it too. Raises CannotFollowError."""
    whole: set[type[nn.Module]] = set()
    while True:
        tracer = _Tracer(whole, inside)
        try:
            with _PATCHES, _follow_makers(), torch.no_grad():
                graph = tracer.trace(_copy_without_values(network))
        except Exception as error:  # the user's forward may raise anything when it is given no tensor
            if tracer.failed is None or tracer.failed in whole:
                raise CannotFollowError(_place(error)) from error
            whole.add(tracer.failed)
            continue
        changed = _find_assigned_buffer(tracer.root)
        if changed is not None:
            if changed[0] is tracer.root:
                raise CannotFollowError(f"it assigns its buffer {changed[1]!r}, which a graph does not show")
            whole.add(type(changed[0]))
            continue
        names = {node.target for node in graph.nodes if node.op == "get_attr"}
        made = {str(n): getattr(tracer.root, n) for n in names if str(n).startswith("_tensor_constant")}
        return Traced(graph, tracer.ends, made)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is called as it is and not looked into: torch's own, and what says something of itself."""
    if is_hooked(module) or is_parametrized(module) or hasattr(module, "takes"):
        return True
    if getattr(module, "batch_statistics", False):
        return True
    kinds = [kind for kind in type(module).__mro__ if kind not in _FOLLOWED]
    return any(f"{kind.__module__}.".startswith(tuple(f"{name}." for name in _WHOLE)) for kind in kinds)


class _Tracer(fx.Tracer):
    def __init__(self, whole: set[type[nn.Module]], inside: bool) -> None:
        super().__init__()
        self.whole, self.inside = whole, inside
        self.ends: list[tuple[str, fx.Node]] = []
        self.failed: type[nn.Module] | None = None  # the innermost that could not be followed
        self._thread = threading.get_ident()
        self._inside: list[str] = []
        self._names: dict[int, str] = {}  # of parameters and buffers

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """One argument: all others have defaults. The mode is a value like any other, so that nobody decides by it."""
        assert isinstance(self.root, nn.Module)
        own = (*self.root.named_buffers(), *self.root.named_parameters())
        self._names = {id(tensor): name for name, tensor in own}
        x = self.create_proxy("placeholder", "x", (), {})
        mode = self.create_proxy("get_attr", TRAINING, (), {})
        for module in self.root.modules():
            if module is self.root or not self.is_leaf_module(module, ""):
                module.__dict__[TRAINING] = mode
        return root_fn, [self.root, x]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not self.inside or type(m) in self.whole or is_layer(m)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:  # of another network, which runs meanwhile
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        self._inside.append(path)
        try:
            output = super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or type(m)
            raise
        finally:
            self._inside.pop()
        self.ends.append((path, next(iter(reversed(self.graph.nodes)))))
        return output

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["inside"] = self._inside[-1] if self._inside else ""
        return node

    def to_bool(self, obj: fx.Proxy) -> bool:
        """A decision whether to raise an error goes into the graph; any other cannot be followed."""
        frame = sys._getframe(2)
        code = list(dis.get_instructions(frame.f_code))
        jump = next(i for i, step in enumerate(code) if step.offset >= frame.f_lasti and "JUMP" in step.opname)
        target = next((i for i, step in enumerate(code) if step.offset == code[jump].argval), 0)
        body = [step.opname for step in code[jump + 1 : target]]
        if_true, if_false = (kind in code[jump].opname for kind in ("IF_TRUE", "IF_FALSE"))
        raises = body[-1:] == ["RAISE_VARARGS"] and not any("RETURN" in name or "JUMP" in name for name in body)
        if (if_true and raises) or (if_false and code[target].opname == "LOAD_ASSERTION_ERROR"):
            holds, wanted = obj, True
        elif if_false and raises:
            holds, wanted = self.create_proxy("call_function", operator.not_, (obj,), {}), False
        else:
            return super().to_bool(obj)
        where = f"{frame.f_code.co_filename}, line {frame.f_lineno}: a check of the network does not hold"
        self.create_proxy("call_function", torch._assert, (holds, where), {})
        return wanted

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Parameters and buffers are read when the graph runs, so that nothing computed from them is a constant."""
        name = self._names.get(id(attr_val))
        if threading.get_ident() != self._thread or name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            node = self.create_node("get_attr", name, (), {})
            parameter_proxy_cache[name] = _Weight(attr_val, node, self)
        return parameter_proxy_cache[name]


class _Weight(fx.Proxy):
    """A parameter or buffer in a graph; its shape is known."""

    def __init__(self, tensor: torch.Tensor, node: fx.Node, tracer: fx.Tracer) -> None:
        super().__init__(node, tracer)
        self.shape, self.ndim, self.dtype = tensor.shape, tensor.ndim, tensor.dtype
        self.size, self.dim, self.numel = tensor.size, tensor.dim, tensor.numel

    def __len__(self) -> int:
        return self.shape[0]


def _find_assigned_buffer(root: nn.Module) -> tuple[nn.Module, str] | None:
    """A module whose forward put something else in the place of a buffer, and its name."""
    buffers = ((m, name, buffer) for m in root.modules() for name, buffer in m._buffers.items())
    return next(((m, name) for m, name, buffer in buffers if isinstance(buffer, fx.Proxy)), None)


def _copy_without_values(network: nn.Module) -> nn.Module:
    """A copy that holds no values: tracing leaves its marks on what it looks at."""
    memo: dict[int, Any] = {}
    for p in network.parameters():
        memo[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
    for b in network.buffers():
        memo[id(b)] = b.detach().to("meta")
    return copy.deepcopy(network, memo)


@contextmanager
def _follow_makers() -> Iterator[None]:
    """Inside, functions that make tensors from numbers are followed if a number is one of the graph's."""

    def follow(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            proxies: list[fx.Proxy] = []
            fx.node.map_aggregate((args, kwargs), lambda a: proxies.append(a) if isinstance(a, fx.Proxy) else a)
            if not proxies:
                return function(*args, **kwargs)
            return proxies[0].tracer.create_proxy("call_function", function, args, kwargs)

        return make

    kept = {name: getattr(torch, name) for name in _MAKERS}
    try:
        for name, function in kept.items():
            setattr(torch, name, follow(function))
        yield
    finally:
        for name, function in kept.items():
            setattr(torch, name, function)


def _place(error: BaseException) -> str:
    """The line of the user's code that an error comes from, and what it says."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent / "trace.py"), str(Path(copy.__file__)))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    message = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if not frames:
        return message
    last = frames[-1]
    return f"{last.filename}, line {last.lineno}, in {last.name}: `{last.line}` ({message})"
