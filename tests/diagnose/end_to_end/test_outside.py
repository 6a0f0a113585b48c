"""Mistakes outside of the operations: none of them is called ok."""

from __future__ import annotations

from pathlib import Path

import pytest

from glassengine.diagnose import check
from glassengine.errors import GlassError
from tests.diagnose.end_to_end.outside import wrong

QUICK = ("mode: bn", "inputs: clamps ids", "cache: stale", "results: dropped", "object: result overwritten")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in wrong()])
def test_no_mistake_outside_of_the_operations_is_ok(name: str, tmp_path: Path) -> None:
    found = wrong()[name](tmp_path)
    try:
        result = check(found.baseline, candidate=found.candidate, inputs=found.inputs, **found.options)
    except GlassError:
        return  # refused with its reason: not ok
    assert not result.ok, result.results
    assert result.not_ok_because
