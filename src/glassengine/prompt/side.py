"""Values that a side of a prompt comparison answers with: plain, so that a worker process can send them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from glassengine.errors import CorruptError, UsageError


class NoTokenizer(UsageError):
    """A side has no tokenizer at all."""


_MOST_TOKENS = 1 << 21
"""Twice as many as the largest tokenizers have."""
SPECIAL = ("bos", "eos", "pad", "unk")
Conversation = Mapping[str, Any]
"""Arguments of a chat template: `messages`, and perhaps `tools`, `add_generation_prompt` and variables."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a side.

    Attributes:
        pieces: The bytes that each id stands for; empty for an id without a token.
        special: "bos", "eos", "pad" and "unk" to their ids; a side may have several ends.
        added: Id -> text of the tokens that are split from a text before anything else.
        can_be_bare: Whether the side encodes a text without the tokens at its ends.
        reads_special: Whether text that spells a special token becomes that token.
    """

    pieces: Sequence[bytes]
    special: Mapping[str, tuple[int, ...]]
    added: Mapping[int, str] = field(default_factory=dict)
    can_be_bare: bool = True
    reads_special: bool = True


@dataclass(frozen=True)
class PromptSetting:
    """A value that steers generation.

    Attributes:
        value: A number, a truth value, or a list of token ids.
        where: The file and key that state it, or "default of ENGINE".
        is_stated: Whether a file states it.
    """

    value: Any
    where: str
    is_stated: bool = True


@dataclass(frozen=True)
class OpenedSide:
    """A side, opened.

    Attributes:
        engine: Name of the program that tokenizes.
        vocabulary: None where the side has no tokenizer.
        template: Source of the chat template; None where the side has none.
        has_templates: Whether the engine knows chat templates at all.
        lacks: Arguments of templates that the engine does not have.
        variables: Variables of templates that the engine sets by itself.
        settings: Name of transformers -> value; None where the side has no place for them.
        rows: Rows of the table of embeddings; None if unknown.
        has_processor: Whether the side takes images or sounds.
        has_weights: Whether the side has a checkpoint of which the headers can be read.
        limits: Begin of the cause of a difference of tokens -> why the engine cannot avoid it, whatever file it reads.
        warnings: Lines that the engine logged while it opened the file.
    """

    engine: str
    vocabulary: Vocabulary | None
    template: str | None = None
    has_templates: bool = True
    lacks: Sequence[str] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, PromptSetting] | None = None
    rows: int | None = None
    has_processor: bool = False
    has_weights: bool = False
    limits: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class Processed:
    """What a processor of images or sounds does.

    Attributes:
        facts: Name -> number, text, or tuple of these.
        outputs: Name of a sample -> the array that the processor makes of it; a text says why it refuses.
        near: How far right outputs may be apart, root mean square.
    """

    facts: Mapping[str, Any]
    outputs: Mapping[str, Any]
    near: float


@dataclass(frozen=True)
class Loaded:
    """What a model takes of its checkpoint.

    Attributes:
        number: Parameters of the checkpoint.
        missing: Parameters of the model that the checkpoint lacks.
        unexpected: Parameters of the checkpoint that the model does not take.
        mismatched: Words about parameters of other shapes.
        untied: Words about pairs that the configuration ties and the file does not.
        reason: Why nothing of this is known; None if it is.
    """

    number: int
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    mismatched: Sequence[str] = ()
    untied: Sequence[str] = ()
    reason: str | None = None


class PromptSide:
    """A tokenizer with its template, in a process of its own."""

    opened: OpenedSide

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the ids of each text, with or without the tokens at its ends."""
        raise NotImplementedError

    def encode_by_file(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the bare ids that the tokenizer's file alone gives; None where the engine is all there is."""
        return None

    def render(self, conversation: Conversation) -> str:
        """Return the text that the chat template makes of a conversation.

        Raises:
            ValueError: The template refuses it; has the template's message.
        """
        raise ValueError("the side has no chat template")

    def render_by_file(self, conversation: Conversation) -> str | None:
        """Return the text that transformers makes of the side's own template; None where `render` does just that.

        Raises:
            ValueError: As for `render`.
        """
        return None

    def process(self) -> Mapping[str, Processed | str]:
        """Return what the processors do, by "image" and "audio"; a text says why one cannot be tried."""
        return {}

    def load(self) -> Loaded:
        """Return what the model takes of its checkpoint."""
        return Loaded(0)


def numbers_of(value: Any) -> tuple[int, ...]:
    """Return the token ids in a value: one, several, or none; negative ones stand for none."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(int(one) for one in values if isinstance(one, int) and one >= 0)


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_FAR = 0xFFFF
"""Lies beyond all bytes."""
_HIDDEN = sorted(set(range(256)) - set(_VISIBLE))
_BYTES = dict.fromkeys(_HIDDEN, _FAR) | {256 + place: one for place, one in enumerate(_HIDDEN)}
"""Characters of byte-level tokenizers -> bytes, as GPT-2 introduced them; the visible ones stand for themselves."""
_WORD = "\u2581"
_SPACE = "\u0120"


def style_of(texts: Iterable[str]) -> str:
    """Return how a vocabulary spells bytes: "pieces" of sentencepiece, "bytes" of GPT-2, or "plain" text."""
    words = spaces = 0
    for text in texts:
        words += text.startswith(_WORD)
        spaces += text.startswith(_SPACE)
    return "pieces" if words > spaces else "bytes" if spaces else "plain"


def bytes_of(text: str, style: str) -> bytes:
    """Return the bytes that a token stands for, from its spelling in the vocabulary."""
    if style == "bytes":
        with suppress(UnicodeEncodeError):  # of a token that is spelled otherwise
            return text.translate(_BYTES).encode("latin-1")
    if style == "pieces":
        byte = _BYTE.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(_WORD, " ").encode("utf-8", "replace")
    return text.removeprefix("##").encode("utf-8", "replace")


def require_countable(size: int) -> None:
    """Refuse a vocabulary of millions of tokens.

    Raises:
        CorruptError: It is one.
    """
    if size > _MOST_TOKENS:
        raise CorruptError(
            "a vocabulary is out of proportion", got=f"{size:,} ids", expected=f"at most {_MOST_TOKENS:,}"
        )


def pieces_of(tokens: Mapping[str, int], added: Mapping[int, str]) -> list[bytes]:
    """Return the bytes of each id of a vocabulary.

    Raises:
        CorruptError: There are millions of ids.
    """
    style = style_of(tokens)
    size = max((*tokens.values(), *added), default=-1) + 1
    require_countable(size)
    pieces = [b""] * size
    for text, number in tokens.items():
        pieces[number] = bytes_of(text, style)
    for number, text in added.items():
        pieces[number] = text.encode("utf-8", "replace")
    return pieces
