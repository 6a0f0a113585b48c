"""One mistake that every layer repeats is one mistake: origins at the same place of layers that are alike.

Two origins are at the same place when their sites differ in the numbers of their module paths only, or, in code that
loops without modules, when one line made both with the same op.

One mistake that two rungs of one candidate see is one as well: an op that is paired with what is no counterpart has no
explanation, and the first wrong result of the module around it may have a proof.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch.fx import Node

from glassengine.judge.graphs.between import ancestors
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


def with_proofs(origins: Sequence[Divergence], program: Program) -> list[Divergence]:
    """Return the origins; the first one of a rung that nothing proves has the proof of what another one finds first.

    Args:
        origins: By rung, each in the order of steps and of the graph.
        program: The baseline's. What is proven is made of the op that has no proof: else it is another mistake.
    """
    firsts: dict[str | None, Divergence] = {}
    for origin in origins:
        firsts.setdefault(origin.rung, origin)
    proven = [first for first in firsts.values() if _is_proven(first)]
    nodes = {node.name: node for node in program.graph.nodes} if 0 < len(proven) < len(firsts) else {}
    found = []
    for origin in origins:
        # Where the graphs inside of a branch or a loop part is known without a proof.
        is_known = _is_proven(origin) or any(hint.evidence == "inside" for hint in origin.hints)
        is_asked = firsts[origin.rung] is origin and not is_known and origin.node in nodes
        known = (other for other in proven if is_asked and _is_of_one_run(origin, other))
        other = next((other for other in known if _is_made_of(nodes.get(other.node or ""), origin.node)), None)
        found.append(origin if other is None else replace(origin, hints=(other.hints[0], *origin.hints)))
    return found


def _is_proven(origin: Divergence) -> bool:
    return bool(origin.hints) and origin.hints[0].proven


def _is_of_one_run(one: Divergence, other: Divergence) -> bool:
    """Whether both are of one candidate, as "candidate" and "candidate, untouched" are, in one step."""
    ours, theirs = ((found.rung or "").partition(",")[0] for found in (one, other))
    return ours == theirs and one.step == other.step


def _is_made_of(node: Node | None, source: str | None) -> bool:
    return node is not None and source in {one.name for one in (node, *ancestors(node))}


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
