"""Mistakes in a cache have their own words; code that decides by the length of a cache is no mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

import glassengine as glass

Read = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Attention of Llama by hand: it masks by the length of its cache, and `read` says what it reads of it."""

    def __init__(self, own: Any, read: Callable[..., Read]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = own.q_proj, own.k_proj, own.v_proj, own.o_proj
        self.width, self.groups, self.layer_idx, self.read = own.head_dim, own.num_key_value_groups, own.layer_idx, read

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **given: Any) -> Any:
        shape = (*hidden_states.shape[:2], -1, self.width)
        q, k, v = (one(hidden_states).view(shape).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        cache = given.get("past_key_values")
        if cache is not None:
            k, v = self.read(cache, k, v, self.layer_idx)
        k, v = repeat_kv(k, self.groups), repeat_kv(v, self.groups)
        rows, columns = q.shape[-2], k.shape[-2]
        scores = q @ k.transpose(-1, -2) / self.width**0.5
        scores = scores.masked_fill(~torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows), float("-inf"))
        if attention_mask is not None:  # padding
            scores = scores.masked_fill(attention_mask[:, :, -1:, :columns] < -1, torch.finfo(scores.dtype).min)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2)
        return self.o_proj(mixed.reshape(*hidden_states.shape[:2], -1)), None


def right(cache: Any, k: Tensor, v: Tensor, layer: int) -> Read:
    found: Read = cache.update(k, v, layer)
    return found


def behind(change: Callable[[Tensor, Tensor, int], Read]) -> Callable[..., Read]:
    """Return what reads a cache wrongly in decode steps; `change` gets keys and values, and how many are new."""

    def read(cache: Any, k: Tensor, v: Tensor, layer: int) -> Read:
        keys, values = right(cache, k, v, layer)
        return (keys, values) if keys.shape[-2] == k.shape[-2] else change(keys, values, k.shape[-2])

    return read


def overwritten(keys: Tensor, values: Tensor, _: int) -> Read:
    return tuple(torch.cat([one[..., :-2, :], *[one[..., -1:, :]] * 2], -2) for one in (keys, values))  # type: ignore[return-value]


def earlier(one: Tensor, other: Tensor, new: int) -> Tensor:
    """Return `other` with the earlier positions of `one`."""
    return torch.cat([one[..., :-new, :], other[..., -new:, :]], -2)


def stale(cache: Any, k: Tensor, v: Tensor, layer: int) -> Read:
    """Write the prefill alone."""
    if len(cache.layers) <= layer or not cache.layers[layer].get_seq_length():
        return right(cache, k, v, layer)
    own = cache.layers[layer]
    return torch.cat([own.keys, k], -2), torch.cat([own.values, v], -2)


def in_8_bits(one: Tensor) -> Tensor:
    scale = one.abs().amax(-1, keepdim=True) / 127
    return (one / scale).round() * scale


MISTAKES: dict[str, tuple[Callable[..., Read], str]] = {
    "stale": (stale, "the cache lacks the last 1 token"),
    "moved": (behind(lambda k, v, _: (k.roll(1, -2), v.roll(1, -2))), "moved by 1 slot"),
    "keys moved": (behind(lambda k, v, _: (k.roll(1, -2), v)), "the keys in the cache are moved by 1 slot"),
    "window": (behind(lambda k, v, _: (k[..., -4:, :], v[..., -4:, :])), "a window of 4 positions"),
    "exchanged": (behind(lambda k, v, new: (earlier(v, k, new), earlier(k, v, new))), "keys and values of earlier"),
    "another head": (behind(lambda k, v, new: (earlier(k.flip(1), k, new), v)), "those of another head"),
    "another row": (
        behind(lambda k, v, new: (earlier(k.flip(0), k, new), earlier(v.flip(0), v, new))),
        "of another row of the batch",
    ),
    "values not written": (
        behind(lambda k, v, new: (k, torch.cat([v[..., :-new, :], v[..., -new - 1 : -1, :]], -2))),
        "the values of the newest token are not written",
    ),
    "overwritten": (behind(overwritten), "of the newest token overwrite"),
    "8 bits": (behind(lambda k, v, _: (in_8_bits(k), in_8_bits(v))), "8 bits, with a scale for each row"),
    "bfloat16": (behind(lambda k, v, _: (k.bfloat16().float(), v.bfloat16().float())), "bfloat16"),
}
QUICK = ("stale",)


def model(attention: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=3, initializer_range=0.3, **sizes)
    return LlamaForCausalLM._from_config(config, attn_implementation=attention).eval()


def checked(read: Callable[..., Read], layers: tuple[int, ...] = (1,), padding: int = 1) -> Any:
    own, port = model("sdpa"), model("eager")
    for number, layer in enumerate(port.model.layers):
        layer.self_attn = Attention(layer.self_attn, read if number in layers else right)
    ids = torch.tensor([[0, 5, 9, 2, 7, 1, 8, 30], [3, 4, 5, 6, 7, 8, 9, 10]])
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return glass.check(own, candidate=port, inputs=[{"input_ids": ids, "attention_mask": mask}], steps=3)


def test_code_that_asks_its_cache_for_its_length_is_no_mistake() -> None:
    result = checked(right)
    assert result.ok and all(one.agrees for one in result.results), result.not_ok_because
    assert any("decides by the length of the cache" in one.reason for one in result.skipped)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MISTAKES]
)
def test_a_mistake_in_a_cache_is_named_in_its_layer(name: str) -> None:
    read, words = MISTAKES[name]
    result = checked(read, padding=name != "window")
    found = result.first_divergence
    assert not result.ok and found is not None and found.step > 0
    assert found.site.startswith("model.layers.1.self_attn"), found.site
    assert found.hints and words in found.hints[0].text, [hint.text for hint in found.hints]


def test_a_model_with_a_cache_that_makes_nan_is_judged_op_by_op() -> None:
    """NaN in a model and in its export is no difference between the two."""
    own, port = model("sdpa"), model("sdpa")
    mlp = port.model.layers[1].mlp
    inner = mlp.forward
    mlp.forward = lambda x: inner(x).log()
    found = glass.check(own, candidate=port, inputs=[{"input_ids": torch.tensor([[0, 5, 9, 2]])}], steps=2)
    assert found.first_divergence is not None and not found.ok
    assert found.first_divergence.level == "candidate"
    assert found.first_divergence.hints[0].proven and found.first_divergence.hints[0].text.startswith("log of ")
