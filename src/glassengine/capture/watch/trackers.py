"""Hands the numbers of a watched run to TensorBoard, Weights & Biases, MLflow or functions, from a thread."""

from __future__ import annotations

import importlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glassengine.errors import GlassError, UsageError
from glassengine.recording.series import MEASURED, NONFINITE, Array
from glassengine.recording.write.policy import Tracker
from glassengine.sites import ROOT

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
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError("a tracker is not installed", got=str(error), hint=f"pip install {name}") from error


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
    package = _package("wandb")
    run = package.run
    if run is None:
        run = package.init(dir=str(directory), name=directory.name)
        ends.append(run.finish)
    run.define_metric("glass/*", step_metric="glass/step")

    def write(step: int, numbers: Mapping[str, float]) -> None:
        # The steps of the run are those of its owner: ours are a number of their own.
        run.log({"glass/step": step, **{f"glass/{_tag(name)}": value for name, value in numbers.items()}})

    return write


def _mlflow(directory: Path, ends: list[Callable[[], object]]) -> Tracker:
    package = _package("mlflow")
    active = package.active_run()
    if active is None:
        active = package.start_run(run_name=directory.name)
        ends.append(package.end_run)
    run = active.info.run_id

    def write(step: int, numbers: Mapping[str, float]) -> None:
        metrics = {f"glass/{_allowed(_tag(name))}": value for name, value in numbers.items()}
        package.log_metrics(metrics, step=step, run_id=run, synchronous=True)

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
