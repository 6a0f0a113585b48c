"""Regular expressions of files, bounded: a file must not be able to keep us busy for ever.

An expression tries the lengths of its repetitions and its alternatives in all combinations. How many these are is
bounded before it is matched, by what Python's own parser says of it.
"""

from __future__ import annotations

import functools
import math
import re
from re import _constants as constants  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from glassengine.errors import CorruptError

_MOST_CHARACTERS = 1 << 14
_MOST_COMBINATIONS = 10**8
_REPEATS = (constants.MAX_REPEAT, constants.MIN_REPEAT, constants.POSSESSIVE_REPEAT)


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern of an adapter is for a module, as in peft: a regular expression for the end of its path.

    Raises:
        CorruptError: It is not a regular expression, or one that may never finish.
    """
    expression, num_repeats, num_choices = _parsed(pattern)
    if math.comb(len(path) + num_repeats, num_repeats) * num_choices > _MOST_COMBINATIONS:
        raise CorruptError("a pattern of the adapter has too many repetitions or alternatives", got=pattern[:400])
    return expression.match(path) is not None


@functools.lru_cache(maxsize=1024)
def _parsed(pattern: str) -> tuple[re.Pattern[str], int, int]:
    """Return an expression, how many repetitions of different lengths it has, and the product of its alternatives."""
    if len(pattern) > _MOST_CHARACTERS:
        raise CorruptError("a pattern of the adapter is too long", got=f"{len(pattern):,} characters")
    whole = rf"(.*\.)?({pattern})$"
    try:
        counts = [0, 1]
        _count(parser.parse(whole), counts, inside=False)
        return re.compile(whole), counts[0], counts[1]
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        raise CorruptError("a pattern of the adapter is not a regular expression", got=pattern[:400]) from error
    except _RepeatedError as error:
        raise CorruptError("a pattern of the adapter repeats a repetition", got=pattern[:400]) from error


def num_repeats(pattern: str) -> int | None:
    """Return how many repetitions of different lengths an expression has; None where one is repeated itself."""
    counts = [0, 1]
    try:
        _count(parser.parse(pattern), counts, inside=False)
    except (re.error, RecursionError, OverflowError, MemoryError, _RepeatedError):
        return None
    return counts[0]


class _RepeatedError(Exception):
    pass


def _count(parsed: Any, counts: list[int], *, inside: bool) -> None:
    """Add the repetitions and alternatives of a parsed expression to `counts`.

    Args:
        parsed: Of Python's parser.
        counts: Repetitions, product of alternatives.
        inside: Whether it is repeated itself.
    """
    for kind, value in parsed:
        is_repeated = kind in _REPEATS and value[1] > 1
        if is_repeated and value[0] != value[1]:
            if inside:
                raise _RepeatedError
            counts[0] += 1
        if kind is constants.BRANCH:
            # Alternatives that are repeated are chosen from again and again.
            if inside:
                raise _RepeatedError
            counts[1] *= len(value[1])
        if kind in _REPEATS and value[1] == 1:
            counts[1] *= 2
        for part in _parts(value):
            _count(part, counts, inside=inside or is_repeated)


def _parts(value: Any) -> list[Any]:
    """Return the expressions within a part of one."""
    waiting, found = [value], []
    while waiting:
        item = waiting.pop()
        if isinstance(item, parser.SubPattern):
            found.append(item)
        elif isinstance(item, list | tuple):
            waiting += item
    return found
