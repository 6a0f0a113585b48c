"""A folder of ONNX Runtime GenAI as a side of a prompt comparison: its tokenizer, template and genai_config.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glassengine.errors import UsageError
from glassengine.prompt.huggingface import described, document, rendered_by_transformers
from glassengine.prompt.settings import TOKENS, stated_in
from glassengine.prompt.side import Conversation, OpenedSide, PromptSide, numbers_of
from glassengine.reading.files import read_text

_MOST_TEMPLATE = 1 << 20
_LIMITS = {
    "normalization": "ONNX Runtime GenAI does not normalize texts",
    "text after a NUL": "a text of ONNX Runtime GenAI ends at a NUL",
    "no BOS": "the tokenizer of ONNX Runtime GenAI adds no BOS: the template has to",
}


class GenaiSide(PromptSide):
    """The tokenizer of a GenAI folder; no model file is opened.

    Args:
        path: Of the folder.

    Raises:
        UsageError: The folder lacks `genai_config.json`.
    """

    def __init__(self, path: Path) -> None:
        file = path / "genai_config.json"
        if not file.is_file():
            raise UsageError("the folder has no genai_config.json", got=str(path))
        import onnxruntime_genai

        self._tokenizer: Any = onnxruntime_genai.Tokenizer(str(path))
        vocabulary = described(path / "tokenizer.json")
        special = {
            **vocabulary.special,
            "bos": numbers_of(self._tokenizer.bos_token_id),
            "eos": tuple(int(one) for one in self._tokenizer.eos_token_ids),
            "pad": numbers_of(self._tokenizer.pad_token_id),
        }
        config = document(file)
        model, search = (_object(config.get(name)) for name in ("model", "search"))
        settings = stated_in(model, "genai_config.json: model.", TOKENS)
        settings |= stated_in(search, "genai_config.json: search.")
        rows = model.get("vocab_size")
        self.opened = OpenedSide(
            "ONNX Runtime GenAI",
            dataclasses.replace(vocabulary, special=special, can_be_bare=False),
            _template(path),
            lacks=("continue_final_message",),
            settings=settings,
            rows=rows if isinstance(rows, int) else None,
            limits=_LIMITS,
        )

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the ids of each text; the engine has no switch for the tokens at the ends."""
        return [[int(one) for one in self._tokenizer.encode(text)] for text in texts]

    def render(self, conversation: Conversation) -> str:
        """Return the text that the engine's own Jinja makes of a conversation."""
        options = dict(conversation)
        messages = json.dumps(options.pop("messages"), ensure_ascii=False)
        tools = options.pop("tools", None)
        prompt = bool(options.pop("add_generation_prompt", False))
        more = {} if tools is None else {"tools": json.dumps(tools, ensure_ascii=False)}
        try:
            return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, **more))
        except Exception as error:  # of the engine, about the template
            raise ValueError(str(error)) from None

    def render_by_file(self, conversation: Conversation) -> str | None:
        """Return the text that transformers makes of the folder's template: the engine's Jinja is another one."""
        assert self.opened.vocabulary is not None
        return rendered_by_transformers(self.opened.template, self.opened.vocabulary, conversation)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return read_text(file, most=_MOST_TEMPLATE)
    template = document(path / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else None
