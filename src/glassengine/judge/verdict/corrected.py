"""The line of the candidate that has a mistake, and as it should read, where it is one number or one name in it."""

from __future__ import annotations

import ast
import io
import keyword
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.graphs.between import region_of
from glassengine.judge.hypotheses.trials.hypothesis import constants_of
from glassengine.judge.verdict.corrected_calls import exchanged, transposed, with_argument, with_bias
from glassengine.program.representation.program import Program
from glassengine.results import Altered, Divergence, Hint
from glassengine.sites import parts_of_line

_OF_AXES = frozenset({"dims", "dim"})
_LEAST_AXES = 3
"""Two numbers beside each other are found in many lines."""
_DIVISIONS = (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar)


def line_of_number(program: Program | None, counterparts: Mapping[str, str], divergence: Divergence) -> str | None:
    """Return "file:line: line" of the one op of a region that has the number which is proven to be the mistake.

    A region of several lines is named by the op that it ends in; None where no op, or more than one, has the number.

    Args:
        program: The candidate's; None where it has none.
        counterparts: Node of the baseline -> node of `program`.
        divergence: Its first hint counts.
    """
    change = next((hint.change for hint in divergence.hints[:1] if hint.proven), None)
    wrong, end = None if change is None else change.candidate, counterparts.get(divergence.node or "")
    # A whole number is a size or an axis of other ops as well.
    if program is None or end is None or not isinstance(wrong, float):
        return None
    target = next((node for node in program.graph.nodes if node.name == end), None)
    ops = [] if target is None else region_of(target, set(counterparts.values()))[0]
    holders = [op for op in ops if _has(op, wrong)]
    if len(holders) != 1:
        return None
    return next((site.source for site in program.sites.by_node.get(holders[0].name, ()) if site.kind == "op"), None)


def _has(op: Node, number: float) -> bool:
    """Whether an op uses a number, which a division has turned over."""
    literals = [leaf for leaf in pytree.tree_leaves(constants_of([op])) if isinstance(leaf, (int, float))]
    if op.target in _DIVISIONS:
        literals += [1 / leaf for leaf in literals if leaf]
    return any(_is_same(leaf, number) for leaf in literals)


def with_lines(divergence: Divergence) -> Divergence:
    """Return a divergence whose proven mistakes say how the candidate's line should read."""
    source = parts_of_line(divergence.candidate_source)
    if source is None:
        return divergence

    def lined(hint: Hint) -> Hint:
        if not hint.proven or hint.change is None:
            return hint
        # The line is that of the op that was flagged: of another op of its region, a call in it is not the one.
        own = [op.rpartition("/")[2] for op in hint.change.ops] == [divergence.site.rpartition("/")[2]]
        line = corrected(source[2], hint.change, is_own=own)
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
    places = [(start, end) for start, end, value in tokens if _is_same(value, wrong)]
    if not places and op and change.argument is not None:
        divided = _divided(line, tokens, right, wrong)
        return divided or with_argument(line, op, change.argument, wrong, right)
    if len(places) != 1:
        return None
    ((start, end),) = places
    return line[:start] + (right if is_name else repr(right)) + line[end:]


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
