"""Texts that show how a tokenizer works: a fixed set, and texts made from the vocabularies of both sides."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from importlib.resources import files

from glassengine.prompt.side import Vocabulary

NUMBER = 460
"""Probes of a comparison."""
ENDS = ("a", "Hello world", "1")
"""Texts that show the tokens at both ends."""

TEXTS: dict[str, list[str]] = {
    **json.loads(files("glassengine.prompt").joinpath("probes.json").read_text(encoding="utf-8")),
    "long": ["word " * 300, "ab" * 60, "-" * 90, "1" * 40],
}
"""Group -> texts. The contractions are those in which the expressions of GPT-2, Llama 3 and Qwen differ."""


def probes_of(*sides: Vocabulary) -> list[tuple[str, str]]:
    """Return pairs of group and text; the same for the same vocabularies.

    Added tokens are tried alone, inside of a word and between spaces. Two or three pieces of small letters make a word
    whose parts only the order of merges decides.
    """
    draw = random.Random(0)  # noqa: S311 (the same probes each time)
    found = [(group, text) for group, texts in TEXTS.items() for text in texts]
    added = list(dict.fromkeys(text for side in sides for text in side.added.values() if text.strip()))
    for text in dict.fromkeys([*added[:20], *draw.sample(added, min(20, len(added)))]):
        found += [("added", text), ("added", f"a{text}b"), ("added", f"a {text} b")]
    words, rare = _words(sides[0])
    if words:
        number = max(NUMBER - len(found), 60)
        found += [("merges", "".join(draw.choices(words, k=2 + place % 2))) for place in range(number)]
    found += [("vocabulary", text) for text in draw.sample(rare, min(40, len(rare)))]
    return list(dict.fromkeys(found))


def _words(side: Vocabulary) -> tuple[list[str], list[str]]:
    """Return the pieces of small letters, and pieces with letters beyond ASCII."""
    added = {text.encode() for text in side.added.values()}
    words, rare = [], []
    for piece in _texts(side):
        if piece.encode() in added:
            continue
        if piece.isascii() and piece.isalpha() and piece.islower() and 2 <= len(piece) <= 9:
            words.append(piece)
        elif piece.strip() and len(piece) < 24 and not piece.isascii():
            rare.append(piece)
    return words, rare


def _texts(side: Vocabulary) -> Iterator[str]:
    for piece in side.pieces:
        try:
            yield piece.decode("utf-8")
        except UnicodeDecodeError:  # a part of a character
            continue
