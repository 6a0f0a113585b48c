"""What of a watched run is recorded in full, and when: the triggers, the steps before them, and their memory."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassengine.errors import UnknownNameError, UsageError

Tracker = Callable[[int, Mapping[str, float]], object]
"""Gets a step and its numbers."""
TRACKERS = ("tensorboard", "wandb", "mlflow")


@dataclass(frozen=True)
class Watch:
    """How `glass.record(..., watch=...)` watches a run; see `docs/guide/watching.md`.

    Attributes:
        nonfinite: Record a step in which NaN or Inf appears at a site, after one without any.
        norm: Record a step in which the norm of a site goes beyond this many times its running median (of the last 64
            steps, from the 16th on); None for never.
        loss: Record a step whose loss lies above its running median by more than this many times the running spread
            (1.4826 times the median distance from the median); None for never.
        error: Record the last step when an exception ends the recording.
        every: Record one step in so many; None for none.
        file: Record a step when this file appears, or is touched.
        signal: Record a step when this signal comes, e.g. "USR1".
        before: Number of steps before that are recorded as well.
        ring_bytes: Most bytes of values that are held for this; the oldest go first.
        most: Most recordings that `nonfinite`, `norm`, `loss` and `every` lead to; further ones are counted.
        trackers: Where numbers go while the model runs: "tensorboard", "wandb", "mlflow", or functions of a step and
            its numbers.
        tracker_every: One step in so many goes there.

    Raises:
        UsageError: A value is out of range.
        UnknownNameError: There is no such signal or tracker.
    """

    nonfinite: bool = True
    norm: float | None = 100.0
    loss: float | None = 20.0
    error: bool = True
    every: int | None = None
    file: str | Path | None = None
    signal: str | int | None = None
    before: int = 2
    ring_bytes: int = 2 << 30
    most: int = 8
    trackers: Sequence[str | Tracker] = ()
    tracker_every: int = 10

    def __post_init__(self) -> None:
        for name, least in (("before", 0), ("ring_bytes", 0), ("most", 1), ("every", 1), ("tracker_every", 1)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= least):
                raise UsageError(f"invalid {name} of a watch", got=repr(value), expected=f"a whole number from {least}")
        for name in ("norm", "loss"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 1):
                raise UsageError(f"invalid {name} of a watch", got=repr(value), expected="a factor above 1, or None")
        if isinstance(self.trackers, str):
            raise UsageError("trackers of a watch are a list", got=repr(self.trackers), hint=f"[{self.trackers!r}]")
        for tracker in self.trackers:
            if not callable(tracker) and tracker not in TRACKERS:
                raise UnknownNameError("tracker", str(tracker), TRACKERS)
        self.signal_number()

    def signal_number(self) -> int | None:
        """Return the number of the signal.

        Raises:
            UnknownNameError: There is no such signal.
        """
        if self.signal is None:
            return None
        names = {found.name.removeprefix("SIG"): int(found) for found in signal.Signals}
        wanted = str(self.signal).upper().removeprefix("SIG")
        if wanted in names:
            return names[wanted]
        if wanted.isdecimal() and int(wanted) in names.values():
            return int(wanted)
        raise UnknownNameError("signal", str(self.signal), names)


def watch_of(given: Watch | bool | Mapping[str, Any] | None) -> Watch | None:
    """Return what `watch=` of `record` means: True is a watch with every default.

    Raises:
        UsageError: It is of another kind.
    """
    if given is None or given is False:
        return None
    if given is True:
        return Watch()
    if not isinstance(given, Watch):
        raise UsageError("watch is of another kind", got=repr(given), expected="True or glass.Watch(...)")
    return given
