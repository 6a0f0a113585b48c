"""What vLLM has computed, recorded by the plug-in in its interpreter: right ones raise no alarm, a mistake is named.

`tests/serving_engines/store.py` made the recordings, of two requests that share forwards, one of them in chunks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import glassengine as glass
from glassengine.results import Comparison
from glassengine.testing.checkpoints import save_small

RECORDED = Path(__file__).parents[4] / "serving_engines" / "recorded"


def judged(name: str, folder: Path) -> Comparison:
    return glass.check(save_small(name.partition("-")[0], folder / "checkpoint"), candidate=RECORDED / name)


@pytest.mark.parametrize(
    "name", ["llama-healthy", *(pytest.param(f"{name}-healthy", marks=pytest.mark.slow) for name in ("gpt2",))]
)
def test_a_right_server_raises_no_alarm(name: str, tmp_path: Path) -> None:
    found = judged(name, tmp_path)
    assert found.ok and found.verdict == "rounding" and not found.origins, found.not_ok_because
    assert found.coverage == 1.0 and not found.skipped
    assert [level.name for level in found.levels] == ["program", "record as deployed"]
    assert max(pair.bound_ratio or 0.0 for pair in found.pairs) <= 1.0
    assert {pair.case for pair in found.pairs} == {"request 0", "request 1"}


def test_rows_of_two_requests_that_are_exchanged_are_named(tmp_path: Path) -> None:
    found = judged("llama-exchanged_rows", tmp_path)
    first = found.first_divergence
    assert not found.ok and first is not None and first.step > 0, "the prefill is right"
    assert first.site.startswith("model.layers.1.self_attn/") and len(found.origins) == 1


@pytest.mark.slow
def test_a_mistake_is_the_only_one_named_in_bfloat16(tmp_path: Path) -> None:
    found = judged("llama-keys_for_values-bfloat16", tmp_path)
    first = found.first_divergence
    assert not found.ok and first is not None and first.step == 0 and first.site.endswith("1.self_attn.k_proj/linear.0")
    assert {one.site.partition("self_attn.")[2] for one in found.origins} == {"k_proj/linear.0", "v_proj/linear.0"}
