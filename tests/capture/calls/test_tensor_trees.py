"""What a recording finds in the arguments of modules: containers of any kind, and caches wherever they come in."""

from __future__ import annotations

from collections import deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.capture.calls.tensor_trees import tensors_in
from glassengine.capture.runs.record import record
from glassengine.recording.read.reader import Recording
from glassengine.testing.models import llama

IDS = torch.tensor([[5, 6, 7]])

Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    x: torch.Tensor
    more: Any


class State:
    def __init__(self) -> None:
        self.hidden = torch.ones(2)


class KVCache:
    """Of a model that is not of transformers."""

    def __init__(self) -> None:
        self.k, self.v = torch.zeros(2), torch.ones(2)


def test_objects_of_own_classes_inside_of_any_container() -> None:
    x = torch.ones(1)
    tree = {"a": Pair(x, State()), "b": Batch(x, {"c": State()}), "d": deque([KVCache()])}
    assert [port for port, _ in tensors_in(":in", tree)] == [
        ":in.a.left",
        ":in.a.right.hidden",
        ":in.b.x",
        ":in.b.more.c.hidden",
        ":in.d[0].k",
        ":in.d[0].v",
    ]


class Wrapper(nn.Module):
    """Calls two language models as somebody's own code does.

    Attributes:
        other: Another one, whose layers have the numbers of those of the first.
    """

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.other, self.run = llama(), llama(), run

    def forward(self, *args: Any) -> torch.Tensor:
        return self.run(self, *args)


def _given(self: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    logits: torch.Tensor = self.model(ids, past_key_values=cache).logits
    return logits


def _made_inside(self: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    logits: torch.Tensor = self.model(ids, use_cache=True).logits
    return logits


@pytest.mark.parametrize("run", [_given, _made_inside])
def test_a_cache_is_found_wherever_it_comes_in(run: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    from transformers import DynamicCache

    model, cache = Wrapper(run).eval(), DynamicCache()
    with record(model, tmp_path / "r"), torch.no_grad():
        model(IDS, cache)
        expected = model.model(IDS, use_cache=True).past_key_values
    opened = Recording.open(tmp_path / "r")
    for layer in (0, 1):
        keys = opened.tensor(f"model.model.layers.{layer}.self_attn:kv.key", 0)
        assert torch.equal(keys, expected.layers[layer].keys)


def test_each_cache_belongs_to_the_layers_that_were_given_it(tmp_path: Path) -> None:
    from transformers import DynamicCache

    def run(self: Any, first: Any, second: Any) -> Any:
        return self.other(IDS + 1, past_key_values=second).logits + self.model(IDS, past_key_values=first).logits

    model = Wrapper(run).eval()
    caches = [DynamicCache(), DynamicCache()]
    with record(model, tmp_path / "r", sites=["*:kv.*"]), torch.no_grad():
        model(*caches)
    opened = Recording.open(tmp_path / "r")
    assert not opened.left_out
    for name, cache in zip(("model", "other"), caches, strict=True):
        for layer in (0, 1):
            kept = opened.tensor(f"{name}.model.layers.{layer}.self_attn:kv.value", 0)
            assert torch.equal(kept, cache.layers[layer].values)


def test_a_quantized_cache_has_its_scales(tmp_path: Path) -> None:
    from transformers import QuantizedCache

    cache: Any = QuantizedCache("fp8", llama().config)
    model = Wrapper(_given).eval()
    with record(model, tmp_path / "r", sites=["*:kv.*"]), torch.no_grad():
        model(IDS, cache)
    opened = Recording.open(tmp_path / "r")
    site = "model.model.layers.1.self_attn:kv._quantized_keys"
    for index, expected in enumerate(cache.layers[1]._quantized_keys):
        kept = opened.tensor(f"{site}[{index}]", 0)
        assert kept.dtype == expected.dtype and torch.equal(kept.float(), expected.float())


def test_caches_of_parts_that_are_called_alone(tmp_path: Path) -> None:
    from transformers import DynamicCache

    model, cache = Wrapper(_given).eval(), DynamicCache()
    inner: Any = model.model
    by_hand = inner.model
    with record(model, tmp_path / "r", sites=["*:kv.key"]), torch.no_grad():
        for _ in range(2):
            inner(IDS, past_key_values=cache)
        model(IDS, cache)  # of the same step as the second call of a part of it
        hidden = by_hand.embed_tokens(IDS)
        positions = by_hand.rotary_emb(hidden, torch.arange(3)[None])
        for layer in by_hand.layers:
            hidden = layer(hidden, position_embeddings=positions, past_key_values=cache)
    opened = Recording.open(tmp_path / "r")
    first, second = (f"model.model.layers.{layer}.self_attn" for layer in (0, 1))
    sites = [(entry.step, entry.site, entry.shape[2]) for entry in opened.entries]
    assert sites == [
        (0, f"{first}:kv.key", 3),
        (0, f"{second}:kv.key", 3),
        (1, f"{first}:kv.key", 6),
        (1, f"{second}:kv.key", 6),
        (1, f"{first}@1:kv.key", 9),
        (1, f"{second}@1:kv.key", 9),
        (2, f"{first}:kv.key", 12),
        (2, f"{second}:kv.key", 12),
    ]
    assert not opened.left_out
