"""Record what is seen from outside only: each run is a step, its inputs and results are sites of the root."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from glassengine import environment
from glassengine.capture.intake.intake import Intake, Steps
from glassengine.capture.watch.watcher import Watcher, watcher_of
from glassengine.recording.background import BackgroundWriter
from glassengine.recording.write.policy import Policy, Wanted
from glassengine.recording.write.watch import Watch, watch_of


@dataclass(frozen=True)
class RunSource:
    """What a recording says of the owner of its runs.

    Attributes:
        kind: Name of the runtime.
        name: The directory of the recording has it.
        metadata: JSON-ready.
    """

    kind: str
    name: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One run that has ended.

    Attributes:
        owner: Whose runs make one recording; anything that can be hashed.
        describe: Tells about the owner; called before its first run is written.
        tensors: (site, value) of its inputs and results: tensors, or what numpy makes an array of.
        stopped: What ended a run that has no results.
    """

    owner: Any
    describe: Callable[[Any], RunSource]
    tensors: Sequence[tuple[str, Any]]
    stopped: str | None


class SessionRecording:
    """A recording of the runs of one owner.

    Args:
        source: What is known of it.
        path: Directory of the recording.
        overwrite: Replace an existing recording.
        durable: As for `record`.
        spool_bytes: As for `record`.
        watch: As for `record`.
        wanted: As for `record`.

    Attributes:
        path: Directory of the recording.
    """

    def __init__(
        self,
        source: RunSource,
        path: Path,
        *,
        overwrite: bool = False,
        durable: bool = True,
        spool_bytes: int | None = None,
        watch: Watch | bool | None = None,
        **wanted: Unpack[Wanted],
    ) -> None:
        self.path = path
        metadata = {
            "kind": source.kind,
            **source.metadata,
            "environment": environment.describe(),
            "command_line": environment.without_secrets(sys.argv),
        }
        self._policy = Policy(**wanted)
        self._writer = BackgroundWriter(
            path, metadata=metadata, overwrite=overwrite, durable=durable, spool_bytes=spool_bytes
        )
        self._policy.watch(lambda: self._writer.is_behind)
        self._watcher: Watcher | None = None
        policy, watched = self._policy, watch_of(watch)
        if watched is not None:
            self._watcher = watcher_of(self._writer, watched, policy, rank=0, shared=None)
            self._watcher.attach()
            policy = policy.unlimited()
        self._intake = Intake(self._watcher or self._writer, policy, 0)
        self._steps = Steps()

    def step(self, run: Run) -> None:
        """Record one run."""
        step = self._steps.next()
        if not self._policy.wants_step(step):
            return
        for site, value in run.tensors:
            self._take(site, step, value)
        self._intake.commit(step, stopped=None if run.stopped is None else run.stopped[:300])

    def _take(self, site: str, step: int, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._intake.take(site, step, value)
            return
        try:
            array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
            # torch warns of an array that it could write to, and refuses one that runs backwards.
            is_usual = array.flags.writeable and all(stride >= 0 for stride in array.strides)
            tensor = torch.from_numpy(array if is_usual else array.copy())
        except (TypeError, ValueError, RuntimeError):
            self._intake.leave_out(site, step, f"a {type(value).__name__} of non-numeric elements")
        else:
            self._intake.take(site, step, tensor)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._watcher is not None:
            self._watcher.detach()
            self._watcher.finish()
            self._writer.metadata["watch"] = self._watcher.summary()
        self._writer.close(None if error is None else f"stopped by {type(error).__name__}: {error}"[:300])
