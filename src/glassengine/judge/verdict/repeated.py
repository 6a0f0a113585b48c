"""One mistake that every layer repeats is one mistake: origins at the same place of layers that are alike.

Two origins are at the same place when their sites differ in the numbers of their module paths only, or, in code that
loops without modules, when one line made both with the same op.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from glassengine.program.representation.program import Program
from glassengine.results import VERDICTS, Divergence
from glassengine.sites import Site

_NUMBER = re.compile(r"(?<![^.@])\d+(?![^.@:/])")


def grouped(origins: Sequence[Divergence], program: Program) -> list[Divergence]:
    """Return the origins with their groups: the first of the worst of each says where the others are.

    Args:
        origins: In any order.
        program: The baseline's, whose sites say how often there is such a place.
    """
    numbers = _counted(program.sites)
    members: dict[tuple[str | None, str], list[Divergence]] = {}
    for origin in origins:
        members.setdefault((origin.rung, place_of(origin.site, origin.source)), []).append(origin)
    found = []
    for origin in origins:
        place = place_of(origin.site, origin.source)
        alike = members[origin.rung, place]
        sites = list(dict.fromkeys(other.site for other in alike))
        if len(sites) < 2:
            found.append(origin)
            continue
        leader = max(alike, key=lambda other: VERDICTS.index(other.verdict))
        others = tuple(site for site in sites if site != origin.site) if origin is leader else ()
        total = max(numbers.get(place, 0), len(sites))
        found.append(replace(origin, group=place, also_at=others, num_alike=total))
    return found


def place_of(site: str, source: str | None) -> str:
    """Return what the sites of one place in repeated layers have in common: `layers.*.mlp/mul.0`."""
    path, _, op = site.rpartition("/")
    place = _NUMBER.sub("*", path or op)
    if not path:
        return place
    if place != path or source is None:
        return f"{place}/{op}"
    return f"{path}/{op.partition('.')[0]} in {source}"


def _counted(sites: Iterable[Site]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    seen = set()
    for site in sites:
        if site.name not in seen and ":in" not in site.name:
            seen.add(site.name)
            place = place_of(site.name, site.source)
            numbers[place] = numbers.get(place, 0) + 1
    return numbers
