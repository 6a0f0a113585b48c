"""Numbers by the names that people give them."""

from __future__ import annotations

import math

import pytest
import torch

from glassengine.judge.hypotheses.mistakes.arguments import base_of, origin_of
from glassengine.judge.hypotheses.mistakes.weights_read import relation


@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        (0.125, "1 / sqrt(64)"),
        (1 / 48, "1 / 48"),
        (math.sqrt(48), "sqrt(48)"),
        (-math.sqrt(48), "-sqrt(48)"),
        (math.log2(math.e), "log2(e)"),
        (math.log(2), "ln(2)"),
        (1.0, None),
        (0.73, None),
        (float("nan"), None),
    ],
)
def test_a_number_is_named(number: float, wanted: str | None) -> None:
    assert origin_of(number, [48, 64]) == wanted


def frequencies(base: float, number: int = 8) -> torch.Tensor:
    return (1 / base ** (torch.arange(0, 2 * number, 2).float() / (2 * number))).double()


@pytest.mark.parametrize("base", [100.0, 1e4, 5e5])
def test_the_base_is_found(base: float) -> None:
    assert base_of(frequencies(base)) == pytest.approx(base, rel=1e-4)


def test_other_numbers_have_none() -> None:
    for other in (torch.arange(8.0), torch.ones(8), frequencies(1e4)[:2], torch.randn(8), frequencies(1e4).flip(0)):
        assert base_of(other.double()) is None


def test_a_buffer_of_another_base_is_a_matter_of_position() -> None:
    told = relation("inv_freq", "inv_freq", frequencies(1e4), frequencies(1e3), {})
    assert told == ("position", "base of the frequencies (theta): 10000 in the baseline, 1000 in the candidate")
    assert relation("gain", "gain", frequencies(1e4), torch.randn(8).double(), {})[0] == "other"
