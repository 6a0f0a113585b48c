"""Ports that keep their own state, and steps with other numbers: each step is judged with what was held before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check

VOCABULARY, WIDTH, LONGEST = 32, 16, 12


class Attention(nn.Module):
    """Keys and values in `kind` of place, written in place from `start` on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.out, self.kind = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), kind
        for name in ("keys", "values"):
            cache = torch.zeros(2, LONGEST, WIDTH)
            if kind == "buffer":
                self.register_buffer(name, cache, persistent=False)
            else:
                setattr(self, name, cache)

    def forward(self, x: Tensor, start: int) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = self.qkv(x).chunk(3, -1)
        self.keys[:batch, start : start + tokens] = key
        self.values[:batch, start : start + tokens] = self.changed(value, start)
        seen = start + tokens
        hidden = torch.full((tokens, seen), float("-inf")).triu(start + 1)
        scores = query @ self.keys[:batch, :seen].transpose(1, 2) / WIDTH**0.5 + hidden
        return self.out(scores.softmax(-1) @ self.values[:batch, :seen])

    def changed(self, value: Tensor, start: int) -> Tensor:
        return value


class LateMistake(Attention):
    """Wrong once there is a past: what a prefill alone does not show."""

    def changed(self, value: Tensor, start: int) -> Tensor:
        return value * 1.01 if start else value


class Model(nn.Module):
    def __init__(self, kind: str = "buffer", attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList([attention(kind) for _ in range(1)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(start_pos, start_pos + tokens.shape[1]))
        for layer in self.layers:
            x = x + layer(self.norm(x), start_pos)
        return self.head(self.norm(x))


class OtherLayout(Attention):
    """Keys and values [tokens, batch, width] in another order of what is remembered."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        del self.keys, self.values
        self.register_buffer("past_values", torch.zeros(LONGEST, 2, WIDTH), persistent=False)
        self.register_buffer("past_keys", torch.zeros(LONGEST, 2, WIDTH), persistent=False)

    def forward(self, x: Tensor, start: int) -> Tensor:
        tokens = x.shape[1]
        query, key, value = self.qkv(x).chunk(3, -1)
        self.past_keys[start : start + tokens] = key.transpose(0, 1)
        self.past_values[start : start + tokens] = value.transpose(0, 1)
        seen = start + tokens
        hidden = torch.full((tokens, seen), float("-inf")).triu(start + 1)
        keys, values = self.past_keys[:seen].permute(1, 2, 0), self.past_values[:seen].transpose(0, 1)
        return self.out((query @ keys / WIDTH**0.5 + hidden).softmax(-1) @ values)


class OtherNames(Model):
    def forward(self, idx: Tensor, input_pos: int) -> Tensor:  # type: ignore[override]
        return super().forward(idx, input_pos)


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = Model().state_dict()
    return {name: torch.randn_like(value) * 0.4 for name, value in made.items()}


@pytest.fixture
def steps(tmp_path: Path) -> str:
    generator = torch.Generator().manual_seed(1)
    sizes = ((5, 0), (1, 5))
    made = [
        {"tokens": torch.randint(0, VOCABULARY, (2, size), generator=generator), "start_pos": start}
        for size, start in sizes
    ]
    torch.save(made, tmp_path / "steps.pt")
    return str(tmp_path / "steps.pt")


def loaded(model: nn.Module) -> nn.Module:
    model.load_state_dict(weights())
    return model


@pytest.mark.parametrize(
    "port", [OtherNames("attribute"), pytest.param(Model(attention=OtherLayout), marks=pytest.mark.slow)]
)
def test_f28_a_cache_of_its_own_and_a_number_for_where_it_is(port: nn.Module, steps: str) -> None:
    result = check(loaded(Model()), candidate=loaded(port), inputs=steps)
    assert result.ok and result.coverage > 0.95
    assert {pair.step for pair in result.pairs} == {0, 1}
    assert {found.name for found in result.results} == {"output"}


@pytest.mark.slow
def test_f28_a_baseline_whose_cache_is_a_plain_attribute(steps: str) -> None:
    baseline = loaded(Model("attribute"))
    result = check(baseline, candidate=loaded(Model("buffer")), inputs=steps)
    assert result.ok and result.coverage == 1.0
    # The caller's own module is left as it was.
    assert all(not bool(layer.keys.any()) for layer in baseline.layers)  # type: ignore[union-attr, operator]


def test_f28_a_mistake_beside_a_past_is_named_in_the_step_where_it_is(steps: str) -> None:
    result = check(loaded(Model()), candidate=loaded(Model(attention=LateMistake)), inputs=steps)
    assert not result.ok and result.first_divergence is not None
    assert result.first_divergence.step == 1
    assert result.first_divergence.site.startswith("layers.0")


class Stateless(nn.Module):
    """The same without a cache: all tokens at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner.tokens(tokens) + self.inner.positions(torch.arange(tokens.shape[1]))
        for layer in self.inner.layers:
            y = self.inner.norm(x)
            query, key, value = layer.qkv(y).chunk(3, -1)  # type: ignore[operator, union-attr]
            hidden = torch.full((tokens.shape[1], tokens.shape[1]), float("-inf")).triu(1)
            scores = query @ key.transpose(1, 2) / WIDTH**0.5 + hidden
            x = x + layer.out(scores.softmax(-1) @ value)  # type: ignore[operator, union-attr]
        return self.inner.head(self.inner.norm(x))


def test_f28_a_baseline_without_state_and_a_port_with_a_cache(tmp_path: Path) -> None:
    """Each step is a forward of its own: the port begins anew."""
    generator = torch.Generator().manual_seed(1)
    made = [{"tokens": torch.randint(0, VOCABULARY, (2, 6), generator=generator)} for _ in range(2)]
    torch.save(made, tmp_path / "steps.pt")
    baseline = Stateless()
    baseline.inner.load_state_dict(weights())
    result = check(baseline, candidate=loaded(OtherNames("attribute")), inputs=str(tmp_path / "steps.pt"))
    assert result.ok and result.coverage == 1.0


class Scaled(nn.Module):
    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(4, 4), shift

    def forward(self, x: Tensor, power: int) -> Tensor:
        y = self.linear(x)
        return y**power + (self.shift if power == 3 else 0.0)


def test_f28_a_number_that_differs_between_steps_without_any_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    baseline = Scaled()
    made: list[dict[str, Any]] = [{"x": torch.randn(2, 4), "power": power} for power in (2, 3, 2)]
    torch.save(made, tmp_path / "steps.pt")
    for shift in (0.0, 0.1):
        port = Scaled(shift)
        port.load_state_dict(baseline.state_dict())
        result = check(baseline, candidate=port, inputs=str(tmp_path / "steps.pt"))
        assert result.ok == (not shift)
        if shift:
            assert result.first_divergence is not None and result.first_divergence.step == 1
