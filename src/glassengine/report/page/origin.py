"""Where both sides of a comparison came from, fact by fact, and which of the facts differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from glassengine.reading.files import printable

_MOST_FACTS = 400
_LONGEST = 2000


@dataclass(frozen=True)
class Fact:
    """One fact of both sides.

    Attributes:
        name: "versions.torch".
        baseline: Its value there; "" where it is not known.
        candidate: Likewise.
        differs: Whether the two are known and not the same, or one is not known.
    """

    name: str
    baseline: str
    candidate: str
    differs: bool


def facts_of(environment: Mapping[str, Any]) -> list[Fact]:
    """Return what is known of both sides, what differs first.

    Args:
        environment: Of a comparison: "baseline" and "candidate", each with facts in any depth.
    """
    sides = [dict(_flat(environment.get(side))) for side in ("baseline", "candidate")]
    found = []
    for name in list(dict.fromkeys([*sides[0], *sides[1]]))[:_MOST_FACTS]:
        left, right = (side.get(name) for side in sides)
        differs = left != right
        if differs and isinstance(left, frozenset) and isinstance(right, frozenset):
            # Of a long list of flags only what one side has and the other has not.
            left, right = left - right, right - left
        found.append(Fact(_text(name), _text(left), _text(right), differs))
    return sorted(found, key=lambda fact: not fact.differs)


def is_of_one_process(environment: Mapping[str, Any]) -> bool:
    """Return whether both sides have the same facts, all of them: they ran in one process."""
    return environment.get("baseline") == environment.get("candidate")


def _flat(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value and depth < 8:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, (list, tuple)) and len(value) > 8 and all(isinstance(one, str) for one in value):
        yield name, frozenset(value)
    elif value is not None and name:
        yield name, value


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (frozenset, list, tuple)):
        value = " ".join(sorted(map(str, value)) if isinstance(value, frozenset) else map(str, value))
    text = printable(str(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
