"""Steps of a loop that the user marks, and closures that run when a step ends.

A step of `mark_step` is one iteration of the user's own loop; generation numbers its steps by itself.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from glassengine import environment, spans
from glassengine.errors import UsageError, logger
from glassengine.executable.counters import registry

MAX_QUEUED = 100
"""Asynchronous closures that may wait; ending a step then waits for one of them, as in PyTorch/XLA."""
_before_end: list[Callable[[], object]] = []


@dataclass(frozen=True)
class _Closure:
    function: Callable[..., Any]
    args: Sequence[Any]
    run_async: bool
    step: int

    def run(self) -> Exception | None:
        """Run it, and return what it raised."""
        try:
            self.function(*self.args)
        except Exception as error:
            name = getattr(self.function, "__qualname__", repr(self.function))
            error.add_note(f"in the step closure {name}, added in step {self.step}")
            return error
        return None


class _Steps:
    """The state of this process; reset in a forked child."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = 0
        self.closures: list[_Closure] = []
        self.errors: list[Exception] = []
        self.waiting: queue.Queue[_Closure] = queue.Queue(MAX_QUEUED)
        self.worker: threading.Thread | None = None

    def enqueue(self, closure: _Closure) -> None:
        with self.lock:
            if self.worker is None:
                self.worker = threading.Thread(target=self._work, name="glass-step-closures", daemon=True)
                self.worker.start()
        self.waiting.put(closure)

    def _work(self) -> None:
        while True:
            closure = self.waiting.get()
            error = closure.run()
            if error is not None:
                with self.lock:
                    self.errors.append(error)
            self.waiting.task_done()


_steps = _Steps()


def current_step() -> int:
    """Return how many steps were marked so far, which is the number of the step that is running; the first is 0."""
    return _steps.number


def is_master_ordinal(local: bool = True) -> bool:
    """Return whether this process is the first of its run.

    Args:
        local: Of those on this machine.
    """
    if not local and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return (environment.local_rank() if local else environment.rank()) == 0


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Run `closure(*args)` when the step that is running ends; closures run in the order they were added.

    Args:
        closure: While it runs `current_step()` is still the number of its step, unless it is asynchronous.
        args: Its arguments; tensors may be nested in containers.
        run_async: Run it in a thread beside the next steps, all such closures one after another. It gets copies of its
            tensors, made when the step ends, so that the next step may overwrite them. What it raises is raised by a
            later `mark_step`.

    Raises:
        UsageError: `args` is a tensor, which would be taken apart.
    """
    if isinstance(args, torch.Tensor):
        raise UsageError("the arguments of a step closure are not a sequence", got="a tensor", hint="args=(tensor,)")
    with _steps.lock:
        _steps.closures.append(_Closure(closure, args, run_async, _steps.number))


def before_end_of_step(function: Callable[[], object]) -> None:
    """Let `function` run whenever a step ends, before its closures; one that is known already is not added again."""
    if function not in _before_end:
        _before_end.append(function)


def mark_step(wait: bool = False) -> None:
    """End a step: run all lazy tensors that are pending as one graph, count the step, and run its closures.

    Args:
        wait: Return only when accelerators have finished and asynchronous closures have run.

    Raises:
        Exception: What a closure raised, or an asynchronous closure of an earlier step, once the step is counted and
            all its closures have run; an ExceptionGroup where there are several.
    """
    with _steps.lock:
        closures, _steps.closures = _steps.closures, []
    errors = []
    try:
        closures = [_with_copies(closure) if closure.run_async else closure for closure in closures]
        for function in _before_end:
            function()
        for closure in closures:
            if closure.run_async:
                _steps.enqueue(closure)
            elif (error := closure.run()) is not None:
                errors.append(error)
        if wait:
            _steps.waiting.join()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
    finally:
        with _steps.lock:
            _steps.number += 1
            earlier, _steps.errors = _steps.errors, []
        registry.count("MarkStep")
        spans.step_ended()
    _raise([*earlier, *errors])


def _with_copies(closure: _Closure) -> _Closure:
    """Return a closure with copies of its tensors; those of lazy tensors are recorded with what is pending."""
    args = pytree.tree_map_only(torch.Tensor, lambda value: value.detach().clone(), list(closure.args))
    return replace(closure, args=args)


def _raise(errors: Sequence[Exception]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup("several step closures failed", errors)


def _finish() -> None:
    """Let the asynchronous closures end; log errors that will not be raised."""
    _steps.waiting.join()
    for error in _steps.errors:
        logger.error("a step closure failed after the last step", exc_info=error)
    if _steps.closures:
        logger.warning("step closures that never ran, since no mark_step came after them: %d", len(_steps.closures))


def _reset_in_child() -> None:
    global _steps
    _steps = _Steps()


atexit.register(_finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
