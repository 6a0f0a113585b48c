"""Text that appears while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from glassengine.engine.prompts.tokenizing import decode

TextCallback = Callable[[str], None]


class TextStream:
    """Turns tokens into pieces of text that never have to be taken back.

    Args:
        tokenizer: Of the model.
        on_text: Called with each piece.
    """

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
