"""Take note of a module whenever it is executed, however the running code comes to import it."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def when_imported(name: str, then: Callable[[ModuleType], None]) -> Iterator[None]:
    """Call `then(module)` after each execution of the module `name`, and now if it has been imported.

    Look-ups alone (`importlib.util.find_spec`), reloads, lazy loaders and a second import after the module was removed
    from `sys.modules` are all seen. What `then` raises is logged: the importing code would run without us.
    """
    finder = _Finder(name, then)
    loaded = sys.modules.get(name)
    if loaded is not None:
        finder.note(loaded)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.is_active = False
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the finders behind it do, and observes its loader."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.is_active = True
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or not self.is_active or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                self._observe(spec.loader)
                return spec
        return None

    def note(self, module: ModuleType) -> None:
        """Hand on a module that has been executed, or will be at its first use."""
        if type(module) is importlib.util._LazyModule:  # type: ignore[attr-defined]
            spec = object.__getattribute__(module, "__spec__")
            self._observe(spec.loader)
            return
        try:
            self._then(module)
        except Exception as error:
            _log.warning("what runs in %s is not recorded: %s: %s", self._name, type(error).__name__, error)

    def _observe(self, loader: Any) -> None:
        execute = getattr(loader, "exec_module", None)
        # A loader that is a class, as that of frozen modules, serves every import of the process.
        if execute is None or isinstance(loader, type) or getattr(execute, "finder", None) is self:
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self.is_active and module.__name__ == self._name:
                self.note(module)

        exec_module.finder = self  # type: ignore[attr-defined]
        with contextlib.suppress(AttributeError, TypeError):  # of one with slots
            loader.exec_module = exec_module
