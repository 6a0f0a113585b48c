"""Prompts: texts, files, chats or token ids of several lengths -> one left-padded batch; and tokenizers that fit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from glassengine.engine.manifest import Manifest
from glassengine.engine.tokenizing import bounded, encode, require_bounded_decoder
from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.program import load_inputs
from glassengine.reading.documents import parsed
from glassengine.reading.files import read_text

TokenIds = str | Path | torch.Tensor | Sequence[int] | Sequence[Sequence[int]]
Images = str | Path | Any | Sequence[str | Path | Any]
"""Files of images, or images of Pillow."""
Message = Mapping[str, Any]
Chat = str | Path | Sequence[Message] | Sequence[Sequence[Message]]

MAX_BYTES = 64 << 20
"""Of a file of prompts; more would not fit any batch."""

MAX_ITEMS = 16_000_000
"""Tokens in a file of them; a number takes some 40 bytes of memory."""

MAX_SEQUENCES = 1 << 20
"""Of one batch; the settings that come with an engine may ask for any number."""


class Reader(Protocol):
    """Who prompts are read for: an engine."""

    manifest: Manifest

    @property
    def tokenizer(self) -> Any:
        """That of the engine."""


@dataclass(frozen=True)
class Prompts:
    """What a request came to, one entry per sequence.

    Attributes:
        texts: Prompts as text; empty where token ids were given.
        rows: Token ids without padding.
        tokenizer: Of the model; None where there is none and none is needed.
        pixel_values: Of all images in the order of their tokens, [N, C, H, W]; None without images.
    """

    texts: tuple[str, ...]
    rows: list[list[int]]
    tokenizer: Any
    pixel_values: torch.Tensor | None = None

    def repeated(self, count: int) -> Prompts:
        """Return each prompt `count` times in a row, as transformers does for `num_return_sequences`.

        Raises:
            UsageError: There would be more than any engine takes.
        """
        if len(self.rows) * count > MAX_SEQUENCES:
            got = f"{len(self.rows)} prompts, num_return_sequences={count}"
            raise UsageError("too many sequences", got=got, expected=f"at most {MAX_SEQUENCES:,}")
        texts = tuple(text for text in self.texts for _ in range(count))
        return replace(self, texts=texts, rows=[row for row in self.rows for _ in range(count)])


@dataclass(frozen=True)
class Request:
    """What to generate from: exactly one of the first four or `inputs`; `Engine.generate` describes them."""

    prompts: str | Sequence[str] | None = None
    input_ids: TokenIds | None = None
    prompt_file: str | Path | None = None
    chat: Chat | None = None
    images: Images | None = None
    inputs: str | Mapping[str, Any] | None = None
    tokenizer: str | Path | None = None

    def read(self, engine: Reader) -> Prompts:
        """Return the prompts as token ids.

        Raises:
            UsageError: None was given, or several; a file cannot be read; or the tokenizer does not fit.
        """
        sources = {
            "text": self.prompts, "token ids": self.input_ids, "a prompt file": self.prompt_file, "a chat": self.chat,
            "tensors": self.inputs,
        }  # fmt: skip
        given = [name for name, source in sources.items() if source is not None]
        if len(given) != 1:
            raise UsageError(
                f"{' and '.join(given)} were both given" if given else "nothing to generate from",
                hint="--input-text TEXT, or --input-ids FILE, or --input-file FILE, or --chat FILE",
            )
        tokenizer = None
        if self.inputs is not None and not engine.manifest.has_encoder:
            raise UsageError("an engine that generates takes prompts", got="--inputs", hint="--input-text TEXT")
        if (self.input_ids is None and self.inputs is None) or self.tokenizer is not None or engine.manifest.tokenizer:
            tokenizer = choose_tokenizer(engine, self.tokenizer)
        if self.inputs is not None:
            return Prompts((), [], tokenizer)
        if self.input_ids is not None:
            is_file = isinstance(self.input_ids, (str, Path))
            rows = read_input_ids(Path(self.input_ids)) if is_file else as_rows(self.input_ids, "input_ids")  # type: ignore[arg-type]
            return Prompts((), rows, tokenizer)
        if self.chat is not None:
            texts = apply_chat_template(tokenizer, read_chat(self.chat))
            return Prompts(texts, encode(tokenizer, texts, add_special_tokens=False), tokenizer)
        if self.prompt_file is not None:
            texts = read_prompt_file(Path(self.prompt_file))
        else:
            assert self.prompts is not None
            texts = (self.prompts,) if isinstance(self.prompts, str) else tuple(self.prompts)
        if not texts:
            raise UsageError("nothing to generate from", hint="--input-text TEXT")
        return Prompts(texts, encode(tokenizer, texts), tokenizer)


def load_tokenizer(directory: str | Path) -> Any:
    """Load a tokenizer of transformers; code that comes with it is never run.

    Raises:
        UsageError: There is none, or it cannot be read.
        CorruptError: It makes long texts of a few tokens.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        require_bounded_decoder(tokenizer, str(directory))
    except CorruptError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            "the tokenizer cannot be loaded", got=f"{directory}: {first}", hint="--tokenizer DIRECTORY"
        ) from error
    return tokenizer


def choose_tokenizer(engine: Reader, directory: str | Path | None) -> Any:
    """Return the tokenizer to use: that of `directory`, or the engine's own.

    Raises:
        UsageError: It has other tokens than the engine's own, or more than the model.
    """
    if directory is None:
        tokenizer = engine.tokenizer
    else:
        if not Path(directory).is_dir():
            raise UsageError("unknown tokenizer directory", got=str(directory), hint="--tokenizer DIRECTORY")
        tokenizer = load_tokenizer(directory)
        if engine.manifest.tokenizer and tokenizer.get_vocab() != engine.tokenizer.get_vocab():
            raise UsageError(
                "the tokenizer does not belong to the model",
                got=f"{len(tokenizer)} tokens in {directory}",
                expected=f"the {len(engine.tokenizer)} tokens of the engine's own",
                hint="leave out --tokenizer to use it",
            )
    size = engine.manifest.vocab_size
    if size is not None and len(tokenizer) > size:
        raise UsageError(
            "the tokenizer does not belong to the model",
            got=f"{len(tokenizer)} tokens",
            expected=f"at most {size}, the model's vocabulary",
            hint="--tokenizer DIRECTORY of the model that was built",
        )
    return tokenizer


def apply_chat_template(tokenizer: Any, conversations: Sequence[Sequence[Message]]) -> tuple[str, ...]:
    """Return the text of each conversation as the model expects it, up to where the answer begins.

    Raises:
        UsageError: The tokenizer has no chat template, or the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "the tokenizer has no chat template",
            expected="a model that was trained on chats",
            hint="write the prompt as text: --input-text TEXT; or give another --tokenizer DIRECTORY",
        )

    def render() -> str:
        made = [
            tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            for messages in conversations
        ]
        return json.dumps(made)

    try:
        return tuple(parsed(bounded(render), list[str], "what the chat template made"))
    except CorruptError as error:
        what = "the chat template refuses the messages"
        raise UsageError(what, got=error.got if "failed" in error.what else f"{error.what}: {error.got}") from error


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token ids, attention mask), both int64 [B, S] of the longest row."""
    length = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


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
