"""What the line `results` says, and what it never calls rounding."""

from __future__ import annotations

import dataclasses

import pytest

from glassengine.report.words import result_line
from glassengine.results import ResultComparison

LOGITS = ResultComparison(
    name="logits",
    candidate_name="logits",
    level="candidate",
    method="name",
    verdict="rounding",
    reason=None,
    case="inputs",
    step=0,
    num_steps=1,
    shape=(1, 6, 50),
    dtype="float32",
    candidate_dtype="float32",
    max_abs_diff=1e-6,
    largest=2.5,
    ulp=4.0,
    snr_db=118.0,
    cosine_similarity=1.0,
    noise_ratio=0.4,
    num_tokens=6,
    same_tokens=6,
    mean_kl=1e-12,
    max_kl=1e-12,
)


def test_a_small_difference_agrees_within_rounding() -> None:
    assert result_line(LOGITS) == (
        "logits agree within rounding: largest difference 1e-06 of 2.5, 4 ulp, 118 dB; no next token changes, "
        "mean KL 1e-12 nats"
    )
    assert not LOGITS.is_unexplained


@pytest.mark.parametrize("far", [{"snr_db": 8.0}, {"max_kl": 0.1}, {"snr_db": -3.0, "max_abs_diff": 4.0}])
def test_f50_nothing_far_apart_is_called_rounding(far: dict[str, float]) -> None:
    found = dataclasses.replace(LOGITS, **far)  # type: ignore[arg-type]
    assert found.is_unexplained
    assert "rounding" not in found.in_words()
    assert found.in_words().startswith("logits differ by")


def test_what_rounding_grows_to_is_not_called_rounding() -> None:
    found = dataclasses.replace(LOGITS, max_abs_diff=0.1, ulp=4e5, snr_db=30.0)
    assert found.in_words().startswith("logits differ no more than rounding may change here: largest difference 0.1 of")


def test_f82_a_tie_explains_it_and_is_not_called_rounding() -> None:
    found = dataclasses.replace(LOGITS, snr_db=12.0, exempt=0.2)
    assert not found.is_unexplained
    assert "rounding" not in found.in_words()


def test_f50_changed_tokens_are_counted_at_all_positions() -> None:
    line = result_line(dataclasses.replace(LOGITS, same_tokens=4, left_out=0.25))
    assert "25% of it left out: padding, or undefined in the baseline" in line
    assert "2 of 6 next tokens change" in line
