"""Caches that are objects: what a module remembers is found in what its attributes hold."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check
from glassengine.program.user_code.module_state import ModuleState, applied_state

WIDTH, LONGEST = 8, 8


class Slots:
    """Grows; knows the module that holds it, which is a circle."""

    __slots__ = ("keys", "owner", "values")

    def __init__(self, owner: nn.Module) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.owner = owner

    def update(self, keys: Tensor, values: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        self.values = values if self.values is None else torch.cat([self.values, values], 1)
        return self.keys, self.values


@dataclasses.dataclass
class Static:
    """Written in place, at positions that it is told."""

    keys: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(2, LONGEST, WIDTH))
    values: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(2, LONGEST, WIDTH))

    def update(self, keys: Tensor, values: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[:, start] = keys
        self.values[:, start] = values
        return self.keys, self.values


class WrongSlot(Static):
    def update(self, keys: Tensor, values: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[:, start] = keys
        self.values[:, start - (start > 4).long()] = values
        return self.keys, self.values


class Stale(Slots):
    """Keeps what it should not, for the step after."""

    __slots__ = ()

    def update(self, keys: Tensor, values: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        made = super().update(keys, values, start)
        assert self.values is not None
        self.values = self.values.roll(1, 1)
        return made


class OfLibrary:
    """As transformers has it: made in the first forward."""

    def __init__(self) -> None:
        from transformers import DynamicCache

        self.inner = DynamicCache()

    def update(self, keys: Tensor, values: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        found = self.inner.update(keys[:, None], values[:, None], 0)
        return found[0][:, 0], found[1][:, 0]


class Decoder(nn.Module):
    def __init__(self, kind: Callable[[nn.Module], Any], place: str = "attribute") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 20)
        self.kind, self.place, self.held = kind, place, None
        if place == "list":
            self.held = [{"cache": kind(self)}]

    def forward(self, ids: Tensor, start: Tensor) -> Tensor:
        if self.held is None:
            self.held = self.kind(self)
        cache = self.held[0]["cache"] if self.place == "list" else self.held
        query, key, value = self.qkv(self.embed(ids)).chunk(3, -1)
        keys, values = cache.update(key, value, start)
        seen = torch.arange(keys.shape[1]) <= start[:, None]
        scores = (query @ keys.transpose(1, 2)).masked_fill(~seen, float("-inf"))
        return self.head(scores.softmax(-1) @ values)


def steps() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    places = [torch.arange(4), torch.tensor([4]), torch.tensor([5])]
    return [{"ids": torch.randint(0, 20, (2, len(at)), generator=generator), "start": at} for at in places]


def made(kind: Callable[[nn.Module], Any], place: str = "attribute") -> nn.Module:
    return Decoder(kind, place).eval()


def static(_: nn.Module) -> Static:
    return Static()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (made(lambda _: OfLibrary()), made(static, "list")),
        (made(static), made(Slots)),
        pytest.param(made(Slots, "list"), made(lambda _: OfLibrary()), marks=pytest.mark.slow),
    ],
)
def test_f68_right_caches_of_other_classes(ours: nn.Module, theirs: nn.Module) -> None:
    result = check(ours, candidate=theirs, inputs=steps(), min_coverage=0.5)  # caches of other lengths
    assert result.ok and {pair.step for pair in result.pairs} == {0, 1, 2}
    # The caller's own modules remember nothing of it.
    assert all(module.place == "list" or module.held is None for module in (ours, theirs))


@pytest.mark.parametrize(
    ("ours", "theirs", "step"),
    [(Slots, lambda _: WrongSlot(), 2), (static, Stale, 1)],
)
def test_f68_a_wrong_slot_and_a_stale_cache_are_named(ours: Any, theirs: Any, step: int) -> None:
    result = check(made(ours), candidate=made(theirs), inputs=steps())
    assert not result.ok and result.standing == "results differ"
    assert result.first_divergence is not None and result.first_divergence.step <= step


class Holder(nn.Module):
    """Views of one tensor, a method bound to a cache, and a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = torch.zeros(2, 3)
        self.parts = deque([self.whole[0], self.whole[1]])
        self.cache = Slots(self)
        self.update = self.cache.update
        self.extra: dict[str, Any] = {"me": self, "lock": __import__("threading").Lock()}

    def forward(self, x: Tensor) -> Tensor:
        self.parts[1].add_(x)
        self.update(x[None, None], x[None, None], x)
        return self.whole.sum()


def test_f68_copies_keep_what_is_shared_and_the_original_is_left_alone() -> None:
    module, x = Holder(), torch.ones(3)
    before = ModuleState.of(module)
    with applied_state(module, before):
        assert module(x) == 3 and module(x) == 6
        assert module.cache.keys is not None and module.cache.owner is module
        later = ModuleState.of(module)
    assert before.differs_from(later) and not before.differs_from(ModuleState.of(module))
    assert module.cache.keys is None and not module.whole.any()
    with applied_state(module, later):
        assert module(x) == 9


def test_sizes_and_results_of_ops_among_what_a_module_holds_are_copied() -> None:
    module = nn.Linear(2, 2)
    module.shape, module.found = torch.Size([2, 3]), torch.ones(2, 3).max(1)  # type: ignore[assignment]
    state = ModuleState.of(module)
    module.found[0].zero_()  # type: ignore[index, operator]
    with applied_state(module, state):
        assert (module.shape, type(module.shape)) == (torch.Size([2, 3]), torch.Size)
        assert type(module.found) is torch.return_types.max
        assert torch.equal(module.found.values, torch.ones(2))  # type: ignore[union-attr, arg-type]
