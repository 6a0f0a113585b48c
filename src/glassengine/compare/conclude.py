"""What all verdicts of a comparison say: which tensor is wrong first, what they rest on, and whether it is ok."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any

from glassengine.compare.execution_order import ExecutionOrder
from glassengine.compare.judge import BY_FLOOR, BY_GIVEN_TOLERANCE, BY_TOLERANCE, severity
from glassengine.compare.matching.matching import Match
from glassengine.compare.matching.phases import phase_of
from glassengine.compare.matching.source_wrapper import SourceWrapper
from glassengine.compare.verdicts import Judging
from glassengine.recording.layout.entries import Entries
from glassengine.recording.layout.noise_floor import NoiseFloor
from glassengine.results import Divergence, Packed, Skipped
from glassengine.sites import matches

# Statistics need several passes (the median), so of many pairs only the worst get them.
_NUM_SUMMARIZED = 3


def summarize_worst(pairs: Packed, judging: Judging, *, all_of_them: bool) -> None:
    """Give all of `pairs`, or else the worst few, the statistics of both sides and of the errors."""
    count = len(pairs) if all_of_them else _NUM_SUMMARIZED
    chosen = heapq.nlargest(count, range(len(pairs)), key=lambda i: severity(pairs[i]))
    for i in chosen:
        pairs[i] = judging.with_statistics(i, pairs[i])


def first_divergence(pairs: Packed, judged: Sequence[Match], judging: Judging) -> Divergence | None:
    """Return the first tensor of the worst verdict, in the order of the run.

    Args:
        pairs: All verdicts.
        judged: What was judged.
        judging: Looks for what explains it.
    """
    flagged, (left, right) = pairs.flagged(), judging.sides
    if not flagged:
        return None
    verdict = "wrong" if any(pairs[i].verdict == "wrong" for i in flagged) else "suspicious"
    step = min(pairs[i].step for i in flagged if pairs[i].verdict == verdict)
    entries = left.entries
    own = entries.of_step(step) if isinstance(entries, Entries) else [one for one in entries if one.step == step]
    order = ExecutionOrder(own)
    there = [i for i in flagged if pairs[i].verdict == verdict and pairs[i].step == step]
    found = min(there, key=lambda i: order.key(judged[i].baseline))
    pair, entry = pairs[found], judged[found].baseline
    # Of the same tensor in other ranks.
    alike = [i for i in range(len(pairs)) if i != found and (pairs[i].step, pairs[i].site) == (pair.step, pair.site)]
    those = sorted([found, *alike])
    rank, hints = judging.explained(those, found)
    sources, candidate_sources = (side.metadata.get("sources") for side in (left, right))
    source = sources.get(entry.site) if isinstance(sources, dict) else None
    other = candidate_sources.get(pair.candidate_site) if isinstance(candidate_sources, dict) else None
    return Divergence(
        rung=phase_of(entry.site) if left.metadata.get("gradients") else None,
        step=entry.step,
        site=entry.site,
        node=entry.node,
        candidate_site=pair.candidate_site,
        source=source if isinstance(source, str) else None,
        verdict=pair.verdict,
        noise_ratio=pair.noise_ratio,
        bound_ratio=None,
        introduced=None,
        inherited=None,
        hints=hints,
        candidate_source=other if isinstance(other, str) else None,
        rank=rank,
    )


def not_compared(pairs: Packed, lost: Sequence[Skipped], asked: Sequence[str]) -> str | None:
    """Return in words what was to be judged and was not; None where all was.

    Args:
        pairs: All verdicts.
        lost: What could not be judged.
        asked: Patterns of tensors that were asked for.
    """
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return f"not judged: {lost[0].site}, step {lost[0].step}{more}: {lost[0].reason}"
    missed = [
        pattern
        for pattern in asked
        if not any(matches(pattern, name) for pair in pairs for name in (pair.site, pair.candidate_site))
    ]
    return f"asked for and not judged: {', '.join(missed)}" if missed else None


def calibration(pairs: Packed, floor: NoiseFloor | None, left: SourceWrapper, why_not: str | None) -> str:
    """Return in words what the verdicts rest on."""
    by: Counter[str] = Counter()
    for (verdict, judged_by, _), count in pairs.tally.items():
        by[judged_by] += count if verdict != "identical" else 0
    if by[BY_GIVEN_TOLERANCE]:
        return "by the given tolerances"
    if floor is None or (by[BY_TOLERANCE] and not by[BY_FLOOR]):
        return "uncalibrated" + (f": {why_not}" if why_not else "")
    return f"calibrated by the floor of {left.path}" + (
        f"; {by[BY_TOLERANCE]} uncalibrated" if by[BY_TOLERANCE] else ""
    )


def same_weights(left: SourceWrapper, right: SourceWrapper) -> bool | None:
    """Return whether both sides are of one model; None where that is not known."""
    sides = [tuple(side.metadata.get(key) for key in ("class", "dtype", "model_fingerprint")) for side in (left, right)]
    # A fingerprint covers names and values in their own dtype: it does not apply to another class or dtype.
    if None in sides[0] or None in sides[1] or sides[0][:2] != sides[1][:2]:
        return None
    return sides[0][2] == sides[1][2]


def environment_of(side: SourceWrapper) -> dict[str, Any]:
    """Return what is known of where a side was made."""
    known = side.metadata.get("environment")
    facts = {**(known if isinstance(known, dict) else {}), "complete": side.complete}
    return {**facts, **side.changes}
