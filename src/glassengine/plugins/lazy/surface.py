"""Public functions and the device type "lazy": make tensors and modules lazy, run their graphs, list pending ones.

PyTorch reserves this type for lazy tensors and has no kernels for it until `torch._lazy` is set up. What makes a tensor
from nothing (`torch.zeros(..., device="lazy")`) and what moves one there (`tensor.to("lazy")`) is registered here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from glassengine.backends.registry import choose_graph_backend
from glassengine.errors import UnknownNameError, UsageError
from glassengine.executable.steps import before_end_of_step
from glassengine.plugins.lazy.dispatching import DispatchRecorder
from glassengine.plugins.lazy.graphs import captured, mark_taps, pending_graph, place_of
from glassengine.plugins.lazy.recording import held, lazy_tensor, recorded
from glassengine.plugins.lazy.running import run_pending
from glassengine.plugins.lazy.settings import settings
from glassengine.plugins.lazy.tensor import DEVICE, LazyTensor
from glassengine.plugins.lazy.values import LazyMemory, LazyValue, pending_memories
from glassengine.results.backends import PendingTensor


def device() -> torch.device:
    """Return the lazy device: operations on tensors moved there are recorded, and run when a value is needed."""
    register()
    return DEVICE


def tensor(data: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False) -> LazyTensor:
    """Return a lazy tensor, a leaf of autograd, with a copy of `data`.

    Args:
        data: A tensor, an array, or numbers.
        dtype: Of the tensor; None for that of the data.
        requires_grad: Whether autograd computes its gradient.
    """
    register()
    if isinstance(data, torch.Tensor):
        with torch.no_grad():
            made = data.detach().to(device=DEVICE, dtype=dtype, copy=True)
    else:
        made = torch.as_tensor(data, dtype=dtype).to(DEVICE)
    return made.requires_grad_(requires_grad)  # type: ignore[return-value]


aten = torch.ops.aten

_MAKERS = (
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
_ORDER = 15
"""Of what loads storages: after that of the CPU."""

_library: torch.library.Library | None = None


def register() -> None:
    """Let tensors be made on, and moved to, the lazy device. May be called again."""
    global _library
    if _library is not None:
        return
    LazyTensor.recorder = DispatchRecorder()
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for maker in _MAKERS:
            packet = getattr(aten, maker)
            for overload in packet.overloads():
                target: OpOverload = getattr(packet, overload)
                if _makes(target):
                    name = target._name.removeprefix("aten::")
                    library.impl(name, functools.partial(_made, target), "Lazy")  # type: ignore[no-untyped-call]
    _autocast()
    torch._C._group_tensors_by_device_and_dtype = _grouped(torch._C._group_tensors_by_device_and_dtype)
    for owner, name in (
        (torch.utils._foreach_utils, "_get_foreach_kernels_supported_devices"),
        (sys.modules[torch.optim.Optimizer.__module__], "_get_fused_kernels_supported_devices"),
    ):
        setattr(owner, name, _with_lazy(getattr(owner, name)))
    # What was saved from a lazy device is a tensor like any other when it is loaded for one.
    torch.serialization.register_package(_ORDER, lambda storage: None, _loaded)
    if not hasattr(torch, DEVICE.type):
        torch._register_device_module(DEVICE.type, _DeviceModule(DEVICE.type))  # type: ignore[no-untyped-call]
    mark_taps()
    before_end_of_step(run_pending)
    _library = library


def _makes(target: OpOverload) -> bool:
    """Return whether an operation makes a tensor of no other one, on a device among its arguments."""
    arguments = target._schema.arguments
    names = {argument.name for argument in arguments}
    tensors = any("Tensor" in str(argument.type) or "Dimname" in str(argument.type) for argument in arguments)
    return "device" in names and not tensors and not target._schema.is_mutable


def _made(target: OpOverload, *args: Any, **kwargs: Any) -> torch.Tensor:
    options = {**kwargs, "device": torch.device("cpu"), "pin_memory": None}
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
        return _to_be_filled(target(*args, **options))
    if torch.Tag.nondeterministic_seeded in target.tags:
        with _disable_current_modes(), torch.no_grad():
            return lazy_tensor(held(target(*args, **options)))
    if target is aten.empty.memory_format and kwargs.get("memory_format") in (None, torch.contiguous_format):
        # Memory that nothing has written would differ from run to run.
        target, args = aten.full.default, (args[0], 0)
        options.pop("memory_format", None)
        options.setdefault("dtype", None)
        options["dtype"] = options["dtype"] or torch.get_default_dtype()
    elif target in (aten.empty.memory_format, aten.empty_strided.default):
        with _disable_current_modes(), torch.no_grad():
            return lazy_tensor(held(target(*args, **options).zero_()))
    (value,) = recorded(target, args, options)
    assert value is not None
    return lazy_tensor(value)


def _to_be_filled(data: torch.Tensor) -> LazyTensor:
    """Return a lazy tensor over memory into which ATen writes before it is used, as `torch.tensor` does."""
    made: LazyTensor = torch.Tensor._make_subclass(LazyTensor, data)
    made._lazy = LazyMemory(held(data))
    return made


def _autocast() -> None:
    """Let autocast of the lazy device be that of the device on which graphs run, which torch refuses as unknown."""
    for owner, name in (
        (torch.amp.autocast_mode.autocast, "__init__"),
        (torch, "is_autocast_enabled"), (torch, "set_autocast_enabled"), (torch, "get_autocast_dtype"),
        (torch, "set_autocast_dtype"), (torch.amp, "is_autocast_available"),
        (torch.amp.autocast_mode, "is_autocast_available"),
    ):  # fmt: skip
        setattr(owner, name, _known(getattr(owner, name)))


class _DeviceModule(types.ModuleType):
    """What code asks of the module of a device type (`torch.cuda` of another one)."""

    _initialized = True

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device(device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def synchronize(device: Any = None) -> None:
        run_pending()

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        """Return nothing: random numbers are drawn from torch's own generator."""
        return torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        """Do nothing."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _with_lazy(devices: Callable[[], list[str]]) -> Callable[[], list[str]]:
    return lambda: [*devices(), DEVICE.type]


def _loaded(storage: Any, location: str) -> Any:
    return storage if torch.device(location).type == DEVICE.type else None


def _grouped(group: Callable[..., Any]) -> Callable[..., Any]:
    """Return what groups tensors for optimizers and the clipping of gradients, with the device that users see."""

    @functools.wraps(group)
    def call(*args: Any, **kwargs: Any) -> Any:
        return {
            (DEVICE if any(isinstance(tensor, LazyTensor) for tensor in lists[0]) else device, dtype): (lists, indices)
            for (device, dtype), (lists, indices) in group(*args, **kwargs).items()
        }

    return call


def _known(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = tuple("cpu" if isinstance(value, str) and value == DEVICE.type else value for value in args)
        if kwargs.get("device_type") == DEVICE.type:
            kwargs["device_type"] = "cpu"
        return function(*given, **kwargs)

    return call


M = TypeVar("M", bound=torch.nn.Module)
Mode = Literal["lazy", "eager_debug"]
_MODES: tuple[Mode, ...] = ("lazy", "eager_debug")


def module(target: M) -> M:
    """Move the parameters and buffers of a module to the lazy device, in place, and return it."""
    register()
    return target.to(DEVICE)


def mark_dynamic(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
    """Say that sizes of a tensor change from step to step, and return it: its graphs are compiled for all sizes.

    Sizes of 0 and 1 are compiled by themselves. `torch._dynamo.mark_dynamic`, called before the tensor is moved to the
    lazy device, does the same.

    Args:
        tensor: A lazy tensor that holds data, as one that was moved to the lazy device.
        dims: The dimensions; none for all of them.

    Raises:
        UsageError: It is no lazy tensor, or its value is computed.
        IndexError: It has no such dimension.
    """
    (value,) = _values(tensor)
    if value.data is None:
        raise UsageError("the sizes of this tensor follow from others", got="a tensor that is computed",
            hint="mark the tensors that are moved to the lazy device")  # fmt: skip
    rank = len(value.spec.shape)
    for dim in dims:
        if not -rank <= dim < rank:
            raise IndexError(f"dimension {dim} of a tensor with {rank}")
    value.dynamic |= {dim % rank for dim in dims or range(rank)}
    return tensor


def is_lazy(value: object) -> bool:
    """Return whether a value is a lazy tensor, or a module that has one."""
    if isinstance(value, torch.nn.Module):
        return any(isinstance(part, LazyTensor) for part in (*value.parameters(), *value.buffers()))
    return isinstance(value, LazyTensor)


@contextlib.contextmanager
def mode(mode: Mode = "lazy", *, backend: str | None = None) -> Iterator[torch.device]:
    """Set how graphs of lazy tensors are compiled and run while the block runs, in every thread.

    What is pending at the end of the block stays pending.

    Args:
        mode: "lazy" for graphs as large as possible; "eager_debug" compiles and runs each operation by itself.
        backend: Which back-end compiles them: "inductor", "eager", ...; None takes the default one.

    Yields:
        The lazy device.

    Raises:
        UnknownNameError: A mode or a back-end that there is not.
        BackendError: The back-end cannot be used here.
        UsageError: It builds engines only.
    """
    if mode not in _MODES:
        raise UnknownNameError("mode", str(mode), _MODES, hint='glass.lazy.mode("eager_debug")')
    before = settings.backend, settings.each_op
    settings.backend, settings.each_op = choose_graph_backend(backend), mode == "eager_debug"
    try:
        yield device()
    finally:
        settings.backend, settings.each_op = before


def pending() -> tuple[PendingTensor, ...]:
    """Return the tensors that have no value yet, in the order in which they were written."""
    found = []
    for memory in pending_memories():
        call = memory.value.call
        assert call is not None
        place = place_of(call.code, call.lasti) if call.code is not None else ("", 0, "")
        where = f"{place[0]}:{place[1]}" if place[0] else ""
        kind = memory.spec
        dtype = str(kind.dtype).removeprefix("torch.")
        found.append(PendingTensor(dtype, tuple(kind.shape), str(call.operation.target), where))
    return tuple(found)


def graph(tensors: torch.Tensor | Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Return the graph that would run for the values of these lazy tensors; it has no operations where nothing would.

    Each node keeps the user's line that recorded it in `meta["stack_trace"]`.

    Raises:
        UsageError: One of them is not lazy.
    """
    values = _values(tensors)
    waiting = [value for value in values if value.data is None]
    return captured(pending_graph(waiting), frozenset(), {})[0].module


def text(tensors: torch.Tensor | Sequence[torch.Tensor]) -> str:
    """Return the graph that would run for the values of these lazy tensors, a line for each operation.

    Raises:
        UsageError: One of them is not lazy.
    """
    values = [value for value in _values(tensors) if value.data is None]
    if not values:
        return "nothing is pending"
    made, *_ = captured(pending_graph(values), frozenset(), {})
    lines = []
    for line, node in zip(made.lines, made.nodes, strict=True):
        where = made.describe(node)
        lines.append(f"{line}  # {where}" if where else line)
    return "\n".join(lines)


def _values(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[LazyValue]:
    found = []
    for one in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        if not isinstance(one, LazyTensor):
            raise UsageError("this is no lazy tensor", got=type(one).__name__, hint="tensor.to(glass.lazy.device())")
        found.append(one._lazy.get())
    return found
