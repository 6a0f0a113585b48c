"""Who looks at executions: snapshots, the search for non-finite values, profiles.

Observers attach to `Executable.run`, the only place where a compiled graph runs, so every front end has all of them.
Nothing is gathered for an unobserved execution.
"""

from __future__ import annotations

from collections.abc import Callable

from glassengine.executable.graph.execution import Observer

_attached: tuple[Observer, ...] = ()
_asked: tuple[Callable[[], Observer | None], ...] = ()


def attach(observer: Observer) -> None:
    """Let `observer` see every execution from now on; the first attached is asked first."""
    global _attached
    _attached = (*_attached, observer)


def detach(observer: Observer) -> None:
    """Undo `attach`; nothing happens where it is not attached."""
    global _attached
    _attached = tuple(other for other in _attached if other is not observer)


def ask(source: Callable[[], Observer | None]) -> None:
    """Ask `source` before every execution from now on who looks at it, after those that are attached."""
    global _asked
    _asked = (*_asked, source)


def observers() -> tuple[Observer, ...]:
    """Return who looks now; the environment is asked each time, so that a loop may turn its variables on and off."""
    found = tuple(observer for source in _asked if (observer := source()) is not None)
    return (*_attached, *found) if found else _attached
