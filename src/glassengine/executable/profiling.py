"""Take a profile: the trace of torch.profiler with the spans of executables, modules and steps in it.

    DIR/profile-000001/rank0.pt.trace.json.gz   for Perfetto, chrome://tracing and TensorBoard
    DIR/profile-000001/profile.json             where the time went, for `glass profile DIR`
    DIR/profile-000001/events.out.tfevents.*    step times, where TensorBoard is installed

A profile covers every thread of the process, whichever thread started it, so that one can be taken of a program that
knows nothing of it.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity

from glassengine import environment, spans
from glassengine.errors import UsageError, logger
from glassengine.executable.graph import Execution, attach, detach
from glassengine.executable.profile_trace import FORMAT, SCHEMA_VERSION, SUMMARY, annotate, sealed, summarize
from glassengine.sites import ROOT
from glassengine.stores.places import RemotePath, deliver, place
from glassengine.writing import aside, next_directory, remove_tree, write_events

TRACE = "rank{rank}.pt.trace.json.gz"

_MAX_JUMP_S = 0.05

_one_at_a_time = threading.Lock()
_active: Profile | None = None
_NAME = re.compile(r"profile-(\d{1,9})")


class Profile:
    """A profile that is being taken, or has been.

    Attributes:
        directory: Of its files, complete once it has stopped.
        num_steps: Steps that ended while it was taken.
    """

    def __init__(self, directory: str | Path) -> None:
        self._rank = environment.rank()
        root = place(directory)
        self._root = root / f"rank{self._rank}" if self._rank else root
        self.directory = self._root
        self.num_steps = 0
        self._undo = contextlib.ExitStack()
        self._watching = contextlib.ExitStack()  # what a forked child undoes as well
        self._pid = os.getpid()
        self._started = 0.0
        self._clock = (0.0, 0.0, 0.0)
        self._profiler = _torch_profiler()

    def start(self) -> None:
        """Begin.

        Raises:
            UsageError: Another profile is being taken in this process, or nothing can be written.
        """
        global _active
        if not _one_at_a_time.acquire(blocking=False):
            raise UsageError(
                "another profile is being taken in this process", hint="one glass.profiler.profile at a time"
            )
        self._undo.callback(_one_at_a_time.release)
        _active = self
        try:
            if torch.autograd.profiler._is_profiler_enabled:  # a second one ends the process when the first one stops
                raise UsageError(
                    "the program takes a profile by torch.profiler itself", hint="wait until that has ended, or read it"
                )
            self.directory = _make_directory(self._root)
            self._clock = _clock()
            self._profiler.start()
            self._undo.callback(self._profiler.stop)
            spans.set_recording(1)
            self._watching.callback(spans.set_recording, -1)
            watching = Executions()
            attach(watching)
            self._watching.callback(detach, watching)
            self._watching.callback(watch_modules(watching.is_open))
            self._watching.callback(spans.on_step_end(self._count))
        except BaseException:
            self._watching.close()
            self._undo.close()
            raise
        self._started = time.perf_counter()

    def stop(self) -> None:
        """End and write the files; nothing in a child that was forked since, as the profile is its parent's.

        Raises:
            UsageError: They cannot be written.
        """
        if self._pid != os.getpid():
            return
        wall_s = time.perf_counter() - self._started
        self._watching.close()
        self._undo.close()
        try:
            self._require_clock()
            self._write(wall_s)
            if isinstance(self._root, RemotePath):
                here, there = self.directory, self._root / self.directory.name
                deliver(here, there, overwrite=False, last=SUMMARY)
                self.directory = there
                remove_tree(here.parent)
        except BaseException as error:
            with contextlib.suppress(OSError):
                self.directory.rmdir()  # where nothing is in it
            if not isinstance(error, OSError):
                raise
            raise UsageError(
                "cannot write the profile",
                got=f"{error.strerror or error} ({error.filename or self.directory})",
                hint="name a directory on a disk that is writable and has room",
            ) from error

    def _require_clock(self) -> None:
        """Raise if the clock was set: torch takes its times from it, and those across the jump would be wrong."""
        (before, unsure_before, began), (now, unsure_now, ended) = self._clock, _clock()
        jump_s = now - before
        # Clocks are slewed by a part in 2000 at most.
        if abs(jump_s) > _MAX_JUMP_S + 2e-3 * (ended - began) + unsure_before + unsure_now:
            raise UsageError(
                "the clock of this machine was set while the profile was taken",
                got=f"{jump_s:+.3f} s: durations across that moment are wrong",
                hint="take the profile again",
            )

    def _count(self) -> None:
        with spans.span("step", str(self.num_steps)):
            self.num_steps += 1

    def _trace(self) -> Any:
        """Return what torch's profiler exports.

        Raises:
            UsageError: It cannot write that, which it does not say.
        """
        folder = Path(tempfile.mkdtemp(dir=self.directory))
        raw = folder / "trace.json"
        try:
            self._profiler.export_chrome_trace(str(raw))
            return json.loads(raw.read_bytes())
        except (FileNotFoundError, ValueError) as error:
            raise UsageError(
                "torch's profiler cannot write its trace",
                got=f"{self.directory}: {'nothing' if isinstance(error, FileNotFoundError) else 'only a part of it'}",
                hint="name a directory on a disk that is writable and has room",
            ) from error
        finally:
            remove_tree(folder)

    def _write(self, wall_s: float) -> None:
        found = self._profiler.profiler
        if found is None or found.kineto_results is None or not found.kineto_results.trace_start_ns():
            raise UsageError(  # torch has one at a time, the last one that began; to export this one ends the process
                "the program began a profile by torch.profiler itself, which ended this one", hint="one at a time"
            )
        trace = self._trace()
        annotate(trace, spans.kernels_of)
        target = self.directory / TRACE.format(rank=self._rank)
        with aside(target) as path, gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
            json.dump(trace, file)
        summary = {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "wall_us": wall_s * 1e6,
            "num_steps": self.num_steps,
            **summarize(trace),
            "environment": environment.describe(),
        }
        with aside(self.directory / SUMMARY) as path:
            path.write_text(sealed(summary), encoding="utf-8")
        try:
            write_scalars(self.directory, summary)
        except OSError as error:  # the profile itself is there
            logger.warning("no scalars for TensorBoard: %s (%s)", error.strerror or error, self.directory)
        logger.info("the profile is in %s", self.directory)


def _clock() -> tuple[float, float, float]:
    """Return the seconds by which the clock is ahead of the monotonic one, the uncertainty, and the latter."""
    best = (0.0, float("inf"), 0.0)
    for _ in range(10):  # another process may run in between
        before, now, after = time.perf_counter(), time.time(), time.perf_counter()
        best = min(best, (now - (before + after) / 2, (after - before) / 2, after), key=lambda found: found[1])
    return best


def prepare() -> None:
    """Set torch's profiler up in this thread; where another thread does, it complains on stderr."""
    if not torch.autograd.profiler._is_profiler_enabled:
        profiler = _torch_profiler()
        profiler.start()
        profiler.stop()


def _torch_profiler() -> torch.profiler.profile:
    environment.quiet_profiler()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(activities=activities, experimental_config=everywhere)


@contextlib.contextmanager
def profile(directory: str | Path, *, steps: int | None = None) -> Iterator[Profile]:
    """Take a profile of a block of code, in all threads.

    Args:
        directory: A new directory `profile-NNNNNN` is made in it; in `rank<r>/` of it for ranks above 0.
        steps: End after this many steps (`mark_step`, or runs of an engine that generates); None: with the block.

    Raises:
        UsageError: Nothing can be written there, or another profile is being taken.
    """
    taken = Profile(directory)
    stopped = threading.Event()

    def stop() -> None:
        if not stopped.is_set():
            stopped.set()
            taken.stop()

    def stop_in_time() -> None:
        if steps is not None and taken.num_steps >= steps:
            stop()

    taken.start()
    undo = spans.on_step_end(stop_in_time)
    try:
        yield taken
    finally:
        undo()
        stop()


def _make_directory(root: Path) -> Path:
    if isinstance(root, RemotePath):
        # Where it is written until it has ended; others may take the same number, and the first one to end has it.
        there = [0, *(int(found[1]) for path in root.iterdir() if (found := _NAME.fullmatch(path.name)))]
        return next_directory(Path(tempfile.mkdtemp(prefix="glassengine-")), "profile", digits=6, first=max(there) + 1)
    try:
        root.mkdir(parents=True, exist_ok=True)
        return next_directory(root, "profile", digits=6)
    except OSError as error:
        raise UsageError(
            "the profile cannot be written there", got=f"{root}: {error.strerror or error}", hint="--profile DIR"
        ) from error


def _reset_in_child() -> None:
    """A child that was forked while a profile is taken takes none: it would grow with every operation, and not end."""
    global _one_at_a_time
    if _one_at_a_time.locked():
        _one_at_a_time = threading.Lock()
        torch._C._autograd._clear_callbacks()  # type: ignore[attr-defined]  # not in the stubs of torch
        torch.autograd.profiler._set_is_profiler_enabled(False)
        if _active is not None:
            _active._watching.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)


def write_scalars(directory: Path, summary: Mapping[str, Any]) -> bool:
    """Write `step_ms` for every step and `total_ms/<kind>` for every kind of span; return whether it could be done.

    Raises:
        OSError: They cannot be written.
    """
    steps = [
        (step, {"tag": "step_ms", "simple_value": length / 1e3}) for step, length in enumerate(summary["steps_us"])
    ]
    kinds = [
        (0, {"tag": f"total_ms/{kind}", "simple_value": found["total_us"] / 1e3})
        for kind, found in sorted(summary["kinds"].items())
    ]
    try:
        write_events(directory, [*steps, *kinds], "0")
    except ImportError:  # TensorBoard is an extra
        return False
    return True


class Executions:
    """Spans around executions."""

    def __init__(self) -> None:
        self._open = threading.local()

    def before(self, execution: Execution) -> None:
        """Open the span of an execution."""
        entered = spans.span("execute", execution.executable.name)
        entered.__enter__()
        self._stack().append(entered)

    def after(self, execution: Execution) -> None:
        """Close it."""
        self._leave()

    def failed(self, execution: Execution, error: BaseException) -> None:
        """Close it."""
        self._leave()

    def is_open(self) -> bool:
        """Return whether this thread is within an execution."""
        return bool(self._stack())

    def _leave(self) -> None:
        if stack := self._stack():
            stack.pop().__exit__(None, None, None)

    def _stack(self) -> list[contextlib.AbstractContextManager[Any]]:
        if not hasattr(self._open, "stack"):
            self._open.stack = []
        found: list[contextlib.AbstractContextManager[Any]] = self._open.stack
        return found


def watch_modules(is_compiled: Callable[[], bool]) -> Callable[[], None]:
    """Put a span around every call of a module outside compiled graphs, and return what undoes it.

    The outermost module of a thread is the root; the others are called what the root calls them.

    Where `is_compiled`, this thread runs a compiled graph, whose modules are not the user's.
    """
    names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
    state = threading.local()

    def enter(module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or is_compiled():
            return
        if not hasattr(state, "stack"):
            state.stack = []
        root = state.stack[0][0] if state.stack else module
        if root not in names:
            found = root.named_modules()
            names[root] = {id(child): path or ROOT for path, child in found}
        entered = spans.span("module", names[root].get(id(module), type(module).__name__))
        entered.__enter__()
        state.stack.append((module, entered))

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if torch.compiler.is_compiling() or is_compiled():
            return
        stack = getattr(state, "stack", [])
        # Calls that were open when the profile began are not on the stack.
        if any(entered is module for entered, _ in stack):
            while stack:
                found, entered = stack.pop()
                entered.__exit__(None, None, None)
                if found is module:
                    break

    # Said by torch when a compiled module is first called: the extra span of its wrapper is what is wanted here.
    warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
    hooks = contextlib.ExitStack()
    hooks.enter_context(register_module_forward_pre_hook(enter))
    hooks.enter_context(register_module_forward_hook(leave, always_call=True))
    return hooks.close
