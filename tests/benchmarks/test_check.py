"""The gate for speed: noise of medians, what it allows, and the chart."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks import check
from benchmarks.plot import Bar, bars


def test_the_noise_of_a_median_falls_with_the_rounds() -> None:
    few, many = check.with_noise([1.0, 1.1, 0.9]), check.with_noise([1.0, 1.1, 0.9] * 9)
    assert few[0] == many[0] == 1.0 and few[1] == pytest.approx(3 * many[1])
    assert check.is_quiet({"x": (1.0, 0.01)}) and not check.is_quiet({"x": (1.0, 0.01), "y": (1.0, 0.1)})


@pytest.mark.parametrize(
    ("now", "processor", "status"), [(1.0, "this", 0), (1.36, "this", 0), (1.4, "this", 1), (1.0, "other", 2)]
)
def test_noise_excuses_a_part_of_a_ratio_of_this_processor(
    now: float, processor: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {processor: {"measure": [1.0, 9.0], "peer: other": [1.0, 0.0]}}
    (tmp_path / "check.json").write_text(json.dumps(kept))
    monkeypatch.setattr(check.environment, "cpu_name", lambda: "this")
    monkeypatch.setattr(check, "KEPT", tmp_path / "check.json")
    monkeypatch.setattr(check, "ratios", lambda _: {"measure": (now, 0.03), "peer: other": (9.0, 0.0)})
    for name in ("measured", "judged"):
        monkeypatch.setattr(check, name, dict)
    for name in ("compared", "recorded"):
        monkeypatch.setattr(check, name, lambda _: {})
    assert check.main([]) == status


def test_bars_have_their_limits_beside() -> None:
    rows = [Bar("measure <float32>", 2.0, 0.25), Bar("other tool", 9.8, is_peer=True)]
    drawn = ET.fromstring(bars("Ratios", rows))
    shown = ["".join(text.itertext()) for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert shown == ["Ratios", "measure <float32>", "2 x, limit 0.25", "other tool", "9.8 x"]
