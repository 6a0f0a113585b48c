"""Compares several candidates with one baseline, each as `compare` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glassengine.compare.compare import compare
from glassengine.errors import UsageError
from glassengine.recording.read.source import TensorSource
from glassengine.results import worst
from glassengine.results.comparison import Comparisons


def compare_many(
    baseline: str | Path | TensorSource, candidates: Sequence[str | Path | TensorSource], **options: Any
) -> Comparisons:
    """Judge every one of `candidates` against `baseline`; the options are those of `compare`.

    Raises:
        UsageError: No candidate is given; otherwise as `compare`.
        IncomparableError: As `compare`.
        UnknownNameError: As `compare`.
        CorruptError: As `compare`.
    """
    if not candidates:
        raise UsageError("no candidate to compare", expected="one or more")
    found = [compare(baseline, candidate, **options) for candidate in candidates]
    bad = [one for one in found if not one.ok]
    return Comparisons(
        baseline=found[0].baseline,
        ok=not bad,
        verdict=worst(one.verdict for one in found),
        comparisons=tuple(found),
        too_little=bool(bad) and all(one.too_little for one in bad),
    )
