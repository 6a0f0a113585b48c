"""Finds the module that something callable holds: a pipeline, a method, a function."""

from __future__ import annotations

import inspect
from types import ModuleType

from torch import nn

from glassengine.errors import UsageError


def module_of(target: object) -> nn.Module:
    """Return `target` if it is a module, or else the one module that it is bound to, holds or refers to.

    Raises:
        UsageError: There is none, or more than one.
    """
    if isinstance(target, nn.Module):
        return target
    held = [getattr(target, "__self__", None)]
    if inspect.isfunction(target):
        names = inspect.getclosurevars(target)
        held += [*names.nonlocals.values(), *names.globals.values()]
    # What a method is bound to, or a function refers to, may be a pipeline in its turn.
    holders = [item for item in (target, *held) if not isinstance(item, (nn.Module, ModuleType))]
    held += [getattr(item, name, None) for item in holders for name in ("model", "module", "_model")]
    found = list(dict.fromkeys(item for item in held if isinstance(item, nn.Module)))
    if len(found) != 1:
        hint = "engine.generate(..., record=path)" if hasattr(target, "manifest") else "name the module that it calls"
        what = ", ".join(type(item).__name__ for item in found) or f"{type(target).__name__}, which holds no module"
        raise UsageError("only one module can be recorded", got=what, hint=hint)
    return found[0]
