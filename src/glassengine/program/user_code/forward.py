"""A module as its user made it, and its forward as an exporter wants it.

As it was made: nothing of it compiled or scripted, and the training mode that its parts were in. An exporter wants
arguments with names, results of known types, and methods that belong to classes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from glassengine.errors import shortened
from glassengine.program.user_code.module_state import applied_state, own_copies
from glassengine.sites import plain_containers

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
    parameters = {}
    scripted: Any = module.forward
    for argument in scripted.schema.arguments[1:]:
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters[argument.name] = inspect.Parameter(
            argument.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=str(argument.type)
        )
    return parameters


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


_RESULTS = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float, str, type(None))


@contextlib.contextmanager
def methods_of_classes(module: nn.Module) -> Iterator[None]:
    """Let methods set on single modules be methods of their classes while the block runs.

    The exporter reaches a module that has several names through a stand-in, which knows under which name it was called.
    A method of a class gets the stand-in; one that is bound to the module itself gets around it, and names are lost.
    """
    with contextlib.ExitStack() as stack:
        for part in module.modules():
            methods = {
                name: value.__func__
                for name, value in vars(part).items()
                if isinstance(value, MethodType) and value.__self__ is part
            }
            if methods:
                stack.enter_context(_with_methods(part, methods))
        yield


@contextlib.contextmanager
def exportable_results(module: nn.Module) -> Iterator[None]:
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


_MOST_NAMES = 4


def training_modules(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules that are in training mode, "" for the module itself."""
    return tuple(path for path, part in module.named_modules() if getattr(part, "training", False))


@contextlib.contextmanager
def restored_modes(module: nn.Module, training: Collection[str]) -> Iterator[None]:
    """Put the modules of these paths into training mode meanwhile; their statistics are given back."""
    if not training:
        yield
        return
    parts = dict(module.named_modules())
    with applied_state(module, None):
        for path in training:
            parts[path].training = True
        try:
            yield
        finally:
            for path in training:
                parts[path].training = False


def influential_modes(module: nn.Module, training: Collection[str], arguments: Mapping[str, Any]) -> list[str]:
    """Return the modules whose training mode changes what a forward returns; none if it changes nothing.

    A draw of random numbers in training mode counts, whatever it gives: the next one is another.

    Args:
        module: In evaluation mode.
        training: Paths of the modules that were in training mode.
        arguments: Of a forward.

    Raises:
        Exception: Any error of its forward.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        draws = RandomDraws()  # type: ignore[no-untyped-call]
        with draws, applied_state(module, None):
            plain = module(**own_copies(arguments))
        before, draws.number = draws.number, 0
        with draws, restored_modes(module, training):
            trained = module(**own_copies(arguments))
    ours, theirs = ([x for x in pytree.tree_leaves(one) if isinstance(x, torch.Tensor)] for one in (plain, trained))
    same = len(ours) == len(theirs) and all(torch.equal(*both) for both in zip(ours, theirs, strict=True))
    if same and draws.number <= before:
        return []
    parts = dict(module.named_modules())
    reading = [path for path in training if _reads_mode(parts[path])]
    return reading or [path for path in training if path] or list(training)


def describe_training(side: str, names: Collection[str]) -> str:
    """Return that modules of a side are in training mode."""
    shown = shortened((name or "the model itself" for name in names), _MOST_NAMES)
    what = f"{len(names)} modules of the {side} are" if len(names) > 1 else f"1 module of the {side} is"
    return f"{what} in training mode: {shown}"


def _reads_mode(part: nn.Module) -> bool:
    """Whether the mode of this very module can matter: its forward reads it, and drops something if it drops."""
    code = getattr(type(part).forward, "__code__", None)
    return code is not None and "training" in code.co_names and getattr(part, "p", 1) != 0


class RandomDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that draw random numbers."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
