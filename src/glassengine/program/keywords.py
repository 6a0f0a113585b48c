"""Arguments that a forward takes through `**kwargs`, for an exporter that wants every argument to have a name."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def explicit_keywords(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Give arguments that go into `**kwargs` of a forward parameters of their own: the exporter knows no others."""
    signature = inspect.signature(module.forward)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    extra = [name for name in names if name not in signature.parameters]
    if not extra or len(own) == len(signature.parameters):
        yield
        return
    # Whoever has put a function of their own there gets it back.
    original, replaced = module.forward, vars(module).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in extra]
    forward.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if replaced is not None:
            module.forward = replaced
