"""A module as its author wrote it, where compiled or scripted code stands for it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_WRAPPED = "_orig_mod"
"""Where `torch.compile(module)` holds the module that it compiles."""
_CALL = "_compiled_call_impl"
"""Where `module.compile()` puts the compiled call."""


def as_written(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` was called with; any other one is what was written."""
    if isinstance(module, torch.jit.ScriptModule):
        return module
    found = module._modules.get(_WRAPPED)
    return module if found is None else found


@contextlib.contextmanager
def uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    """Let no part of a module be compiled: what is traced has the names and the ops that were written.

    Args:
        module: It, or parts of it, may be compiled, by `torch.compile(part)` or `part.compile()`.
    """
    root = as_written(module)
    held: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []
    calls: list[tuple[nn.Module, object]] = []
    parts = [] if isinstance(root, torch.jit.ScriptModule) else list(root.modules())
    for part in parts:
        if isinstance(part, torch.jit.ScriptModule):
            continue
        for name, child in list(part._modules.items()):
            if name != _WRAPPED and child is not None and as_written(child) is not child:
                held.append((part._modules, name, child))
        if part.__dict__.get(_CALL) is not None:
            calls.append((part, part.__dict__[_CALL]))
    try:
        for modules, name, child in held:
            modules[name] = as_written(child)
        for part, _ in calls:
            del part.__dict__[_CALL]
        yield root
    finally:
        for modules, name, child in held:
            modules[name] = child
        for part, call in calls:
            part.__dict__[_CALL] = call


def forward_parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's forward by name, those of scripted code from its schema."""
    if isinstance(module, _ByName):
        return module.signature.parameters
    if not isinstance(module, torch.jit.ScriptModule):
        return inspect.signature(as_written(module).forward).parameters
    found = {}
    scripted: Any = module.forward
    for argument in scripted.schema.arguments[1:]:
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        found[argument.name] = inspect.Parameter(
            argument.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=str(argument.type)
        )
    return found


def called_by_name(module: nn.Module) -> nn.Module:
    """Return a module that takes its arguments by name, where `module` is a graph of torch.export that does not.

    What `ExportedProgram.module()` returns takes arguments as they were given to the export, by position mostly.
    """
    spec = getattr(module, "_in_spec", None)
    if not isinstance(module, torch.fx.GraphModule) or spec is None or not spec.children()[0].num_children:
        return module
    return _ByName(module)


class _ByName(nn.Module):
    """A graph with its own parameters, buffers and submodules, by its own names, and another way to call it."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__()
        self._graph = (graph,)  # no submodule: its names are those of the root
        self._parameters, self._buffers, self._modules = graph._parameters, graph._buffers, graph._modules
        self.signature = inspect.signature(graph.forward)
        names = list(self.signature.parameters)
        positional: int = graph._in_spec.children()[0].num_children
        self._positional, self._named = names[:positional], names[positional:]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph."""
        given = self.signature.bind(*args, **kwargs).arguments
        return self._graph[0](*(given[n] for n in self._positional), **{n: given[n] for n in self._named if n in given})
