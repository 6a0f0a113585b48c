"""Packages that are imported for things that no model of theirs needs here: what they are asked for is empty."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_TORCHVISION = ("ops", "ops.misc", "transforms", "transforms.functional", "transforms.v2", "datasets", "models")


class _Empty(ModuleType):
    """A module that has every class, each of them empty."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def standing_in(*names: str) -> Iterator[None]:
    """Import within this as if some modules were there; afterwards they are absent again, as transformers looks."""
    added = [name for name in names if name not in sys.modules]
    for name in added:
        module = sys.modules[name] = _Empty(name)
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent in added:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def timm_model(name: str) -> Any:
    """Return a file of models of timm, which wants torchvision for reading images."""
    data = _Empty("timm.data")
    data.__dict__.update(dict.fromkeys(("IMAGENET_DEFAULT_MEAN", "IMAGENET_DEFAULT_STD"), (0.5, 0.5, 0.5)))
    with standing_in("torchvision", *(f"torchvision.{part}" for part in _TORCHVISION)):
        sys.modules.setdefault("timm.data", data)
        return importlib.import_module(f"timm.models.{name}")
