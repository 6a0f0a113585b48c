"""Decides when a step of a watched run is recorded with values: by its numbers, or by a request from outside."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np

from glassengine.errors import GlassError, shortened
from glassengine.reading.documents import Size, parsed
from glassengine.reading.files import open_regular, printable, shown
from glassengine.recording.series import MEASURED, NONFINITE, Array
from glassengine.recording.write.policy import Watch

WINDOW, WARM_UP = 64, 16
# The medians of norms are computed again after so many steps.
_EVERY = 8
_SPREAD = 1.4826  # of a normal distribution, per median distance from the median
_LEAST_SPREAD = 1e-3  # of the median: a loss that has not moved at all does not trigger with its last digits
_MOST_NAMES = 3
EVERY = "every"
_MOST_BYTES = 1 << 20
# A line that no end of line comes to is not one of ours.
_MOST_LINE, _MOST_WHY = 1 << 13, 500


class _Asked(msgspec.Struct):
    """What a rank asks the others for: a line of the shared file."""

    rank: Size
    step: Size
    why: str


class NumberTriggers:
    """Looks at the numbers of each step; what it remembers is bounded."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._norms = np.full((WINDOW, 0), np.nan, dtype=np.float32)
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._medians: Array = np.zeros(0, dtype=np.float32)
        self._num_seen = 0
        # Of the step before: a state that lasts triggers once.
        self._was_nonfinite = self._was_beyond = self._was_high = False

    def look(self, states: Array, norms: Array, names: Sequence[str], losses: Sequence[float]) -> list[str]:
        """Return why the step is worth recording; one reason a line."""
        return [*self._nonfinite(states, names), *self._beyond(states, norms, names), *self._high(losses)]

    def _nonfinite(self, states: Array, names: Sequence[str]) -> list[str]:
        found = np.flatnonzero(states == NONFINITE)
        was, self._was_nonfinite = self._was_nonfinite, bool(found.size)
        if not self._watch.nonfinite or was or not found.size:
            return []
        return [f"not finite: {shortened(map(names.__getitem__, found.tolist()), _MOST_NAMES)}"]

    def _beyond(self, states: Array, norms: Array, names: Sequence[str]) -> list[str]:
        factor = self._watch.norm
        if factor is None:
            return []
        if len(norms) > self._norms.shape[1]:
            more = np.full((WINDOW, len(norms) - self._norms.shape[1]), np.nan, dtype=np.float32)
            self._norms = np.concatenate([self._norms, more], axis=1)
        measured = states == MEASURED
        lines: list[str] = []
        if len(self._medians):
            medians = self._medians
            known = len(medians)
            with np.errstate(invalid="ignore"):
                far = measured[:known] & (medians > 0) & (norms[:known] > factor * medians)
            found = np.flatnonzero(far)
            if found.size and not self._was_beyond:
                column = found[0]
                what = f"{norms[column]:.6g}, beyond {factor:g} times its median {medians[column]:.6g}"
                lines = [f"norm {what}: {shortened(map(names.__getitem__, found.tolist()), _MOST_NAMES)}"]
            self._was_beyond = bool(found.size)
        self._norms[self._num_seen % WINDOW] = np.where(measured, norms, np.nan)
        self._num_seen += 1
        if self._num_seen >= WARM_UP and self._num_seen % _EVERY == 0:
            self._medians = _medians(self._norms[: self._num_seen])
        return lines

    def _high(self, losses: Sequence[float]) -> list[str]:
        factor = self._watch.loss
        lines: list[str] = []
        for loss in losses:
            if not math.isfinite(loss):
                if self._watch.nonfinite and not self._was_nonfinite:
                    self._was_nonfinite = True
                    lines.append(f"the loss is {loss}")
                continue
            if factor is not None and len(self._losses) >= WARM_UP:
                known = np.array(self._losses)
                median = float(np.median(known))
                spread = max(_SPREAD * float(np.median(np.abs(known - median))), _LEAST_SPREAD * abs(median))
                is_high = loss > median + factor * spread
                if is_high and not self._was_high:
                    lines.append(f"loss {loss:.6g}, of median {median:.6g} and spread {spread:.3g} before")
                self._was_high = is_high
            self._losses.append(loss)
        return lines


def _medians(norms: Array) -> Array:
    """Return the lower median of each column with enough numbers, else NaN; NaN in `norms` [steps, columns] is none."""
    counts = np.count_nonzero(~np.isnan(norms), axis=0)
    ordered = np.sort(norms, axis=0)  # NaN last
    found = ordered[np.maximum(counts - 1, 0) // 2, np.arange(norms.shape[1])]
    return np.asarray(np.where(counts >= WARM_UP, found, np.nan))


class OutsideTriggers:
    """What asks for a step from outside: a file that appears, a signal, every so many steps, another rank.

    Ranks of one run ask each other by a file beside their recordings: no collective operation, which could wait for a
    rank that never comes.

    Args:
        watch: What triggers.
        shared: File in which ranks note the steps that they record; None where there is one rank.
        rank: Of this process.
    """

    def __init__(self, watch: Watch, shared: Path | None, rank: int) -> None:
        self._watch = watch
        self._file = None if watch.file is None else Path(watch.file).absolute()
        self._stamp = _stamp(self._file)
        self._shared = shared
        self._rank = rank
        # What an earlier run has left there does not count.
        self._read = _size(shared)
        self._rest = b""
        self._signals = 0
        self._number = watch.signal_number()
        self._before: Any = None
        self._is_installed = False

    def attach(self) -> str | None:
        """Listen to the signal; return why that cannot be done, if it cannot."""
        if self._number is None:
            return None
        if threading.current_thread() is not threading.main_thread():
            return "signals reach the main thread only, and the recording was begun in another one"
        self._before = signal.signal(self._number, self._came)
        self._is_installed = True
        return None

    def detach(self) -> None:
        """Listen no more."""
        if self._is_installed and self._number is not None:
            self._is_installed = False
            if signal.getsignal(self._number) == self._came:
                signal.signal(self._number, self._before or signal.SIG_DFL)

    def look(self, step: int) -> tuple[list[str], list[str]]:
        """Return why an ended step is worth recording: what the user asked for, and what repeats by itself."""
        asked, repeated = [], []
        if self._signals:
            self._signals = 0
            asked.append(f"signal {self._watch.signal}")
        # It is left alone: other models, and other ranks, look at the same one.
        stamp = _stamp(self._file)
        if self._file is not None and stamp not in (None, self._stamp):
            asked.append(f"the file {self._file.name}")
        self._stamp = stamp
        if self._watch.every is not None and step % self._watch.every == 0:
            repeated.append(f"{EVERY} {self._watch.every} steps")
        return asked, repeated

    def tell(self, step: int, why: Sequence[str]) -> None:
        """Ask the other ranks for a step."""
        if self._shared is not None:
            line = json.dumps(msgspec.to_builtins(_Asked(self._rank, step, shown(why[0])[:_MOST_WHY]))) + "\n"
            # Something else of this name may be a link, or a pipe that nobody reads.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            with contextlib.suppress(OSError):
                descriptor = os.open(self._shared, flags, 0o644)
                try:
                    os.write(descriptor, line.encode())
                finally:
                    os.close(descriptor)

    def asked_by_others(self) -> list[tuple[int, str]]:
        """Return the steps that other ranks have asked for since, and why."""
        size = _size(self._shared)
        if self._shared is None or size <= self._read:
            return []
        # Others can put something else in its place at any time.
        with contextlib.suppress(OSError, GlassError), open_regular(self._shared, inside=self._shared.parent) as file:
            file.seek(self._read)
            data = self._rest + file.read(_MOST_BYTES)
            self._read = file.tell()
            *lines, rest = data.split(b"\n")
            self._rest = rest if len(rest) <= _MOST_LINE else b""
            return [found for line in lines if (found := self._asked(line)) is not None]
        return []

    def _asked(self, line: bytes) -> tuple[int, str] | None:
        if len(line) > _MOST_LINE or self._shared is None:
            return None
        try:
            found = parsed(line, _Asked, self._shared)
        except GlassError:
            return None
        if found.rank == self._rank:
            return None
        return found.step, f"rank {found.rank}: {printable(found.why[:_MOST_WHY])}"

    def _came(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if callable(self._before):
            self._before(number, frame)


def _stamp(path: Path | None) -> tuple[int, int] | None:
    try:
        found = None if path is None else path.stat()
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_mtime_ns)


def _size(path: Path | None) -> int:
    try:
        return 0 if path is None else path.stat().st_size
    except OSError:
        return 0
