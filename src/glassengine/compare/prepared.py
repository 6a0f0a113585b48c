"""What a comparison begins with: both sides opened and asked whether they can be compared, and the plan."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from glassengine.compare.bench import Bench
from glassengine.compare.matching.maps import TensorMap, load_map
from glassengine.compare.plan import Plan, planned
from glassengine.compare.requirements import (
    check_arguments,
    nothing_to_compare,
    printed_statistics,
    require_names,
    require_same_tokens,
)
from glassengine.compare.units import Request
from glassengine.errors import UsageError
from glassengine.recording.read.source import TensorSource, open_source
from glassengine.sites import patterns_of
from glassengine.stores.places import place

Side = str | Path | TensorSource
Map = str | Path | Mapping[str, Any] | TensorMap | None


def prepared(
    baseline: Side,
    candidate: Side,
    *,
    rtol: float | None,
    atol: float | None,
    map: Map,
    show_only: Sequence[str],
    floating_point_only: bool,
    transpose: Sequence[str],
    device: str,
    fail_on: str | None,
    min_coverage: float,
) -> tuple[Plan, Request]:
    """Return the plan of a comparison, and the options of it; the arguments are those of `compare`.

    Raises:
        IncomparableError: The sides hold different token ids, or nothing can be compared.
        UnknownNameError: A pattern names nothing.
        UsageError: A side does not exist, or an argument or the map is invalid.
        CorruptError: A side is damaged.
    """
    check_arguments(rtol, atol, fail_on or "wrong", min_coverage, device)
    show_only, transpose = patterns_of(show_only, "show_only"), patterns_of(transpose, "transpose")
    by_drift = fail_on is None and rtol is None and atol is None
    options = Request("", "", rtol, atol, None, tuple(transpose), device, by_drift)
    rules = None if map is None else load_map(map)
    left, right = (side if not isinstance(side, str | Path) else open_source(side) for side in (baseline, candidate))
    left, right = printed_statistics(left, right) or (left, right)
    require_same_tokens(left, right)
    bench = Bench.of(options, left, right, rules)
    left, right = bench.judge.left, bench.judge.right
    require_names(show_only, left, right)
    require_names(transpose, left)
    plan = planned(bench, rules, show_only=show_only, floating_point_only=floating_point_only)
    if not len(plan.pairs):
        raise nothing_to_compare(left, right, plan.impossible)
    return plan, options


def sendable(options: Request, baseline: Side, candidate: Side, map: Map) -> Request:
    """Return the request with what other processes open.

    Raises:
        UsageError: A side is open, or the map is not a document.
    """
    sides = [everywhere(side) if isinstance(side, str | Path) else None for side in (baseline, candidate)]
    if sides[0] is None or sides[1] is None or isinstance(map, TensorMap):
        raise UsageError(
            "other processes cannot be given what is open in this one",
            got="a source" if None in sides else "a TensorMap",
            expected="paths",
            hint="jobs=1",
        )
    told = dict(map) if isinstance(map, Mapping) else None if map is None else everywhere(map)
    changed: Request = msgspec.structs.replace(
        options, baseline=sides[0], candidate=sides[1], map=told, token=uuid.uuid4().hex
    )
    return changed


def everywhere(path: str | Path) -> str:
    """Return a path as another process, which may be in another directory, finds it."""
    return str(place(path).absolute())
