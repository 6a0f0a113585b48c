"""Finds origins among flagged ops: those that make an error, not those that pass one on.

An error is passed on when an unbroken chain of flagged tensors leads to it. A tensor that is judged and clean breaks
the chain; one that could not be observed passes it on; the cache carries it into later steps. An op that a replay found
clean is not an origin: its error comes from an origin above it, however long the chain, or from the rounding of
many ops together. The verdict of an origin is the worst of its chain: where a small mistake first shows, it may still
be only suspicious.

A tie (see `replay`) is not an error, but everything below it may legally differ: there only replay counts. So it
is where rows of padding, which two kernels may fill differently, flow into a tensor of which the rows are unknown
that count (tokens sorted by expert, a mean over all positions).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from torch.fx import Node

from glassengine.judge.site_pairs import ancestors, maker_of, place_of
from glassengine.numerics.verdict import TIE
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.program import Program
from glassengine.results import VERDICTS, Divergence, Verdict, worst


class Why(Enum):
    """Why the verdict of a tensor is not that of its figures; the value says it to people."""

    TIE = TIE
    BELOW_TIE = "below a tie or padding: other values are legal here"
    MANY_ROUNDINGS = "no op makes an error, but the rounding of many is larger than expected"


@dataclass(frozen=True)
class Visited:
    """What a tensor turned out to be: final verdict, whether the error was passed on, why the verdict changed."""

    verdict: Verdict | None
    inherited: bool = False
    why: Why | None = None

    @property
    def reason(self) -> str | None:
        """Why the verdict changed, in words."""
        return None if self.why is None else self.why.value


@dataclass(frozen=True)
class _Trail:
    """What leads to a tensor: origins by an unbroken chain, origins by any path, ties, and padding that differs."""

    blame: frozenset[str] = frozenset()
    above: frozenset[str] = frozenset()
    is_tied: bool = False
    padding_differs: bool = False

    def __or__(self, other: _Trail) -> _Trail:
        return _Trail(
            self.blame | other.blame,
            self.above | other.above,
            self.is_tied or other.is_tied,
            self.padding_differs or other.padding_differs,
        )


@dataclass
class OriginTracker:
    """Follows flagged tensors of one side through the steps of one case.

    Attributes:
        program: The baseline's.
        origins: Ops that made an error -> the worst verdict of what it led to.
    """

    program: Program
    origins: dict[str, Verdict] = field(default_factory=dict)
    _trails: dict[str, _Trail] = field(default_factory=dict)
    _cache_trails: dict[str, _Trail] = field(default_factory=dict)

    def begin_step(self) -> None:
        """Carry over what the caches hold."""
        inputs = {port.name: port.node for port in self.program.inputs}
        self._cache_trails = {
            inputs[past]: self._trails.get(self.program.output_nodes[present], _Trail())
            for past, present in self.program.caches.items()
        }
        self._trails = {}

    def visit(
        self,
        node: Node,
        verdict: Verdict | None,
        *,
        introduced: bool | None = None,
        tied: bool = False,
        is_choice: bool = False,
        is_broken: bool = False,
        masked: bool = True,
        padding_differs: bool = False,
    ) -> Visited:
        """Record a tensor node; called for every one, in graph order.

        Args:
            node: The node.
            verdict: None when it was not observed.
            introduced: Whether a replay found that the op itself made the error; None when only the graph can tell.
            tied: Whether the op chose otherwise among values that differ by less than rounding.
            is_choice: Whether the values are integers or bools: another one comes of a tie, where no op made an error.
            is_broken: Whether there are NaN or infinities: they come from the origin above, if one exists.
            masked: Whether padding was left out of the verdict, or there is none.
            padding_differs: Whether what was left out is not the reference's.
        """
        trail = _Trail(is_tied=tied)
        for source in node.all_input_nodes:
            trail |= self._trail_of(source)
        if trail.padding_differs and not masked:
            trail = replace(trail, is_tied=True)
        if is_broken and not trail.blame:
            trail = replace(trail, blame=trail.above)
        visited, blame = self._judged(node, verdict, introduced, trail)
        if is_choice and introduced is False and not visited.inherited and visited.verdict != verdict:
            visited, trail = Visited("rounding", why=Why.TIE), replace(trail, is_tied=True)
        self._trails[node.name] = _Trail(blame, trail.above | blame, trail.is_tied, padding_differs)
        return visited

    def _judged(
        self, node: Node, verdict: Verdict | None, introduced: bool | None, trail: _Trail
    ) -> tuple[Visited, frozenset[str]]:
        if verdict is None:
            return Visited(None), trail.blame
        if verdict not in ("suspicious", "wrong"):
            return Visited(verdict), frozenset()
        if not introduced and trail.is_tied:
            return Visited("rounding", why=Why.BELOW_TIE), frozenset()
        if introduced or (introduced is None and not trail.blame):
            self.origins[node.name] = worst([self.origins.get(node.name, verdict), verdict])
            return Visited(verdict), frozenset({node.name})
        carried = trail.blame or trail.above
        if not carried:
            softer: Verdict = "suspicious" if verdict == "wrong" else "rounding"
            return Visited(softer, why=Why.MANY_ROUNDINGS), frozenset()
        for name in carried:
            self.origins[name] = worst([self.origins[name], verdict])
        return Visited(verdict, inherited=True), carried

    def _trail_of(self, source: Node) -> _Trail:
        """Trail of an input; non-tensor nodes (the list that a split returns) pass on that of their own."""
        if source.name not in self._trails:
            found = self._cache_trails.get(source.name, _Trail())
            for earlier in source.all_input_nodes:
                found |= self._trail_of(earlier)
            self._trails[source.name] = found
        return self._trails[source.name]


def grouped(origins: Sequence[Divergence], program: Program) -> list[Divergence]:
    """Return the origins with their groups: the first of the worst of each says where the others are.

    Args:
        origins: In any order.
        program: The baseline's, whose sites say how often there is such a place.
    """
    makers = {node.name: op_name(maker_of(node) or node) for node in program.graph.nodes}
    places = [(place_of(one.name, one.source), makers.get(one.node)) for one in program.sites if ":in" not in one.name]
    numbers = Counter(places)  # how often there is a place in which an op of one name makes the value
    members: dict[tuple[str | None, str], list[Divergence]] = {}
    for origin in origins:
        members.setdefault((origin.level, place_of(origin.site, origin.source)), []).append(origin)
    found = []
    for origin in origins:
        place = place_of(origin.site, origin.source)
        alike = members[origin.level, place]
        sites = list(dict.fromkeys(other.site for other in alike))
        if len(sites) < 2:
            found.append(origin)
            continue
        leader = max(alike, key=lambda other: VERDICTS.index(other.verdict))
        others = tuple(site for site in sites if site != origin.site) if origin is leader else ()
        total = max(numbers[place, makers.get(origin.node or "")], len(sites))
        found.append(replace(origin, group=place, also_at=others, num_alike=total))
    return found


def with_proofs(origins: Sequence[Divergence], program: Program) -> list[Divergence]:
    """Return the origins; the first one of a level that nothing proves has the proof of what another one finds first.

    Args:
        origins: By level, each in the order of steps and of the graph.
        program: The baseline's. What is proven is made of the op that has no proof: else it is another mistake.
    """
    firsts: dict[str | None, Divergence] = {}
    for origin in origins:
        firsts.setdefault(origin.level, origin)
    proven = [first for first in firsts.values() if _is_proven(first)]
    found = []
    for origin in origins:
        # Where the graphs inside of a branch or a loop part is known without a proof.
        is_known = _is_proven(origin) or any(hint.evidence == "inside" for hint in origin.hints)
        is_asked = firsts[origin.level] is origin and not is_known and origin.node in program.nodes
        other = next((other for other in proven if is_asked and _shows(other, origin, program)), None)
        found.append(origin if other is None else replace(origin, hints=(other.hints[0], *origin.hints)))
    return found


def _is_proven(origin: Divergence) -> bool:
    return bool(origin.hints) and origin.hints[0].proven


def _shows(proven: Divergence, other: Divergence, program: Program) -> bool:
    """Whether one is made of the other's op in one run, as those of "candidate" and "candidate, untouched" are."""
    node = program.nodes.get(proven.node or "")
    ours, theirs = ((found.level or "").partition(",")[0] for found in (proven, other))
    is_of_one_run = ours == theirs and proven.step == other.step
    return is_of_one_run and node is not None and other.node in {one.name for one in (node, *ancestors(node))}
