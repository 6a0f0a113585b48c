"""Runs a script and shares each step of its models with the process that compares two of them.

`python -m glassengine.diagnose.paired_side SOCKET SLOT SLOT DIRECTORY IS_MODULE PATTERNS SCRIPT ARGUMENTS...`; the
first three are inherited descriptors. A step lies in one slot of memory while the next one is written into the other.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.capture.record import Recorder, describe_model
from glassengine.capture.run_script import run_recorded
from glassengine.capture.runtimes import RuntimeRun
from glassengine.capture.script_recorder import ScriptRecorder
from glassengine.diagnose.paired_steps import KeptOnce, StepRecorder
from glassengine.recording.layout.layout import LeftOut
from glassengine.recording.layout.tensors import dtype_name

_ALIGNMENT = 64
_LEAST_BYTES = 1 << 20


class _Slots:
    """The memory of a side, and its line to the process that compares."""

    def __init__(self, line: Connection, descriptors: Sequence[int]) -> None:
        self.line = line
        self._descriptors = descriptors
        self._maps: list[mmap.mmap | None] = [None] * len(descriptors)
        self._num_sent = self._num_read = 0
        self._used = 0
        self._tensors: list[Any] = []
        self._sites: dict[str, int] = {}
        self._kept = KeptOnce(self._share)
        self._left_out: list[tuple[str, int, int, str]] = []

    def put(self, site: str, tensor: Tensor) -> None:
        """Copy the values of a tensor, and note where they are."""
        if not self._sites:
            while self._num_sent - self._num_read >= len(self._descriptors):
                self._receive()
            self._used = 0
        self._sites[site] = self._kept.of(tensor)

    def _share(self, tensor: Tensor) -> int:
        place = self._num_sent % len(self._descriptors)
        start, size = self._used, tensor.nbytes
        self._used = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
        if size:
            memory = torch.frombuffer(self._memory(place), dtype=tensor.dtype, count=tensor.numel(), offset=start)
            with torch.no_grad():
                memory.view(tensor.shape).copy_(tensor.detach())
        self._tensors.append([dtype_name(tensor.dtype), list(tensor.shape), start, size])
        return len(self._tensors) - 1

    def send(self, model: int, step: int) -> None:
        """Hand a step over."""
        shared = {"tensors": self._tensors, "sites": self._sites, "left_out": self._left_out}
        self.tell(kind="step", model=model, step=step, **shared)
        self._num_sent += 1
        self._tensors, self._sites, self._left_out = [], {}, []
        self._kept.clear()

    def leave_out(self, item: LeftOut) -> None:
        """Note a tensor without values."""
        self._left_out.append((item.site, item.step, item.rank, item.reason))

    def tell(self, **message: Any) -> None:
        """Send a message; end this process if the other one has ended."""
        try:
            self.line.send_bytes(json.dumps(message, default=str).encode())
        except OSError:
            os._exit(1)

    def wait(self) -> None:
        """Wait until all steps are compared."""
        while self._num_read < self._num_sent:
            self._receive()

    def _receive(self) -> None:
        try:
            self.line.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)
        self._num_read += 1

    def _memory(self, place: int) -> mmap.mmap:
        known = self._maps[place]
        if known is None or len(known) < self._used:
            size = max(_LEAST_BYTES, 2 * self._used)
            os.ftruncate(self._descriptors[place], size)
            known = self._maps[place] = mmap.mmap(self._descriptors[place], size)
        return known


class _SlotScriptRecorder(ScriptRecorder):
    """Shares what each model of a script computes; the n-th model of one side is that of the other."""

    def __init__(self, slots: _Slots, directory: str, sites: Sequence[str] | None) -> None:
        super().__init__(directory, sites=sites)
        self._slots, self._sites = slots, sites

    def recorder_of(self, module: nn.Module, path: Path) -> Recorder:
        number = len(self._recorders)
        self._slots.tell(kind="model", model=number, metadata=describe_model(module))
        return StepRecorder(self._slots, number, module, path, self._sites)

    def _begin_session(self, run: RuntimeRun) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        is_failure = error is not None and not (isinstance(error, SystemExit) and not error.code)
        why = f"{type(error).__name__}: {error}"[:300] if is_failure else None
        self._slots.tell(kind="end", why=why)


def main(arguments: Sequence[str]) -> int:
    """Run a script, and return its exit status."""
    line, *slots = map(int, arguments[:3])
    directory, is_module, patterns, script, *rest = arguments[3:]
    shared = _Slots(Connection(line), slots)
    recorder = _SlotScriptRecorder(shared, directory, json.loads(patterns))
    status = run_recorded(recorder, script, rest, is_module=is_module == "1", ends_process=True).status
    shared.wait()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
