"""Finds the one statement that two versions of a function do not share, near the one that runs an op.

A line that only picks a tensor, or a part of one, runs no op: the source has it, and a trace does not.
"""

from __future__ import annotations

import ast
import linecache
import re
from difflib import SequenceMatcher
from functools import lru_cache

from torch.fx import Node

from glassengine.program.representation.naming import op_name, user_frames

ALIKE = 0.65
"""Share of the characters that two versions of a line have in common."""
_ASSIGNS = re.compile(r" [-+*/@&|]*= ")
_NAME = re.compile(r"(?!self\b)\b[^\W\d]\w*")


def statements_apart(ours: Node, theirs: Node) -> tuple[str, str] | None:
    """Return "file:line: code" of the statement of each side that the other lacks, in a function that runs two ops.

    It runs the op, makes what the statement that runs it reads, or reads what that makes, of an op that takes a part.
    The innermost function with such a statement counts; None where none has one, or one has several.
    """
    is_part = op_name(ours) == "getitem"
    for frames in zip(user_frames(ours)[::-1], user_frames(theirs)[::-1], strict=False):
        texts, own = zip(*(_statements(frame["file"], int(frame["line"])) for frame in frames), strict=True)
        apart = [
            [line for text, line in texts[i].items() if text not in texts[1 - i] and _is_near(text, own[i], is_part)]
            for i in (0, 1)
        ]
        if any(apart):
            both = [some[0] for some in apart if len(some) == 1]
            codes = [line.partition(": ")[2] for line in both]
            return (both[0], both[1]) if codes[1:] and SequenceMatcher(None, *codes).ratio() >= ALIKE else None
    return None


@lru_cache(maxsize=256)
def _statements(file: str, line: int) -> tuple[dict[str, str], str]:
    """Return the statements of the function around a line, each with "file:line: code", and the one on the line."""
    around = [one for one in _functions(file) if _has(one, line)][-1:]
    found = [one for function in around for one in ast.walk(function) if isinstance(one, ast.stmt)][1:]
    texts = {one: ast.unparse(one).partition("\n")[0] for one in found}
    name, lines = file.split("/site-packages/")[-1], linecache.getlines(file)
    places = {text: f"{name}:{one.lineno}: {lines[one.lineno - 1].strip()}" for one, text in texts.items()}
    return places, next((text for one, text in reversed(texts.items()) if _has(one, line)), "")


def _has(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


@lru_cache(maxsize=16)
def _functions(file: str) -> list[ast.FunctionDef]:
    """Return the functions of a file, those inside of others after these."""
    return [one for one in ast.walk(ast.parse("".join(linecache.getlines(file)))) if isinstance(one, ast.FunctionDef)]


def _is_near(text: str, own: str, is_part: bool) -> bool:
    """Whether a statement is another one, makes what it reads, or reads a part that it makes."""
    (*made, read), (*made_there, read_there) = (
        [set(_NAME.findall(part)) for part in _ASSIGNS.split(one, maxsplit=1)] for one in (text, own)
    )
    return text == own or any(names & read_there for names in made) or any(is_part and n & read for n in made_there)
