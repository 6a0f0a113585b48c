"""Sides of a prompt comparison: folders of ONNX Runtime GenAI and of OpenVINO, and a checkpoint in vLLM."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glassengine.errors import UsageError
from glassengine.prompt.huggingface import Directory, described, document, rendered_by_transformers, settings_of
from glassengine.prompt.settings import TOKENS, stated_in
from glassengine.prompt.side import Conversation, OpenedSide, PromptSetting, PromptSide, numbers_of
from glassengine.reading.files import read_text

_MOST_TEMPLATE = 1 << 20
_LIMITS = {
    "normalization": "ONNX Runtime GenAI does not normalize texts",
    "text after a NUL": "a text of ONNX Runtime GenAI ends at a NUL",
    "no BOS": "the tokenizer of ONNX Runtime GenAI adds no BOS: the template has to",
}


class GenaiSide(PromptSide):
    """The tokenizer of a GenAI folder; no model file is opened.

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


FILE = "openvino_tokenizer.xml"


class OpenvinoSide(PromptSide):
    """The tokenizer of a folder; no model is read.

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


_TAKEN = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")
"""What vLLM takes of generation_config.json by itself, beside the ids of ends."""
_NEUTRAL = {"repetition_penalty": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "do_sample": True}


class VllmSide(Directory):
    """Tokenizer, chat template and processors as vLLM opens them, with vLLM's defaults of sampling."""

    engine = "vLLM"
    weighs = False

    def opened_tokenizer(self, path: Path) -> Any:
        """Return the tokenizer by vLLM's function, which has moved between its versions."""
        try:
            module = importlib.import_module("vllm.tokenizers")
        except ModuleNotFoundError:
            module = importlib.import_module("vllm.transformers_utils.tokenizer")
        return module.get_tokenizer(str(path), trust_remote_code=False)

    def settings(self, path: Path) -> dict[str, PromptSetting] | None:
        """Return what vLLM takes of the checkpoint, and its defaults."""
        settings = {name: PromptSetting(value, "default of vLLM", False) for name, value in _NEUTRAL.items()}
        stated = document(path / "generation_config.json")
        return settings | stated_in(stated, "generation_config.json: ", (*_TAKEN, *TOKENS))
