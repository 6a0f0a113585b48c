"""The two programs of an encoder-decoder: one fills the cross-attention cache, the other decodes with it.

    encoder   inputs of the model -> keys and values of every cross-attention, once per batch
    decoder   the program of a causal language model, with these keys and values as inputs that no step changes

Both are traced from the unchanged user model. For the encoder it runs with one token and an empty cache, and only what
leads to the cross-attention cache is kept.

Shape legend: B batch, S new tokens, T cache length, E encoder positions, H heads, D head size.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from glassengine.program.kinds import causal_lm
from glassengine.program.kinds.causal_lm import USER_MODULE, CacheLayer, KVLayout

SOURCE_MASK = "encoder_attention_mask"
"""Input of the decoder: [B, E], 1 for encoder positions that count; only of models whose encoder takes a mask."""


def cross_names(num_layers: int) -> list[str]:
    """Return the names of the cross-attention cache: results of the encoder, inputs of the decoder."""
    return [f"cross_{kind}_{index}" for index in range(num_layers) for kind in ("key", "value")]


def takes_mask(model: nn.Module) -> bool:
    """Whether padding of the encoder's input can be masked."""
    is_text = getattr(model, "main_input_name", "") == "input_ids"
    return is_text and "attention_mask" in inspect.signature(model.forward).parameters


def start_token(settings: Any) -> int | None:
    """Return the token that decoding begins with, as transformers chooses it; None where `settings` state none."""
    start: int | None = settings.decoder_start_token_id
    return start if start is not None else settings.bos_token_id


class Encoder(nn.Module):
    """Wrapper that is exported: inputs of the encoder -> the cross-attention cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        setattr(self, USER_MODULE, model)

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return `cross_key_i` and `cross_value_i` [B, H, E, D]."""
        cache, _ = _first_step(getattr(self, USER_MODULE), inputs)
        layers: list[Any] = cache.cross_attention_cache.layers
        tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        return dict(zip(cross_names(len(layers)), tensors, strict=True))


def _first_step(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> tuple[EncoderDecoderCache, Any]:
    """Return the caches after one token, and what the model returns for it."""
    first = next(iter(inputs.values()))
    token = torch.zeros((first.shape[0], 1), dtype=torch.int64, device=first.device)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    return cache, model(**inputs, decoder_input_ids=token, past_key_values=cache, use_cache=True)


class _CrossLayer(CacheLayer):
    """Keys and values of one cross-attention, which are never updated."""

    def get_seq_length(self) -> int:
        """Return a length that says: it is filled."""
        return self.keys.shape[2]


class Decoder(nn.Module):
    """Wrapper that is exported: as `causal_lm.CausalLM`, with the cross-attention cache."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        setattr(self, USER_MODULE, model)
        self._width = width

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        cache_position: torch.Tensor,
        cache: Sequence[torch.Tensor],
        cross: Sequence[torch.Tensor],
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits [B, S, V].

        Args:
            input_ids: [B, S] int64, tokens of the decoder.
            attention_mask: [B, T] int64 over cache slots.
            position_ids: [B, S] int64; the decoder counts for itself, from the slots.
            cache_position: [S] int64.
            cache: Keys and values of the self-attentions, [B, H, T, D]; written in place.
            cross: Keys and values of the cross-attentions, [B, H, E, D].
            encoder_attention_mask: [B, E] int64.
        """
        own = [CacheLayer(k, v, cache_position) for k, v in zip(cache[::2], cache[1::2], strict=True)]
        filled = [_CrossLayer(k, v, cache_position) for k, v in zip(cross[::2], cross[1::2], strict=True)]
        caches = EncoderDecoderCache(Cache(layers=own), Cache(layers=filled))
        # Nothing of the encoder's states is read once the cross-attention cache is filled, but for their size.
        states = cross[0].new_zeros((cross[0].shape[0], cross[0].shape[2], self._width))
        user = getattr(self, USER_MODULE)
        masked = {"attention_mask": encoder_attention_mask} if encoder_attention_mask is not None else {}
        result = user(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            decoder_input_ids=input_ids,
            decoder_attention_mask=attention_mask,
            past_key_values=caches,
            use_cache=True,
            **masked,
        )
        logits: torch.Tensor = result.logits
        return logits


class Layouts(NamedTuple):
    """Layouts of the caches of self- and cross-attention, and the hidden size of the encoder."""

    own: KVLayout
    cross: KVLayout
    width: int


def probe_layouts(model: nn.Module, inputs: Mapping[str, torch.Tensor], *, has_values: bool) -> Layouts:
    """Find the layouts by one forward of one token.

    Args:
        model: In evaluation mode.
        inputs: Of the encoder.
        has_values: Whether the weights have been loaded; else nothing is computed.
    """
    shapes_only = contextlib.nullcontext() if has_values else FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), shapes_only:
        cache, result = _first_step(model, inputs)

    def layout(one: Any) -> KVLayout:
        sizes = ((layer.keys.shape, layer.values.shape) for layer in one.layers)
        return KVLayout(tuple((int(k[1]), int(k[3]), int(v[3])) for k, v in sizes))

    width = int(result.encoder_last_hidden_state.shape[-1])
    return Layouts(layout(cache.self_attention_cache), layout(cache.cross_attention_cache), width)


def input_names(model: nn.Module, layouts: Layouts) -> list[str]:
    """Return the names of the decoder's inputs in order."""
    mask = [SOURCE_MASK] if takes_mask(model) else []
    return [*causal_lm.input_names(layouts.own), *cross_names(len(layouts.cross.layers)), *mask]


def example_inputs(model: Any, layouts: Layouts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return example inputs of the decoder and their dynamic dimensions."""
    device = next(model.parameters()).device
    inputs, shapes = causal_lm.example_inputs(layouts.own, model.dtype, device)
    dynamic = torch.export.Dim.DYNAMIC
    batch, positions = inputs["input_ids"].shape[0], 7
    inputs["cross"] = list(layouts.cross.allocate(batch, positions, model.dtype, str(device)).values())
    shapes["cross"] = [{0: dynamic, 2: dynamic}] * len(inputs["cross"])
    if takes_mask(model):
        inputs[SOURCE_MASK] = torch.ones((batch, positions), dtype=torch.int64, device=device)
        shapes[SOURCE_MASK] = {0: dynamic, 1: dynamic}
    return inputs, shapes
