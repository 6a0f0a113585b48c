"""Measures every tensor between an intake and a writer, passes on the steps that matter, and feeds trackers."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Unpack

import numpy as np
import torch
from torch import Tensor

from glassengine.capture.intake import Writer
from glassengine.capture.recent_steps import MEASURED as MEASURED_DTYPES
from glassengine.capture.recent_steps import (
    Column,
    DeviceNorms,
    HeldStep,
    Number,
    StepBuffer,
    StepItem,
    note_of,
    retain_freed_memory,
)
from glassengine.capture.triggers import EVERY, NumberTriggers, OutsideTriggers
from glassengine.errors import GlassError, UsageError
from glassengine.extensions import require_package
from glassengine.recording.background import BackgroundWriter
from glassengine.recording.layout.description import Facts
from glassengine.recording.layout.layout import LeftOut
from glassengine.recording.layout.tensors import norm_of
from glassengine.recording.series import ABSENT, MEASURED, NONFINITE, UNMEASURED, Array, SeriesLog
from glassengine.recording.write.policy import RecordingPolicy, Tracker, Watch
from glassengine.sites import ROOT
from glassengine.stores.places import RemotePath

LOSS = "loss"
# In which the ranks of a run ask each other for steps.
TRIGGERS = "triggers.log"
# Written to by every step of an optimizer.
_CHANGING = (":param", ":state.")

_log = logging.getLogger(__name__)


class Destination(Writer, Protocol):
    """What the values of the steps that matter go to."""

    @property
    def path(self) -> Path:
        """Directory of the recording."""


class Watcher:
    """Takes tensors as a `Writer` does; what it holds of them is bounded.

    Args:
        writer: Gets the steps that matter.
        watch: Which those are.
        obstacle: Takes bytes of values from the budget, or returns why they are left out.
        rank: Of this process.
        shared: Where ranks of one run ask each other for steps; None where there is one.

    Attributes:
        events: What triggered: step, reasons, and the steps that were recorded for it.
        num_suppressed: Triggers beyond `Watch.most`.
    """

    def __init__(
        self,
        writer: Destination,
        watch: Watch,
        obstacle: Callable[[int], str | None],
        *,
        rank: int,
        shared: Path | None,
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.num_suppressed = 0
        self._writer = writer
        self._watch = watch
        self._obstacle = obstacle
        self._rank = rank
        self._log = SeriesLog(writer.path)
        self._ring = StepBuffer(watch.ring_bytes, watch.before + 1 + (shared is not None))  # another rank may be ahead
        self._columns: dict[str, Column] = {}
        self._series: list[str] = []
        self._numbers_of: dict[str, int] = {}
        self._norms: dict[int, DeviceNorms] = {}
        self._waits = False
        self._unread: deque[tuple[HeldStep, DeviceNorms | None]] = deque()
        self._triggers = NumberTriggers(watch)
        self._outside = OutsideTriggers(watch, shared, rank)
        self._trackers = Trackers(watch.trackers, watch.tracker_every, writer.path)
        self._num_automatic = 0
        self._error: str | None = None
        self._give_back: Callable[[], None] = lambda: None
        self._lock = threading.RLock()

    def attach(self) -> None:
        """Begin to listen for what comes from outside."""
        self._give_back = retain_freed_memory(self._watch.ring_bytes)
        problem = self._outside.attach()
        if problem is not None:
            self._log.note(problem)
            _log.warning("the signal does not trigger: %s", problem)

    def detach(self) -> None:
        """Listen no more."""
        self._outside.detach()
        self._give_back()

    def take_repeat(self, site: str, step: int, tensor: Tensor, rank: int) -> bool:
        """Take a tensor of a site that is known; false for one that is not."""
        column = self._columns.get(site)
        if column is None or column.facts:
            return False
        place = tensor.data_ptr()  # raises for what has no memory of its own
        if not place or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            return False
        self._take(column, step, tensor, place)
        return True

    def write(self, site: str, step: int, tensor: Tensor, *, rank: int = 0, **facts: Unpack[Facts]) -> None:
        """Take a tensor whose values are wanted where its step matters."""
        known = {name: value for name, value in facts.items() if value is not None}
        self._take(self._column(site, None, known), step, tensor, tensor.data_ptr())

    def measure(self, site: str, step: int, tensor: Tensor, *, rank: int, reason: str) -> bool:
        """Take a tensor whose values are not wanted; True."""
        self._take(self._column(site, reason, {}), step, tensor, tensor.data_ptr())
        return True

    def leave_out(self, item: LeftOut) -> None:
        """Take note of a tensor that cannot be recorded."""
        with self._lock:
            self._ring.step(item.step).items.append(item)

    def number(self, name: str, step: int, value: Tensor | float) -> None:
        """Take a number that belongs to a step; those of the same name in a step get a number each."""
        with self._lock:
            numbers = self._ring.step(step).numbers
            count = sum(known == name or known.startswith(f"{name}@") for known in numbers)
            numbers[f"{name}@{count}" if count else name] = self._numeric(step, value)

    def _numeric(self, step: int, value: Tensor | float) -> Number:
        if isinstance(value, Tensor) and not value.is_cpu:
            return self._norms_of(step).add_number(value)
        return Number(float(value))

    def _norms_of(self, step: int) -> DeviceNorms:
        if not self._waits:
            self._waits = True
            self._ring.most_steps += 1  # one whose numbers are on their way
        return self._norms.setdefault(step, DeviceNorms())

    def hold(self, step: int, *, token_ids: Sequence[Sequence[int]] = ()) -> None:
        """A step that goes on is in memory alone."""

    def commit(self, step: int, *, token_ids: Sequence[Sequence[int]] = (), stopped: str | None = None) -> None:
        """End a step, and judge it, or the one before where numbers of this one are on their way."""
        with self._lock:
            held = self._ring.end(step, token_ids, stopped)
            norms = self._norms.pop(step, None)
            is_waiting = norms is not None and norms.end()
            self._unread.append((held, norms))
            self._read(keep=1 if is_waiting else 0)

    def fail(self, error: str) -> None:
        """Note that an exception ends the recording."""
        self._error = error

    def finish(self) -> None:
        """Judge what is left, and write no more."""
        with self._lock:
            self._read(keep=0)
            if self._error is not None and self._watch.error and self._ring.ended:
                self._record(self._ring.ended[-1].step, [self._error])
            if self._ring.num_cut:
                self._log.note(f"{self._ring.num_cut} tensors were let go early: the memory of the watch was used up")
            self._ring.clear()
            self._trackers.close()
            self._log.close()

    def summary(self) -> dict[str, Any]:
        """Return what the metadata of the recording says of the watch."""
        summary_facts: dict[str, Any] = {"events": self.events, "num_suppressed": self.num_suppressed}
        summary_facts["num_cut"] = self._ring.num_cut
        if self._log.failure is not None:
            summary_facts["series_failed"] = str(self._log.failure.strerror or self._log.failure)
        if self._trackers.problems:
            summary_facts["trackers"] = self._trackers.problems
        return summary_facts

    def _column(self, site: str, reason: str | None, facts: dict[str, Any]) -> Column:
        found = self._columns.get(site)
        if found is None:
            must_copy = any(port in site for port in _CHANGING)
            found = self._columns[site] = Column(site, None, reason, facts, must_copy=must_copy)
        elif found.facts != facts:
            found.facts = facts
        return found

    def _take(self, column: Column, step: int, tensor: Tensor, place: int) -> None:
        with self._lock:
            item, is_new = self._ring.take(step, column, tensor, place)
            if tensor.dtype not in MEASURED_DTYPES:
                return
            if column.number is None:
                self._enter(column)
            if not is_new:
                return
            if not math.isnan(item.norm):
                return
            if tensor.is_cpu:
                item.norm, item.num_nonfinite = norm_of(tensor if item.copy is None else item.copy)
            else:
                self._norms_of(step).add(item, tensor)

    def _enter(self, column: Column) -> None:
        column.number = self._log.column(column.site, "norm")
        if column.number is not None:
            self._series.append(column.site)

    def _read(self, *, keep: int) -> None:
        while len(self._unread) > keep:
            held, norms = self._unread.popleft()
            if norms is not None:
                norms.finish()
            numbers = {name: value.norm for name, value in held.numbers.items()}
            for name in numbers:
                if name not in self._numbers_of and (column := self._log.column(name, "number")) is not None:
                    self._numbers_of[name] = column
                    self._series.append(name)
            states, values, nonfinite = self._rows(held, numbers)
            self._log.row(held.step, time.time(), states, values, nonfinite)
            self._trackers.take(held.step, self._series, states, values)
            losses = [value for name, value in numbers.items() if name.partition("@")[0] == LOSS]
            norm_states = states.copy()
            norm_states[list(self._numbers_of.values())] = ABSENT
            self._judge(held, self._triggers.look(norm_states, values, self._series, losses))

    def _rows(self, held: HeldStep, numbers: dict[str, float]) -> tuple[Any, Any, list[tuple[int, int, float]]]:
        states = np.zeros(len(self._series), dtype=np.uint8)
        values = np.zeros(len(self._series), dtype=np.float32)
        nonfinite = []
        places, found, kinds = [], [], []
        for entry in held.items:
            if isinstance(entry, LeftOut) or entry[0].number is None:
                continue
            column, item = entry
            places.append(column.number or 0)
            found.append(min(item.norm, 3e38))
            kinds.append(NONFINITE if item.num_nonfinite else UNMEASURED if math.isnan(item.norm) else MEASURED)
            if kinds[-1] == NONFINITE:
                norm = item.norm if math.isfinite(item.norm) else 0.0
                nonfinite.append((places[-1], item.num_nonfinite, norm))
        states[places], values[places] = kinds, found
        for name, value in numbers.items():
            if (column_number := self._numbers_of.get(name)) is not None:
                states[column_number] = MEASURED if math.isfinite(value) else NONFINITE
                values[column_number] = value
        return states, values, nonfinite

    def _judge(self, held: HeldStep, why: list[str]) -> None:
        asked, repeated = self._outside.look(held.step)
        if (why or repeated) and self._num_automatic >= self._watch.most:
            self.num_suppressed += 1
            why, repeated = [], []
        self._num_automatic += bool(why or repeated)
        why = [*why, *repeated, *asked]
        if held.stopped is not None and self._watch.error:
            why.append(f"stopped by {held.stopped}")
        if why:
            self._outside.tell(held.step, why)
            self._record(held.step, why)
        for step, reason in self._outside.asked_by_others():
            self._record(step, [reason])

    def _record(self, step: int, why: list[str]) -> None:
        """Pass on a step and those before it, as far as they are held."""
        first = max(step - self._watch.before, 0)
        there = {held.step: held for held in self._ring.ended if first <= held.step <= step}
        missing = []
        for number in range(first, step + 1):
            held = there.get(number)
            if held is None:
                missing.append(f"step {number} was not held" if number != step else f"step {number} was held no more")
            elif not held.is_recorded:
                self._pass_on(held)
        recorded = [number for number in sorted(there) if there[number].is_recorded]
        self.events.append({"step": step, "why": why, "recorded": recorded, "missing": missing})
        self._log.event(step, why, recorded, missing)
        level = logging.INFO if all(reason.startswith(EVERY) for reason in why) else logging.WARNING
        _log.log(level, "step %d: %s; recorded: %s", step, "; ".join(why), ", ".join(map(str, recorded)) or "nothing")

    def _pass_on(self, held: HeldStep) -> None:
        held.is_recorded = True
        for entry in held.items:
            if isinstance(entry, LeftOut):
                self._writer.leave_out(entry)
            else:
                self._pass_on_tensor(held.step, *entry)
        self._writer.commit(held.step, token_ids=held.token_ids, stopped=held.stopped)
        self._ring.let_go(held)

    def _pass_on_tensor(self, step: int, column: Column, item: StepItem) -> None:
        values = item.values()
        if values is None:
            self._writer.leave_out(note_of(column, item, step, self._rank))
            return
        reason = column.reason or self._obstacle(values.nbytes)
        with torch.no_grad():
            if reason is None:
                self._writer.write(column.site, step, values, rank=self._rank, **column.facts)
            elif not self._writer.measure(column.site, step, values, rank=self._rank, reason=reason):
                item.lost = reason
                self._writer.leave_out(note_of(column, item, step, self._rank))


def watcher_of(
    writer: BackgroundWriter, watch: Watch, policy: RecordingPolicy, *, rank: int, shared: Path | None
) -> Watcher:
    """Return a watcher; closes the writer where that fails."""
    try:
        if isinstance(writer.path, RemotePath):
            raise UsageError(
                "the series of a watched run are written on this machine",
                got=str(writer.path),
                expected="a directory",
                hint="glass upload brings the recorded steps to a store",
            )
        return Watcher(writer, watch, policy.obstacle, rank=rank, shared=shared and shared / TRIGGERS)
    except BaseException:
        writer.close("it never began")
        raise


Note = Callable[[Tensor], None]

_lock = threading.Lock()
_listeners: list[Note] = []
_original: Callable[..., Any] | None = None


def listen(note: Note) -> None:
    """Call `note` with every floating scalar that `backward` is called on, ahead of it."""
    global _original
    with _lock:
        _listeners.append(note)
        if _original is None:
            _original = torch.autograd.backward
            torch.autograd.backward = _backward


def stop_listening(note: Note) -> None:
    """Undo `listen`."""
    global _original
    with _lock:
        if note in _listeners:
            _listeners.remove(note)
        # Another one may have taken the place meanwhile, and calls ours.
        if not _listeners and _original is not None and torch.autograd.backward is _backward:
            torch.autograd.backward = _original
            _original = None


def _backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tuple(tensors):
            if type(tensor) is Tensor and tensor.numel() == 1 and tensor.is_floating_point():
                for note in tuple(_listeners):
                    note(tensor.detach())
    assert _original is not None
    return _original(tensors, *args, **kwargs)


_MOST_WAITING = 64
_END_S = 60.0

_log = logging.getLogger(__name__)


class Trackers:
    """Gives one step in so many to each tracker; what one raises ends it and is kept, and never reaches the model.

    Args:
        names: "tensorboard", "wandb", "mlflow", or functions.
        every: One step in so many.
        directory: Of the recording; TensorBoard's files go to `tensorboard/` in it.
    """

    def __init__(self, names: Sequence[str | Tracker], every: int, directory: Path) -> None:
        self.problems: dict[str, str] = {}
        self._every = every
        self._num_skipped = 0
        self._ends: list[Callable[[], object]] = []
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            title = name if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)
            self._trackers[title] = _opened(name, directory, self._ends) if isinstance(name, str) else name
        self._queue: queue.Queue[tuple[int, list[str], Array, Array] | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None

    def take(self, step: int, names: Sequence[str], states: Array, values: Array) -> None:
        """Take what was measured in a step; a tracker that is too slow misses it, which is counted."""
        if not self._trackers or step % self._every:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="glassengine-trackers", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((step, list(names), states, values))
        except queue.Full:
            self._num_skipped += 1

    def close(self) -> None:
        """Hand over what waits."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_END_S)
        for end in self._ends:
            try:
                end()
            except Exception as error:  # of another package
                _log.warning("a tracker did not end well: %s", error)
        if self._num_skipped:
            self.problems["skipped"] = f"{self._num_skipped} steps: the trackers were too slow"
            _log.warning("the trackers missed %d steps: they were too slow", self._num_skipped)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            step, names, states, values = item
            shown = np.flatnonzero((states == MEASURED) | (states == NONFINITE))
            numbers = {names[column]: float(values[column]) for column in shown if states[column] == MEASURED}
            numbers["num_nonfinite_sites"] = float(np.count_nonzero(states == NONFINITE))
            for title, tracker in list(self._trackers.items()):
                try:
                    tracker(step, numbers)
                except Exception as error:  # of another package
                    self.problems[title] = f"{type(error).__name__}: {error}"[:500]
                    del self._trackers[title]
                    _log.warning("%s gets no more numbers: %s", title, self.problems[title])


def _opened(name: str, directory: Path, ends: list[Callable[[], object]]) -> Tracker:
    try:
        return _OPENERS[name](directory, ends)
    except GlassError:
        raise
    except Exception as error:  # of another package
        raise UsageError(f"{name} cannot begin", got=f"{type(error).__name__}: {error}"[:500]) from error


def _package(name: str) -> Any:
    return require_package(name, "a tracker is not installed", f"pip install {name}")


def _tensorboard(directory: Path, ends: list[Callable[[], object]]) -> Tracker:
    writer = _package("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(directory / "tensorboard"))
    event = _package("tensorboard.compat.proto.event_pb2").Event
    summary = _package("tensorboard.compat.proto.summary_pb2").Summary
    clock = _package("time").time
    ends.append(writer.close)

    def write(step: int, numbers: Mapping[str, float]) -> None:
        values = [summary.Value(tag=_tag(name), simple_value=value) for name, value in numbers.items()]
        writer.add_event(event(wall_time=clock(), step=step, summary=summary(value=values)))

    return write


def _wandb(directory: Path, ends: list[Callable[[], object]]) -> Tracker:
    wandb = _package("wandb")
    run = wandb.run
    if run is None:
        run = wandb.init(dir=str(directory), name=directory.name)
        ends.append(run.finish)
    run.define_metric("glass/*", step_metric="glass/step")

    def write(step: int, numbers: Mapping[str, float]) -> None:
        # The steps of the run are those of its owner: ours are a number of their own.
        run.log({"glass/step": step, **{f"glass/{_tag(name)}": value for name, value in numbers.items()}})

    return write


def _mlflow(directory: Path, ends: list[Callable[[], object]]) -> Tracker:
    mlflow = _package("mlflow")
    active = mlflow.active_run()
    if active is None:
        active = mlflow.start_run(run_name=directory.name)
        ends.append(mlflow.end_run)
    run = active.info.run_id

    def write(step: int, numbers: Mapping[str, float]) -> None:
        metrics = {f"glass/{_allowed(_tag(name))}": value for name, value in numbers.items()}
        mlflow.log_metrics(metrics, step=step, run_id=run, synchronous=True)

    return write


def _tag(name: str) -> str:
    """Return the tag of a series: grouped by the kind of the site, where viewers make groups of what is before "/"."""
    path, colon, port = name.partition(":")
    path = "(model)" if path == ROOT else path  # MLflow takes names for paths of files, and no "." in them
    return f"{port}/{path}" if colon else f"out/{path}" if path != name or "." in name else name


def _allowed(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name)


_OPENERS: dict[str, Callable[[Path, list[Callable[[], object]]], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
