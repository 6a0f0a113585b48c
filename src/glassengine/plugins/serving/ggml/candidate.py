"""`gguf:FILE`: llama.cpp with a GGUF file, whose tensors stand for parameters of a checkpoint."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from glassengine.compare.matching.maps import MapRule, captures, substitute
from glassengine.errors import CorruptError, UsageError
from glassengine.extensions import require_package
from glassengine.plugins.serving.alignment import EPSILONS, AlignmentTable, Unread, as_parameter, numbers_of, table_of
from glassengine.plugins.serving.ggml.child import find_library, run_llama
from glassengine.plugins.serving.ggml.file import GgufFile, GgufTensor
from glassengine.plugins.serving.ggml.types import dequantized, step_of
from glassengine.reading.files import open_regular, read_at, shown
from glassengine.results import Kind
from glassengine.serving.protocol import EngineSetting, ServedWeight, ServingOptions, ServingRun

_TIED = {"output.weight": "token_embd.weight"}
"""What llama.cpp reads instead of a tensor that the file has not."""


def served_weights(
    file: GgufFile, module: nn.Module, table: AlignmentTable
) -> tuple[Mapping[str, ServedWeight], list[str]]:
    """Return what the file has for each parameter of a module, and its tensors that stand for none of them."""
    layers = int(file.number("block_count") or 0)
    weights: dict[str, Callable[[], ServedWeight]] = {}
    used: set[str] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        rule, stored = stored_names(name, table, file.architecture, layers)
        missing = [one for one in stored if one not in file.tensors]
        tied = bool(missing) and len(stored) == 1 and _TIED.get(stored[0], "") in file.tensors
        if tied:
            stored, missing = (_TIED[stored[0]],), []
        used.update(stored)
        if missing or not stored:
            reason = f"the file has no {' and '.join(missing)}" if missing else "gguf has no name for it"
            weights[name] = partial(ServedWeight, stored, None, reason=reason)
        else:
            weights[name] = partial(_weight, file, stored, rule, parameter, tied=tied)
    return Unread(weights), [name for name in file.tensors if name not in used]


@functools.lru_cache(maxsize=8)
def _names(architecture: str, layers: int) -> Callable[[str], str | None]:
    """Return gguf's own table: name of a parameter -> name of a tensor."""
    gguf = require_package("gguf", "GGUF files are read with the package gguf", "pip install 'glassengine[gguf]'")
    by_name = {text: key for key, text in gguf.MODEL_ARCH_NAMES.items()}
    kind = by_name.get(architecture)
    if kind is None:
        raise UsageError("gguf does not know the architecture", got=architecture, expected=sorted(by_name)[:8])
    table = gguf.get_tensor_name_map(kind, layers)

    def name_of(parameter: str) -> str | None:
        found: str | None = table.get_name(parameter, try_suffixes=(".weight", ".bias"))
        return found

    return name_of


def stored_names(
    name: str, table: AlignmentTable, architecture: str, layers: int
) -> tuple[MapRule | None, tuple[str, ...]]:
    """Return the rule of a parameter, and the tensors of a file that it is made of."""
    for rule in reversed(table.weights):
        captured = next(captures(rule.baseline, name), None)
        if captured is not None:
            return rule, tuple(substitute(one, captured) for one in rule.candidates)
    found = _names(architecture, layers)(name)
    return None, (found,) if found is not None else ()


def _weight(
    file: GgufFile, stored: tuple[str, ...], rule: MapRule | None, parameter: Tensor, *, tied: bool
) -> ServedWeight:
    tensors = [file.tensors[name] for name in stored]
    types = tuple(tensor.type.name for tensor in tensors)
    try:
        values = [read_values(file, tensor) for tensor in tensors]
    except UsageError as error:
        return ServedWeight(stored, None, types=types, reason=error.what, tied=tied)
    steps = [
        step_of(value, tensor.type) if tensor.type.is_quantized else None
        for value, tensor in zip(values, tensors, strict=True)
    ]
    return as_parameter(stored, rule, values, steps, types, parameter, tied=tied)


def read_values(file: GgufFile, tensor: GgufTensor) -> Tensor:
    """Return the numbers of a tensor in float32.

    Raises:
        CorruptError: The file is shorter than when it was checked, or cannot be read any more.
    """
    try:
        with open_regular(file.path) as opened:
            data = read_at(opened.fileno(), tensor.num_bytes, tensor.offset)
    except (OSError, UsageError) as error:  # not of this tensor alone
        raise CorruptError("a file cannot be read any more", got=f"{shown(file.path)}: {error}") from error
    if len(data) != tensor.num_bytes:
        got = f"{shown(file.path)}: {len(data):,} bytes of a tensor at {tensor.offset:,}"
        raise CorruptError("a file has changed while it was read", got=got, expected=f"{tensor.num_bytes:,} bytes")
    return dequantized(np.frombuffer(data, np.uint8), tensor.shape, tensor.type).float()


@dataclass
class GgufCandidate:
    """A GGUF file, and the library that runs it."""

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
