"""Models of other authors beside a reference: right ones are ok and finely judged, mistakes are named at their op."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import audio
import cached
import decoders
import diffusion
import formats
import graphs
import images
import mixers
import pytest
import recommendation
import relative
import rewrites
import sequences
import series
import speech
import text
import torch
import towers
import unseen
import vision
import vision_transformers
from pair import Pair

from glassengine.diagnose import check
from glassengine.results import Comparison

PAIRS = [
    *vision.PAIRS,
    *images.PAIRS,
    *vision_transformers.PAIRS,
    *diffusion.PAIRS,
    *audio.PAIRS,
    *sequences.PAIRS,
    *graphs.PAIRS,
    *recommendation.PAIRS,
    *series.PAIRS,
    *speech.PAIRS,
    *text.PAIRS,
    *unseen.PAIRS,
    *cached.PAIRS,
    *towers.PAIRS,
    *decoders.PAIRS,
    *relative.PAIRS,
    *mixers.PAIRS,
    *rewrites.PAIRS,
    *formats.PAIRS,
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning"),  # of packages
]
LARGEST = 12
"""Ops of a region that still counts as fine."""
LISTED = 0.6
"""Score of a hint that lists which ops either side has, and explains nothing. A higher one says what is wrong."""


@dataclass(frozen=True)
class Outcome:
    """What was said of one mistake: the first op named and the hints that the screen shows."""

    is_found: bool
    is_exact: bool
    is_useful: bool
    misleads: bool
    site: str | None
    hints: tuple[str, ...]


OUTCOMES: dict[str, Outcome] = {}
"""Of the mistakes that this run has tried."""


def checked(pair: Pair, mistake: str, tmp_path: Path) -> Comparison:
    missing = [name for name in pair.packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (make test-foreign)")
    torch.set_num_threads(1)
    baseline, candidate = pair.make(mistake)
    path = tmp_path / "inputs.pt"
    pair.keep_inputs(path)
    return check(baseline, candidate=candidate, inputs=str(path))


def outcome(pair: Pair, mistake: str, tmp_path: Path) -> Outcome:
    result = checked(pair, mistake, tmp_path)
    first = result.first_divergence
    if pair.mistakes[mistake].because:
        is_named = any(text in str(result.not_ok_because) for text in pair.mistakes[mistake].because)
        return Outcome(not result.ok, is_named, is_named, False, None, (str(result.not_ok_because),))
    if first is None:
        return Outcome(not result.ok, False, False, False, None, ())
    others = [origin for origin in result.origins if origin.level == first.level and origin.site != first.site]
    # What the screen shows: two hints of the first divergence, one of two others.
    hints = [*first.hints[:2], *(hint for origin in others[:2] for hint in origin.hints[:1])]
    wanted = pair.mistakes[mistake]
    is_useful = any(text in hint.text for hint in hints for text in wanted.says)
    is_useful = is_useful or any(hint.kind in wanted.kinds for hint in hints)
    return Outcome(
        not result.ok,
        any(fnmatch(first.site, pattern) for pattern in wanted.sites),
        is_useful,
        not is_useful and any(hint.score > LISTED for hint in hints),
        first.site,
        tuple(hint.text for hint in hints),
    )


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_right_port_is_ok_and_finely_judged(pair: Pair, tmp_path: Path) -> None:
    result = checked(pair, "", tmp_path)
    assert result.ok, result.not_ok_because
    if result.origins and pair.known:
        pytest.xfail(pair.known)
    assert not result.origins
    assert all(found.verdict in ("identical", "rounding") for found in result.pairs)
    fine = result.granularity[0]
    if fine.op_by_op + fine.in_regions < 0.95 and pair.known:
        pytest.xfail(pair.known)
    assert fine.op_by_op + fine.in_regions >= 0.95, fine


@pytest.mark.parametrize(
    ("pair", "mistake"),
    [pytest.param(pair, mistake, id=f"{pair.name}: {mistake}") for pair in PAIRS for mistake in pair.mistakes],
)
def test_a_mistake_is_found(pair: Pair, mistake: str, tmp_path: Path) -> None:
    found = OUTCOMES[f"{pair.name}: {mistake}"] = outcome(pair, mistake, tmp_path)
    assert found.is_found
    if found.misleads and pair.mistakes[mistake].known:
        pytest.xfail(pair.mistakes[mistake].known)
    assert not found.misleads, found


def test_most_are_named_at_their_op_and_most_hints_help() -> None:
    """The last of this file: it counts what the tests before it have seen, and prints a table (`-s`)."""
    lines = []
    for name, found in OUTCOMES.items():
        place = "exact" if found.is_exact else "elsewhere" if found.is_found else "MISSED"
        hint = "useful" if found.is_useful else "MISLEADS" if found.misleads else "no hint"
        lines.append(f"{name:50} {place:10} {hint:8} {found.site}: {'; '.join(found.hints)}")
    number = len(OUTCOMES)
    found, exact, useful, misleading = (
        sum(getattr(outcome, key) for outcome in OUTCOMES.values())
        for key in ("is_found", "is_exact", "is_useful", "misleads")
    )
    lines.append(
        f"{number} mistakes: {found} found, {exact} at their op, {useful} useful hints, {misleading} misleading"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    assert exact >= 0.95 * number
    assert useful >= 0.8 * number
