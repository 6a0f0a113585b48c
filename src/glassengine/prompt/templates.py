"""Compares the chat templates of two sides by the text that they make of conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glassengine.prompt.side import Conversation, PromptSide
from glassengine.results.prompt import PromptExample, PromptFinding, PromptLevel

_AROUND = 40
"""Characters of a rendered text that are shown on both sides of its first difference."""
_REFUSED = "\x00refused: "
_ENGINE = "the engine renders templates otherwise"
"""Cause of a difference that the same template does not have in transformers."""


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
    marks: tuple[tuple[str, str], ...] = ()


def _message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_SYSTEM = _message("system", "Answer like a pirate.")
_USER = _message("user", "What is the capital of Peru?")
_REPLY = _message("assistant", "It is Lima.")
_MORE = _message("user", "And of Chile?")
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
_CALL = _message(
    "assistant",
    "",
    tool_calls=[
        {"type": "function", "id": "call00001", "function": {"name": "get_weather", "arguments": {"town": "Cusco"}}}
    ],
)
_ANSWER = _message("tool", "17 degrees", name="get_weather", tool_call_id="call00001")
_THOUGHT = _message("assistant", "<think>Peru has Quechua roots.</think>It is Lima.")
_REASONED = _message("assistant", "It is Lima.", reasoning_content="Peru has Quechua roots.")
_PROMPT = {"add_generation_prompt": True}

SHAPES = (
    Shape("user", {"messages": [_USER], **_PROMPT}, (("user message", "capital of Peru"),)),
    Shape("without generation prompt", {"messages": [_USER], "add_generation_prompt": False}),
    Shape("system", {"messages": [_SYSTEM, _USER], **_PROMPT}, (("system prompt", "pirate"),)),
    Shape("several turns", {"messages": [_USER, _REPLY, _MORE], **_PROMPT}, (("earlier turn", "Lima"),)),
    Shape(
        "system and several turns",
        {"messages": [_SYSTEM, _USER, _REPLY, _MORE], **_PROMPT},
        (("system prompt", "pirate"),),
    ),
    Shape("tools", {"messages": [_USER], "tools": [_TOOL], **_PROMPT}, (("tools", "get_weather"),)),
    Shape(
        "tool call",
        {"messages": [_USER, _CALL], "tools": [_TOOL], "add_generation_prompt": False},
        (("tool call", "Cusco"),),
    ),
    Shape(
        "tool result",
        {"messages": [_USER, _CALL, _ANSWER], "tools": [_TOOL], **_PROMPT},
        (("tool result", "17 degrees"),),
    ),
    Shape(
        "reasoning in the last turn",
        {"messages": [_USER, _THOUGHT], "add_generation_prompt": False},
        (("reasoning", "Quechua"),),
    ),
    Shape(
        "reasoning in an earlier turn", {"messages": [_USER, _THOUGHT, _MORE], **_PROMPT}, (("reasoning", "Quechua"),)
    ),
    Shape("reasoning as a field", {"messages": [_USER, _REASONED, _MORE], **_PROMPT}, (("reasoning", "Quechua"),)),
    Shape("empty user message", {"messages": [_message("user", "")], **_PROMPT}),
    Shape("white space around", {"messages": [_message("user", "  two  spaces\n")], **_PROMPT}),
    Shape("text that spells a token", {"messages": [_message("user", "<|im_end|> </s> [INST]")], **_PROMPT}),
    Shape(
        "other scripts", {"messages": [_message("user", "ol\u00e9 \u65e5\u672c \U0001f680 <b>&amp;</b>")], **_PROMPT}
    ),
    Shape(
        "assistant prefix",
        {"messages": [_USER, _message("assistant", "The answer is")], "continue_final_message": True},
    ),
    Shape("two user messages", {"messages": [_USER, _MORE], **_PROMPT}, (("user message", "capital of Peru"),)),
    Shape("system alone", {"messages": [_SYSTEM], **_PROMPT}, (("system prompt", "pirate"),)),
)


def compare_templates(baseline: PromptSide, candidate: PromptSide) -> tuple[list[PromptFinding], int]:
    """Return the causes by which rendered conversations differ, and the number of conversations that a side rendered.

    Where transformers makes the baseline's text of the candidate's own template, the candidate's engine is the cause:
    that is a limit, whatever differs.
    """
    groups: dict[str, list[tuple[Shape, str, str]]] = {}
    of_candidate: list[tuple[Shape, str]] = []
    lacks = {*baseline.opened.lacks, *candidate.opened.lacks}
    shapes = [shape for shape in SHAPES if not lacks & shape.conversation.keys()]
    number = 0
    for shape in shapes:
        ours, theirs = _rendered(baseline, shape.conversation), _rendered(candidate, shape.conversation)
        if not theirs.startswith(_REFUSED):
            of_candidate.append((shape, theirs))
        if ours.startswith(_REFUSED) and theirs.startswith(_REFUSED):
            continue  # each in words of its own
        number += 1
        if ours != theirs:
            cause = _ENGINE if _rendered_by_file(candidate, shape) == ours else _cause(shape, ours, theirs)
            groups.setdefault(cause, []).append((shape, ours, theirs))
    found = []
    for cause, cases in sorted(groups.items(), key=lambda item: -len(item[1])):
        shape, ours, theirs = min(cases, key=lambda case: len(case[1]))
        names = ", ".join(case[0].name for case in cases[:4]) + (", ..." if len(cases) > 4 else "")
        shown = _windows(ours, theirs)
        example = PromptExample(json.dumps(shape.conversation, ensure_ascii=False), (), (), [shown[0]], [shown[1]])
        detail = f"{len(cases)} of {number} conversations: {names}"
        level: PromptLevel = "limit" if cause == _ENGINE else "wrong"
        found.append(PromptFinding("template", cause, level, detail, len(cases), number, example))
    return [*found, *_twice(candidate, of_candidate), *_unkept(baseline, candidate)], number


def _rendered(side: PromptSide, conversation: Conversation) -> str:
    try:
        return side.render(conversation)
    except ValueError as error:
        return f"{_REFUSED}{error}"


def _rendered_by_file(side: PromptSide, shape: Shape) -> str | None:
    try:
        return side.render_by_file(shape.conversation)
    except ValueError:
        return None


def _cause(shape: Shape, ours: str, theirs: str) -> str:
    if theirs.startswith(_REFUSED):
        return "conversation refused"
    if ours.startswith(_REFUSED):
        return "conversation accepted, which the baseline refuses"
    for part, mark in shape.marks:
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
    first = _rendered(side, {"messages": [_USER, _THOUGHT], "add_generation_prompt": False})
    second = _rendered(side, {"messages": [_USER, _THOUGHT, _MORE], "add_generation_prompt": False})
    if first.startswith(_REFUSED) or second.startswith(_REFUSED):
        return None
    return second.startswith(first)
