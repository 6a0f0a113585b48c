"""A call in a line of Python, as it should read: two arguments exchanged, one that was left to its default, a bias that
stands beside the weight; and a weight that is to be transposed, or not.
"""

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


def with_bias(line: str, op: str, bias: str) -> str | None:
    """Return a line in which the one call of a function has the bias of the module whose weight it has.

    Args:
        line: Of Python, of one statement.
        op: Name of the function.
        bias: Name of the tensor, with its module.
    """
    call, names = _the_call(line, op), list(_parameters(op))
    if call is None or "bias" not in names or len(call.args) != names.index("bias") or call.end_col_offset is None:
        return None
    if any(word.arg in ("bias", None) for word in call.keywords):
        return None
    weight = call.args[names.index("weight")]
    parts, module = ast.unparse(weight).split("."), bias.split(".")[:-1]
    if not module or not isinstance(weight, ast.Attribute) or parts[-2:] != [module[-1], "weight"]:
        return None
    name = ".".join([*parts[:-1], bias.rpartition(".")[2]])
    _, end = _columns(weight)
    return f"{line[:end]}, {name}{line[end:]}"


def transposed(line: str, weight: str) -> str | None:
    """Return a line in which a weight is transposed, or is not any more; None where it is not read exactly once.

    Args:
        line: Of Python, of one statement.
        weight: Name of a matrix, with its module.
    """
    tree = _parsed(line)
    ending = weight.split(".")[-2:]
    if tree is None or len(ending) < 2:
        return None
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _ends(node, ending)]
    if len(found) != 1:
        return None
    _, end = _columns(found[0])
    rest = line[end:]
    undone = next((word for word in (".T", ".mT", ".t()") if rest.startswith(word)), None)
    if undone is None:
        return None if rest.startswith((".", "[")) else f"{line[:end]}.T{rest}"
    after = rest[len(undone) :]
    return None if after[:1].isidentifier() or after.startswith((".", "[")) else line[:end] + after


def _ends(node: ast.Attribute, names: list[str]) -> bool:
    return ast.unparse(node).split(".")[-len(names) :] == names


def _parsed(line: str) -> ast.Module | None:
    """Return the tree of a line that is a whole statement; columns are counted in bytes, so that it is of ASCII."""
    try:
        return ast.parse(line) if line.isascii() else None
    except (SyntaxError, ValueError):
        return None


def _the_call(line: str, op: str) -> ast.Call | None:
    """Return the one call of a function in a line that is a whole statement; None where there is none, or several."""
    tree = _parsed(line)
    if tree is None:
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
    "linear": {"input": inspect.Parameter.empty, "weight": inspect.Parameter.empty, "bias": None},
    "gelu": {"input": inspect.Parameter.empty, "approximate": "none"},
}
"""Functions that are written in C, as torch documents them; those that mistakes are known of."""


def _columns(node: ast.expr) -> tuple[int, int]:
    assert node.end_col_offset is not None
    return node.col_offset, node.end_col_offset
