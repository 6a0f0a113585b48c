"""Modules whose public names are imported when they are first used, so that importing them costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


def deferred(module: str, public: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a module that only gives names to what others define.

    Args:
        module: Its `__name__`.
        public: Name -> "package.module" that defines it, "package.module:name" where it has another name there, or the
            submodule of that name.
    """
    namespace = vars(sys.modules[module])

    def get(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        from glassengine.extensions import imported  # takes as long as the rest of the package

        origin, _, attribute = public[name].partition(":")
        found = imported(origin)
        namespace[name] = found if origin == f"{module}.{name}" else getattr(found, attribute or name)
        return namespace[name]

    return get, lambda: sorted({*namespace, *public})
