"""What a profile watches beside torch: executions and modules."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from glassengine import spans
from glassengine.executable.graph.execution import Execution
from glassengine.sites import ROOT


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

    Args:
        is_compiled: Whether this thread runs a compiled graph, whose modules are not the user's.
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
    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
