"""What llama.cpp computes without being told, held against a checkpoint: a file of another model would be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from glassengine.errors import UsageError
from glassengine.plugins.serving.alignment import numbers_of

_SILU, _GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")
_ACTIVATIONS = {"gemma2": _GELU, "gemma3": _GELU, "gpt2": _GELU, "starcoder2": _GELU, "bert": ("gelu",)}
_WINDOWS = frozenset({"gemma2", "gemma3", "phi3"})
"""Architectures whose windows of attention llama.cpp knows."""
_LARGEST_GEMMA = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and layers of those whose attention is scaled by the width of all heads."""
_ROTATED_BUT = 4
"""Of so many layers of SmolLM3 llama.cpp rotates all but the last."""
_RENORMALIZED = {"qwen2moe": False, "qwen3moe": True}


def require_assumed(config: Any, architecture: str, length: int | None) -> None:
    """Refuse a model that llama.cpp would compute in another way.

    Args:
        config: Of the checkpoint.
        architecture: As llama.cpp calls it.
        length: Most tokens of a sequence.

    Raises:
        UsageError: Says which setting, and what llama.cpp takes it for.
    """
    for name, found, expected, hint in _differences(config, architecture, length):
        raise UsageError(
            f"llama.cpp has no such setting for the architecture {architecture!r}",
            got=f"{name} {found}",
            expected=expected,
            hint=hint,
        )


def _differences(config: Any, architecture: str, length: int | None) -> Iterator[tuple[str, Any, str, str | None]]:
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
