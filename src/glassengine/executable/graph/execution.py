"""One run of one executable, and its observers: snapshots, the search for non-finite values, profiles.

Observers attach to `Executable.run`, the only place where a compiled graph runs, so every front end has all of them.
Nothing is gathered for an unobserved execution.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from glassengine.executable.graph.graph import CapturedGraph

Arguments = Mapping[str, Any] | list[Any]
_attached: tuple[Observer, ...] = ()
_sources: tuple[Callable[[], Observer | None], ...] = ()


class Runnable(Protocol):
    """What runs, as observers see it; its attributes are those of `Executable`."""

    name: str
    number: int
    backend: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    graph: CapturedGraph | Callable[[], CapturedGraph] | None

    def captured(self) -> CapturedGraph | None:
        """Return the graph, read now if needed; None if unknown."""


class Execution:
    """One run of one executable, as observers see it.

    Attributes:
        executable: What runs.
        number: How many executions of it on this device went before.
        device_index: Of the device it runs on, among the devices of that kind; 0 on the CPU.
        inputs: Name -> tensor or plain value; before the run, and after it the same objects, perhaps written to.
        outputs: Name -> tensor, plain value or None; empty until the run ends well.
    """

    def __init__(
        self, executable: Runnable, number: int, device_index: int, arguments: Arguments, looking: tuple[Observer, ...]
    ) -> None:
        self._looking = looking
        self.executable = executable
        self.number = number
        self.device_index = device_index
        # A list is emptied by the run, so that what it holds can be freed: this keeps the values alive until the end.
        self.inputs: Mapping[str, Any] = (
            arguments if isinstance(arguments, Mapping) else dict(zip(executable.input_names, arguments, strict=True))
        )
        self.outputs: Mapping[str, Any] = {}
        for number, observer in enumerate(self._looking):
            try:
                observer.before(self)
            except BaseException as error:
                self._looking = self._looking[:number]
                self.fail(error)
                raise

    def finish(self, outputs: Mapping[str, Any] | Sequence[Any]) -> None:
        """Show the outputs of a run that ended well."""
        if not isinstance(outputs, Mapping):
            outputs = dict(zip(self.executable.output_names, outputs, strict=True))
        self.outputs = outputs
        with contextlib.ExitStack() as others:  # what one of them raises must not leave the others waiting
            for observer in self._looking:
                others.callback(observer.after, self)

    def fail(self, error: BaseException) -> None:
        """Show what the run raised."""
        with contextlib.ExitStack() as others:
            for observer in self._looking:
                others.callback(observer.failed, self, error)


class Observer(Protocol):
    """What looks at executions; what it raises ends the run and reaches the caller as it is.

    Of each that saw a run begin, `after` or `failed` is called once, however it ends; in the reverse order.
    """

    def before(self, execution: Execution) -> None:
        """Look at the inputs before the run."""

    def after(self, execution: Execution) -> None:
        """Look at the outputs after the run."""

    def failed(self, execution: Execution, error: BaseException) -> None:
        """Look at a run that raised `error`, which is raised again afterwards; Ctrl-C is one as well."""


def attach(observer: Observer) -> None:
    """Let `observer` see every execution from now on; the first attached is asked first."""
    global _attached
    _attached = (*_attached, observer)


def detach(observer: Observer) -> None:
    """Undo `attach`; nothing happens where it is not attached."""
    global _attached
    _attached = tuple(other for other in _attached if other is not observer)


def add_source(source: Callable[[], Observer | None]) -> None:
    """Ask `source` before every execution from now on who looks at it, after those that are attached."""
    global _sources
    _sources = (*_sources, source)


def observers() -> tuple[Observer, ...]:
    """Return who looks now; the environment is asked each time, so that a loop may turn its variables on and off."""
    found = tuple(observer for source in _sources if (observer := source()) is not None)
    return (*_attached, *found) if found else _attached
