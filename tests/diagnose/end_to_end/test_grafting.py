"""Grafting lists all mistakes of a port, and a grafted check is never ok."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.errors import UnknownNameError, UsageError
from glassengine.testing import models
from glassengine.testing.models import llama


def _scaled(module: Any, factor: float) -> None:
    before = module.forward
    module.forward = lambda *args, **kwargs: before(*args, **kwargs) * factor


def _attention(layer: Any) -> None:
    layer.self_attn.scaling *= 1.2


def _activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU().eval()


def _epsilon(layer: Any) -> None:
    layer.input_layernorm.variance_epsilon = 0.5


def _late_epsilon(layer: Any) -> None:
    layer.post_attention_layernorm.variance_epsilon = 0.5


def _output(layer: Any) -> None:
    _scaled(layer.self_attn.o_proj, 1.1)


def _down(layer: Any) -> None:
    _scaled(layer.mlp.down_proj, 0.9)


def _not_a_number(layer: Any) -> None:
    _scaled(layer.mlp.up_proj, float("nan"))


KINDS: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    "scale of attention": (_attention, ("self_attn/scaled_dot",)),
    "activation": (_activation, ("mlp.act_fn", "mlp/")),
    "epsilon": (_epsilon, ("input_layernorm",)),
    "late epsilon": (_late_epsilon, ("post_attention_layernorm",)),
    "o_proj": (_output, ("o_proj", "/add.0")),
    "down_proj": (_down, ("down_proj", "/add.1")),
    "not a number": (_not_a_number, ("up_proj", "mlp/mul")),
}
"""Mistake -> what makes it, and parts of the sites at which it may be named: its op, or the op that reads it."""


_SETTINGS = {**models.ENCODER, "vocab_size": 272, "num_key_value_heads": 2, "max_position_embeddings": 128}
_MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": models.llama,
    "qwen3": models.qwen3,
    "mistral": lambda **own: models.from_config("MistralForCausalLM", "MistralConfig", {**_SETTINGS, **own}),
    "qwen2": lambda **own: models.from_config("Qwen2ForCausalLM", "Qwen2Config", {**_SETTINGS, **own}),
}


def _check(places: list[tuple[int, str]], layers: int, family: str = "llama", **options: Any) -> glass.Comparison:
    port: Any = _MODELS[family](num_hidden_layers=layers)
    for layer, kind in places:
        KINDS[kind][0](port.model.layers[layer])
    inputs = {"input_ids": torch.arange(3, 15)[None]}
    return glass.check(_MODELS[family](num_hidden_layers=layers), candidate=port, inputs=inputs, steps=0, **options)


def _missed(result: glass.Comparison, places: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the mistakes that no origin names."""
    sites = [one.site for one in result.origins]
    return [
        (layer, kind)
        for layer, kind in places
        if not any(f"layers.{layer}" in site and part in site for site in sites for part in KINDS[kind][1])
    ]


@pytest.mark.parametrize(
    "places",
    [
        [(0, "scale of attention"), (0, "activation")],
        pytest.param([(0, "not a number"), (1, "scale of attention")], marks=pytest.mark.slow),
    ],
)
def test_mistakes_are_listed_and_those_behind_others(places: list[tuple[int, str]]) -> None:
    result = _check(places, places[-1][0] + 1, graft_until_clean=True)
    assert not result.ok and not _missed(result, places), [one.site for one in result.origins]
    assert "grafting lists 2 mistakes" in result.notes[0] and "nothing else is wrong" in result.notes[0]


def test_a_grafted_check_is_never_ok() -> None:
    site = "model.layers.0.self_attn/scaled_dot_product_attention.0"
    result = _check([(0, "scale of attention")], 1, graft=[f"{site}=baseline"])
    assert (result.standing, result.origins) == ("too little judged", ())
    assert "ran with tensors of the baseline" in str(result.not_ok_because)


@pytest.mark.parametrize(
    ("graft", "error"), [("nothing=baseline", UnknownNameError), ("lm_head", UsageError), ("=baseline", UsageError)]
)
def test_a_graft_that_names_nothing_is_refused(graft: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        _check([], 1, graft=[graft])


def test_engines_have_no_grafts() -> None:
    with pytest.raises(UsageError, match="--graft is for a model"):
        glass.check(llama(num_hidden_layers=1), graft=["lm_head=baseline"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_five_mistakes_of_a_port_are_listed(seed: int) -> None:
    family = list(_MODELS)[seed % 4] if seed > 10 else "llama"
    drawn = random.Random(seed)
    places = [(layer, drawn.choice(list(KINDS))) for layer in drawn.sample(range(5), 5)]
    result = _check(sorted(places), 5, family, graft_until_clean=True)
    assert not _missed(result, places), (places, [one.site for one in result.origins], result.notes)
    assert "nothing else is wrong" in result.notes[0]
