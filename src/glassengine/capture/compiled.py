"""Modules whose call is compiled code: hooks do not run in it, so the call is observed from around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_CALL = "_compiled_call_impl"


class _ObservedCall:
    """Takes the place of a compiled call; every recording of the module observes it."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self.module = module
        self.compiled = compiled
        self.observers: list[CompiledCall] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        observers = tuple(self.observers)
        for observer in observers:
            observer.before(self.module, args, kwargs)
        result = None
        try:
            result = self.compiled(*args, **kwargs)
        finally:
            for observer in observers:
                observer.after(self.module, args, kwargs, result)
        return result


class CompiledCall:
    """Observes the call of a module that `module.compile()` has compiled.

    Args:
        module: Such a module.
        before: Gets what a forward pre-hook with keyword arguments gets.
        after: Gets what a forward hook with keyword arguments gets; also when the call raises, with None for a result.
    """

    def __init__(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        self.before = before
        self.after = after
        call = module.__dict__[_CALL]
        if not isinstance(call, _ObservedCall):
            call = module.__dict__[_CALL] = _ObservedCall(module, call)
        self._call = call
        call.observers.append(self)

    def remove(self) -> None:
        """Observe no more; the module gets its compiled call back unless it has been compiled again meanwhile."""
        call = self._call
        call.observers.remove(self)
        if not call.observers and call.module.__dict__.get(_CALL) is call:
            call.module.__dict__[_CALL] = call.compiled


def has_compiled_call(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called."""
    return module.__dict__.get(_CALL) is not None


def why_unseen(module: nn.Module) -> str | None:
    """Return why calls of the modules inside of `module` are not seen, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted code"
    compiled_forward = getattr(getattr(module, "forward", None), "_torchdynamo_orig_callable", None) is not None
    if has_compiled_call(module) or compiled_forward or "_orig_mod" in module._modules:
        return "compiled code"
    return None
