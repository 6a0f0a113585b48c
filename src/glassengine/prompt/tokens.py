"""Compares two tokenizers by what they make of probes, and names the cause of each difference.

The bytes of the pieces decide the class, not their spelling. Other bytes: a normalization, a prefix space, a lost byte.
The same bytes with other boundaries: other merges if words of small letters differ, else another pre-tokenizer, named
by the text below the first boundary that differs.

Texts that show how a tokenizer works: a fixed set, and texts made from the vocabularies of both sides.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Literal

from glassengine.prompt.side import SPECIAL, PromptSide, Vocabulary
from glassengine.results.without_tensors import PromptExample, PromptFinding, PromptLevel

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


_PADDING = re.compile(
    rb"\[PAD\d+\]|<\|?(?:reserved|unused|extra|special|placeholder)[^>]*>|\[unused\d+\]|<0x[0-9A-F]{2}>"
)
"""Names that tools give to ids without a token."""
_SHOWN = 12
"""Tokens of an example."""
_MERGES = "merge order"
_CHANGES = ("normalization", "prefix space", "byte fallback")
_MANY = 1.5
"""A change of bytes that shows so many times as often as each other one explains them."""
_PRE = "pre-tokenizer"


@dataclass(frozen=True)
class _Ends:
    """Ids that a side puts before and behind every text."""

    first: list[int]
    last: list[int]

    def cut(self, ids: list[int]) -> list[int]:
        """Return ids without those at the ends, where they have them."""
        if self.first and ids[: len(self.first)] == self.first:
            ids = ids[len(self.first) :]
        if self.last and ids[-len(self.last) :] == self.last:
            ids = ids[: -len(self.last)]
        return ids


@dataclass
class _Group:
    """Probes that differ for one cause."""

    cases: list[tuple[str, list[int], list[int]]] = field(default_factory=list)

    def shortest(self) -> tuple[str, list[int], list[int]]:
        return min(self.cases, key=lambda case: len(case[0]))


def compare_tokens(
    baseline: PromptSide, candidate: PromptSide, texts: Sequence[str] = ()
) -> tuple[list[PromptFinding], int]:
    """Return the differences of two tokenizers, and the number of probes that were tried; `texts` are some of them."""
    a, b = baseline.opened.vocabulary, candidate.opened.vocabulary
    assert a is not None and b is not None
    ends = _ends_of(baseline, a), _ends_of(candidate, b)
    probes = [*(("given", text) for text in texts), *probes_of(a, b)]
    if not (a.reads_special and b.reads_special):
        spelled = [text for text in {*a.added.values(), *b.added.values()} if text]
        probes = [probe for probe in probes if not any(text in probe[1] for text in spelled)]
    texts = [text for _, text in probes]
    added = sorted({*a.added.items(), *b.added.items()}, key=lambda item: -len(item[1]))
    ours = _bare(baseline, a, ends[0], texts)
    theirs = _bare(candidate, b, ends[1], texts)
    groups: dict[str, _Group] = {}
    differ = set()
    for (group, text), x, y in zip(probes, ours, theirs, strict=True):
        if x != y:
            differ.add(group)
            cause = _of_added(added, b, text, x, y) or _cause(a, b, group, x, y)
            groups.setdefault(cause, _Group()).cases.append((text, x, y))
    found = [*_of_vocabulary(a, b), *_of_rows(baseline, candidate), *_of_special(a, b), *_of_ends(a, *ends)]
    for cause, one in _joined(groups, differ).items():
        text, x, y = one.shortest()
        detail = f"{len(one.cases)} of {len(probes)} texts have other tokens"
        example = PromptExample(text, x[:_SHOWN], y[:_SHOWN], _shown(a, x), _shown(b, y))
        is_limit = cause.startswith(tuple(candidate.opened.limits))
        deviates = None if is_limit else _deviating(baseline, candidate, one.cases)
        found.append(PromptFinding("tokens", cause, "wrong", detail, len(one.cases), len(probes), example, deviates))
    return found, len(probes)


def _bare(side: PromptSide, vocabulary: Vocabulary, ends: _Ends, texts: Sequence[str]) -> list[list[int]]:
    if vocabulary.can_be_bare:
        return side.encode(texts, special=False)
    return [ends.cut(ids) for ids in side.encode(texts, special=True)]


def _ends_of(side: PromptSide, vocabulary: Vocabulary) -> _Ends:
    full = side.encode(ENDS, special=True)
    if vocabulary.can_be_bare:
        for whole, bare in zip(full, side.encode(ENDS, special=False), strict=True):
            for at in range(len(whole) - len(bare) + 1):
                if bare and whole[at : at + len(bare)] == bare:
                    return _Ends(whole[:at], whole[at + len(bare) :])
        return _Ends([], [])
    special = {number for numbers in vocabulary.special.values() for number in numbers} | set(vocabulary.added)
    first, last = _common(full, special), _common([ids[::-1] for ids in full], special)
    return _Ends(first, last[::-1])


def _common(rows: Sequence[list[int]], special: set[int]) -> list[int]:
    """Return the special ids that all rows begin with."""
    found: list[int] = []
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1 or column[0] not in special:
            break
        found.append(column[0])
    return found


def _of_vocabulary(a: Vocabulary, b: Vocabulary) -> list[PromptFinding]:
    both = min(len(a.pieces), len(b.pieces))
    others = [
        number
        for number in range(both)
        if a.pieces[number] != b.pieces[number]
        and a.pieces[number]
        and b.pieces[number]
        and not _PADDING.fullmatch(a.pieces[number])
        and not _PADDING.fullmatch(b.pieces[number])
    ]
    found = []
    if others:
        first = others[0]
        detail = (
            f"{len(others)} of {both} ids stand for other text: id {first} is {_quoted(a.pieces[first])} in the "
            f"baseline, {_quoted(b.pieces[first])} in the candidate"
        )
        found.append(PromptFinding("tokens", "vocabulary", "wrong", detail, len(others), both))
    gone = [
        number
        for number, piece in enumerate(a.pieces)
        if piece and not _PADDING.fullmatch(piece) and (number >= len(b.pieces) or not b.pieces[number])
    ]
    lost = [number for number in gone if number in a.added]
    plain = [number for number in gone if number not in a.added]
    if plain:
        first = plain[0]
        detail = f"the candidate lacks {len(plain)} tokens of the baseline: id {first} is {_quoted(a.pieces[first])}"
        found.append(PromptFinding("tokens", "missing tokens", "wrong", detail, len(plain), len(a.pieces)))
    if lost:
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        detail = f"the candidate has no token {a.added[lost[0]]!r} (id {lost[0]}){more}"
        found.append(PromptFinding("tokens", "missing added token", "wrong", detail, len(lost), len(a.added)))
    return found


def _of_rows(*sides: PromptSide) -> list[PromptFinding]:
    """Name ids that the table of embeddings of their own side has no row for: a note unless the other side has them."""
    tables = [side.opened.rows for side in sides]
    sizes = [len(side.opened.vocabulary.pieces) if side.opened.vocabulary is not None else 0 for side in sides]
    beyond = [rows is not None and size > rows for size, rows in zip(sizes, tables, strict=True)]
    found = []
    for name, rows, size, is_beyond in zip(("baseline", "candidate"), tables, sizes, beyond, strict=True):
        if is_beyond and rows is not None:
            level: PromptLevel = "note" if all(beyond) or (name == "baseline" and tables[1] is None) else "wrong"
            detail = f"the tokenizer of the {name} has ids up to {size - 1}, its table of embeddings {rows} rows"
            found.append(PromptFinding("tokens", "vocabulary beyond the embeddings", level, detail, size - rows, size))
    return found


def _of_special(a: Vocabulary, b: Vocabulary) -> list[PromptFinding]:
    found = []
    for name in SPECIAL:
        ours, theirs = a.special.get(name, ()), b.special.get(name, ())
        if ours and theirs and not set(ours) & set(theirs):
            detail = f"{name} is {_ids(a, ours)} in the baseline, {_ids(b, theirs)} in the candidate"
            # Padding is masked: what stands there changes no answer, and republished models often have another one.
            level: PromptLevel = "note" if name == "pad" else "wrong"
            found.append(PromptFinding("tokens", f"special token {name}", level, detail))
    return found


def _of_ends(a: Vocabulary, ours: _Ends, theirs: _Ends) -> list[PromptFinding]:
    found = []
    for place, x, y in (("begins", ours.first, theirs.first), ("ends", ours.last, theirs.last)):
        if x == y:
            continue
        name = "BOS" if place == "begins" else "EOS"
        if len(y) > len(x):
            cause = f"{name} twice" if len(y) > len(set(y)) else f"{name} added"
        else:
            cause = f"no {name}" if len(y) < len(x) else f"another {name}"
        detail = f"a text {place} with {_ids(a, x)} in the baseline, {_ids(a, y)} in the candidate"
        found.append(PromptFinding("tokens", cause, "wrong", detail, len(ENDS), len(ENDS)))
    return found


def _joined(groups: dict[str, _Group], differ: set[str]) -> dict[str, _Group]:
    """Return causes with all kinds of text that one pre-tokenizer splits otherwise as one, most probes first."""
    of_words = "merges" in differ
    # Without a difference inside words of small letters the merges are the same.
    parts = {cause: one for cause, one in groups.items() if cause.startswith(_PRE)}
    if parts and not of_words and _MERGES in groups:
        parts[f"{_PRE} (other)"] = groups[_MERGES]
    rest = {cause: one for cause, one in groups.items() if one not in parts.values()}
    if of_words and parts and _MERGES in groups:
        # Other merges change the boundaries of any text.
        rest[_MERGES].cases += [case for one in parts.values() for case in one.cases]
    elif parts:
        order = sorted(parts, key=lambda cause: -len(parts[cause].cases))
        kinds = ", ".join(cause[len(_PRE) + 2 : -1] for cause in order)
        rest[f"{_PRE} ({kinds})"] = _Group([case for cause in order for case in parts[cause].cases])
    return dict(sorted(_folded(rest).items(), key=lambda item: -len(item[1].cases)))


def _folded(groups: dict[str, _Group]) -> dict[str, _Group]:
    """Return causes with rarer changes of bytes as part of the most frequent one: one normalizer makes them all."""
    counts = {cause: len(one.cases) for cause, one in groups.items() if cause.startswith(_CHANGES)}
    of_bytes = sorted(counts, key=lambda cause: -counts[cause])
    if len(of_bytes) < 2 or counts[of_bytes[0]] < _MANY * counts[of_bytes[1]]:
        return groups
    for cause in of_bytes[1:]:
        groups[of_bytes[0]].cases += groups.pop(cause).cases
    return groups


def _deviating(
    baseline: PromptSide, candidate: PromptSide, cases: Sequence[tuple[str, list[int], list[int]]]
) -> Literal["baseline", "candidate"] | None:
    """Return the side that leaves its own tokenizer file on all of these texts."""
    texts = [text for text, _, _ in cases]
    ours, theirs = baseline.encode_by_file(texts), candidate.encode_by_file(texts)
    if ours is not None and all(ids != x for ids, (_, x, _) in zip(ours, cases, strict=True)):
        return "baseline"
    if theirs is not None and all(ids != y for ids, (_, _, y) in zip(theirs, cases, strict=True)):
        return "candidate"
    return None


def _of_added(added: Sequence[tuple[int, str]], b: Vocabulary, text: str, x: list[int], y: list[int]) -> str | None:
    """Return the cause where one side alone splits an added token from a text; the longest ones come first."""
    for number, token in added:
        if token and token in text and (number in x) != (number in y):
            if number in x:
                return "added token not split"
            kind = "end" if number in b.special.get("eos", ()) else "added"
            return f"{kind} token split, which the baseline reads as text"
    return None


def _cause(a: Vocabulary, b: Vocabulary, group: str, x: list[int], y: list[int]) -> str:
    s, t = _joined_bytes(a, x), _joined_bytes(b, y)
    if s != t:
        return _cause_of_bytes(b, s, t, y)
    if group == "merges":
        return _MERGES
    return _cause_of_boundary(group, _region(a, b, x, y))


def _cause_of_bytes(b: Vocabulary, s: bytes, t: bytes, y: list[int]) -> str:
    if b"\x00" in s and s.split(b"\x00")[0] == t:
        return "text after a NUL"
    if t == b" " + s or s == b" " + t:
        return "prefix space" if s.strip() else "normalization (white space)"
    u, v = s.decode("utf-8", "replace").strip(), t.decode("utf-8", "replace").strip()
    if "".join(u.split()) == "".join(v.split()):
        return "normalization (white space)"
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        if unicodedata.normalize(form, u) == v or unicodedata.normalize(form, v) == u:
            return f"normalization ({form})"
    if u.lower() == v or v.lower() == u:
        return "normalization (lower case)"
    plain = "".join(letter for letter in unicodedata.normalize("NFD", u) if not unicodedata.combining(letter))
    if v in (plain, plain.lower(), unicodedata.normalize("NFC", plain)):
        return "normalization (accents are removed)"
    if set(y) & set(b.special.get("unk", ())) or len(t) < len(s) or b"<unk>" in t or b"[UNK]" in t:
        return "byte fallback (bytes become unknown or are lost)"
    return "normalization (other)"


_KINDS: tuple[tuple[str, Callable[[str], object]], ...] = (
    ("digits", lambda part: re.search(r"\d", part) and re.fullmatch(r"\s?[\d\W]*", part)),
    ("contractions", lambda part: re.search(r"['\u2019]\s?\w", part)),
    ("white space", lambda part: not part.strip() or re.search(r"\s{2,}|[\r\n\t]", part)),
    ("combining marks", lambda part: any(unicodedata.category(letter).startswith("M") for letter in part)),
    ("punctuation", lambda part: re.search(r"\w", part) and re.search(r"[^\w\s]", part)),
)
"""Kind of text that a pre-tokenizer splits -> whether a text is of it."""


def _cause_of_boundary(group: str, part: str) -> str:
    if group == "contractions":
        return f"{_PRE} (contractions)"
    for kind, is_of in _KINDS:
        if is_of(part):
            return f"{_PRE} ({kind})"
    return f"{_PRE} (case)" if group == "case" else _MERGES


def _region(a: Vocabulary, b: Vocabulary, x: list[int], y: list[int]) -> str:
    """Return the text below the first tokens that differ, up to the next boundary that both sides have."""
    m = n = next((place for place, (i, j) in enumerate(zip(x, y, strict=False)) if i != j), min(len(x), len(y)))
    p, q = b"", b""
    while m < len(x) or n < len(y):
        if m < len(x) and (len(p) <= len(q) or n == len(y)):
            p, m = p + _piece(a, x[m]), m + 1
        else:
            q, n = q + _piece(b, y[n]), n + 1
        if p and len(p) == len(q):
            break
    return max(p, q, key=len).decode("utf-8", "replace")


def _piece(side: Vocabulary, number: int) -> bytes:
    return side.pieces[number] if 0 <= number < len(side.pieces) else b"?"


def _joined_bytes(side: Vocabulary, ids: Sequence[int]) -> bytes:
    return b"".join(_piece(side, number) for number in ids)


def _quoted(piece: bytes) -> str:
    return repr(piece.decode("utf-8", "backslashreplace"))


def _shown(side: Vocabulary, ids: Sequence[int]) -> list[str]:
    return [_piece(side, number).decode("utf-8", "backslashreplace") for number in ids[:_SHOWN]]


def _ids(side: Vocabulary, ids: Sequence[int]) -> str:
    return ", ".join(f"{number} {_quoted(_piece(side, number))}" for number in ids) or "nothing"
