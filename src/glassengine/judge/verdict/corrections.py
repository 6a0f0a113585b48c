"""Says how the candidate's line should read, and which value of the baseline's configuration a number comes from.

A line is corrected where one number, one name, one list of axes or one call in it is the mistake, and nothing else in
the line could be meant.
"""

from __future__ import annotations

import ast
import inspect
import io
import keyword
import math
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from glassengine.results import Altered, Divergence, Findings, Hint
from glassengine.sites import parts_of_line

_OF_AXES = frozenset({"dims", "dim"})
_OF_PLACES = frozenset({"index", "start", "end", "step", "length"})
"""Arguments that a line may calculate: a number in `x[i - 1]` is a part of one."""
_OF_SHAPES = frozenset({"reshape", "view", "expand", "repeat", "flatten", "unflatten", "transpose", "permute", "size"})
"""Functions whose whole numbers are sizes and axes: none of them is a number of another op on the line."""
_LEAST_AXES = 3
"""Two numbers beside each other are found in many lines."""


def with_lines(divergence: Divergence) -> Divergence:
    """Return a divergence whose proven mistakes say how the candidate's line should read."""
    source = parts_of_line(divergence.candidate_source)
    if source is None:
        return divergence

    def lined(hint: Hint) -> Hint:
        if not hint.proven or hint.change is None:
            return hint
        # The line is that of the op that was flagged: of another op of its region, a call in it is not the one.
        line = corrected(source[2], hint.change, is_own=hint.change.is_of(divergence.site))
        return hint if line is None else replace(hint, line=line)

    return replace(divergence, hints=tuple(map(lined, divergence.hints)))


def corrected(line: str, change: Altered, *, is_own: bool = True) -> str | None:
    """Return a line with the baseline's literal instead of the candidate's; None where it is not there exactly once.

    Args:
        line: Of Python.
        change: What is another in the candidate.
        is_own: Whether the line is that of the op which is changed: only then its calls are.
    """
    wrong, right = change.candidate, change.baseline
    op = change.ops[0].rpartition("/")[2].partition(".")[0] if is_own and len(change.ops) == 1 else ""
    if change.exchanged:
        return exchanged(line, op, change.exchanged) if op else None
    if change.argument == "bias" and isinstance(right, str):
        return with_bias(line, op, right) if op else None
    if change.argument == "transposed":
        return transposed(line, change.operands[0]) if len(change.operands) == 1 else None
    if isinstance(right, list):
        return _with_axes(line, right, wrong) if change.argument in _OF_AXES else None
    if right is None or type(wrong) is not type(right):
        return None
    is_name = isinstance(wrong, str) and change.argument == "activation"
    if is_name and not (wrong.isidentifier() and right.isidentifier() and not keyword.iskeyword(right)):
        return None
    tokens = list(_tokens(line, names=is_name))
    places = [
        (start, end)
        for start, end, value in tokens
        if _is_same(value, wrong) and (isinstance(value, type(wrong)) or _is_operand(line, start, end))
        if isinstance(value, float) or _called(line, start) not in _OF_SHAPES - {op}
        if change.argument not in _OF_PLACES or not _is_operand(line, start, end)
        if change.argument != "b" or line[:start].endswith("[")  # the item of a list
    ]
    if not places and op and change.argument is not None:
        divided = _divided(line, tokens, right, wrong)
        return divided or with_argument(line, op, change.argument, wrong, right)
    if len(places) != 1:
        return None
    ((start, end),) = places
    is_known = is_name or not isinstance(right, float) or math.isfinite(right)
    written = (right if is_name else repr(right)) if is_known else f"float('{right}')"
    return line[:start] + written + line[end:]


def _is_operand(line: str, start: int, end: int) -> bool:
    """Whether a literal is multiplied, divided, added or a power: a number that stands alone is a size or an index."""
    return line[:start].rstrip().endswith(("*", "/", "+", "-")) or line[end:].lstrip().startswith(("*", "/", "+", "-"))


def _called(line: str, place: int) -> str:
    """Return the name of the function among whose arguments a place of a line is; empty outside of calls."""
    depth = 0
    for at in range(place - 1, -1, -1):
        depth += (line[at] in ")]") - (line[at] in "([")
        if depth < 0:
            return (re.search(r"\w*$", line[:at]) or [""])[0] if line[at] == "(" else ""
    return ""


def _with_axes(line: str, right: list[Any], wrong: Any) -> str | None:
    """Return a line with axes in the right order, where they stand in it once and nothing else could be meant."""
    if not isinstance(wrong, list) or len(wrong) != len(right) or len(wrong) < _LEAST_AXES:
        return None
    found = list(re.finditer(r"(?<![\w.,] )(?<![\w.,-])" + r",\s*".join(map(str, wrong)) + r"(?![\w.]|,\s*-?\w)", line))
    return line[: found[0].start()] + ", ".join(map(str, right)) + line[found[0].end() :] if len(found) == 1 else None


def _divided(line: str, tokens: list[tuple[int, int, Any]], right: Any, wrong: Any) -> str | None:
    """Return a line with another divisor, where a factor is the one number that it divides by."""
    if not (isinstance(wrong, float) and isinstance(right, float) and wrong and right):
        return None
    places = [
        (start, end)
        for start, end, value in tokens
        if not isinstance(value, (bool, str)) and value and _is_same(1 / value, wrong)
        if line[:start].rstrip().endswith("/") and not line[:start].rstrip().endswith("//")
    ]
    if len(places) != 1:
        return None
    ((start, end),) = places
    return f"{line[:start]}{float(f'{1 / right:.12g}')!r}{line[end:]}"


def _tokens(line: str, *, names: bool) -> Iterator[tuple[int, int, Any]]:
    """Yield first place, last place and value of the literals of a line, or of its names."""
    before = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            is_flag = token.string in ("True", "False")
            if token.type == tokenize.NAME and not is_flag:
                if names:
                    yield token.start[1], token.end[1], token.string
            elif not names and (is_flag or token.type in (tokenize.NUMBER, tokenize.STRING)):
                start, value = token.start[1], ast.literal_eval(token.string)
                yield start, token.end[1], value
                if before == "-" and token.type == tokenize.NUMBER:
                    yield line.rindex("-", 0, start), token.end[1], -value
            before = token.string
    except (tokenize.TokenError, SyntaxError, ValueError):
        return  # a line of several


def _is_same(value: Any, wrong: Any) -> bool:
    if isinstance(wrong, (bool, str)) or isinstance(value, (bool, str)):
        return bool(type(value) is type(wrong) and value == wrong)
    return isinstance(value, (int, float)) and abs(value - wrong) <= 1e-6 * abs(wrong)


_MODULES = frozenset({"F", "torch", "functional"})
"""Names under which functions are called, whose arguments are those of the op; a method has one of them before it."""


def exchanged(line: str, op: str, places: tuple[int, ...]) -> str | None:
    """Return a line in which two arguments of the one call of a function have changed places; None without it.

    Args:
        line: Of Python, of one statement.
        op: Name of the function.
        places: Of its positional arguments, those of a list counted one by one.
    """
    call = _the_call(line, op)
    if call is None or len(places) != 2:
        return None
    # The tensors of a list are counted one by one.
    lists = (argument.elts if isinstance(argument, (ast.List, ast.Tuple)) else [argument] for argument in call.args)
    arguments = [argument for tensors in lists for argument in tensors]
    if len(arguments) <= max(places) or any(isinstance(argument, ast.Starred) for argument in arguments):
        return None
    a, b = sorted((arguments[place] for place in places), key=lambda argument: argument.col_offset)
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


def _ends(node: ast.expr, names: list[str]) -> bool:
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
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and any(_ends(node.func, [module, op]) for module in _MODULES)
    ]
    others = sum(isinstance(node, ast.Attribute) and node.attr == op for node in ast.walk(tree))
    return calls[0] if len(calls) == 1 and others == 1 else None


def _parameters(op: str) -> dict[str, Any]:
    """Return the parameters of a function of torch with their defaults; empty where it has none of this name."""
    known, without = getattr(functional, op, None), inspect.Parameter.empty
    try:
        return {name: one.default for name, one in inspect.signature(known).parameters.items()} if known else {}
    except (TypeError, ValueError):  # written in C: its operator has the same
        operator = getattr(getattr(torch.ops.aten, op, None), "default", None)
        arguments = [] if operator is None else operator._schema.arguments
        return {one.name: one.default_value if one.has_default_value() else without for one in arguments}


def _columns(node: ast.expr) -> tuple[int, int]:
    assert node.end_col_offset is not None
    return node.col_offset, node.end_col_offset


_OF_KIND = {
    "eps": ("eps",),
    "position": ("theta", "base"),
    "scale": ("scal", "multiplier", "factor", "head_dim", "softcap"),
    "activation": ("act", "activation"),
    "mask": ("window",),
}
"""Kind of a mistake -> what the names of its values in a configuration have in common."""
_ROOTS = ("head_dim", "query_pre_attn_scalar")
"""Values whose root turned over is the scale of the scores."""
_MOST_DEPTH = 3


def with_configuration(result: Findings, module: Any) -> Findings:
    """Return findings whose hints name the value of the configuration that the baseline's number is.

    Args:
        result: Of a check.
        module: The reference; it may have no configuration.
    """
    values = dict(_values(getattr(module, "config", None)))
    if not values:
        return result

    def named(found: Divergence) -> Divergence:
        return replace(found, hints=tuple(_named(hint, values) for hint in found.hints))

    first = result.first_divergence and named(result.first_divergence)
    levels = [
        replace(level, first_divergence=level.first_divergence and named(level.first_divergence))
        for level in result.levels
    ]
    return replace(result, first_divergence=first, origins=tuple(map(named, result.origins)), levels=tuple(levels))


def _named(hint: Hint, values: Mapping[str, Any]) -> Hint:
    change = hint.change
    if change is None or change.argument is None or isinstance(change.baseline, (bool, list, type(None))):
        return hint
    name = value_named(change.baseline, hint.kind, values)
    if name is None:
        return hint
    shown = f"{values[name]:.6g}" if isinstance(values[name], float) else values[name]
    text = f"{hint.text}; the reference has config.{name} = {shown}"
    return replace(hint, text=text, change=replace(change, configured=name))


def value_named(number: Any, kind: str, values: Mapping[str, Any]) -> str | None:
    """Return the one name of a configuration whose value a literal is, for its kind; None where none or several are.

    Args:
        number: A number or a word of the baseline.
        kind: Of the mistake in it.
        values: Name -> value.
    """
    words = _OF_KIND.get(kind, ())
    found = [
        name
        for name, value in values.items()
        if any(word in name.rpartition(".")[2] for word in words)
        and "initializer" not in name
        and _is_same(number, _as_used(name, value))
    ]
    # One value may be written twice: for the layers and in the part that all of them share.
    return found[0] if len({name.rpartition(".")[2] for name in found}) == 1 else None


def _as_used(name: str, value: Any) -> Any:
    """Return a value as models compute with it: of a root only the scale is made, and a width alone is none."""
    is_root = name.rpartition(".")[2] in _ROOTS and not isinstance(value, str) and value > 0
    return value**-0.5 if is_root else value


def _values(config: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and words of a configuration, those of its parts by dotted names."""
    held = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    if not isinstance(held, Mapping) or depth == _MOST_DEPTH:
        return
    for name, value in held.items():
        if not isinstance(name, str) or name.startswith("_"):
            continue
        if isinstance(value, str) or (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        ):
            yield f"{path}{name}", value
        elif isinstance(value, Mapping) or name.endswith("config"):
            yield from _values(value, f"{path}{name}.", depth + 1)
