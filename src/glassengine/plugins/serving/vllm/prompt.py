"""A checkpoint in vLLM as a side of a prompt comparison; runs in the interpreter that vLLM is installed for."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from glassengine.prompt.huggingface import Directory, document
from glassengine.prompt.settings import TOKENS, stated_in
from glassengine.prompt.side import PromptSetting

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
