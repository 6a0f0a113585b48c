"""Record an ONNX Runtime session: each run is a step, its inputs and results are sites of the root."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glassengine import environment
from glassengine.capture.intake import Intake
from glassengine.capture.steps import Steps
from glassengine.recording.policy import Policy
from glassengine.recording.worker import BackgroundWriter


class SessionRecording:
    """A recording of one session.

    Args:
        session: An `onnxruntime.InferenceSession`.
        path: Directory of the recording.
        sites: As for `record`.
        values: As for `record`.
        steps: As for `record`.
        byte_budget: As for `record`.
        overwrite: Replace a recording that exists.

    Attributes:
        path: Directory of the recording.
    """

    def __init__(
        self,
        session: Any,
        path: Path,
        *,
        sites: Sequence[str] | None,
        values: bool | Sequence[str],
        steps: Collection[int] | None,
        byte_budget: int | None,
        overwrite: bool,
    ) -> None:
        self.path = path
        metadata = {
            "kind": "onnxruntime",
            "model": str(getattr(session, "_model_path", None)),
            "providers": list(session.get_providers()),
            "environment": environment.describe(),
            "command_line": environment.without_secrets(sys.argv),
        }
        self._policy = Policy(sites=sites, values=values, steps=steps, byte_budget=byte_budget)
        self._outputs = [output.name for output in session.get_outputs()]
        # An engine of the same file knows a result by the name of its value, as it knows every other one.
        metadata["aliases"] = {name: f".:out.{name}" for name in self._outputs}
        self._writer = BackgroundWriter(path, metadata=metadata, overwrite=overwrite)
        self._intake = Intake(self._writer, self._policy, 0)
        self._steps = Steps()

    def step(
        self,
        output_names: Sequence[str] | None,
        inputs: Mapping[str, Any],
        results: Sequence[Any],
        stopped: str | None = None,
    ) -> None:
        """Record one run that has ended; `stopped` says what ended one that has no results."""
        step = self._steps.next()
        if not self._policy.wants_step(step):
            return
        for name, value in inputs.items():
            self._take(f".:in.{name}", step, value)
        for name, value in zip(output_names or self._outputs, results, strict=False):
            self._take(f".:out.{name}", step, value)
        self._intake.commit(step, stopped=None if stopped is None else stopped[:300])

    def _take(self, site: str, step: int, value: Any) -> None:
        try:
            array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
            # torch warns of an array that it could write to, and refuses one that runs backwards.
            is_usual = array.flags.writeable and all(stride >= 0 for stride in array.strides)
            tensor = torch.from_numpy(array if is_usual else array.copy())
        except (TypeError, ValueError, RuntimeError):
            self._intake.leave_out(site, step, f"a {type(value).__name__} of elements that are no numbers")
        else:
            self._intake.take(site, step, tensor)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._writer.close(None if error is None else f"stopped by {type(error).__name__}: {error}"[:300])
