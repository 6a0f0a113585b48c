"""Leaves texts, paths and values out of a result, so that a report of it can be given to others."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glassengine.results import FLAGGED, CaseInputs, Figures, Hint, InputUsed, Pair
from glassengine.results.stored import OnPair, Stored
from glassengine.results.without_tensors import PromptFinding, RolloutToken
from glassengine.sites import parts_of_line

MOST_BYTES = 1_000_000
MOST_PAIRS = (4000, 1000, 100)
"""Tensors of a report: the first number with which it is below `MOST_BYTES`."""
_MOST_SKIPPED = 200
_LEFT_OUT: Mapping[type, Mapping[str, Any]] = {
    CaseInputs: {"texts": ()},
    InputUsed: {"minimum": None, "maximum": None, "num_distinct": None, "value": None},
    PromptFinding: {"detail": "", "example": None},
    RolloutToken: {"text": None},
    Hint: {"line": None},
    Pair: {"baseline": None, "candidate": None, "values": None},
    Figures: {"worst_index": None, "baseline_at_worst": None, "candidate_at_worst": None},
}
"""Type of a part of a result -> field -> what stands in its place."""
_SIDES = ("baseline", "candidate", "snapshot")
_KEPT_FACTS = ("versions", "platform", "machine")
# A directory of a machine; names of sites and of files in a package have none of these at their beginning.
_FOLDERS = re.compile(
    r"(?:[A-Za-z]:|~|(?<![\w.])/(?:home|root|Users|mnt|tmp|var|data|work|opt|srv|usr|workspace|media|scratch|private))"
    r"[/\\](?:[^\s/\\:'\",;()]+[/\\])*"
)


def redacted_text(text: str) -> str:
    """Return a sentence without the directories of this machine; the names of files stay."""
    return _FOLDERS.sub("", text.replace(f"{Path.home()}/", "~/"))


def redacted(result: Stored) -> Stored:
    """Return a result without texts, paths and values. Sites, shapes, verdicts, errors and mistakes stay."""
    comparison = result.comparison
    if comparison is not None:
        facts = {side: _facts(found) for side, found in comparison.environment.items()}
        short = dataclasses.replace(comparison, environment=facts, skipped=comparison.skipped[:_MOST_SKIPPED], reads={})
        comparison = _walk(short)
    return result._replace(comparison=comparison, replayed=_walk(result.replayed))


def first_pairs(take: OnPair, most: int) -> OnPair:
    """Return what hands redacted pairs over: those that are flagged, and as many of the others as there is room for."""
    left = {True: most, False: most}

    def redacting(pair: Pair, _: Any) -> None:
        is_flagged = pair.verdict in FLAGGED and not pair.inherited
        left[is_flagged] -= 1
        if left[is_flagged] >= 0:
            found = _walk(pair)
            take(found, found.to_dict())

    return redacting


def _facts(found: Any) -> Any:
    return {name: found[name] for name in _KEPT_FACTS if name in found} if isinstance(found, Mapping) else None


def _walk(value: Any, name: str = "") -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        without = _LEFT_OUT.get(type(value), {})
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: without.get(name, _walk(one, name)) for name, one in fields.items()})
    if isinstance(value, Mapping):
        return {key: _walk(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_walk(one, name) for one in value)
    if not isinstance(value, str):
        return value
    if (line := parts_of_line(value)) is not None:
        return f"{Path(line[0]).name}:{line[1]}: (left out)"
    return Path(value).name if name in _SIDES else redacted_text(value)
