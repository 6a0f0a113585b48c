"""Named spans of time, what a profile shows beside the operations of torch; and where a step ends.

A span costs one look at a flag while no profile is taken. Its name in the trace carries its kind, which
`executable/profile_trace.py` takes apart again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar

import torch

Kind = Literal["step", "compile", "execute", "transfer", "snapshot", "module", "op", "trace"]
PREFIX = "glass|"

P = ParamSpec("P")
R = TypeVar("R")
_recording = 0
_NOTHING = contextlib.nullcontext()


def is_recording() -> bool:
    """Return whether a profile is being taken."""
    return _recording > 0


def set_recording(change: Literal[1, -1]) -> None:
    """Count the profiles that are being taken."""
    global _recording
    _recording += change


def span(kind: Kind, name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that a profile shows as `name`."""
    return torch.profiler.record_function(f"{PREFIX}{kind}|{name}") if _recording else _NOTHING


class Trace:
    """A named span of the user's own code, as a context manager or a decorator.

        with glass.profiler.Trace("model_build"):
            loss = model(batch)

    Args:
        name: As a profile shows it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._open: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> Self:
        entered = span("trace", self.name)
        entered.__enter__()
        self._open.append(entered)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.pop().__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function` with a span around each of its calls."""

        @functools.wraps(function)
        def traced(*args: P.args, **kwargs: P.kwargs) -> R:
            with span("trace", self.name):
                return function(*args, **kwargs)

        return traced


_at_step_end: tuple[Callable[[], None], ...] = ()


def step_ended() -> None:
    """Notify waiting code that a step has ended: a generation calls it once per run, training once per update."""
    for listener in _at_step_end:
        listener()


def on_step_end(listener: Callable[[], None]) -> Callable[[], None]:
    """Call `listener` in the thread that ends a step, from now on, and return what undoes this."""
    global _at_step_end
    _at_step_end = (*_at_step_end, listener)

    def undo() -> None:
        global _at_step_end
        _at_step_end = tuple(other for other in _at_step_end if other is not listener)

    return undo


Kernels = Sequence[tuple[str, str]]
"""(name of a kernel, site that it computes), in the order of execution."""

_kernels: dict[str, Callable[[], Kernels]] = {}


def name_kernels(executable: str, kernels: Callable[[], Kernels]) -> None:
    """Say which sites the kernels of an executable compute, where a span of the back-end names each kernel.

    Args:
        executable: Its name; one loaded later under the same name takes its place.
        kernels: Called when a profile is written.
    """
    _kernels[executable] = kernels


def kernels_of(executable: str) -> Kernels:
    """Return the kernels of an executable; none where it does not tell."""
    found = _kernels.get(executable)
    return found() if found is not None else ()
