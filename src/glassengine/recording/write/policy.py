"""Selects what a run records: sites, steps and values, and the number of bytes; and what triggers in a watched run."""

from __future__ import annotations

import copy
import operator
import re
import signal
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, get_args

from glassengine.errors import UnknownNameError, UsageError
from glassengine.sites import matches, patterns_of

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
    """Return what `watch=` of `record` means: True is a watch with every default."""
    if given is None or given is False:
        return None
    if given is True:
        return Watch()
    if not isinstance(given, Watch):
        raise UsageError("watch is of another kind", got=repr(given), expected="True or glass.Watch(...)")
    return given


NO_VALUES = "values were not asked for"
OVER_BUDGET = "the byte budget was used up"
BEHIND = "the store did not keep up"


WhenBehind = Literal["wait", "cut"]
"""What is done while a store takes less than is recorded: the model waits, or values are left out."""


class Wanted(TypedDict, total=False):
    """What of a run is recorded, as `RecordingPolicy` takes it."""

    sites: Sequence[str] | None
    values: bool | Sequence[str]
    steps: Collection[int] | None
    byte_budget: int | None
    when_behind: WhenBehind


class RecordOptions(Wanted, total=False):
    """What of a run is recorded, and how, as `record` takes it."""

    overwrite: bool
    durable: bool
    spool_bytes: int | None
    watch: Watch | bool | None


class ScriptOptions(RecordOptions, total=False):
    """The same of all models that a script calls; a run of another runtime has no gradients."""

    gradients: bool
    optimizer: bool
    microbatches: int


class RecordingPolicy:
    """Answers for every tensor whether it, and its values, belong into the recording.

    Args:
        sites: Patterns of the sites to record (globs and `re:`); all when None.
        values: Whether values are kept; or patterns of the sites whose values are. Of the others light statistics are.
        steps: The steps to record, e.g. range(3); all when None.
        byte_budget: Most bytes of values; None for no limit. A tensor that does not fit leaves its statistics.
        when_behind: Whether a store that takes less than is recorded makes the model wait, or leaves values out.

    Raises:
        UsageError: A pattern is not a valid regular expression, the budget is negative, or an argument of another kind.
    """

    def __init__(
        self,
        *,
        sites: Sequence[str] | None = None,
        values: bool | Sequence[str] = True,
        steps: Collection[int] | None = None,
        byte_budget: int | None = None,
        when_behind: WhenBehind = "wait",
    ) -> None:
        if when_behind not in get_args(WhenBehind):
            expected = list(get_args(WhenBehind))
            raise UsageError("invalid when_behind", got=repr(when_behind), expected=expected)
        if byte_budget is not None and not (isinstance(byte_budget, int | float) and byte_budget >= 0):
            raise UsageError("invalid byte budget", got=repr(byte_budget), expected="a number of bytes, from 0 on")
        self._sites = None if sites is None else _patterns("sites", sites)
        self._values = values if isinstance(values, bool) else _patterns("values", values)
        self._steps = None if steps is None else _step_numbers(steps)
        self._left = byte_budget
        self._cuts = when_behind == "cut"
        self._is_behind: Callable[[], bool] | None = None
        self._lock = threading.Lock()
        self._known: dict[str, tuple[bool, bool]] = {}
        self._matched: set[str] = set()

    def wants_step(self, step: int) -> bool:
        """Return whether anything of `step` is recorded."""
        return self._steps is None or step in self._steps

    def wants(self, site: str) -> tuple[bool, bool]:
        """Return whether `site` is recorded, and whether its values are."""
        found = self._known.get(site)
        if found is None:
            found = self._known[site] = self._look(site)
        return found

    def may_want(self, path: str) -> bool:
        """Return whether a site of the module at `path` may be recorded; taps inside of it aside."""
        if self._sites is None:
            return True
        parts = path.split(".")
        ends = [".".join(parts[first:]) for first in range(len(parts))]
        return any(_may_name(pattern, ends) for pattern in self._sites)

    def watch(self, is_behind: Callable[[], bool]) -> None:
        """Leave values out while a store is behind, if that was asked for."""
        self._is_behind = is_behind if self._cuts else None

    def obstacle(self, num_bytes: int) -> str | None:
        """Return why `num_bytes` of values are left out; None where they are taken, and charged."""
        if self._is_behind is not None and self._is_behind():
            return BEHIND
        return None if self.charge(num_bytes) else OVER_BUDGET

    def charge(self, num_bytes: int) -> bool:
        """Take `num_bytes` from the budget; false, and nothing taken, where they exceed it."""
        if self._left is None:
            return True
        with self._lock:
            if num_bytes > self._left:
                return False
            self._left -= num_bytes
            return True

    def unlimited(self) -> Self:
        """Return the same policy without its budget; what one of them sees, both have seen."""
        found = copy.copy(self)
        found._left = found._is_behind = None
        return found

    def unmatched(self) -> list[str]:
        """Return the patterns that no site has matched so far."""
        patterns = [*(self._sites or ()), *(() if isinstance(self._values, bool) else self._values)]
        return [pattern for pattern in dict.fromkeys(patterns) if pattern not in self._matched]

    @property
    def has_budget(self) -> bool:
        """Whether bytes are limited."""
        return self._left is not None or self._is_behind is not None

    @property
    def nothing_matched(self) -> bool:
        """Whether patterns of `sites` were given and none of them matched anything."""
        return self._sites is not None and not self._matched.intersection(self._sites)

    def asked_sites(self) -> list[str]:
        """Return the sites that were asked about."""
        return list(self._known)

    def _look(self, site: str) -> tuple[bool, bool]:
        wanted = self._sites is None or self._any(self._sites, site)
        keeps = self._values if isinstance(self._values, bool) else self._any(self._values, site)
        return wanted, wanted and keeps

    def _any(self, patterns: Sequence[str], site: str) -> bool:
        found = [pattern for pattern in patterns if matches(pattern, site)]
        self._matched.update(found)
        return bool(found)


def _may_name(pattern: str, ends: Sequence[str]) -> bool:
    """Return whether a pattern may match one of `ends` with a call or port, by what comes before its first wildcard."""
    if pattern.startswith("re:") or "kv" in pattern:  # caches are found in the inputs of other modules
        return True
    literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    is_glob = literal != pattern
    return any(literal.startswith((f"{end}:", f"{end}@")) or end == literal for end in ends) or (
        is_glob and any(end.startswith(literal) for end in ends)
    )


def _step_numbers(steps: Collection[int]) -> Collection[int]:
    if isinstance(steps, range):
        return steps
    try:
        return frozenset(map(operator.index, steps))
    except TypeError:
        what = "steps is not a collection of step numbers"
        raise UsageError(what, got=repr(steps), hint="the first five: steps=range(5)") from None


def _patterns(name: str, patterns: Sequence[str]) -> tuple[str, ...]:
    found = patterns_of(patterns, name)
    for pattern in found:
        matches(pattern, "")
    return found
