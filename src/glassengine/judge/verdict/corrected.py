"""The line of the candidate as it should read, where a mistake is one number or one name in it."""

from __future__ import annotations

import ast
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from glassengine.results import Altered, Divergence, Hint

_SOURCE = re.compile(r"[^:]*(?::[^:]*)?:\d+: (.*)", re.DOTALL)


def with_lines(divergence: Divergence) -> Divergence:
    """Return a divergence whose proven mistakes say how the candidate's line should read."""
    source = _SOURCE.fullmatch(divergence.candidate_source or "")
    if source is None:
        return divergence

    def lined(hint: Hint) -> Hint:
        line = corrected(source.group(1), hint.change) if hint.proven and hint.change is not None else None
        return hint if line is None else replace(hint, line=line)

    return replace(divergence, hints=tuple(map(lined, divergence.hints)))


def corrected(line: str, change: Altered) -> str | None:
    """Return a line with the baseline's literal instead of the candidate's; None where it is not there exactly once.

    Args:
        line: Of Python.
        change: What is another in the candidate.
    """
    wrong, right = change.candidate, change.baseline
    if right is None or isinstance(right, list) or type(wrong) is not type(right):
        return None
    is_name = isinstance(wrong, str) and change.argument == "activation"
    if is_name and not (wrong.isidentifier() and right.isidentifier() and not keyword.iskeyword(right)):
        return None
    places = [(start, end) for start, end, value in _tokens(line, names=is_name) if _is_same(value, wrong)]
    if len(places) != 1:
        return None
    ((start, end),) = places
    return line[:start] + (right if is_name else repr(right)) + line[end:]


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
