"""Explanations have every number that decided."""

from __future__ import annotations

import dataclasses

import pytest

from glassengine.errors import UnknownNameError
from glassengine.report.explained import explained
from glassengine.results import Comparison
from tests.report.conftest import GUILTY


def test_the_whole(wrong: Comparison) -> None:
    text = "\n".join(explained(wrong))
    assert text.startswith("NOT OK") and "standing: results differ" in text and GUILTY in text


def test_one_tensor(wrong: Comparison) -> None:
    text = "\n".join(explained(wrong, "*silu.0"))
    assert (
        "mistake: activation: silu in the baseline, gelu in the candidate" in text
        and "proven: the baseline with this" in text
    )
    assert "./silu.0: wrong: rounding does not explain the difference" in text
    assert "judged by the op, computed again" in text and "times the noise floor" in text and "beyond its bound" in text
    assert "128 of 128 elements differ" in text and "in the candidate: ./gelu.0" in text
    below = "\n".join(explained(wrong, "down/linear.0"))
    assert "passed on: its inputs carried the error in, made by ./silu.0" in below or "identical" in below


def test_foreign_text_stays_on_one_line(wrong: Comparison) -> None:
    pair = dataclasses.replace(wrong.pairs[0], site="a\nok: all is well\x1b[2J", verdict="wrong")
    lines = explained(dataclasses.replace(wrong, pairs=(pair,)), "a*")
    assert not any("\n" in line or "\x1b" in line or line.startswith("ok: ") for line in lines)


def test_an_unknown_tensor_is_an_error_with_the_nearest_names(wrong: Comparison) -> None:
    with pytest.raises(UnknownNameError, match=r"silu\.0"):
        explained(wrong, "silu.1")
