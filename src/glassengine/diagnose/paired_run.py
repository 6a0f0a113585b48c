"""Compares two scripts step by step while they run, and stops both at the first step that is beyond rounding.

Each side runs in a process of its own (`paired_side`) and shares its steps in memory without a name: nothing
is left behind when a process is killed. A side is at most one step ahead of the comparison (`paired_steps`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from glassengine import starting
from glassengine.diagnose.paired_steps import LiveStep, StepComparison
from glassengine.errors import GlassError, IncomparableError
from glassengine.recording.layout.layout import LeftOut
from glassengine.results import Comparison

_NUM_SLOTS = 2
_SIDES: tuple[Literal["baseline"], Literal["candidate"]] = ("baseline", "candidate")


@dataclasses.dataclass(frozen=True)
class PairedScript:
    """A script, or a module, and its arguments."""

    script: str
    arguments: Sequence[str] = ()
    is_module: bool = False


def _tensors(message: Mapping[str, Any], memory: mmap.mmap) -> dict[str, Tensor]:
    """Return the values by site of what a message says to be in the memory."""
    tensors = [_tensor(memory, *words) for words in message["tensors"]]
    return {site: tensors[number] for site, number in message["sites"].items()}


def _tensor(memory: mmap.mmap, name: str, shape: list[int], start: int, size: int) -> Tensor:
    dtype = getattr(torch, name)
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize, offset=start).view(shape)


class _PairedSide:
    """The process of a side, and what it has shared."""

    def __init__(self, name: str, script: PairedScript, folder: str, sites: Sequence[str] | None) -> None:
        self.name = name
        self.ended: str | None = None
        self.steps: dict[tuple[int, int], LiveStep] = {}
        self.num_steps = 0
        self._models: dict[int, dict[str, Any]] = {}
        self._maps: list[mmap.mmap | None] = [None] * _NUM_SLOTS
        self._words = " ".join([script.script, *script.arguments])
        self.slots = [_memory() for _ in range(_NUM_SLOTS)]
        ours, theirs = socket.socketpair()
        inherited = [theirs.fileno(), *self.slots]
        patterns = json.dumps(None if sites is None else list(sites))
        words = [*map(str, inherited), folder, str(int(script.is_module)), patterns, script.script, *script.arguments]
        self.process = starting.start(
            starting.python("glassengine.diagnose.paired_side", *words),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else None,
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C reaches this process, which ends the sides
        )
        theirs.close()
        self.line = Connection(ours.detach())

    def read(self) -> None:
        """Take a message, or note that the process has ended."""
        try:
            message = json.loads(self.line.recv_bytes())
        except (EOFError, OSError):
            status = self.process.wait()
            self.ended = self.ended or f"ended with status {status}"
            self.line.close()
            return
        if message["kind"] == "model":
            self._models[message["model"]] = message["metadata"]
        elif message["kind"] == "end":
            self.ended = "ended" if message["why"] is None else f"raised {message['why']}"
        else:
            memory = self._memory(self.num_steps % _NUM_SLOTS)
            metadata = self._models[message["model"]]
            left_out = [LeftOut(*words) for words in message["left_out"]]
            self.steps[message["model"], message["step"]] = LiveStep(
                self._words, metadata, message["step"], _tensors(message, memory), left_out
            )
            self.num_steps += 1

    def _memory(self, place: int) -> mmap.mmap:
        size = max(mmap.PAGESIZE, os.fstat(self.slots[place]).st_size)
        known = self._maps[place]
        if known is None or len(known) != size:  # each map costs a fault a page
            known = self._maps[place] = mmap.mmap(self.slots[place], size)
        return known

    def release(self, key: tuple[int, int]) -> None:
        """Let the side write into the memory of a step that was compared."""
        del self.steps[key]
        with contextlib.suppress(OSError):
            self.line.send_bytes(b"read")

    def stop(self) -> None:
        """End the process with all that it has started, and give the memory back."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.line.close()
        for descriptor in self.slots:
            os.close(descriptor)


def watch_scripts(
    baseline: PairedScript, candidate: PairedScript, *, sites: Sequence[str] | None = None, **options: Any
) -> Comparison:
    """Run two scripts side by side, and compare every step of their models as soon as both have it.

    Args:
        baseline: What is right.
        candidate: Judged against it; its n-th model belongs to the n-th model of the baseline.
        sites: Patterns of the sites to compare; all when None.
        options: As for `compare`.

    Returns:
        The comparison of the first step that is not ok, else of the step with the mildest worst verdict; a note says
        how many steps were compared. Both scripts are stopped at a step that is not ok.

    Raises:
        IncomparableError: A side ends before the other, or no tensor has a partner.
        GlassError: A side fails.
    """
    with tempfile.TemporaryDirectory(prefix="glassengine-watch-") as folder, contextlib.ExitStack() as stack:
        sides = []
        for name, script in zip(_SIDES, (baseline, candidate), strict=True):
            side = _PairedSide(name, script, str(Path(folder) / name), sites)
            stack.callback(side.stop)
            sides.append(side)
        steps = StepComparison(options)
        for key in _common_steps(*sides):
            if not steps.add(key[0], *(side.steps[key] for side in sides)):
                break
            for side in sides:
                side.release(key)
        return steps.conclusion("; ".join(f"{side.name}: {side.num_steps} steps" for side in sides))


def _common_steps(*sides: _PairedSide) -> Iterator[tuple[int, int]]:
    """Yield model and step as soon as both sides have it; raise an error where one has ended and the other goes on."""
    while True:
        common = [key for key in sides[0].steps if key in sides[1].steps]
        if common:
            yield common[0]
            continue
        for side, other in (sides, sides[::-1]):
            if side.ended is None:
                continue
            if side.ended != "ended" and (other.ended or not side.steps):
                raise GlassError(f"the {side.name} fails while it is watched", got=f"it {side.ended}")
            if side.ended == "ended" and other.steps:
                got = f"{side.num_steps} steps; the {other.name} goes on"
                raise IncomparableError(f"the {side.name} ended before the {other.name}", got=got)
        open_lines = [side.line for side in sides if not side.line.closed]
        if not open_lines:
            return
        ready = wait(open_lines)
        for side in sides:
            if side.line in ready:
                side.read()


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError):
        return False
    return True


def _memory() -> int:
    """Return a descriptor of memory without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("glassengine-watch")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
