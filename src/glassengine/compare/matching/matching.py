"""Pairs tensors of the baseline with tensors of the candidate: by a map, by name, by alias.

From strict to loose, and never by position; the method is kept with the pair. Tensors pair within one step and rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from glassengine.compare.matching.maps import MapRule, NameIndex, TensorMap, captures, steps_of, substitute, wildcards
from glassengine.errors import UnknownNameError, UsageError, nearest
from glassengine.recording.layout.layout import Entry
from glassengine.recording.source import TensorSource
from glassengine.sites import other_spellings

_Place = tuple[int, int, str]


@dataclass(frozen=True)
class MatchedPair:
    """A tensor of the baseline and its counterpart; several of a rule that concatenates them.

    `method` is "map" (then `rule` says in which layout), "name" or "alias".
    """

    baseline: Entry
    candidates: tuple[Entry, ...]
    method: str
    rule: MapRule | None = None

    @property
    def candidate_site(self) -> str:
        """The name, or names, of the counterpart."""
        return " + ".join(dict.fromkeys(entry.site for entry in self.candidates))


@dataclass(frozen=True)
class Matching:
    """The matches in the order of the baseline, and what has none, with the reason."""

    matches: tuple[MatchedPair, ...]
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
        matches: list[MatchedPair] = []
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
    ) -> list[MatchedPair]:
        step, rank, site = place
        found: list[MatchedPair] = []
        rules_here = [(rule, names) for rule, names in self._by_map.get(site, ()) if rule.rank in (None, rank)]
        for rule, names in rules_here:
            entries = [theirs.get((one, rank, name)) for one in steps_of(rule, step) for name in names]
            whole = tuple(other for other in entries if other is not None)
            if whole and len(whole) == len(entries):
                found.append(MatchedPair(entry, whole, "map", rule))
        if found or rules_here:
            return found
        other = theirs.get(place) if self._mapped_away.isdisjoint([(None, site), (rank, site)]) else None
        if other is not None:
            return [MatchedPair(entry, (other,), "name")]
        if (alias := self._aliases.get(site)) is not None and (step, rank, alias) in theirs:
            return [MatchedPair(entry, (theirs[step, rank, alias],), "alias")]
        spelled = [theirs.get((step, rank, name)) for name in other_spellings(site)]
        # Not a namesake of another tensor, nor the first of another list.
        alike = [
            other for other in spelled if other is not None and other.shape == entry.shape and _place(other) not in ours
        ]
        return [MatchedPair(entry, (other,), "alias") for other in alike[:1]]


def _by_map(
    left: TensorSource, right: TensorSource, rules: TensorMap | None
) -> tuple[dict[str, list[tuple[MapRule, tuple[str, ...]]]], dict[str, str]]:
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
    table: dict[str, list[tuple[MapRule, tuple[str, ...]]]] = {}
    for pair in pairs:
        table.setdefault(pair.baseline, []).append((pair.rule, pair.candidates))
    return table, missing


def _by_alias(left: TensorSource, right: TensorSource) -> dict[str, str]:
    """Return name -> name for tensors of two names that share one by an alias that a side knows."""
    ours, theirs = set(_names(left)), set(_names(right))
    our_aliases, their_aliases = _aliases(left), _aliases(right)
    pairs: dict[str, str] = {}
    for alias in {**our_aliases, **their_aliases}:
        here = alias if alias in ours else our_aliases.get(alias)
        there = alias if alias in theirs else their_aliases.get(alias)
        if here in ours and there in theirs:
            pairs.setdefault(str(here), str(there))
    return pairs


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


@dataclass(frozen=True)
class NamePair:
    """A name of the baseline and the names of the candidate that a rule gives it."""

    rule: MapRule
    baseline: str
    candidates: tuple[str, ...]


def pair_names(
    rules: Iterable[MapRule],
    baseline: Iterable[str],
    candidate: Iterable[str],
    *,
    baseline_aliases: Mapping[str, str] | None = None,
    candidate_aliases: Mapping[str, str] | None = None,
) -> tuple[list[NamePair], dict[str, str]]:
    """Return the pairs, and for names of the baseline whose counterpart is missing what the map says it is called.

    A name may be in several pairs (of a fused tensor, each part has its own); a rule never pairs by position, except
    the numbers that an alias file's aliases have by definition.

    Args:
        rules: The map.
        baseline: Names of the baseline in recorded order.
        candidate: Names of the candidate in recorded order.
        baseline_aliases: Other name -> name, which the patterns of an alias file may use as well.
        candidate_aliases: The same of the candidate.

    Raises:
        UnknownNameError: A rule names nothing in the baseline, or nothing in the candidate.
        UsageError: What a rule names is ambiguous.
    """
    ours, theirs = NameIndex(baseline), NameIndex(candidate)
    pairs: list[NamePair] = []
    missing: dict[str, str] = {}
    for rule in rules:
        if rule.is_alias:
            found = _pair_by_alias(rule, ours, theirs, baseline_aliases or {}, candidate_aliases or {})
        else:
            found, lacking = _by_pattern(rule, ours, theirs)
            missing.update(lacking)
        pairs += found
    paired = {pair.baseline for pair in pairs}
    return pairs, {name: target for name, target in missing.items() if name not in paired}


def _by_pattern(rule: MapRule, ours: NameIndex, theirs: NameIndex) -> tuple[list[NamePair], dict[str, str]]:
    names = _named(rule.baseline, ours, {})
    if not names and not rule.is_optional:
        raise UnknownNameError("tensor in the baseline of the map", rule.baseline, ours.names)
    found, lacking = [], {}
    for name in names:
        targets = _resolve(rule, name, theirs)
        if targets is not None:
            found.append(NamePair(rule, name, targets))
        else:
            lacking[name] = next((targets[0] for targets in _targets(rule, name)), rule.candidates[0])
    if not found and rule.is_optional:
        return [], {}
    if not found:
        target = next(iter(lacking.values()))
        close = nearest(target, theirs.names)
        raise UsageError(
            f"the rule {rule} names nothing in the candidate",
            got=f"{len(names)} tensors of the baseline, such as {names[0]!r}, which would be {target!r}",
            expected=[f"one of {len(theirs.names)} names", *close],
        )
    return found, lacking


def _pair_by_alias(
    rule: MapRule,
    ours: NameIndex,
    theirs: NameIndex,
    our_aliases: Mapping[str, str],
    their_aliases: Mapping[str, str],
) -> list[NamePair]:
    """Pair whichever side has the pattern's names with the aliases of the other."""
    (alias,) = rule.candidates
    found = _aliased(rule, ours, theirs, our_aliases)
    if found:
        return [NamePair(rule, name, (target,)) for name, target in found]
    found = _aliased(rule, theirs, ours, their_aliases)
    if found:
        return [NamePair(rule, target, (name,)) for name, target in found]
    # Both sides were built with this file: they pair by name.
    if any(name in theirs for name in ours.names if name in (alias, f"{alias}_0")):
        return []
    if _named(rule.baseline, ours, our_aliases) or _named(rule.baseline, theirs, their_aliases):
        raise UnknownNameError("alias in the map", alias, [*ours.names, *theirs.names])
    raise UnknownNameError("tensor in the map", rule.baseline, [*ours.names, *theirs.names])


def _aliased(rule: MapRule, having: NameIndex, other: NameIndex, aliases: Mapping[str, str]) -> list[tuple[str, str]]:
    (alias,) = rule.candidates
    names = _named(rule.baseline, having, aliases)
    if wildcards(alias):
        resolved = [(name, _resolve(rule, name, other)) for name in names]
        return [(name, targets[0]) for name, targets in resolved if targets is not None]
    if len(names) == 1:
        return [(names[0], target) for target in (alias, f"{alias}_0") if target in other][:1]
    numbered = [f"{alias}_{i}" for i in range(len(names))]
    there = [name for name in numbered if name in other]
    if not there:
        return []
    if len(there) < len(names) or f"{alias}_{len(names)}" in other:
        raise UsageError(
            f"the numbers of the alias {alias!r} are ambiguous",
            got=f"{rule.baseline!r} names {len(names)} tensors on one side, and the other has other aliases: "
            f"{', '.join(name for name in other.names if name.startswith(f'{alias}_'))[:200]}",
            hint="give each its own line in the map: SITE -> ALIAS_N",
        )
    return list(zip(names, numbered, strict=True))


def _named(pattern: str, index: NameIndex, aliases: Mapping[str, str]) -> list[str]:
    """Return the names that `pattern` names: exactly, by another name, or as a pattern."""
    if pattern in index:
        return [pattern]
    other = aliases.get(pattern)
    if other is not None and other in index:
        return [other]
    return [name for name in index.names if next(captures(pattern, name), None) is not None]


def _resolve(rule: MapRule, name: str, theirs: NameIndex) -> tuple[str, ...] | None:
    """Return the names of the candidate that `name` has by `rule`: whole names first, then unique suffixes."""
    options = _targets(rule, name)
    for targets in options:
        if all(target in theirs for target in targets):
            return targets
    several: Sequence[str] = ()
    for targets in options:
        found = [[target] if target in theirs else theirs.with_suffix(target) for target in targets]
        if all(len(names) == 1 for names in found):
            return tuple(names[0] for names in found)
        several = several or next((names for names in found if len(names) > 1), ())
    if several:
        raise UsageError(
            f"the rule {rule} names several tensors of the candidate for {name!r}",
            got=", ".join(several[:5]),
            hint="write more of the name",
        )
    return None


def _targets(rule: MapRule, name: str) -> list[tuple[str, ...]]:
    # A name that is meant whole, or by another name, stands for no wildcards.
    options = dict.fromkeys(captures(rule.baseline, name)) or {(): None}
    needed = max(map(wildcards, rule.candidates))
    return [
        tuple(substitute(template, _moved(captured, rule.layer_offset)) for template in rule.candidates)
        for captured in options
        if len(captured) >= needed
    ]


def _moved(captured: tuple[str, ...], offset: int) -> tuple[str, ...]:
    """Return what wildcards stand for, with the number of a layer `offset` further on."""
    at = next((place for place, text in enumerate(captured) if text.isdigit()), None)
    if at is None or not offset:
        return captured
    return (*captured[:at], str(int(captured[at]) + offset), *captured[at + 1 :])
