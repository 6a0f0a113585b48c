"""Finds the one statement that two versions of a function do not share, near the one that runs an op.

A line that only picks a tensor, or a part of one, runs no op: the source has it, and a trace does not.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import linecache
import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import lru_cache

from torch.fx import Node

from glassengine.program.representation.naming import op_name, user_frames
from glassengine.sites import parts_of_line

ALIKE = 0.65
"""Share of the characters that two versions of a line have in common."""
_IS, _ASSIGNS = re.compile(" = "), re.compile(r" [-+*/@&|]*= ")
_METHOD = re.compile(r"([^\W\d]\w*)\.\w+\(")
_NAME = re.compile(r"(?!self\b)\b[^\W\d]\w*")


def statements_apart(ours: Node, theirs: Node) -> tuple[str, str] | None:
    """Return "file:line: code" of the statement of each side that the other lacks, in a function that runs two ops.

    It runs the op, makes what the statement that runs it reads, or reads what that makes, of an op that takes a part.
    The innermost function with such a statement counts; where none has one, those that are further above the op count.
    None where a function has several.
    """
    is_part = op_name(ours) == "getitem"
    frames = _of_both(user_frames(ours), user_frames(theirs))[::-1]
    for is_deep, pair in itertools.product((False, True), frames):
        texts, own = zip(*map(_at, pair), strict=True)
        names = [_names(own[i], texts[i] if is_deep else ()) for i in (0, 1)]
        apart = [
            [
                line
                for text, line in texts[i].items()
                if text not in texts[1 - i] and _is_near(text, own[i], names[i], is_part)
            ]
            for i in (0, 1)
        ]
        if any(apart):
            both = [some[0] for some in apart if len(some) == 1]
            codes = [parts[2] for line in both if (parts := parts_of_line(line))]
            return (
                (both[0], both[1]) if codes[1:] and SequenceMatcher(None, codes[0], codes[1]).ratio() >= ALIKE else None
            )
    return None


def statement_not_run(ours: Node, theirs: Iterable[Node]) -> str | None:
    """Return "file:line: code" of the statement that calls the one that makes an op, where other ops run that one.

    A module that is not called is missing where it is called: its own lines may run for another one. None where the
    innermost statement is run by none of the others, and where all are run.
    """
    run = {_at(frame)[1] for node in theirs for frame in user_frames(node)}
    for depth, frame in enumerate(user_frames(ours)[::-1]):
        places, own = _at(frame)
        if own and own not in run:
            return places.get(own) if depth else None
    return None


def _at(frame: re.Match[str]) -> tuple[dict[str, str], str]:
    return _statements(frame["file"], int(frame["line"]))


def _of_both(ours: list[re.Match[str]], theirs: list[re.Match[str]]) -> list[tuple[re.Match[str], re.Match[str]]]:
    """Return the frames of each side that stand in one place; where one side calls more, the last of one name."""
    if len(ours) == len(theirs):
        return list(zip(ours, theirs, strict=True))
    here, there = ([frame["function"] for frame in frames] for frames in (ours, theirs))
    blocks = SequenceMatcher(None, here, there).get_matching_blocks()
    return [(ours[i + k], theirs[j + k]) for i, j, size in blocks for k in range(size)][-1:]


@lru_cache(maxsize=256)
def _statements(file: str, line: int) -> tuple[dict[str, str], str]:
    """Return the statements of the function around a line, each with "file:line: code", and the one on the line."""
    name, lines = file.split("/site-packages/")[-1], linecache.getlines(file)
    around = [one for one in _parsed("".join(lines)) if one.lineno <= line <= (one.end_lineno or 0)]
    functions = [one for one in around if isinstance(one, ast.FunctionDef)]
    inside = [one for one in ast.walk(functions[-1]) if isinstance(one, ast.stmt)][1:] if functions else []
    texts = {ast.unparse(one).partition("\n")[0]: one.lineno for one in inside}
    places = {text: f"{name}:{number}: {lines[number - 1].strip()}" for text, number in texts.items()}
    return places, ast.unparse(around[-1]).partition("\n")[0] if around else ""


@lru_cache(maxsize=16)
def _parsed(source: str) -> list[ast.stmt]:
    """Return the statements of a file, those inside of others after these; none where it cannot be parsed."""
    with contextlib.suppress(SyntaxError):
        return [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.stmt)]
    return []


def _names(own: str, texts: Iterable[str]) -> set[str]:
    """Return the names that a statement reads, and those that others read to make or to change them."""
    found, before = _read(own), set[str]()
    while found != before:
        before = set(found)
        for text in texts:
            found |= _read(text) if _made(text) & before else set()
    return found


def _is_near(text: str, own: str, names: set[str], is_part: bool) -> bool:
    """Whether a statement is another one, makes what it reads, or reads a part that it makes."""
    return text == own or bool(_made(text) & names) or (is_part and bool(_made(own) & _read(text)))


def _made(text: str) -> set[str]:
    """Return the names that a statement gives values, or of which it calls a method."""
    called = _METHOD.match(text)
    return {called[1]} if called else set(_NAME.findall("".join(_ASSIGNS.split(text, maxsplit=1)[:-1])))


def _read(text: str) -> set[str]:
    return set(_NAME.findall(_IS.split(text, maxsplit=1)[-1]))
