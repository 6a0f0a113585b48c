"""The one program of a causal language model: static cache, dynamic in batch, sequence and cache length.

The wrapper hands the untouched user model a cache whose layers are plain tensors written in place at
`cache_position`; masks (causal, padding, sliding window) are made by the model's own code from the 2-D
`attention_mask` over cache slots, so the program contains nothing of ours but the two writes per layer.

Shape legend: B batch, S new tokens, T cache length, H key/value heads, D head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from glassengine.errors import UsageError

USER_MODULE = "user"
"""Attribute of the wrapper that holds the user's model; stripped from every path."""


@dataclass(frozen=True)
class KVLayout:
    """Shapes of the cache: one (heads, key size, value size) per layer."""

    layers: tuple[tuple[int, int, int], ...]

    def allocate(self, batch: int, length: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Return zeroed cache inputs `past_key_i` [B, H, T, Dk] and `past_value_i` [B, H, T, Dv]."""
        tensors: dict[str, torch.Tensor] = {}
        for index, (heads, key_size, value_size) in enumerate(self.layers):
            for name, size in (("key", key_size), ("value", value_size)):
                shape = (batch, heads, length, size)
                tensors[f"past_{name}_{index}"] = torch.zeros(shape, dtype=dtype, device=device)
        return tensors


class _CacheLayer(CacheLayerMixin):
    """One layer of the static cache: two tensors owned by the caller, written in place."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.positions = keys, values, positions
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the tensors exist from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, H, S, D] at the positions of this step; return the whole cache [B, H, T, D]."""
        self.keys.index_copy_(2, self.positions, key_states)
        self.values.index_copy_(2, self.positions, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (key length, offset) for the model's own mask code."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        """Return the slot of the first new token, a 0-d tensor so that it stays dynamic in the graph."""
        return self.positions[0]

    def get_max_length(self) -> int:
        """Return the cache length T."""
        return self.keys.shape[2]


class CausalLM(nn.Module):
    """Wrapper that is exported: (ids, mask, positions, slots, cache) -> logits, cache updated in place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        setattr(self, USER_MODULE, model)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        cache_position: torch.Tensor,
        cache: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Return logits [B, S, V].

        Args:
            input_ids: [B, S] int64.
            attention_mask: [B, T] int64 over cache slots: 1 for slots that hold (or now receive) a real token.
            position_ids: [B, S] int64, position of each token in its own sequence.
            cache_position: [S] int64, the cache slots that this step writes.
            cache: key and value of each layer in turn, [B, H, T, D] in the model's dtype; written in place.
        """
        layers = [
            _CacheLayer(keys, values, cache_position) for keys, values in zip(cache[::2], cache[1::2], strict=True)
        ]
        result = getattr(self, USER_MODULE)(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=Cache(layers=layers),
            use_cache=True,
        )
        logits: torch.Tensor = result.logits
        return logits


def input_names(layout: KVLayout) -> list[str]:
    """Return the names of the program's inputs in order, as the reference documents spell them."""
    cache = [f"past_{kind}_{index}" for index in range(len(layout.layers)) for kind in ("key", "value")]
    return ["input_ids", "attention_mask", "position_ids", "cache_position", *cache]


def probe_layout(model: nn.Module, *, has_values: bool = True) -> KVLayout:
    """Find the cache layout by one forward of two tokens with transformers' own cache.

    Args:
        model: In evaluation mode.
        has_values: Whether its weights have been loaded; else nothing is computed, and no memory of theirs touched.

    Raises:
        UsageError: The model keeps something other than plain keys and values (recurrent state, say).
    """
    device = next(model.parameters()).device
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))  # type: ignore[operator, union-attr]
    shapes_only = contextlib.nullcontext() if has_values else FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), exportable_experts(model), shapes_only:
        ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
    odd = {type(layer).__name__ for layer in cache.layers if not isinstance(layer, DynamicLayer)}
    if odd or not cache.layers:
        raise UsageError(
            "this model has no plain key/value cache",
            got=", ".join(sorted(odd)) or f"{type(model).__name__} filled no cache",
            expected="decoder-only models whose layers all keep keys and values",
            hint="build it as a plain module: glass build file.py:factory --inputs FILE",
        )
    shapes = [(layer.keys.shape, layer.values.shape) for layer in cache.layers]
    return KVLayout(tuple((int(k[1]), int(k[3]), int(v[3])) for k, v in shapes))


def example_inputs(layout: KVLayout, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return example inputs and their dynamic dimensions; all at least 2, or export specialises them."""
    batch, new, length = 2, 5, 12
    dynamic = torch.export.Dim.DYNAMIC

    def ids(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    cache = list(layout.allocate(batch, length, dtype, str(device)).values())
    inputs = {
        "input_ids": ids(batch, new),
        "attention_mask": ids(batch, length) + 1,
        "position_ids": ids(batch, new) + torch.arange(new, device=device),
        "cache_position": torch.arange(new, device=device),
        "cache": cache,
    }
    shapes = {
        "input_ids": {0: dynamic, 1: dynamic},
        "attention_mask": {0: dynamic, 1: dynamic},
        "position_ids": {0: dynamic, 1: dynamic},
        "cache_position": {0: dynamic},
        "cache": [{0: dynamic, 2: dynamic}] * len(cache),
    }
    return inputs, shapes


@contextlib.contextmanager
def exportable_experts(model: nn.Module) -> Iterator[None]:
    """Trace mixture-of-experts layers with `batched_mm`: the default uses ops that no converter knows."""
    config: Any = getattr(model, "config", None)
    before = getattr(config, "_experts_implementation", None)
    if before is None or not hasattr(model, "set_experts_implementation"):
        yield
        return
    model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_experts_implementation(before)  # type: ignore[operator]


def expert_modules(model: nn.Module) -> list[str]:
    """Return the paths of modules that `exportable_experts` traces with another algorithm than the model may use.

    Their results are the same, but their inner values come in another order.
    """
    # Set by transformers' decorator for experts, and by nothing else.
    return [name for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")]
