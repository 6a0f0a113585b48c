"""Files of prompts, chats and token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.program import load_inputs
from glassengine.reading.documents import parsed
from glassengine.reading.files import read_text

Message = Mapping[str, Any]


Chat = str | Path | Sequence[Message] | Sequence[Sequence[Message]]


MAX_BYTES = 64 << 20
"""Of a file of prompts; more would not fit any batch."""


MAX_ITEMS = 16_000_000
"""Tokens in a file of them; a number takes some 40 bytes of memory."""


def read_input_ids(path: Path) -> list[list[int]]:
    """Read token ids: .json (a list, a list of lists, or {"input_ids": ...}), .npz, .pt or .safetensors.

    Raises:
        UsageError: It cannot be read, or holds something else.
    """
    if path.suffix == ".json" and path.is_file():
        data = _document(_text_of(path), path)
    elif not path.is_file():
        raise UsageError("no such file of token ids", got=str(path), hint="--input-ids FILE")
    else:
        data = load_inputs(str(path))[0]
    if isinstance(data, dict):
        if "input_ids" not in data:
            raise UsageError(
                f"{path} holds no token ids",
                got=", ".join(map(str, list(data)[:5])) or "no names",
                expected="input_ids, or a list without a name",
            )
        data = data["input_ids"]
    return as_rows(data, str(path))


def as_rows(data: Any, origin: str) -> list[list[int]]:
    """Return token ids as one list per sequence.

    Raises:
        UsageError: They are something else than whole numbers, one row or several.
    """
    if isinstance(data, torch.Tensor):
        data = data.tolist()
    rows = [data] if isinstance(data, (list, tuple)) and data and not isinstance(data[0], (list, tuple)) else data
    problem = _not_rows(rows)
    if problem:
        raise UsageError(
            "not token ids",
            got=f"{problem} in {origin}",
            expected="input_ids: a list of whole numbers, or one list per sequence",
        )
    return [list(row) for row in rows]


def _not_rows(rows: Any) -> str | None:
    """Return what keeps `rows` from being one list of whole numbers per sequence."""
    if not isinstance(rows, (list, tuple)):
        return type(rows).__name__
    if not rows:
        return "an empty list"
    for index, row in enumerate(rows):
        if not isinstance(row, (list, tuple)):
            return f"{type(row).__name__} as sequence {index}"
        if not row:
            return f"no tokens as sequence {index}"
        for token in row:
            if not isinstance(token, int) or isinstance(token, bool):
                return f"{type(token).__name__} {str(token)[:40]!r} as a token of sequence {index}"
    return None


def read_prompt_file(path: Path) -> tuple[str, ...]:
    """Read texts: .txt with one a line (empty lines are skipped), .json or .jsonl of strings or objects with "prompt"
    or "text".

    Raises:
        UsageError: It cannot be read, holds something else, or no prompt at all.
    """
    if path.suffix == ".txt":
        texts = [line.rstrip("\r") for line in _text_of(path).split("\n") if line.strip()]
    else:
        texts = [_prompt_of(item, path) for item in _items_of(path)]
    if not texts:
        raise UsageError(f"{path} has no prompts", expected="one prompt per line")
    return tuple(texts)


def read_chat(chat: Chat) -> list[list[Message]]:
    """Return one list of messages per conversation.

    Args:
        chat: Messages, conversations, or a file of them: .json, or .jsonl with a conversation a line (or a message a
            line, all of one conversation). A conversation may be an object with "messages".

    Raises:
        UsageError: It cannot be read, or holds something else.
    """
    origin = str(chat) if isinstance(chat, (str, Path)) else "chat"
    items = _items_of(Path(chat)) if isinstance(chat, (str, Path)) else list(chat)
    if items and all(isinstance(item, Mapping) and "messages" not in item for item in items):
        items = [items]
    conversations: list[list[Message]] = []
    for item in items:
        messages = item["messages"] if isinstance(item, Mapping) and "messages" in item else item
        if (
            not isinstance(messages, (list, tuple))
            or not messages
            or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and len(m) > 1 for m in messages)
        ):
            raise UsageError(
                "not a chat file",
                got=f"{type(messages).__name__} in {origin}",
                expected='messages, each {"role": "user", "content": "..."}, or a list of such lists',
            )
        conversations.append([dict(message) for message in messages])
    if not conversations:
        raise UsageError(f"{origin} has no messages", expected='[{"role": "user", "content": "..."}]')
    return conversations


def _text_of(path: Path) -> str:
    try:
        return read_text(path, most=MAX_BYTES, encoding="utf-8-sig")  # some editors begin a file with a mark
    except GlassError as error:
        raise UsageError(f"{path} cannot be read", got=f"{error.what}: {error.got}", expected=error.expected) from error


def _document(text: str, path: Path) -> Any:
    try:
        return parsed(text, Any, path, items=MAX_ITEMS)
    except CorruptError as error:
        raise UsageError(f"{path} cannot be read", got=error.got) from error


def _items_of(path: Path) -> list[Any]:
    """Return the entries of a .json list or the lines of a .jsonl file."""
    if path.suffix not in (".json", ".jsonl"):
        raise UsageError(f"{path} is not a prompt file", expected=".txt, .json or .jsonl")
    text = _text_of(path)
    if path.suffix == ".jsonl":
        return [_document(line, path) for line in text.split("\n") if line.strip()]
    data = _document(text, path)
    return data if isinstance(data, list) else [data]


def _prompt_of(item: Any, path: Path) -> str:
    text = item.get("prompt", item.get("text")) if isinstance(item, Mapping) else item
    if not isinstance(text, str):
        raise UsageError(
            f"{path} holds something else than prompts",
            got=type(item).__name__,
            expected='strings, or objects with "prompt" or "text"',
        )
    return text
