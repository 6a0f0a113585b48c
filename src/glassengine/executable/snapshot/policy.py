"""Policy of snapshots: which executions get one, its content and limits, and the callback that chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from glassengine.errors import UsageError, logger

Occasion = Literal["every", "nonfinite", "error"]
KeepInputs = Literal["reference", "device", "host"]
OCCASIONS: tuple[Occasion, ...] = get_args(Occasion)
KEEP_INPUTS: tuple[KeepInputs, ...] = get_args(KeepInputs)
CONTENTS = ("inputs", "outputs", "inputs outputs")

MIN_FREE_BYTES = 1 << 30

Callback = Callable[[str, int, int], str]
WORDS = frozenset({"inputs", "outputs"})
_lock = threading.Lock()


@dataclass(frozen=True)
class SnapshotPolicy:
    """When snapshots are taken, what they hold, and what limits them.

    Attributes:
        directory: Where they go.
        on: "every" execution for which the callback asks; one whose outputs are "nonfinite"; one that ends in an
            "error". Of the last two, one snapshot is taken in all, with inputs and outputs.
        contents: What a snapshot of every execution holds where no callback is registered.
        keep_inputs: How inputs outlast a run that may go wrong: as they are, but for copies of those that it may write
            to ("reference"), copied on their device ("device"), or in main memory ("host").
        ranks: Processes that take any; None for all of them.
        first_device_only: Only executions on the first device of the machine.
        max_snapshots: Most of this process; None for no limit.
        max_bytes: Most on disk, of this process; None for no limit.
        min_free_bytes: What must remain free on the disk.
        redact: Shapes, statistics and hashes in place of values.
    """

    directory: Path
    on: frozenset[str] = frozenset({"every"})
    contents: str = "inputs"
    keep_inputs: KeepInputs = "reference"
    ranks: frozenset[int] | None = None
    first_device_only: bool = False
    max_snapshots: int | None = None
    max_bytes: int | None = None
    min_free_bytes: int = MIN_FREE_BYTES
    redact: bool = False


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


def has_callback() -> bool:
    """Return whether a callback is registered."""
    return _registered.function is not inputs_always


def ask_callback(name: str, device_index: int, execution: int) -> frozenset[str]:
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
