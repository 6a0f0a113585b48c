"""The rule of `ok`: results first, then the inside, then how much was judged. `docs/concepts.md` has its cases.

    results differ     a result is beyond its floor: never ok, for any verdict inside
    differs inside     a tensor is wrong, from its own inputs: not ok, though these inputs may hide it from the results
    token changes      the release engine picks another token than the engine with debug outputs
    weights differ     a weight is another, and no tensor of these inputs depends on it
    over budget        a result has a smaller signal-to-noise ratio than --min-snr
    too little judged  nothing is wrong, and less than `--min-coverage` was judged finely enough, or one could not be,
                       or a result was not compared

Two alarms are softened to suspicious, which is ok unless `--fail-on suspicious`: a tensor that nothing reads, and a
tensor that was paired by its name alone where the same one was judged from its own inputs and found right, provided
that every result agrees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glassengine.judge.exclusions.unread import unread_nodes
from glassengine.judge.sides.protocol import Level, Place
from glassengine.judge.verdict.score import Score
from glassengine.judge.verdict.severity import Severity
from glassengine.program.representation.program import Program
from glassengine.results import FLAGGED, VERDICTS, Divergence, Pair, ResultComparison, Standing, Verdict

UNREAD = "nothing reads it: no result can depend on it"
BY_NAME_ONLY = "by its name alone; from its own inputs it is right, and the results agree"


@dataclass(frozen=True)
class Decision:
    """Why a comparison is ok or not, as a type and in words; None where it is ok."""

    standing: Standing
    reason: str | None = None


def decide(
    verdict: Verdict,
    results: Sequence[ResultComparison],
    first: Divergence | None,
    severity: Mapping[str, Severity],
    coverage: float,
    *,
    fail_on: str,
    min_coverage: float,
    min_snr: float | None = None,
    left: str | None = None,
    missing: str | None = None,
    differences: Sequence[str] = (),
) -> Decision:
    """Apply the rule.

    Args:
        verdict: The worst one inside.
        results: What was compared end to end, on all rungs.
        first: The first divergence inside.
        severity: By rung.
        coverage: What counts of it.
        fail_on: Lowest verdict that makes the command fail.
        min_coverage: The least coverage that is ok.
        min_snr: Of each result, in dB.
        differences: What differs between the sides as a user runs them, in words.
        left: Which results were not compared, in words; None where all were.
        missing: What is missing for `min_coverage`, in words.
    """

    def fails(found: str) -> bool:
        return VERDICTS.index(found) >= VERDICTS.index(fail_on)

    inside = f"a tensor is {verdict} at {first.site}" if first is not None else None
    if differences:
        return Decision("results differ", "; ".join(dict.fromkeys(differences)))
    different = [result for result in results if fails(result.verdict)]
    if different:
        also = f"; {inside}" if inside is not None and fails(verdict) else ""
        return Decision("results differ", f"{different[-1].in_words()}{also}")
    if fails(verdict):
        if inside is None:
            return Decision("weights differ", "weights differ")
        # A quantized candidate's results do differ, by what its precision costs.
        is_hidden = bool(results) and all(r.agrees and r.judged_by == "noise floor" for r in results)
        hidden = "differs inside, not in the results: " if is_hidden else ""
        return Decision("differs inside", hidden + inside)
    release = severity.get(Place.RELEASE)
    if release is not None and release.first_change is not None:
        return Decision(
            "token changes", f"the release engine picks another token than the engine: {release.first_change}"
        )
    over = over_budget(results, min_snr)
    if over is not None:
        return Decision("over budget", over)
    undecided = next((result for result in results if not result.is_decided), None)
    if left is not None or undecided is not None:
        text = left or undecided.in_words()  # type: ignore[union-attr]
        return Decision("too little judged", f"{text}; {missing}" if missing else text)
    if coverage < min_coverage:
        wanted = f"(--min-coverage {min_coverage:g})"
        text = f"only {coverage:.0%} of the baseline's float-valued sites were judged {wanted}"
        if results and all(result.agrees for result in results):
            text += "; the results agree"
        return Decision("too little judged", f"{text}; {missing}" if missing else text)
    return Decision("ok")


def over_budget(results: Sequence[ResultComparison], min_snr: float | None) -> str | None:
    """Return which result loses more of its signal than is allowed; None where none does."""
    known = [result for result in results if result.snr_db is not None]
    if min_snr is None or not known:
        return None
    least = min(known, key=lambda result: result.snr_db or 0.0)
    if least.snr_db is not None and least.snr_db >= min_snr:
        return None
    return f"{least.name} {'have' if least.is_plural else 'has'} {least.snr_db:.1f} dB (--min-snr {min_snr:g}dB)"


@dataclass(frozen=True)
class Softened:
    """Pairs and divergences by rung, after alarms that cannot matter were softened."""

    pairs: dict[str, list[Pair]]
    divergences: dict[str, list[Divergence]]


def softened(scores: Sequence[Score], program: Program) -> Softened:
    """Return what all sides found, with those alarms softened that the module's docstring names."""
    unread = unread_nodes(program)
    main = [score for score in scores if score.side.level is Level.OP and score.side.place is not Place.PASS]
    agree = [score for score in scores if _agrees(score)]
    right: set[str] = set()
    for score in main:
        flagged = {pair.site for pair in score.pairs if pair.verdict in FLAGGED}
        # One op that is wrong, and what was paired by name may be what shows it.
        if score in agree and score is not scores[0] and not any(pair.verdict == "wrong" for pair in score.pairs):
            right |= {n for n in score.judged_nodes if program.sites.by_node[n][0].name not in flagged}
    pairs, divergences = {}, {}
    for score in scores:
        excused = dict.fromkeys(unread, UNREAD)
        if score.side.level is Level.SEGMENT and score in agree and score is not scores[0]:
            named = {site.name for node in right for site in program.sites.by_node.get(node, ())}
            if all(pair.site in named for pair in score.pairs if pair.verdict == "wrong"):
                excused = dict.fromkeys(right, BY_NAME_ONLY) | excused
        sites = {site.name: why for node, why in excused.items() for site in program.sites.by_node.get(node, ())}
        pairs[score.side.rung] = [_softer(pair, sites) for pair in score.pairs]
        divergences[score.side.rung] = [
            dataclasses.replace(found, verdict="suspicious")
            if found.verdict == "wrong" and (found.node or "") in excused
            else found
            for found in score.divergences.values()
        ]
    return Softened(pairs, divergences)


def _agrees(score: Score) -> bool:
    """Whether all results of a side were compared and agree, and no tie had to excuse any of them."""
    found = score.results.found
    return bool(found) and all(result.agrees and not result.exempt for result in found)


def _softer(pair: Pair, sites: Mapping[str, str]) -> Pair:
    if pair.verdict != "wrong" or pair.site not in sites:
        return pair
    return dataclasses.replace(pair, verdict="suspicious", reason=sites[pair.site])
