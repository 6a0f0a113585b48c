"""Text to tokens and back by foreign tokenizers, which replace, split and insert as their files define.

They are compiled code: nothing interrupts them, and what fails in them may end the process. So text is taken apart in a
process of its own, with bounds on time and memory. Tokens become text again after every step, for which that would be
slow; how much a decoder can make of a token is bounded before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from glassengine.engine.prompts.templates import MOST_BYTES, MOST_MEMORY, MOST_SECONDS, bounded
from glassengine.errors import CorruptError, UsageError
from glassengine.reading.documents import parsed
from glassengine.reading.files import shown
from glassengine.reading.patterns import num_repeats

# Of the text: a token of one byte takes 200 bytes here and there, and up to 20 as it is sent.
_MEMORY_PER_BYTE = 512
_SENT_PER_BYTE = 32
_BYTES_PER_SECOND = 50_000
_MOST_ITEMS = 1 << 30
_MOST_GROWTH = 1024
_MOST_DECODERS = 1000
_MOST_REPEATS = 3
TextCallback = Callable[[str], None]


def encode(tokenizer: Any, prompts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
    """Tokenize as transformers does.

    Args:
        tokenizer: Of the model.
        prompts: Texts.
        add_special_tokens: False for text that has them already, as a chat template writes it.

    Raises:
        UsageError: A prompt has no tokens at all, or the tokenizer fails, or takes too much time or memory.
    """
    rows = token_rows(tokenizer, prompts, add_special_tokens=add_special_tokens)
    for text, row in zip(prompts, rows, strict=True):
        if not row:
            raise UsageError("the prompt has no tokens", got=repr(text), hint="--input-text TEXT")
    return rows


def token_rows(tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
    """Return the tokens of texts, of which there may be none.

    Raises:
        UsageError: As for `encode`.
    """

    def tokenized() -> str:
        given = {"add_special_tokens": add_special_tokens}
        return json.dumps([list(map(int, tokenizer(text, **given)["input_ids"])) for text in texts])

    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    bounds: dict[str, Any] = {
        "memory": MOST_MEMORY + _MEMORY_PER_BYTE * size, "seconds": MOST_SECONDS + size / _BYTES_PER_SECOND,
        "most": MOST_BYTES + _SENT_PER_BYTE * size,
    }  # fmt: skip
    try:
        answer = bounded(tokenized, what="the tokenizer", quiet=True, **bounds)
        return parsed(answer, list[list[int]], "what the tokenizer made", items=_MOST_ITEMS)
    except CorruptError as error:
        got = error.got if "failed" in error.what else f"{error.what}: {error.got}"
        raise UsageError("the tokenizer takes no prompt", got=got) from error


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of tokens, without the special ones.

    Raises:
        UsageError: The tokenizer fails.
    """
    try:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
    except BaseException as error:
        # Of compiled code; not an `Exception`, so that it is not caught as an expected one.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        got = shown(f"{type(error).__name__}: {error}")[:400]
        raise UsageError("the tokenizer makes no text of these tokens", got=got) from error


def require_bounded_decoder(tokenizer: Any, where: str) -> None:
    """Refuse a tokenizer that can make a long text of a few tokens.

    Raises:
        CorruptError: It can.
    """
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return
    waiting: list[Any] = [parsed(decoder.__getstate__(), dict[str, Any], where, what="the decoder of the tokenizer")]
    growth, count = 1, 0
    while waiting:
        one = waiting.pop()
        waiting += one.get("decoders") or ()
        count += 1
        if one.get("type") == "Replace":
            growth *= _growth(one["pattern"], str(one["content"]), where)
        if growth > _MOST_GROWTH or count > _MOST_DECODERS:
            got = f"{shown(where)}: {count:,} decoders, {growth:,} characters of one"
            raise CorruptError("the decoder of the tokenizer is out of proportion", got=got)


def _growth(pattern: dict[str, str], content: str, where: str) -> int:
    """Return how many characters a replacement makes of one."""
    text = pattern.get("String")
    if text:
        return max(1, -(-len(content) // len(text)))
    repeats = num_repeats(pattern.get("Regex", ""))
    if repeats is None or repeats > _MOST_REPEATS:
        got = f"{shown(where)}: {shown(pattern.get('Regex', ''))[:400]}"
        raise CorruptError("a pattern of the tokenizer's decoder may never finish", got=got)
    return len(content) + 1  # of nothing, between all characters


class TextStream:
    """Turns tokens into pieces of text that never have to be taken back."""

    def __init__(self, tokenizer: Any, on_text: TextCallback) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._sent = ""

    def put(self, tokens: Sequence[int]) -> None:
        """Send what is certain of all tokens so far: an unfinished character or trailing space may still change."""
        text = self._text(tokens)
        if not text.endswith("\ufffd"):
            self._send(text.rstrip(" "))

    def end(self, tokens: Sequence[int]) -> None:
        """Send the rest."""
        self._send(self._text(tokens))

    def _text(self, tokens: Sequence[int]) -> str:
        return decode(self._tokenizer, tokens)

    def _send(self, text: str) -> None:
        if len(text) > len(self._sent) and text.startswith(self._sent):
            self._on_text(text[len(self._sent) :])
            self._sent = text
