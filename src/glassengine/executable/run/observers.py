"""Who looks at executions: snapshots, the search for non-finite values, profiles.

Observers attach to `Executable.run`, the only place where a compiled graph runs, so every front end has all of them.
Nothing is gathered for an unobserved execution.
"""

from __future__ import annotations

from glassengine.executable.graph.execution import Observer
from glassengine.executable.snapshot.environment import requested_taker

_attached: tuple[Observer, ...] = ()


def attach(observer: Observer) -> None:
    """Let `observer` see every execution from now on; the first attached is asked first."""
    global _attached
    _attached = (*_attached, observer)


def detach(observer: Observer) -> None:
    """Undo `attach`; nothing happens where it is not attached."""
    global _attached
    _attached = tuple(other for other in _attached if other is not observer)


def observers() -> tuple[Observer, ...]:
    """Return who looks now; the environment is asked each time, so that a loop may turn its variables on and off."""
    taker = requested_taker()
    return _attached if taker is None else (*_attached, taker)
