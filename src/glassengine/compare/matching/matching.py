"""Which tensor of the baseline is judged against which of the candidate: by a map, by name, by alias.

From strict to loose, and never by position; the method is kept with the pair. Tensors pair within one step and rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from glassengine.compare.matching.maps import Rule, TensorMap, steps_of
from glassengine.compare.matching.rules import pair_names
from glassengine.errors import UsageError
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource
from glassengine.sites import other_spellings

_Place = tuple[int, int, str]


@dataclass(frozen=True)
class Match:
    """A tensor of the baseline and its counterpart; several of a rule that concatenates them.

    `method` is "map" (then `rule` says in which layout), "name" or "alias".
    """

    baseline: Entry
    candidates: tuple[Entry, ...]
    method: str
    rule: Rule | None = None

    @property
    def candidate_site(self) -> str:
        """The name, or names, of the counterpart."""
        return " + ".join(dict.fromkeys(entry.site for entry in self.candidates))


@dataclass(frozen=True)
class Matching:
    """The matches in the order of the baseline, and what has none, with the reason."""

    matches: tuple[Match, ...]
    baseline_only: tuple[tuple[Entry, str], ...]
    candidate_only: tuple[tuple[Entry, str], ...]


def match(left: TensorSource, right: TensorSource, rules: TensorMap | None = None) -> Matching:
    """Return how the tensors of `left` (the baseline) and `right` correspond.

    Raises:
        UsageError: A rule names nothing, or is ambiguous.
    """
    return Matcher(left, right, rules).match(left.entries, right.entries)


class Matcher:
    """Pairs the tensors of two sides, of all steps or of some: names are looked at once.

    Args:
        left: The baseline.
        right: The candidate.
        rules: Of the map.

    Raises:
        UsageError: A rule names nothing, or is ambiguous.
    """

    def __init__(self, left: TensorSource, right: TensorSource, rules: TensorMap | None = None) -> None:
        self._by_map, missing = _by_map(left, right, rules)
        # The counterpart of one tensor is not that of its namesake as well.
        self._mapped_away = {
            (rule.rank, name) for pairs in self._by_map.values() for rule, names in pairs for name in names
        }
        self._aliases = _by_alias(left, right)
        self._expected = missing | {site: " + ".join(pairs[0][1]) for site, pairs in self._by_map.items()}
        self._steps = [{entry.step for entry in side.entries} for side in (left, right)]

    def match(self, left: Iterable[Entry], right: Iterable[Entry]) -> Matching:
        """Return how tensors correspond, all of a step on each side."""
        ours = {_place(entry): entry for entry in left}
        theirs = {_place(entry): entry for entry in right}
        matches: list[Match] = []
        baseline_only: list[Entry] = []
        used: set[_Place] = set()
        for place, entry in ours.items():
            found = self._of(place, entry, ours, theirs)
            matches += found
            used.update(_place(other) for one in found for other in one.candidates)
            if not found:
                baseline_only.append(entry)
        alone = [(entry, _why(entry, "baseline", self._steps[0], None)) for p, entry in theirs.items() if p not in used]
        return Matching(
            tuple(matches),
            tuple(
                (entry, _why(entry, "candidate", self._steps[1], self._expected.get(entry.site)))
                for entry in baseline_only
            ),
            tuple(alone),
        )

    def _of(
        self, place: _Place, entry: Entry, ours: Mapping[_Place, Entry], theirs: Mapping[_Place, Entry]
    ) -> list[Match]:
        step, rank, site = place
        found: list[Match] = []
        rules_here = [(rule, names) for rule, names in self._by_map.get(site, ()) if rule.rank in (None, rank)]
        for rule, names in rules_here:
            entries = [theirs.get((one, rank, name)) for one in steps_of(rule, step) for name in names]
            whole = tuple(other for other in entries if other is not None)
            if whole and len(whole) == len(entries):
                found.append(Match(entry, whole, "map", rule))
        if found or rules_here:
            return found
        other = theirs.get(place) if self._mapped_away.isdisjoint([(None, site), (rank, site)]) else None
        if other is not None:
            return [Match(entry, (other,), "name")]
        if (alias := self._aliases.get(site)) is not None and (step, rank, alias) in theirs:
            return [Match(entry, (theirs[step, rank, alias],), "alias")]
        spelled = [theirs.get((step, rank, name)) for name in other_spellings(site)]
        # Not a namesake of another tensor, nor the first of another list.
        alike = [
            other for other in spelled if other is not None and other.shape == entry.shape and _place(other) not in ours
        ]
        return [Match(entry, (other,), "alias") for other in alike[:1]]


def _by_map(
    left: TensorSource, right: TensorSource, rules: TensorMap | None
) -> tuple[dict[str, list[tuple[Rule, tuple[str, ...]]]], dict[str, str]]:
    if rules is None:
        return {}, {}
    ranks = sorted({entry.rank for entry in left.entries})
    for rule in rules.rules:
        if rule.rank is not None and rule.rank not in ranks:
            got, expected = f"rank {rule.rank} in {rule}", f"rank {', '.join(map(str, ranks))}"
            raise UsageError("a rule of the map is of a rank that is not compared", got=got, expected=expected)
    pairs, missing = pair_names(
        rules.rules,
        _names(left),
        _names(right),
        baseline_aliases=_other_names(left),
        candidate_aliases=_other_names(right),
    )
    table: dict[str, list[tuple[Rule, tuple[str, ...]]]] = {}
    for pair in pairs:
        table.setdefault(pair.baseline, []).append((pair.rule, pair.candidates))
    return table, missing


def _by_alias(left: TensorSource, right: TensorSource) -> dict[str, str]:
    """Return name -> name for tensors of two names that share one by an alias that a side knows."""
    ours, theirs = set(_names(left)), set(_names(right))
    our_aliases, their_aliases = _aliases(left), _aliases(right)
    found: dict[str, str] = {}
    for alias in {**our_aliases, **their_aliases}:
        here = alias if alias in ours else our_aliases.get(alias)
        there = alias if alias in theirs else their_aliases.get(alias)
        if here in ours and there in theirs:
            found.setdefault(str(here), str(there))
    return found


def _other_names(side: TensorSource) -> dict[str, str]:
    nodes = {entry.node: entry.site for entry in side.entries if entry.node is not None}
    return {**nodes, **_aliases(side)}


def _aliases(side: TensorSource) -> dict[str, str]:
    known = side.metadata.get("aliases")
    if not isinstance(known, dict):
        return {}
    return {alias: site for alias, site in known.items() if isinstance(site, str)}


def _names(side: TensorSource) -> Iterable[str]:
    return dict.fromkeys(entry.site for entry in side.entries)


def _why(entry: Entry, other: str, steps: set[int], expected: str | None) -> str:
    if entry.step not in steps:
        return f"the {other} has no step {entry.step}"
    if expected is not None:
        return f"the {other} has no {expected!r}, as the map calls it"
    return f"the {other} has no tensor of this name, step and rank"


def _place(entry: Entry) -> _Place:
    return entry.step, entry.rank, entry.site


def by_step(left: Sequence[Entry], right: Sequence[Entry]) -> Iterator[tuple[dict[int, Entry], dict[int, Entry]]]:
    """Yield the entries of each step on both sides, by their places; of all steps at once where they are mixed."""
    if not all(one <= other for side in (left, right) for one, other in itertools.pairwise(e.step for e in side)):
        yield dict(enumerate(left)), dict(enumerate(right))
        return
    groups = [itertools.groupby(enumerate(side), key=lambda numbered: numbered[1].step) for side in (left, right)]
    heads = [next(group, None) for group in groups]
    while any(head is not None for head in heads):
        step = min(head[0] for head in heads if head is not None)
        found: list[dict[int, Entry]] = [{}, {}]
        for i, head in enumerate(heads):
            if head is not None and head[0] == step:
                found[i] = dict(head[1])
                heads[i] = next(groups[i], None)
        yield found[0], found[1]
