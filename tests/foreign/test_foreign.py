"""Models of other authors beside a reference: right ones are ok and finely judged, mistakes are named at their op."""

from __future__ import annotations

import importlib.util
from fnmatch import fnmatch
from pathlib import Path

import audio
import pytest
import sequences
import torch
import vision
from pair import Pair

from glassengine.diagnose import check
from glassengine.results import Comparison

PAIRS = [*vision.PAIRS, *audio.PAIRS, *sequences.PAIRS]
pytestmark = pytest.mark.slow
LARGEST = 12
"""Ops of a region that still counts as fine."""


def checked(pair: Pair, mistake: str, tmp_path: Path) -> Comparison:
    missing = [name for name in pair.packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (make test-foreign)")
    torch.set_num_threads(1)
    baseline, candidate = pair.make(mistake)
    path = tmp_path / "inputs.pt"
    torch.save(dict(pair.inputs), path)
    return check(baseline, candidate=candidate, inputs=str(path))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_right_port_is_ok_and_finely_judged(pair: Pair, tmp_path: Path) -> None:
    result = checked(pair, "", tmp_path)
    assert result.ok and not result.origins, result.not_ok_because
    assert all(found.verdict in ("identical", "rounding") for found in result.pairs)
    fine = result.fineness[0]
    assert fine.op_by_op + fine.in_regions >= 0.95, fine


@pytest.mark.parametrize(
    ("pair", "mistake"),
    [pytest.param(pair, mistake, id=f"{pair.name}: {mistake}") for pair in PAIRS for mistake in pair.mistakes],
)
def test_a_mistake_is_named_at_its_op(pair: Pair, mistake: str, tmp_path: Path) -> None:
    result = checked(pair, mistake, tmp_path)
    first = result.first_divergence
    assert not result.ok and first is not None
    assert any(fnmatch(first.site, pattern) for pattern in pair.mistakes[mistake]), first
