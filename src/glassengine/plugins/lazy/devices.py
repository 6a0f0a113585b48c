"""The device type "lazy": what makes a tensor on it, and autocast for it.

PyTorch reserves this type for lazy tensors and has no kernels for it until `torch._lazy` is set up. What makes a tensor
from nothing (`torch.zeros(..., device="lazy")`) and what moves one there (`tensor.to("lazy")`) is registered here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from glassengine.executable.metrics.steps import before_end_of_step
from glassengine.plugins.lazy.dispatching import DispatchRecorder
from glassengine.plugins.lazy.observed import mark_taps
from glassengine.plugins.lazy.recording import held, lazy_tensor, recorded
from glassengine.plugins.lazy.running import run_pending
from glassengine.plugins.lazy.tensor import DEVICE, LazyTensor
from glassengine.plugins.lazy.values import LazyMemory

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
