"""Compares the chat templates of two sides by the text that they make of conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from glassengine.prompt.side import Conversation, PromptSide
from glassengine.results.without_tensors import PromptExample, PromptFinding, PromptLevel

_AROUND = 40
"""Characters of a rendered text that are shown on both sides of its first difference."""
_REFUSED = "\x00refused: "
_ENGINE = "the engine renders templates otherwise"
"""Cause of a difference that the same template does not have in transformers."""


_DATA = json.loads(files("glassengine.prompt").joinpath("conversations.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Shape:
    """A conversation, and the words by which parts of it are found in the rendered text.

    Attributes:
        name: Kind of conversation.
        conversation: Arguments of the template.
        marks: Part -> a word that only this part has.
    """

    name: str
    conversation: Conversation
    marks: Mapping[str, str]


def _messages(*names: str) -> list[dict[str, Any]]:
    return [_DATA["messages"][name] for name in names]


def _shape(one: Mapping[str, Any]) -> Shape:
    tools = {"tools": [_DATA["tool"]]} if "tools" in one else {}
    conversation = {"messages": _messages(*one["messages"]), **tools, **one["options"]}
    return Shape(one["name"], conversation, one.get("marks", {}))


SHAPES = [_shape(one) for one in _DATA["conversations"]]


def compare_templates(baseline: PromptSide, candidate: PromptSide) -> tuple[list[PromptFinding], int]:
    """Return the causes by which rendered conversations differ, and the number of conversations that a side rendered.

    Templates are compared by transformers' text of each. Where the candidate's engine makes another text of its own
    template, the engine is the cause: that is a limit, whatever differs.
    """
    groups: dict[tuple[PromptLevel, str], list[tuple[Shape, str, str]]] = {}
    of_candidate: list[tuple[Shape, str]] = []
    lacks = {*baseline.opened.lacks, *candidate.opened.lacks}
    shapes = [shape for shape in SHAPES if not lacks & shape.conversation.keys()]
    number = 0
    for shape in shapes:
        ours, theirs = (_rendered(side.render, shape.conversation) or "" for side in (baseline, candidate))
        by_file = _rendered(candidate.render_by_file, shape.conversation)
        if not theirs.startswith(_REFUSED):
            of_candidate.append((shape, theirs))
        if ours.startswith(_REFUSED) and theirs.startswith(_REFUSED):
            continue  # each in words of its own
        number += 1
        text = theirs if by_file is None else by_file
        if ours != text and not (ours.startswith(_REFUSED) and text.startswith(_REFUSED)):
            groups.setdefault(("wrong", _cause(shape, ours, text)), []).append((shape, ours, text))
        elif ours != theirs:
            cause = f"{_ENGINE}{_set_by_engine(candidate, shape, theirs)}"
            groups.setdefault(("limit", cause), []).append((shape, ours, theirs))
    found = []
    for (level, cause), cases in sorted(groups.items(), key=lambda item: -len(item[1])):
        shape, ours, theirs = min(cases, key=lambda case: len(case[1]))
        names = ", ".join(case[0].name for case in cases[:4]) + (", ..." if len(cases) > 4 else "")
        shown = _windows(ours, theirs)
        example = PromptExample(json.dumps(shape.conversation, ensure_ascii=False), (), (), [shown[0]], [shown[1]])
        detail = f"{len(cases)} of {number} conversations: {names}"
        found.append(PromptFinding("template", cause, level, detail, len(cases), number, example))
    return [*found, *_twice(candidate, of_candidate), *_unkept(baseline, candidate)], number


def _set_by_engine(candidate: PromptSide, shape: Shape, theirs: str) -> str:
    """Return the variables that explain the text of the candidate's engine, which sets them by itself."""
    values = candidate.opened.variables
    for names in [[name] for name in values] + [list(values)] * (len(values) > 1):
        conversation = {**shape.conversation, **{name: values[name] for name in names}}
        if names and _rendered(candidate.render_by_file, conversation) == theirs:
            return f": it sets {' and '.join(f'{name} = {values[name]!r}' for name in names)}"
    return ""


def _rendered(render: Callable[[Conversation], str | None], conversation: Conversation) -> str | None:
    try:
        return render(conversation)
    except ValueError as error:
        return f"{_REFUSED}{error}"


def _cause(shape: Shape, ours: str, theirs: str) -> str:
    if theirs.startswith(_REFUSED):
        return "conversation refused"
    if ours.startswith(_REFUSED):
        return "conversation accepted, which the baseline refuses"
    for part, mark in shape.marks.items():
        if (mark in ours) != (mark in theirs):
            return f"{part} dropped" if mark in ours else f"{part} kept, which the baseline drops"
    if "".join(ours.split()) == "".join(theirs.split()):
        return "white space of the template"
    short, long = sorted((ours, theirs), key=len)
    if long.endswith(short) or long.startswith(short):
        place = "begin" if long.endswith(short) else "end"
        return f"text at the {place} {'missing' if short is theirs else 'added'}"
    return "text of the template"


def _windows(ours: str, theirs: str) -> tuple[str, str]:
    """Return the parts of both texts around their first difference."""
    at = next((n for n, (i, j) in enumerate(zip(ours, theirs, strict=False)) if i != j), min(len(ours), len(theirs)))
    first = max(at - _AROUND, 0)
    return tuple(  # type: ignore[return-value]
        ("..." if first else "") + text[first : at + _AROUND].replace("\x00", "") for text in (ours, theirs)
    )


def _twice(side: PromptSide, texts: Sequence[tuple[Shape, str]]) -> list[PromptFinding]:
    """Name a BOS that the template and the tokenizer both write: it is there twice where a rendered text is encoded."""
    vocabulary = side.opened.vocabulary
    if vocabulary is None or not texts or not vocabulary.special.get("bos"):
        return []
    bos = vocabulary.special["bos"][0]
    (ids,) = side.encode([texts[0][1]], special=True)
    if ids[:2] != [bos, bos]:
        return []
    detail = (
        f"the template writes {vocabulary.pieces[bos].decode('utf-8', 'replace')!r} and the tokenizer adds it again: "
        "encode rendered text with add_special_tokens=False"
    )
    example = PromptExample(texts[0][1], (), ids[:6], (), [])
    return [PromptFinding("template", "BOS twice in rendered text", "note", detail, example=example)]


def _unkept(baseline: PromptSide, candidate: PromptSide) -> list[PromptFinding]:
    """Name templates whose text of n turns does not begin the text of n + 1 turns, which trainers rely on."""
    kept = [_keeps_prefix(side) for side in (baseline, candidate)]
    if kept[0] == kept[1] or None in kept:
        return []
    name = "candidate" if kept[0] else "baseline"
    detail = f"the text of the {name} changes an earlier turn when a turn is added; the other side keeps it"
    return [PromptFinding("template", "prefix not kept", "wrong", detail)]


def _keeps_prefix(side: PromptSide) -> bool | None:
    """Whether the text and the tokens of two turns begin those of three; None where the template refuses them."""
    names = ("user", "thought", "more")
    conversations = [{"messages": _messages(*names[:number]), "add_generation_prompt": False} for number in (2, 3)]
    texts = [_rendered(side.render_by_file, one) or _rendered(side.render, one) or "" for one in conversations]
    if any(text.startswith(_REFUSED) for text in texts):
        return None
    first, second = texts if side.opened.vocabulary is None else side.encode(texts, special=False)
    return texts[1].startswith(texts[0]) and second[: len(first)] == first
