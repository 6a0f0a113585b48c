"""Numbers by the names that people give them."""

from __future__ import annotations

import math

import pytest

from glassengine.judge.hypotheses.mistakes.constants import origin_of


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
