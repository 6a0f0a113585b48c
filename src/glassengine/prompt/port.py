"""A tokenizer that a function of the user returns, as a side: of transformers, of tokenizers, or of a port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from glassengine.errors import UsageError
from glassengine.program.user_code.calls import call_factory
from glassengine.prompt.huggingface import rendered
from glassengine.prompt.side import SPECIAL, Conversation, OpenedSide, PromptSide, Vocabulary, numbers_of, pieces_of

_SWITCH = "add_special_tokens"
_OPTIONS: Sequence[Mapping[str, Any]] = ({_SWITCH: False}, {"allowed_special": "all"}, {})
"""Of `encode`: of transformers and tokenizers, of tiktoken, of others."""


class TokenizerPort(PromptSide):
    """An object with `encode(text)`; `get_vocab`, ids of special tokens and a chat template are used where it has them.

    Args:
        spec: `file.py:factory`.
        known: Vocabulary of the baseline, for what the object does not have.

    Raises:
        UsageError: The function raised, or returns no tokenizer.
    """

    def __init__(self, spec: str, known: Vocabulary | None) -> None:
        self._tokenizer: Any = call_factory(spec)
        self._options = self._accepted(spec)
        added = {number: getattr(one, "content", str(one)) for number, one in self._added().items()}
        special = {name: numbers_of(getattr(self._tokenizer, f"{name}_token_id", None)) for name in SPECIAL}
        pieces: Sequence[bytes]
        if callable(getattr(self._tokenizer, "get_vocab", None)):
            pieces = pieces_of(self._tokenizer.get_vocab(), added)
        else:
            pieces, added = ([], {}) if known is None else (known.pieces, dict(known.added))
        vocabulary = Vocabulary(pieces, special, added, can_be_bare=_SWITCH in self._options)
        template = getattr(self._tokenizer, "chat_template", None)
        has_templates = isinstance(template, str) and hasattr(self._tokenizer, "apply_chat_template")
        self.opened = OpenedSide(
            type(self._tokenizer).__name__, vocabulary, template if has_templates else None, has_templates=has_templates
        )

    def _accepted(self, spec: str) -> Mapping[str, Any]:
        """Return the first options that `encode` takes."""
        for options in _OPTIONS:
            with suppress(TypeError, AttributeError):
                self._ids("a", options)
                return options
        got = type(self._tokenizer).__name__
        raise UsageError(f"{spec} did not return a tokenizer", got=got, expected="an object with encode(text)")

    def _added(self) -> Mapping[int, Any]:
        found = getattr(self._tokenizer, "added_tokens_decoder", None)
        if found is None and hasattr(self._tokenizer, "get_added_tokens_decoder"):
            found = self._tokenizer.get_added_tokens_decoder()
        return found if isinstance(found, Mapping) else {}

    def _ids(self, text: str, options: Mapping[str, Any]) -> list[int]:
        found = self._tokenizer.encode(text, **options)
        return [int(one) for one in getattr(found, "ids", found)]

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the ids of each text."""
        options = self._options if _SWITCH not in self._options else {_SWITCH: special}
        return [self._ids(text, options) for text in texts]

    def render(self, conversation: Conversation) -> str:
        """Return the text of a conversation."""
        return rendered(self._tokenizer.apply_chat_template, conversation)
