"""Taps: marks that a user puts into model code, `glass.tap("inter", x)`.

A tap returns its argument itself. It does something only while a sink is installed: the exporter installs one that
inserts a marking op (erased again after functionalisation, so no executable ever contains it), a recorder one that
writes the tensor down. Without a sink a tap costs a function call, and a user's own export or compile sees nothing;
`torch.compile(..., backend="glass")` keeps taps, as results of its graphs, and so do the graphs of lazy tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from glassengine.errors import UsageError

T = TypeVar("T")
Sink = Callable[[str, Any], None]

_sinks: ContextVar[tuple[Sink, ...]] = ContextVar("glassengine_tap_sinks", default=())
_installed: list[Sink] = []
"""Sinks of all contexts; a look at it is cheaper than one at a context variable."""


def tap(name: str, value: T) -> T:
    """Name an intermediate tensor; its site is `<module path>.<name>`.

    Args:
        name: The tap's name, a Python identifier; unique within one call of one module.
        value: A tensor of any shape and dtype. Where it is changed in place later, the tap keeps what it is now.

    Returns:
        `value` itself, not a copy.

    Raises:
        UsageError: While something listens: `name` is not an identifier, or `value` is not a tensor.
    """
    # First of all, so that code compiled now stays valid when something listens later.
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime  # there is no compiling without it, and it takes long to import

        comptime(_tell_compiler)
        return value
    if _mark is not None and type(value) is _lazy:
        _require_tensor(name, value)
        _mark(name, value)
    if not _installed:
        return value
    sinks = _sinks.get()
    if sinks:
        _require_tensor(name, value)
        for sink in sinks:
            sink(name, value)
    return value


_compiler: Callable[[Any], None] | None = None


def set_compiler(compiler: Callable[[Any], None]) -> None:
    """Let `compiler` see each tap that TorchDynamo traces, as the context of `comptime` in a frame of `tap`."""
    global _compiler
    _compiler = compiler


def _tell_compiler(context: Any) -> None:
    if _compiler is not None:
        _compiler(context)


_lazy: type | None = None
_mark: Callable[[str, Any], None] | None = None


def set_lazy(kind: type, mark: Callable[[str, Any], None]) -> None:
    """Let `mark` see each tap of a tensor of type `kind`, whether or not anything listens."""
    global _lazy, _mark
    _lazy, _mark = kind, mark


def is_heard() -> bool:
    """Return whether anything listens to the taps of this context."""
    return bool(_installed) and bool(_sinks.get())


def deliver(name: str, value: torch.Tensor) -> None:
    """Pass a tap of compiled code to its listeners; `name` starts with the path of its module, if that is inside."""
    for sink in _sinks.get():
        sink(name, value)


def _require_tensor(name: str, value: object) -> None:
    if not name.isidentifier():
        raise UsageError("a tap needs a name that is a Python identifier", got=repr(name), hint='glass.tap("inter", x)')
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"tap {name!r} was not given a tensor", got=type(value).__name__, hint="tap each tensor of a container"
        )


def register_network_output(module: object, name: str, value: T) -> T:
    """Drop-in for TensorRT-LLM's method: `MyModule.register_network_output = glass.compat.register_network_output`."""
    return tap(name, value)


@contextlib.contextmanager
def tap_sink(sink: Sink) -> Iterator[None]:
    """Send every tap of this context (thread or task) to `sink(name, tensor)`, beside those that get them already."""
    token = _sinks.set((*_sinks.get(), sink))
    _installed.append(sink)
    try:
        yield
    finally:
        _installed.remove(sink)
        _sinks.reset(token)
