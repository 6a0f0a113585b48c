"""Back-end "gguf": the checkpoint as a GGUF file, run by llama.cpp in a process of its own. Portable.

A model that llama.cpp would compute in another way, by settings that a file does not hold, is refused.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from glassengine.backends.protocol.backend import Availability, Capabilities, Weights
from glassengine.errors import BackendError, UnknownNameError, UsageError
from glassengine.plugins.serving.alignment import numbers_of
from glassengine.plugins.serving.ggml.child import find_library
from glassengine.plugins.serving.ggml.session import LlamaRun
from glassengine.plugins.serving.ggml.write import ARCHITECTURES, WRITTEN, vocabulary_of, write_gguf
from glassengine.program.representation.program import Program

logger = logging.getLogger("glassengine")

FILE = "model.gguf"
_PLAIN = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_GENERATE = [kind for kind, architecture in ARCHITECTURES.items() if architecture != "bert"]
_SILU, _GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")
_ACTIVATIONS = {"gemma2": _GELU, "gemma3": _GELU, "gpt2": _GELU, "starcoder2": _GELU, "bert": ("gelu",)}
_WINDOWS = frozenset({"gemma2", "gemma3", "phi3"})
"""Architectures whose windows of attention llama.cpp knows."""
_LARGEST_GEMMA = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and layers of those whose attention is scaled by the width of all heads."""
_ROTATED_BUT = 4
"""Of so many layers of SmolLM3 llama.cpp rotates all but the last."""
_RENORMALIZED = {"qwen2moe": False, "qwen3moe": True}


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
        _require_implicit_settings(config, ARCHITECTURES[kind], length)

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


def _require_implicit_settings(config: Any, architecture: str, length: int | None) -> None:
    """Refuse a model that llama.cpp would compute in another way.

    Args:
        config: Of the checkpoint.
        architecture: As llama.cpp calls it.
        length: Most tokens of a sequence.

    Raises:
        UsageError: Says which setting, and what llama.cpp takes it for.
    """
    for name, found, expected, hint in _implicit_settings(config, architecture, length):
        raise UsageError(
            f"llama.cpp has no such setting for the architecture {architecture!r}",
            got=f"{name} {found}",
            expected=expected,
            hint=hint,
        )


def _implicit_settings(
    config: Any, architecture: str, length: int | None
) -> Iterator[tuple[str, Any, str, str | None]]:
    numbers = numbers_of(config)
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        found = getattr(config, name, None)
        known = _ACTIVATIONS.get(architecture, _SILU)
        if found is not None and found not in known:
            yield name, found, " or ".join(known), None
            break
        if found is not None:
            break
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = rope if all(isinstance(one, dict) for one in rope.values()) else {"": rope}
    for kind, one in kinds.items():
        found = one.get("rope_type", "default")
        if found not in ("default", "linear"):
            yield f"rope_type of {kind or 'all layers'}", found, "default or linear", None
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window and architecture not in _WINDOWS and (length is None or length > window):
        yield "sliding_window", window, "none", f"--max-seq-len {window}"
    scalar = getattr(config, "query_pre_attn_scalar", None)
    heads, hidden, layers = numbers["heads"], numbers["hidden"], numbers["layers"]
    assert heads is not None and hidden is not None
    width = hidden // heads if (architecture, layers) in _LARGEST_GEMMA else numbers["head_dim"]
    if scalar is not None and scalar != width:
        yield "query_pre_attn_scalar", scalar, f"{width}, the width of a head", None
    rotated = getattr(config, "no_rope_layers", None) if architecture == "smollm3" else None
    if rotated is not None and [*map(bool, rotated)] != [(at + 1) % _ROTATED_BUT != 0 for at in range(len(rotated))]:
        yield "no_rope_layers", rotated, f"0 for each {_ROTATED_BUT}th layer, 1 for others", None
    renormalized = _RENORMALIZED.get(architecture)
    if renormalized is not None and bool(getattr(config, "norm_topk_prob", renormalized)) is not renormalized:
        yield "norm_topk_prob", config.norm_topk_prob, str(renormalized), None
    if getattr(config, "mlp_only_layers", None) or (getattr(config, "decoder_sparse_step", None) or 1) != 1:
        yield "mlp_only_layers", config.mlp_only_layers, "experts in each layer", None
