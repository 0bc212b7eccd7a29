"""A pretended accelerator, so that device paths can be tested where there is none.

    with counterfeit_device() as counts:
        mheads.fit(net, loss, train=train, test=test, device="counterfeit")
    print(counts.operations.total(), counts.synchronisations.total())

Torch lets one outside device register itself (PrivateUse1), also in plain Python. A tensor of this one is a wrapper
around a CPU tensor: operations compute on what is inside, so results have the CPU's bits. As a GPU does, it raises on
operands of two devices, and it keeps parameters the same objects when a module moves. Every operation is counted, and
so is every one that makes the host wait for the device (`.item()`, `.cpu()`, `.tolist()`, `bool()`, `nonzero()`, a mask
as index) and every upload. What it cannot show: speed, memory, streams, and kernels that only a real device has.

Outside `counterfeit_device` torch says that no accelerator is available, so `device="auto"` means the CPU.
"""

import functools
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "counterfeit"
COPIES = ("aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize")
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")  # take indices of the CPU
# Elsewhere a scalar of the CPU is as good as a number.
NO_CPU_SCALARS = ("aten::cat", "aten::stack", "aten::_fused_")
MAKING = ("empty.memory_format", "empty_strided", "_copy_from",
          "arange", "arange.start", "arange.start_step", "linspace", "randperm")  # fmt: skip
WAITING = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
# What autocast casts: torch has such lists for the devices that it knows, and none for others.
TO_LOWER = ("conv1d", "conv2d", "conv3d", "linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm")
TO_FLOAT32 = ("avg_pool3d", "mse_loss", "nll_loss", "smooth_l1_loss", "cross_entropy_loss")


@dataclass
class Counts:
    """What the device was asked for, by the name of the operation. `uploads` by whether the host waits for them."""

    operations: Counter = field(default_factory=Counter)
    synchronisations: Counter = field(default_factory=Counter)
    uploads: Counter = field(default_factory=Counter)


@dataclass
class _State:
    available: bool = False
    counts: Counts = field(default_factory=Counts)
    lock: threading.Lock = field(default_factory=threading.Lock)


_state = _State()


@contextmanager
def counterfeit_device():
    """Inside, torch sees an accelerator of this name; gives the counts."""
    _register()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    run_backward = torch.autograd._engine_run_backward

    def run_in_this_thread(*args, **kwargs):
        # Torch makes its threads for devices at the first backward of a process, which may have been before.
        with torch.autograd.set_multithreading_enabled(False):
            return run_backward(*args, **kwargs)

    _state.available, _state.counts = True, Counts()
    torch.autograd._engine_run_backward = run_in_this_thread
    torch.__future__.set_swap_module_params_on_conversion(True)  # a module that moves keeps its parameters' identity
    try:
        yield _state.counts
    finally:
        _state.available = False
        torch.autograd._engine_run_backward = run_backward
        torch.__future__.set_swap_module_params_on_conversion(swaps)


class CounterfeitTensor(torch.Tensor):
    """A tensor that says it is on the device; `inside` is the CPU tensor that has its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inside):
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            inside.size(),
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            layout=inside.layout,
            device=torch.device(NAME, 0),
        )
        wrapper.inside = inside
        return wrapper

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):
        torch.Tensor.data.__set__(self, other)
        self.inside = other.inside

    def __repr__(self):
        return f"CounterfeitTensor({self.inside})"

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError(f"a tensor on {NAME} has no numpy form: use .cpu() first")
        return self.detach().cpu().numpy()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, *args, **(kwargs or {}))


def _run(function, *args, **kwargs):
    """Runs an operation that has a tensor or a result on the device."""
    name = function._schema.name
    operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    _check_devices(name, operands)
    _count(function, name, args, kwargs, operands)
    on_device = any(isinstance(x, CounterfeitTensor) for x in operands)
    if kwargs.get("device") is not None:
        on_device = torch.device(kwargs["device"]).type == NAME
        kwargs["device"] = torch.device("cpu")
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    if name == "aten::_copy_from":  # which no CPU has
        _unwrap(args[1]).copy_(_unwrap(args[0]))
        return args[1]
    result = function(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
    written = _written(function, args, kwargs)
    if any(x.shape != x.inside.shape or x.stride() != x.inside.stride() for x in written.values()):
        raise NotImplementedError(f"{name} changes the shape of a tensor in place, which {NAME} cannot")
    if name == "aten::copy_":
        return args[0]

    def wrap(x):
        if not isinstance(x, torch.Tensor) or not on_device:
            return x
        return written[id(x)] if id(x) in written else CounterfeitTensor(x)

    # A view of a tensor from outside inference mode is none from inside, as on other devices.
    view = any(argument.alias_info for argument in function._schema.returns)
    with torch.inference_mode(torch.is_inference_mode_enabled() and not (view and not operands[0].is_inference())):
        return tree_map(wrap, result)


def _unwrap(x):
    return x.inside if isinstance(x, CounterfeitTensor) else x


def _written(function, args, kwargs):
    """The operands that the operation writes to, by the identity of what is inside."""
    named = zip(function._schema.arguments, args, strict=False)
    values = [value for argument, value in named if argument.alias_info and argument.alias_info.is_write]
    values += [kwargs[a.name] for a in function._schema.arguments if a.is_out and a.name in kwargs]
    return {id(x.inside): x for x in tree_leaves(values) if isinstance(x, CounterfeitTensor)}


def _check_devices(name, operands):
    """Raises where a GPU would: operands of two devices, but for copies, scalars and indices of the CPU."""
    elsewhere = [x for x in operands if not isinstance(x, CounterfeitTensor)]
    if name in COPIES or not elsewhere or len(elsewhere) == len(operands):
        return
    for x in elsewhere:
        scalar = x.dim() == 0 and not name.startswith(NO_CPU_SCALARS)
        index = name in INDEXING and x is not operands[0] and x.dtype in (torch.int64, torch.bool)
        if not scalar and not index:
            raise RuntimeError(f"{name}: operands on {NAME} and on {x.device}, of {list(x.shape)}")


def _count(function, name, args, kwargs, operands):
    waits = bool(WAITING & set(function.tags))
    if name in INDEXING:
        waits = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    upload = None
    if name == "aten::_to_copy":
        waits = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    elif name in COPIES:
        target, source = (args[0], args[1]) if name == "aten::copy_" else (args[1], args[0])
        waits = isinstance(source, CounterfeitTensor) and not isinstance(target, CounterfeitTensor)
        if isinstance(target, CounterfeitTensor) and not isinstance(source, CounterfeitTensor):
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            upload = "non-blocking" if non_blocking else "blocking"
    with _state.lock:
        _state.counts.operations[name] += 1
        _state.counts.synchronisations[name] += waits
        if upload:
            _state.counts.uploads[upload] += 1


class _Module:
    """What torch asks a device's module, `torch.counterfeit`."""

    def is_available(self):
        return _state.available

    def is_initialized(self):
        return True

    def device_count(self):
        return int(_state.available)

    def current_device(self):
        return 0

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


@functools.cache
def _register():
    """Once per process: torch has no way back."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    # What makes tensors of this device from others, or from nothing; all else meets `__torch_dispatch__`.
    for name in MAKING:
        aten.impl(name, functools.partial(_run, _operation(name)), "PrivateUse1")
    for name in (*TO_LOWER, *TO_FLOAT32):
        cast = functools.partial(_cast_and_run, _operation(name), name in TO_LOWER)
        aten.impl(name, cast, "AutocastPrivateUse1")
    return rest, aten  # kept by the cache: a library that is freed takes its operations back


def _operation(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _cast_and_run(operation, lower, *args, **kwargs):
    dtype = torch.get_autocast_dtype(NAME) if lower else torch.float32

    def cast(x):
        eligible = isinstance(x, CounterfeitTensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if eligible else x

    with torch.autocast(NAME, enabled=False):
        return operation(*tree_map(cast, args), **tree_map(cast, kwargs))
