"""`gguf:FILE`: llama.cpp with a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from glassengine.errors import UsageError
from glassengine.plugins.serving.alignment import EPSILONS, AlignmentTable, numbers_of, table_of
from glassengine.plugins.serving.ggml.child import find_library, run_llama
from glassengine.plugins.serving.ggml.file import GgufFile
from glassengine.plugins.serving.ggml.weights import read_values, served_weights
from glassengine.results import Kind
from glassengine.serving.protocol import EngineSetting, ServedWeight, ServingOptions, ServingRun


@dataclass
class GgufCandidate:
    """A GGUF file, and the library that runs it.

    Args:
        file: Checked.
        options: Of the run.
    """

    file: GgufFile
    options: ServingOptions
    kind: str = "gguf"
    _extra: list[str] = field(default_factory=list)

    @property
    def spec(self) -> str:
        """As it was given."""
        return f"gguf:{self.file.path}"

    @property
    def encodes(self) -> bool:
        """Whether it is an encoder, which runs in one step."""
        return self.file.encodes

    def table(self, config: Any) -> AlignmentTable:
        """Return the table of its architecture for a checkpoint."""
        return table_of("ggml", self.file.architecture, numbers_of(config))

    def weights(self, module: nn.Module, config: Any) -> Mapping[str, ServedWeight]:
        """Return the file's tensors by the module's parameters, in their layout."""
        found, self._extra = served_weights(self.file, module, self.table(config))
        return found

    def extra_weights(self) -> Sequence[str]:
        """Return the file's tensors that stand for no parameter."""
        return self._extra

    def settings(self, config: Any) -> Sequence[EngineSetting]:
        """Return the numbers among the file's settings that the checkpoint's configuration has too."""
        return list(_settings(self.file, config))

    def record(self, run: ServingRun, path: Path) -> None:
        """Run llama.cpp in a process of its own and write down every node."""
        run_llama(self.file, find_library(self.options.library), run, path, self.options.threads)


def open_gguf(place: str, options: ServingOptions) -> GgufCandidate:
    """Return the candidate of a file.

    Raises:
        UsageError: There is no such file.
        CorruptError: It is damaged.
    """
    if not Path(place).is_file():
        near = (
            sorted(str(path) for path in Path(place).parent.glob("*.gguf"))[:4] if Path(place).parent.is_dir() else []
        )
        raise UsageError("no such GGUF file", got=place, expected=near or None)
    return GgufCandidate(GgufFile(place), options)


def _settings(file: GgufFile, config: Any) -> Iterator[EngineSetting]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    numbers = numbers_of(config)
    rope = getattr(text, "rope_parameters", None)
    rope = rope if isinstance(rope, dict) else {}
    full = rope.get("full_attention", rope) if isinstance(rope.get("full_attention"), dict) else rope
    local = rope.get("sliding_attention")
    eps = next(
        (getattr(text, name, None) for name in EPSILONS if hasattr(text, name)),
        None,
    )
    known: dict[str, tuple[Any, Kind]] = {
        "block_count": (numbers["layers"], "other"),
        "embedding_length": (numbers["hidden"], "other"),
        "attention.head_count": (numbers["heads"], "other"),
        "attention.head_count_kv": (numbers["kv_heads"], "other"),
        "attention.layer_norm_rms_epsilon": (eps, "eps"),
        "attention.layer_norm_epsilon": (eps, "eps"),
        "rope.freq_base": (full.get("rope_theta"), "position"),
        "rope.freq_base_swa": (local.get("rope_theta") if isinstance(local, dict) else None, "position"),
        "rope.scaling.factor": (full.get("factor"), "position"),
        "attention.sliding_window": (getattr(text, "sliding_window", None), "mask"),
        "attn_logit_softcapping": (getattr(text, "attn_logit_softcapping", None), "scale"),
        "final_logit_softcapping": (getattr(text, "final_logit_softcapping", None), "scale"),
        "attention.scale": (getattr(text, "attention_multiplier", None), "scale"),
        "embedding_scale": (getattr(text, "embedding_multiplier", None), "scale"),
        "residual_scale": (getattr(text, "residual_multiplier", None), "scale"),
        "logit_scale": (getattr(text, "logits_scaling", None), "scale"),
        "expert_used_count": (getattr(text, "num_experts_per_tok", None), "other"),
        "rope.dimension_count": (numbers["rotated"], "position"),
    }
    for name, (expected, kind) in known.items():
        found = file.number(name)
        if found is not None and isinstance(expected, (int, float)) and math.isfinite(expected):
            yield EngineSetting(f"{file.architecture}.{name}", float(found), float(expected), kind)
    if full.get("rope_type") == "llama3" and _has_long_waves(full, numbers["rotated"] or 0):
        tensor = file.tensors.get(_FACTORS)
        found = 1.0 if tensor is None else float(read_values(file, tensor).max())
        yield EngineSetting(f"the largest number of {_FACTORS}", found, float(full["factor"]), "position")


_FACTORS = "rope_freqs.weight"
"""What frequencies of the rotation are divided by; 1 where a file has no such tensor."""


def _has_long_waves(rope: Mapping[str, Any], rotated: int) -> bool:
    """Whether the slowest rotation of Llama 3's scaling is divided by the whole factor."""
    if rotated < 2 or not all(isinstance(rope.get(name), (int, float)) for name in _OF_LLAMA3):
        return False
    theta, context, low, _ = (float(rope[name]) for name in _OF_LLAMA3)
    return bool(2 * math.pi * theta ** ((rotated - 2) / rotated) > context / low)


_OF_LLAMA3 = ("rope_theta", "original_max_position_embeddings", "low_freq_factor", "factor")
