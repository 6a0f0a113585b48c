"""The callback that says, for each execution, what of it a snapshot is to hold."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from glassengine.errors import UsageError

logger = logging.getLogger("glassengine")

Callback = Callable[[str, int, int], str]
WORDS = frozenset({"inputs", "outputs"})


def inputs_always(name: str, addressable_device_index: int, execution_count: int) -> str:
    """Return the default content of a snapshot, without callback: the graph and its inputs."""
    del name, addressable_device_index, execution_count
    return "inputs"


class _Registered:
    """The callback in force; a class, so that the whole of it changes at once.

    Attributes:
        function: Returned to its owner on the next registration.
        is_disabled: Whether it raised; it is not asked again.
        complained: Invalid answers that were logged.
    """

    def __init__(self, function: Callback) -> None:
        self.function = function
        self.is_disabled = False
        self.complained: set[str] = set()


_registered = _Registered(inputs_always)
_lock = threading.Lock()


def register_snapshot_callback(callback: Callback) -> Callback:
    """Let `callback` decide, before each execution, what its snapshot holds.

    It is asked while snapshots of every execution are asked for: by `glass.snapshots.take(DIRECTORY)` or by
    `XLA_FLAGS="--xla_dump_hlo_snapshots --xla_dump_to=DIRECTORY"`. One that raises is logged once and not asked again:
    no more snapshots are taken until another one is registered.

    Args:
        callback: Takes the name of the executable, the index of the device it runs on, and how many executions of it on
            that device went before (0 for the first); returns "inputs", "outputs", "inputs outputs", or "" for no
            snapshot. None counts as "".

    Returns:
        The callback before it; at first, one that always returns "inputs".

    Raises:
        UsageError: It cannot be called.
    """
    global _registered
    if not callable(callback):
        raise UsageError(
            "a snapshot callback is a function",
            got=type(callback).__name__,
            expected="name, addressable_device_index, execution_count -> words",
            hint="register what the call before returned, to undo it",
        )
    with _lock:
        previous, _registered = _registered, _Registered(callback)
    return previous.function


register_hlo_snapshot_callback = register_snapshot_callback
"""As the document calls it."""


def is_default() -> bool:
    """Return whether no callback is registered."""
    return _registered.function is inputs_always


def ask(name: str, device_index: int, execution: int) -> frozenset[str]:
    """Return the words of the callback's answer that mean something; the others are logged once."""
    registered = _registered
    if registered.is_disabled:
        return frozenset()
    try:
        answer = registered.function(name, device_index, execution)
    except Exception:
        registered.is_disabled = True
        logger.exception("the snapshot callback failed in execution %d of %s; it is not asked again", execution, name)
        return frozenset()
    words = frozenset(answer.split()) if isinstance(answer, str) else frozenset()
    unknown = words - WORDS if isinstance(answer, str) or answer is None else {repr(answer)}
    for word in sorted(unknown - registered.complained):
        registered.complained.add(word)
        logger.warning("the snapshot callback answered %s; it knows '', 'inputs', 'outputs', 'inputs outputs'", word)
    return words & WORDS
