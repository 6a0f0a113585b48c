"""Texts that show how a tokenizer works: a fixed set, and texts made from the vocabularies of both sides."""

from __future__ import annotations

import random
from collections.abc import Iterator

from glassengine.prompt.side import Vocabulary

NUMBER = 460
"""Probes of a comparison."""
ENDS = ("a", "Hello world", "1")
"""Texts that show the tokens at both ends."""

# Group -> texts. The contractions are those in which the expressions of GPT-2, Llama 3 and Qwen differ.
TEXTS: dict[str, tuple[str, ...]] = {
    "plain": ("Hello world", "the", " the", "a b", "Question: what? Answer.", "x", "."),
    "digits": (
        *("1", "12", "123", "1234", "12345", "1234567890", "3.14159", "a1b22c333", "2026-11-24", "0x1F", "1,000,000"),
        *("\u0663\u0664\u0665\u0666", "\u4e00\u4e8c\u4e09 1000000", "x2y", "7 8 9", "100%", "$12.50"),
    ),
    "contractions": (
        *("don't", "I'll we've they're it's", "DON'T", "WE'VE", "'tis 'sand", "I'M", "y'all'd", "I'MANY", "x'REally"),
        *("'SAND", "we'VEry", "I'Some", "WE'THE", "x'TER", "'SON", "can\u2019t"),
    ),
    "spaces": (
        *("a  b", "a   b", "a    b", "  a", "a  ", "\ta", "a\t\tb", "a \t b", " " * 9 + "x", "x" + " " * 33),
        *("\u00a0x", "a\u3000b", " ", "   ", "\t", "a b  c   d"),
    ),
    "lines": (
        *("a\nb", "a\n\nb", "a\n\n\nb", "\n a", "a \n b", "a\r\nb", "\r\r", "\n\n", ".\n\n", ".\n", "a\n  b\n    c"),
        *(")\n\n{", "\n", "a\n", "\n\n\n\n"),
    ),
    "code": (
        *("def f(x):\n    return x+1", "a->b; c::d", "foo_bar.bazQux", "if(a&&b){c=='d'}", "//////", "=====", "x!=y"),
        *('{"a": [1, 2]}', "#include <x.h>", "$x = \\frac{1}{2}", "https://example.org/a?b=c&d=1", "a@b.org", "`x`"),
    ),
    "case": (
        *("Hello HELLO hELLO", "CamelCaseWord", "iPhone", "HTTPServer", "\u00c0\u00c9\u00ce", "Stra\u00dfe STRASSE"),
        *("\u0130stanbul", "McDonald", "eBay USA"),
    ),
    "normalization": (
        *("\u00e9", "e\u0301", "\ufb01 \ufb02", "\u2460\u2461", "\u00c5 \u212b", "\ud55c\uad6d", "\u1112\u1161\u11ab"),
        *(
            "\uff46\uff55\uff4c\uff4c",
            "x\u00b2",
            "\u2026",
            "\u200bzero",
            "a\u0308\u0301",
            "\u2018quote\u2019 \u201cq\u201d",
        ),
        *("\uf97a", "\u017f", "\u2126"),
    ),
    "marks": (
        *(
            "\u0928\u092e\u0938\u094d\u0924\u0947",
            "\u0939\u093f\u0928\u094d\u0926\u0940",
            "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22",
        ),
        *(
            "\u09ac\u09be\u0982\u09b2\u09be",
            "\u0ba4\u0bae\u0bbf\u0bb4\u0bcd",
            "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd",
        ),
        "\u0645\u064e\u0631\u0652\u062d\u064e\u0628\u064b\u0627",
    ),
    "scripts": (
        *(
            "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
            "\u4e2d\u6587\u5b57\u7b26",
            "\ud55c\uad6d\uc5b4 \ubb38\uc7a5",
        ),
        *(
            "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
            "\u05e2\u05d1\u05e8\u05d9\u05ea",
            "\u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u044f\u0437\u044b\u043a",
        ),
        *(
            "\u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac",
            "\U0001d518\U0001d52b\U0001d526",
            "\u10e5\u10d0\u10e0\u10d7\u10e3\u10da\u10d8",
        ),
    ),
    "bytes": (
        *("\U0001f680", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f3f3\ufe0f\u200d\U0001f308"),
        *("\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7", "\U0001f44d\U0001f3fd", "\U00010348", "\U0001f9ff", "\x7f"),
        *("\ufffd", "\ue000", "\U00013000", "\u2603\ufe0f", "a\U0001f680b"),
    ),
    "nul": ("a\x00b",),
    "empty": ("",),
    "long": ("word " * 300, "ab" * 60, "-" * 90, "1" * 40),
    "spelled": (
        *("<s>", "</s> a", "<|endoftext|>", "<|im_start|>user", "[INST] x [/INST]", "<pad>", "<unk>", "a<s>b", "< s >"),
        *("<|begin_of_text|>", "<think>", "<tool_call>"),
    ),
}


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
