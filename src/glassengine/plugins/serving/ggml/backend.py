"""Back-end "gguf": the checkpoint as a GGUF file, run by llama.cpp in a process of its own. Portable."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from torch import nn

from glassengine.backends.protocol.backend import Availability, Capabilities, Weights
from glassengine.errors import BackendError, UnknownNameError, UsageError
from glassengine.plugins.serving.ggml.assumed import require_assumed
from glassengine.plugins.serving.ggml.child import find_library
from glassengine.plugins.serving.ggml.session import LlamaRun
from glassengine.plugins.serving.ggml.tokens import vocabulary_of
from glassengine.plugins.serving.ggml.write import ARCHITECTURES, WRITTEN, write_gguf
from glassengine.program.representation.program import Program

logger = logging.getLogger("glassengine")

FILE = "model.gguf"
_PLAIN = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_GENERATE = [kind for kind, architecture in ARCHITECTURES.items() if architecture != "bert"]


class GgufBackend:
    """Writes the model, not its graph; steps run in sessions, whose caches llama.cpp keeps."""

    name = "gguf"
    quantizations = tuple(kind for kind in WRITTEN if kind not in _PLAIN.values())
    capabilities = Capabilities(dtypes=tuple(_PLAIN), kv="own", portable=True, native_code=False)

    def available(self) -> Availability:
        """Needs what writes the file and what runs it, both of the extra `gguf`."""
        install = "pip install 'glassengine[gguf]'"
        if importlib.util.find_spec("gguf") is None:
            return Availability(False, "the package gguf is not installed", install)
        try:
            find_library(None)
        except UsageError as error:
            return Availability(False, error.what, install)
        return Availability(True)

    def keeps_weights(self, program: Program) -> bool:
        """They are in the file."""
        return True

    def require(self, module: nn.Module, quantize: str | None, length: int | None) -> None:
        """Refuse a model that llama.cpp does not know, or would compute in another way.

        Raises:
            UnknownNameError: No table is of its kind, or there is no such type.
            UsageError: It has a setting that llama.cpp has not.
        """
        if quantize is not None and quantize.upper() not in self.quantizations:
            raise UnknownNameError("type of a GGUF file", quantize, self.quantizations)
        config = getattr(module, "config", None)
        kind = getattr(config, "model_type", None)
        if not isinstance(kind, str):
            raise UsageError(
                "GGUF files are written of models of transformers", got=type(module).__name__, expected=_GENERATE
            )
        if kind not in _GENERATE:
            raise UnknownNameError("kind of model that is written as GGUF", kind, _GENERATE)
        require_assumed(config, ARCHITECTURES[kind], length)

    def build_model(self, module: nn.Module, directory: Path, quantize: str | None, tokenizer: str | None) -> None:
        """Write `model.gguf`, with the tokenizer where llama.cpp has its kind."""
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        kind = _PLAIN[dtype] if quantize is None else quantize.upper()
        left = write_gguf(module, directory / FILE, kind=kind, vocabulary=vocabulary_of(module, tokenizer))
        if left:
            logger.warning(
                "%d matrices are F16 instead of %s: their rows are no whole blocks (%s)", len(left), kind, left[0]
            )

    def build(self, program: Program, directory: Path) -> None:
        """Refuse: a graph does not say which model it is of.

        Raises:
            BackendError: Always.
        """
        raise BackendError(
            "back-end 'gguf' writes models, not graphs", hint="glass build MODEL --backend gguf, without passes"
        )

    def load(self, directory: Path, weights: Weights | None) -> LlamaRun:
        """Return what runs the file in sessions.

        Raises:
            UsageError: No library of llama.cpp is installed.
        """
        return LlamaRun(directory / FILE)

    def served(self, directory: Path) -> str:
        """Return the file as a candidate."""
        return f"gguf:{directory / FILE}"
