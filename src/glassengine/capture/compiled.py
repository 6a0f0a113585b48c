"""Modules whose call is compiled code: hooks do not run in it, so the call is observed from around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_CALL = "_compiled_call_impl"


class CompiledCall:
    """The call of a module that `module.compile()` has compiled, with `before` and `after` around it.

    Args:
        module: Such a module.
        before: Gets what a forward pre-hook with keyword arguments gets.
        after: Gets what a forward hook with keyword arguments gets; also when the call raises, with None for a result.
    """

    def __init__(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._module = module
        self._compiled = original = module.__dict__[_CALL]

        def call(*args: Any, **kwargs: Any) -> Any:
            before(module, args, kwargs)
            result = None
            try:
                result = original(*args, **kwargs)
            finally:
                after(module, args, kwargs, result)
            return result

        self._observed = module.__dict__[_CALL] = call

    def remove(self) -> None:
        """Give the module its compiled call back, unless it has been compiled again meanwhile."""
        if self._module.__dict__.get(_CALL) is self._observed:
            self._module.__dict__[_CALL] = self._compiled


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
