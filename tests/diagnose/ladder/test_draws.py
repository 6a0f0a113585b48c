"""Models that draw random numbers: their results are compared with one seed, and what they draw is compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.diagnose.ladder import draws
from glassengine.numerics.drift import signal_of

Draw = Callable[[Tensor], Tensor]


class Sampled(nn.Module):
    """A tensor with noise of a given size."""

    def __init__(self, draw: Draw, *, is_late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean, self.size, self.out = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 3)
        self.draw, self.is_late = draw, is_late

    def forward(self, x: Tensor) -> Tensor:
        size = self.size(x).exp()
        if self.is_late:
            second = torch.rand_like(size)
            first = self.draw(size)
        else:
            first = self.draw(size)
            second = torch.rand_like(size)
        return self.out(self.mean(x) + size * first + second)


def normal(size: Tensor) -> Tensor:
    return torch.randn_like(size)


def written_out(size: Tensor) -> Tensor:
    return torch.randn(size.shape)


def turned(size: Tensor) -> Tensor:
    return torch.randn(size.T.shape).T


def uniform(size: Tensor) -> Tensor:
    return torch.rand_like(size)


def of_one_row(size: Tensor) -> Tensor:
    return torch.randn(1, size.shape[-1])


def checked(candidate: nn.Module) -> glass.Comparison:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    return glass.check(Sampled(normal).eval(), candidate=candidate.eval(), inputs={"x": x})


def of_results(result: glass.Comparison) -> str:
    return next(one.reason for one in result.skipped if one.reason.startswith("not compared end to end"))


def test_same_draws_give_the_same_results_with_one_seed() -> None:
    result = checked(Sampled(written_out))
    assert result.ok, result.not_ok_because
    assert of_results(result).endswith("; with one seed both models return the same output")


@pytest.mark.parametrize(
    ("draw", "words"), [(uniform, "uniform numbers [5, 4]"), (of_one_row, "normal numbers [1, 4]")]
)
def test_another_draw_is_a_difference(draw: Draw, words: str) -> None:
    result = checked(Sampled(draw))
    assert not result.ok
    assert result.not_ok_because is not None
    assert result.not_ok_because.startswith(f"the candidate draws {words} (")
    assert ", the baseline normal numbers [5, 4] (" in result.not_ok_because


def test_as_many_numbers_in_another_shape_are_told_and_are_no_mistake() -> None:
    result = checked(Sampled(turned))
    assert result.ok, result.not_ok_because
    assert "with one seed the models differ in output" in of_results(result)


class Noisy(nn.Module):
    """Adds noise of one size."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.out, self.draw = nn.Linear(6, 4), nn.Linear(4, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.out(y + self.draw(y))


def in_place(y: Tensor) -> Tensor:
    return 0.1 * torch.empty_like(y).normal_()


def of_a_size(y: Tensor) -> Tensor:
    return torch.normal(torch.zeros_like(y), 0.1)


def test_the_size_of_a_draw_may_be_its_argument() -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    result = glass.check(Noisy(in_place).eval(), candidate=Noisy(of_a_size).eval(), inputs={"x": x})
    assert result.ok, result.not_ok_because


def normal_after_another(size: Tensor) -> Tensor:
    torch.rand(2)
    return torch.randn_like(size)


def test_a_draw_that_nothing_reads_is_no_difference() -> None:
    assert checked(Sampled(normal_after_another)).ok


class Named(Sampled):
    """The same, with a name for its result."""

    def forward(self, x: Tensor) -> Any:
        return {"sample": super().forward(x)}


def test_results_of_other_names_are_compared_by_place() -> None:
    assert of_results(checked(Named(normal))).endswith("; with one seed both models return the same output")


def test_nan_in_one_result_alone_leaves_no_signal() -> None:
    baseline = torch.tensor([1.0, 2.0, math.nan])
    assert signal_of(baseline, baseline.clone()) == math.inf
    assert signal_of(baseline, torch.tensor([1.0, math.nan, math.nan])) == -math.inf


def test_another_order_of_draws_is_told_and_is_no_mistake() -> None:
    result = checked(Sampled(normal, is_late=True))
    assert result.ok, result.not_ok_because
    assert "with one seed the models differ in output" in of_results(result)


def test_other_results_of_the_same_draws_are_not_called_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    # Judged op by op all is well here: what a user's own run returns stands for what no op shows.
    real, calls = draws._returned, iter(range(9))

    def returned(side: Any, step: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = real(side, step)
        return {name: -value for name, value in found.items()} if next(calls) == 2 else found

    monkeypatch.setattr(draws, "_returned", returned)
    result = checked(Sampled(written_out))
    assert result.standing == "too little judged"
    assert result.not_ok_because == "with one seed the models differ in output (-6 dB)"
