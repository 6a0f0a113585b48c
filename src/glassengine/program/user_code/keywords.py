"""A forward as an exporter wants it: arguments with names, results of known types, methods that belong to classes."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from glassengine.program.user_code.written_modules import forward_parameters
from glassengine.sites import plain_containers

_RESULTS = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float, str, type(None))


@contextlib.contextmanager
def methods_of_classes(module: nn.Module) -> Iterator[None]:
    """Let methods set on single modules be methods of their classes while the block runs.

    The exporter reaches a module that has several names through a stand-in, which knows under which name it was called.
    A method of a class gets the stand-in; one that is bound to the module itself gets around it, and names are lost.
    """
    with contextlib.ExitStack() as stack:
        for part in module.modules():
            own = {
                name: value.__func__
                for name, value in vars(part).items()
                if isinstance(value, MethodType) and value.__self__ is part
            }
            if own:
                stack.enter_context(_with_methods(part, own))
        yield


@contextlib.contextmanager
def plain_results(module: nn.Module) -> Iterator[None]:
    """Remove from the results of a forward what is not a tensor, number or container of such: the exporter refuses it.

    A cache that a model returns beside its logits is an object of its own; one forward is judged without it. Containers
    whose entries have no names become dicts and lists.
    """

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            found = plain_containers(original(*args, **kwargs))
            return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, _RESULTS) else None, found)

        return forward

    with _other_forward(module, wrapped):
        yield


@contextlib.contextmanager
def explicit_keywords(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Give arguments that go into `**kwargs` of a forward parameters of their own: the exporter knows no others."""
    known = forward_parameters(module)
    extra = [name for name in names if name not in known]
    if not extra or all(p.kind is not p.VAR_KEYWORD for p in known.values()):
        yield
        return

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        signature = inspect.signature(original)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in extra]
        forward.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
        return forward

    with _other_forward(module, wrapped):
        yield


@contextlib.contextmanager
def _other_forward(module: nn.Module, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let a module have what `wrapped` makes of its forward, a function of the module and its arguments."""
    own = vars(module).get("forward")
    if own is None:
        with _with_methods(module, {"forward": wrapped(type(module).forward)}):
            yield
        return
    # A foreign function, which need not know of the module.
    module.forward = wrapped(own)
    try:
        yield
    finally:
        module.forward = own


@contextlib.contextmanager
def _with_methods(module: nn.Module, methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Let a module be of a class of its own, which has `methods`."""
    kind = type(module)
    before = {name: vars(module)[name] for name in methods if name in vars(module)}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    module.__class__ = type(kind.__name__, (kind,), {**names, **methods})
    for name in before:
        del vars(module)[name]
    try:
        yield
    finally:
        module.__class__ = kind
        vars(module).update(before)
