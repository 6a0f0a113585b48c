"""A piece of a graph as Python source that needs nothing but torch.

The text is made of names of our own, registered operators and plain literals. Names and source lines that come from a
model appear in comments only, with everything but printable ASCII escaped.
"""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from glassengine.errors import UsageError
from glassengine.judge.graphs.cut import Piece
from glassengine.numerics.float64 import CHECKED, retarget, target_of
from glassengine.program.representation.naming import op_name, source_line

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_MAX_COMMENT = 160


def comment(text: str) -> str:
    """Return `text` as what may follow a # on one line."""
    escaped = text.encode("unicode_escape").decode("ascii")
    return escaped if len(escaped) <= _MAX_COMMENT else escaped[: _MAX_COMMENT - 3] + "..."


def function_source(name: str, piece: Piece, arguments: Mapping[str, str], *, float64: bool = False) -> str:
    """Return a function that computes the outputs of `piece`, as a tuple.

    Args:
        name: Of the function.
        piece: What it computes.
        arguments: Name of each input of the piece -> name of the parameter.
        float64: Write float64 for the floating dtypes in the graph.

    Raises:
        UsageError: The piece has an operator or a literal that cannot be written down.
    """
    names: dict[Node, str] = {}
    lines = [f"def {name}({', '.join(arguments[given] for given in piece.inputs)}):"]
    for node, given in zip(piece.module.graph.find_nodes(op="placeholder"), piece.inputs, strict=True):
        names[node] = arguments[given]
    before = None
    for node in piece.ops:
        names[node] = f"v{len(names)}"
        if (source := source_line(node)) is not None and source != before:
            lines.append(f"    # {comment(source)}")
            before = source
        lines.append(f"    {names[node]} = {_call(node, names, float64)}")
    results = [names[node] for node in piece.module.graph.output_node().args[0]]  # type: ignore[union-attr,index]
    return "\n".join([*lines, f"    return ({', '.join(results)},)", ""])


def _call(node: Node, names: Mapping[Node, str], float64: bool) -> str:
    args, kwargs = node.args, dict(node.kwargs)
    if node.target is operator.getitem:
        return f"{_literal(args[0], names)}[{_literal(args[1], names)}]"
    target = target_of(node) if float64 and op_name(node) not in CHECKED else node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise UsageError(f"an operator cannot be written as source: {target}")
    if float64:
        args, kwargs = (torch.fx.node.map_aggregate(value, retarget) for value in (args, kwargs))  # type: ignore[assignment]
    written = [_literal(value, names) for value in args]
    written += [f"{_identifier(key)}={_literal(value, names)}" for key, value in kwargs.items()]
    namespace, _, rest = str(target).partition(".")
    operation = ".".join(_identifier(part) for part in (namespace, *rest.split(".")))
    return f"torch.ops.{operation}({', '.join(written)})"


def _identifier(text: str) -> str:
    if not _NAME.fullmatch(text) or keyword.iskeyword(text):
        raise UsageError(f"a name cannot be written as source: {text!r}")
    return text


def _literal(value: Any, names: Mapping[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_literal(item, names) for item in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside},)"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return f"torch.{_identifier(str(value).removeprefix('torch.'))}"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    raise UsageError(f"a literal cannot be written as source: {type(value).__name__}")
