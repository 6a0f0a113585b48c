"""A folder of ONNX Runtime GenAI as a side of a prompt comparison: its tokenizer, template and genai_config.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glassengine.errors import UsageError
from glassengine.prompt.huggingface import described
from glassengine.prompt.settings import NAMES, TOKENS
from glassengine.prompt.side import Conversation, Opened, Setting
from glassengine.prompt.templates import TOOLS
from glassengine.reading.documents import read_document
from glassengine.reading.files import read_text

_MOST_BYTES = 64 << 20
_LIMITS = {
    "normalization (NFC)": "ONNX Runtime GenAI does not normalize texts",
    "text after a NUL": "a text of ONNX Runtime GenAI ends at a NUL",
    "no BOS": "the tokenizer of ONNX Runtime GenAI adds no BOS: the template has to",
    TOOLS: "ONNX Runtime GenAI rewrites the definitions of tools for its templates",
    "white space of the template": "the templates of ONNX Runtime GenAI have no trim_blocks and lstrip_blocks",
}


class GenaiSide:
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
        ends = tuple(int(one) for one in self._tokenizer.eos_token_ids)
        special = {
            **vocabulary.special,
            "bos": _known(self._tokenizer.bos_token_id),
            "eos": ends,
            "pad": _known(self._tokenizer.pad_token_id),
        }
        config = read_document(file, dict, most=_MOST_BYTES)
        model = config.get("model") if isinstance(config, dict) else None
        search = config.get("search") if isinstance(config, dict) else None
        settings = {
            name: Setting(search[name], f"genai_config.json: search.{name}")
            for name in NAMES
            if isinstance(search, dict) and search.get(name) is not None
        }
        for name in TOKENS:
            if isinstance(model, dict) and model.get(name) is not None:
                settings[name] = Setting(model[name], f"genai_config.json: model.{name}")
        rows = model.get("vocab_size") if isinstance(model, dict) else None
        self.opened = Opened(
            "ONNX Runtime GenAI",
            dataclasses.replace(vocabulary, special=special, can_be_bare=False),
            _template(path),
            renders=True,
            lacks=("continue_final_message",),
            settings=settings,
            rows=rows if isinstance(rows, int) else None,
            limits=_LIMITS,
        )

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the ids of each text; the engine has no switch for the tokens at the ends."""
        return [[int(one) for one in self._tokenizer.encode(text)] for text in texts]

    def encode_by_file(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the ids of `tokenizer.json`, which the engine reads by code of its own."""
        return None

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


def _known(number: Any) -> tuple[int, ...]:
    return (int(number),) if isinstance(number, int) and number >= 0 else ()


def _template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return read_text(file, most=_MOST_BYTES)
    config = path / "tokenizer_config.json"
    found = read_document(config, dict, most=_MOST_BYTES) if config.is_file() else {}
    template = found.get("chat_template") if isinstance(found, dict) else None
    return template if isinstance(template, str) else None
