"""A folder that OpenVINO's converter wrote as a side of a prompt comparison: its tokenizer is a graph."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glassengine.errors import UsageError
from glassengine.prompt.huggingface import described, document, rendered_by_transformers, settings_of
from glassengine.prompt.side import Conversation, OpenedSide, PromptSide, numbers_of

FILE = "openvino_tokenizer.xml"


class OpenvinoSide(PromptSide):
    """The tokenizer of a folder; no model is read.

    Args:
        path: Of the folder.

    Raises:
        UsageError: It has no graph of a tokenizer, no `tokenizer.json`, or openvino-tokenizers is not installed.
    """

    def __init__(self, path: Path) -> None:
        for name in (FILE, "tokenizer.json"):
            if not (path / name).is_file():
                raise UsageError(f"the folder has no {name}", got=str(path), hint="convert it with --convert-tokenizer")
        try:
            import openvino

            importlib.import_module("openvino_tokenizers")  # adds the operations of tokenizers
        except ImportError as error:
            raise UsageError("openvino-tokenizers is not installed", got=str(error)) from None
        model = openvino.Core().read_model(path / FILE)
        self._run: Any = openvino.compile_model(model, "CPU")
        stated = {name: value.value for name, value in model.get_rt_info().items() if hasattr(value, "value")}
        vocabulary = described(path / "tokenizer.json")
        special = {name: numbers_of(stated.get(f"{name}_token_id")) or ids for name, ids in vocabulary.special.items()}
        template = stated.get("chat_template")
        self.opened = OpenedSide(
            "OpenVINO",
            dataclasses.replace(vocabulary, special=special, can_be_bare=False),
            template if isinstance(template, str) else None,
            settings=settings_of(path, document(path / "config.json")),
        )

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the ids of each text; the graph has no switch for the tokens at the ends."""
        found = []
        for text in texts:
            one = self._run([text])
            found.append([int(number) for number in one["input_ids"][0][one["attention_mask"][0] == 1]])
        return found

    def render(self, conversation: Conversation) -> str:
        """Return the text that transformers' Jinja makes of the template in the graph."""
        assert self.opened.vocabulary is not None
        return rendered_by_transformers(self.opened.template, self.opened.vocabulary, conversation)
