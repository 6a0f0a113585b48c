"""Names for the module calls of a running model: alias of the module and per-step call index."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from glassengine.sites import ROOT, with_call

# Modules that pass their call on to the one they hold; their name is no part of a path.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARALLEL = frozenset({"DistributedDataParallel", "DataParallel"})


@dataclass(eq=False)
class KnownModule:
    """A module of the model.

    Attributes:
        module: The module.
        paths: Its paths, wrapper names removed; several where it is shared.
        is_root: Whether a call of it is a whole forward: the model, or what wraps it.
        wrapped: The module it passes its call on to, if it is a wrapper.
        is_wrapped: Whether another one passes its call on to this one.
        is_called: Whether it was called.
    """

    module: nn.Module
    paths: list[str]
    is_root: bool
    wrapped: nn.Module | None
    is_wrapped: bool
    is_called: bool = False


@dataclass
class OpenCalls:
    """The calls of one step that are open in one thread.

    Attributes:
        step: Its number.
        records: Whether anything of it is wanted.
        thread: Identity of the thread.
        open: (module, path with call, whether it only passes on the call of its wrapper), outermost first.
        num_calls: Calls of each path so far.
        in_call: Whether an outermost call has begun and not been dealt with to its end.
        handled: The exception that was being handled when the outermost call began.
        leave: Undoes what was set up for the duration of the outermost call.
        alone: Modules that were called by themselves, outside of the model, in this step.
        watched: Handles of hooks for gradients, to be removed when the step ends.
        watched_sites: What they deliver.
        caches: What may be a key/value cache, by identity, and the paths that got it.
    """

    step: int
    records: bool
    thread: int
    open: list[tuple[KnownModule, str, bool]] = field(default_factory=list)
    num_calls: dict[str, int] = field(default_factory=dict)
    in_call: bool = False
    handled: BaseException | None = None
    leave: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    alone: set[nn.Module] = field(default_factory=set)
    watched: list[Any] = field(default_factory=list)
    watched_sites: set[str] = field(default_factory=set)
    caches: dict[int, tuple[Any, set[str]]] = field(default_factory=dict)


class OfThread(threading.local):
    """The forward that is open in a thread, and the step that was the last one there.

    Attributes:
        is_noting: Whether a call is being noted: what is called meanwhile, by the handler of a signal, has to wait.
        waiting: What notes these calls, and its arguments.
    """

    forward: OpenCalls | None = None
    last: int | None = None

    def __init__(self) -> None:
        self.is_noting = False
        self.waiting: list[tuple[Callable[..., None], Any]] = []

    def wait(self, note: Callable[..., None], *call: Any) -> None:
        """Keep what the handler of a signal calls while a call is noted."""
        self.waiting.append((note, pytree.tree_map_only(Tensor, torch.clone, call)))

    def note_apart(self) -> None:
        """Note what waits: whole forwards that have ended, which are no part of the one that is open."""
        self.forward, outer = None, self.forward
        while self.waiting:
            note, call = self.waiting.pop(0)
            note(*call)
        self.forward = outer


class ModuleNames:
    """The paths of a model's modules as the user knows them.

    Args:
        root: The model; may be compiled or wrapped for parallel work.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        paths_of: dict[nn.Module, list[str]] = defaultdict(list)
        self._holders: dict[str, nn.Module] = {}
        wrapped = {root}
        wrapped_by: dict[nn.Module, nn.Module] = {}
        for path, module in _walk(root):
            if path not in paths_of[module]:
                paths_of[module].append(path)
            inner = _wrapped(module)
            if inner is not None:
                wrapped_by[module] = inner
                if module in wrapped:
                    wrapped.add(inner)
            for name, child in module._modules.items():
                if child is not None and child is not inner:
                    self._holders.setdefault(_join(path, name), module)
        inner_ones = set(wrapped_by.values())
        self.known = {
            module: KnownModule(module, paths, module in wrapped, wrapped_by.get(module), module in inner_ones)
            for module, paths in paths_of.items()
        }
        self._logs: list[_AccessLog] = []
        # Names by which shared modules were looked up and not called yet; those that never are are forgotten.
        self._looked_up: dict[nn.Module, deque[tuple[nn.Module, str]]] = defaultdict(lambda: deque(maxlen=64))
        self._last: dict[nn.Module, tuple[nn.Module | None, str]] = {}

    def parameters(self) -> dict[Tensor, str]:
        """Return the name of every parameter; of a shared one the first."""
        names: dict[Tensor, str] = {}
        for module, known in self.known.items():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    names.setdefault(parameter, _join(known.paths[0], name))
        return names

    def enter(self, known: KnownModule, forward: OpenCalls) -> str | None:
        """Note a call and return its path with call; None where it passes on the call of its wrapper."""
        open_calls, paths = forward.open, known.paths
        if open_calls and open_calls[-1][0].wrapped is known.module:
            open_calls.append((known, open_calls[-1][1], True))
            return None
        path = paths[0] if len(paths) == 1 else self._alias(known, forward)
        num_calls = forward.num_calls.get(path, 0)
        where = with_call(path, num_calls) if num_calls else path
        forward.num_calls[path] = num_calls + 1
        open_calls.append((known, where, False))
        return where

    def newcomers(self) -> list[str]:
        """Return the paths of the modules that the model has now and did not have."""
        return [path for path, module in _walk(self.root) if module not in self.known]

    def log_aliases(self) -> None:
        """From now on notice by which name a shared module is looked up; undone by `stop_logging`."""
        shared = [known for known in self.known.values() if len(known.paths) > 1]
        holders = {self._holders[path] for known in shared for path in known.paths if path in self._holders}
        for holder in holders:
            log = _AccessLog(holder, self._looked_up)
            self._logs.append(log)
            holder.__dict__["_modules"] = log

    def stop_logging(self) -> None:
        """Give every module its own dict back, with what was changed meanwhile."""
        for log in self._logs:
            log.restore()
        self._logs.clear()

    def _alias(self, known: KnownModule, forward: OpenCalls) -> str:
        """Return the path that the running code used for a shared module."""
        # In `self.b(self.a(x))` both names are looked up before the first call: the last one not yet called is meant.
        waiting = self._looked_up[known.module]
        holder, name = waiting.pop() if waiting else self._last.get(known.module, (None, ""))
        self._last[known.module] = (holder, name)
        paths = known.paths
        if holder is not None:
            mine = [p for p in paths if self._holders.get(p) is holder and p.rpartition(".")[2] == name]
            paths = mine or paths
        # Of a shared holder the alias that is being called.
        for _, where, _ in reversed(forward.open):
            inside = [path for path in paths if path.rpartition(".")[0] == where.partition("@")[0]]
            if inside:
                return inside[0]
        return paths[0]


class _AccessLog(dict[str, Any]):
    """The submodules of one module; remembers in which order and by which name they were handed out."""

    def __init__(self, holder: nn.Module, looked_up: dict[nn.Module, deque[tuple[nn.Module, str]]]) -> None:
        self.holder = holder
        self.original = holder.__dict__["_modules"]
        self._looked_up = looked_up
        super().__init__(self.original)

    def _note(self, name: str, module: Any) -> Any:
        if module is not None:
            self._looked_up[module].append((self.holder, name))
        return module

    def __getitem__(self, name: str) -> Any:
        return self._note(name, super().__getitem__(name))

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return (self._note(name, module) for name, module in super().items())

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((name, self._note(name, module)) for name, module in super().items())

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module, or its pickle, has the plain one.
        return dict, (), None, None, iter(dict.items(self))

    def restore(self) -> None:
        self.original.clear()
        self.original.update(dict.items(self))
        self.holder.__dict__["_modules"] = self.original


def _walk(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) under every alias, parents first; a module inside itself once."""

    def walk(path: str, module: nn.Module, above: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
        if module in above:
            return
        yield path or ROOT, module
        inner = _wrapped(module)
        for name, child in module._modules.items():
            if child is not None:
                yield from walk(path if child is inner else f"{path}.{name}".lstrip("."), child, (*above, module))

    yield from walk("", root, ())


def _join(path: str, name: str) -> str:
    return name if path == ROOT else f"{path}.{name}"


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module that `module` passes its calls on to, if it is a wrapper."""
    for name, child in module._modules.items():
        if name in _WRAPPERS or (name == "module" and any(kind.__name__ in _PARALLEL for kind in type(module).__mro__)):
            return child
    return None
