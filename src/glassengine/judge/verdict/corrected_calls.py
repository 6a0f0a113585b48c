"""A call in a line of Python, as it should read: two arguments exchanged, or one that was left to its default."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from torch.nn import functional

_MODULES = frozenset({"F", "torch", "functional"})
"""Names under which functions are called, whose arguments are those of the op; a method has one of them before it."""


def exchanged(line: str, op: str, places: tuple[int, ...]) -> str | None:
    """Return a line in which two arguments of the one call of a function have changed places; None without it.

    Args:
        line: Of Python, of one statement.
        op: Name of the function.
        places: Of its positional arguments.
    """
    call = _the_call(line, op)
    if call is None or len(places) != 2 or len(call.args) <= max(places):
        return None
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    a, b = sorted((call.args[place] for place in places), key=lambda argument: argument.col_offset)
    (start, middle), (further, end) = _columns(a), _columns(b)
    return line[:start] + line[further:end] + line[middle:further] + line[start:middle] + line[end:]


def with_argument(line: str, op: str, name: str, default: Any, value: Any) -> str | None:
    """Return a line in which the one call of a function has an argument that it left to its default.

    Args:
        line: Of Python, of one statement.
        op: Name of the function.
        name: Of the argument.
        default: What the candidate computes with, which has to be the function's own default.
        value: As it should be.
    """
    call = _the_call(line, op)
    parameters = _parameters(op)
    if call is None or name not in parameters or not isinstance(value, (bool, int, float, str)):
        return None
    is_given = any(word.arg in (name, None) for word in call.keywords)
    is_starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    place = list(parameters).index(name)
    if is_given or is_starred or len(call.args) > place or not call.args:
        return None
    if type(parameters[name]) is not type(default) or parameters[name] != default or call.end_col_offset is None:
        return None
    end = call.end_col_offset - 1
    return f"{line[:end].rstrip().rstrip(',')}, {name}={value!r}{line[end:]}"


def _the_call(line: str, op: str) -> ast.Call | None:
    """Return the one call of a function in a line that is a whole statement; None where there is none, or several."""
    if not line.isascii():
        return None  # columns are counted in bytes
    try:
        tree = ast.parse(line)
    except (SyntaxError, ValueError):
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_of(node.func, op)]
    others = sum(isinstance(node, ast.Attribute) and node.attr == op for node in ast.walk(tree))
    return calls[0] if len(calls) == 1 and others == 1 else None


def _is_of(function: ast.expr, op: str) -> bool:
    """Whether a called name is that of a function of torch: `F.gelu`, `torch.nn.functional.gelu`."""
    if not isinstance(function, ast.Attribute) or function.attr != op:
        return False
    owner = function.value
    return (owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else "") in (
        _MODULES
    )


def _parameters(op: str) -> dict[str, Any]:
    """Return the parameters of a function of torch with their defaults; empty where Python does not know them."""
    known = getattr(functional, op, None)
    try:
        return {name: one.default for name, one in inspect.signature(known).parameters.items()} if known else {}
    except (TypeError, ValueError):
        return _DOCUMENTED.get(op, {})


_DOCUMENTED: dict[str, dict[str, Any]] = {
    "scaled_dot_product_attention": {
        "query": inspect.Parameter.empty,
        "key": inspect.Parameter.empty,
        "value": inspect.Parameter.empty,
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    },
    "gelu": {"input": inspect.Parameter.empty, "approximate": "none"},
}
"""Functions that are written in C, as torch documents them; those that mistakes are known of."""


def _columns(node: ast.expr) -> tuple[int, int]:
    assert node.end_col_offset is not None
    return node.col_offset, node.end_col_offset
