"""Applies the rules of a map to the names of two sides. Nothing is read here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from glassengine.compare.matching.globs import NameIndex, captures, substitute, wildcards
from glassengine.compare.matching.maps import Rule
from glassengine.errors import UnknownNameError, UsageError, nearest


@dataclass(frozen=True)
class NamePair:
    """A name of the baseline and the names of the candidate that a rule gives it."""

    rule: Rule
    baseline: str
    candidates: tuple[str, ...]


def pair_names(
    rules: Iterable[Rule],
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
            found = _by_alias(rule, ours, theirs, baseline_aliases or {}, candidate_aliases or {})
        else:
            found, lacking = _by_pattern(rule, ours, theirs)
            missing.update(lacking)
        pairs += found
    paired = {pair.baseline for pair in pairs}
    return pairs, {name: target for name, target in missing.items() if name not in paired}


def _by_pattern(rule: Rule, ours: NameIndex, theirs: NameIndex) -> tuple[list[NamePair], dict[str, str]]:
    names = _named(rule.baseline, ours, {})
    if not names and not rule.is_optional:
        raise UnknownNameError("tensor in the baseline of the map", rule.baseline, ours.names)
    found, lacking = [], {}
    for name in names:
        targets = _resolve(rule, name, theirs)
        if targets is not None:
            found.append(NamePair(rule, name, targets))
        else:
            lacking[name] = _first_target(rule, name)
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


def _by_alias(
    rule: Rule,
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


def _aliased(rule: Rule, having: NameIndex, other: NameIndex, aliases: Mapping[str, str]) -> list[tuple[str, str]]:
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


def _resolve(rule: Rule, name: str, theirs: NameIndex) -> tuple[str, ...] | None:
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


def _targets(rule: Rule, name: str) -> list[tuple[str, ...]]:
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


def _first_target(rule: Rule, name: str) -> str:
    return next((targets[0] for targets in _targets(rule, name)), rule.candidates[0])
