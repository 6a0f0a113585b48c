"""Judges several candidates against one baseline, each as `compare` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from glassengine.compare.compare import compare
from glassengine.compare.matching.maps import TensorMap, load_map
from glassengine.errors import UsageError
from glassengine.progress import Progress, silent
from glassengine.recording.read.source import TensorSource, open_source
from glassengine.results import worst
from glassengine.results.comparison import Comparisons


def compare_many(
    baseline: str | Path | TensorSource,
    candidates: Sequence[str | Path | TensorSource],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    map: str | Path | Mapping[str, Any] | TensorMap | None = None,
    show_only: Sequence[str] = (),
    floating_point_only: bool = False,
    transpose: Sequence[str] = (),
    device: str = "cpu",
    fail_on: Literal["rounding", "suspicious", "wrong"] | None = None,
    min_coverage: float = 0.9,
    min_snr: float | None = None,
    jobs: int = 1,
    cluster: str | None = None,
    first: bool = False,
    progress: Progress = silent,
) -> Comparisons:
    """Judge every one of `candidates` against `baseline`. The arguments are those of `compare`.

    Raises:
        UsageError: No candidate is given; otherwise as `compare`.
        IncomparableError: As `compare`.
        UnknownNameError: As `compare`.
        CorruptError: As `compare`.
    """
    if not candidates:
        raise UsageError("no candidate to compare", expected="one or more")
    is_here = jobs == 1 and cluster is None
    rules = map if map is None or not is_here else load_map(map)
    left = open_source(baseline) if isinstance(baseline, str | Path) else baseline
    found = [
        compare(
            left if is_here else baseline,
            candidate,
            rtol=rtol,
            atol=atol,
            map=rules,
            show_only=show_only,
            floating_point_only=floating_point_only,
            transpose=transpose,
            device=device,
            fail_on=fail_on,
            min_coverage=min_coverage,
            min_snr=min_snr,
            jobs=jobs,
            cluster=cluster,
            first=first,
            progress=progress,
        )
        for candidate in candidates
    ]
    bad = [one for one in found if not one.ok]
    return Comparisons(
        baseline=str(left.path),
        ok=not bad,
        verdict=worst(one.verdict for one in found),
        comparisons=tuple(found),
        too_little=bool(bad) and all(one.too_little for one in bad),
    )
