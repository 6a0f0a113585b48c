"""Arguments of a node by the names that its schema gives them, wherever they stand."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.fx import Node


def argument(node: Node, name: str) -> Any:
    """Return an argument of what `node` calls, its default where it is left out; None without any."""
    if name in node.kwargs:
        return node.kwargs[name]
    position, default = _place(node.target, name)
    return node.args[position] if position is not None and position < len(node.args) else default


@functools.lru_cache(maxsize=4096)
def _place(target: Any, name: str) -> tuple[int | None, Any]:
    """Return (position, default) of an argument."""
    if isinstance(target, torch._ops.OpOverload):
        for position, described in enumerate(target._schema.arguments):
            if described.name == name:
                return None if described.kwarg_only else position, described.default_value
        return None, None
    try:  # what a node of a translated ONNX graph calls
        given = inspect.signature(getattr(target, "function", target)).parameters
    except (TypeError, ValueError):
        return None, None
    if name not in given:
        return None, None
    default = None if given[name].default is inspect.Parameter.empty else given[name].default
    return None if given[name].kind is inspect.Parameter.KEYWORD_ONLY else list(given).index(name), default
