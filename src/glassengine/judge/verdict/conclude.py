"""From scores to `results.Findings`: softens, groups the origins, counts, and concludes."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.fx import Node

from glassengine.errors import IncomparableError
from glassengine.judge.cases import Case
from glassengine.judge.end_to_end import Seeded, Severity, are_random, results_left, results_of
from glassengine.judge.exclusions.perturbation import of_inputs, unread_nodes
from glassengine.judge.replay.replay import covered
from glassengine.judge.sides.protocol import ObservedAt, Place, float_nodes
from glassengine.judge.site_pairs import paired_results, place_of
from glassengine.judge.verdict.corrections import with_lines
from glassengine.judge.verdict.coverage import coverage, granularity, missing, not_judged, region_nodes
from glassengine.judge.verdict.origins import grouped, with_proofs
from glassengine.judge.verdict.score import Score
from glassengine.judge.verdict.source_lines import as_written
from glassengine.judge.verdict.structural_diff import left_out, written_differently
from glassengine.numerics.drift import drift_rows
from glassengine.ops.traits import traits_of
from glassengine.program.representation.program import Program
from glassengine.results import (
    FLAGGED,
    VERDICTS,
    CaseInputs,
    Divergence,
    Findings,
    Hint,
    LevelResult,
    Pair,
    Skipped,
    Verdict,
    WeightsComparison,
    WrittenDifferently,
    counts_of,
    worst,
)

_LABEL = re.compile(r"\S+\.\d+")
"""What a hint calls one tensor, in one pass of a loop."""
_PLACES = ", in "
"""Where a hint goes on with the number of places."""
_MOST_ALIKE = 4
"""Layers that are asked whether they are written like the wrong one."""
_EXPLAINS = 0.8
"""Score of a hint that was tried, and makes what the candidate made."""
_COMPARED = {
    Place.PROGRAM: ("the model as it is", "its exported program"),
    Place.RANKS: ("program", "the programs of all ranks side by side"),
    Place.SOURCE: ("program", "the file as it is, node by node"),
    Place.OP_BY_OP: ("program", "every op compiled alone"),
    Place.ENGINE: ("program", "engine with debug outputs"),
    Place.BISECTION: ("program", "release engine with a few outputs"),
    Place.RELEASE: ("program", "release engine"),
    Place.CANDIDATE: ("program", "the candidate's program"),
    Place.RECORD: ("program", "what was recorded"),
    Place.RECORDED: ("program", "what was recorded"),
    Place.UNTOUCHED: ("program", "the candidate as it runs"),
}
"""What is compared on a level, in words."""


def findings_of(
    program: Program,
    scores: Sequence[Score],
    skipped: Sequence[Skipped],
    severity: Mapping[str, Severity],
    weights: WeightsComparison | None = None,
    *,
    baseline: str,
    candidate: str,
    min_coverage: float,
    environment: Mapping[str, Any],
    cases: Sequence[Case] = (),
    accumulated: str | None = None,
    texts: Mapping[str, tuple[str, ...]] | None = None,
    differences: Sequence[str] = (),
    notes: Sequence[str] = (),
    seeded: Seeded | None = None,
) -> Findings:
    """Return what the scores of all sides come to; `results.findings` has the rule of `ok`.

    Raises:
        IncomparableError: Nothing was compared.
    """
    if not are_random(score.results for score in scores):
        seeded = None  # what is drawn has no part in a result
    order = {node.name: index for index, node in enumerate(program.graph.nodes)}
    levels: list[LevelResult] = []
    origins: list[Divergence] = []
    pairs_of, divergences_of = softened(scores, program)
    verdicts = {level: worst(pair.verdict for pair in found) for level, found in pairs_of.items()}
    for score in scores:
        found = sorted(divergences_of[score.side.level], key=lambda d: (d.step, order[d.node or ""]))
        found = [_with_ops_left_out(score, program, _with_observer_effect(one, verdicts)) for one in found]
        found = joined([with_lines(as_written(score, program, divergence)) for divergence in found])
        origins += found
        levels.append(_level(score, program, found, severity.get(score.side.level), verdicts[score.side.level]))
    origins = grouped(with_proofs(origins, program), program)
    pairs = tuple(pair for score in scores for pair in [*pairs_of[score.side.level], *_within_regions(score, program)])
    if not pairs:
        raise IncomparableError("nothing was compared", expected="sites that both sides have")
    inside = worst(pair.verdict for pair in pairs)
    main = main_of(scores)
    if weights is not None and set(weights.different) - _folded(main, program):
        # Perhaps no tensor of these inputs depends on it (the embedding of another token), but it exists.
        inside = worst([inside, "suspicious"])
    if accumulated is not None:
        inside = worst([inside, "suspicious"])
    # The baseline's agreement with its own program says nothing of a candidate without results.
    is_compared = any(score.results.compared for score in scores[1:] or scores)
    results = tuple(r for score in scores for r in score.results.compared if is_compared or not r.agrees)
    agree = bool(results) and all(result.agrees for result in results)
    judged = coverage(main, program, results_agree=agree)
    if main.side.observed_at is ObservedAt.RESULT:
        # The ops were not observed: results alone are a small share.
        ops = float_nodes(program, ("op",))
        judged = len(ops & main.judged_nodes) / len(ops) if ops else 1.0
    first = _first(origins, order, [score.side.level for score in scores])
    release = severity.get(Place.RELEASE)
    drifting = [score for score in scores if score.drift is not None]
    ends = next((score.results.drift_rows() for score in reversed(drifting) if score.results.compared), ())
    left_out = [item for score in scores for item in score.left_out.values()]
    all_skipped = [*skipped, *left_out]
    all_skipped += not_judged(program, scores, main, all_skipped, seeded)
    drawn = () if seeded is None else seeded.other_draws
    return Findings(
        baseline=baseline,
        candidate=candidate,
        environment=environment,
        inside=inside,
        inside_reason=accumulated if first is None else None,
        differences=[*differences, *drawn, *memorized(program, scores)],
        token_change=None if release is None else release.first_change,
        left=results_left([score.results for score in scores[1:]], seeded),
        missing=missing(main, program) if judged < min_coverage else None,
        first_divergence=first,
        origins=origins,
        counts=counts_of(
            pairs,
            unmatched_baseline=sum(s.side == "baseline" for s in all_skipped),
            unmatched_candidate=sum(s.side == "candidate" and s.level == Place.CANDIDATE for s in all_skipped),
            not_recorded=sum(s.level == Place.ENGINE for s in all_skipped),
        ),
        pairs=pairs,
        skipped=all_skipped,
        coverage=judged,
        levels=levels,
        severity={level: value.to_dict() for level, value in severity.items()},
        results=results,
        drift=(*drift_rows(program, [score.drift for score in drifting if score.drift is not None]), *ends),
        # The one that the verdict rests on comes first.
        granularity=[granularity(score, program) for score in [main, *(s for s in scores if s is not main)]],
        inputs=[CaseInputs(case.name, case.num_steps, case.inputs, (texts or {}).get(case.name, ())) for case in cases],
        weights=weights,
        written_differently=list(_written_differently(program, scores)),
        exemptions=main.ledger.exemptions(),
        num_elements=main.ledger.num_elements,
        notes=[note for note in (accumulated, *notes, *vacuous(program, scores)) if note is not None],
        generates=program.generates,
        reads=reads_of(program),
    )


def reads_of(program: Program) -> dict[str, tuple[str, ...]]:
    """Return, of each site, the sites whose tensors its op reads, through nodes without one."""
    sites = {node: reads[0].name for node, reads in program.sites.by_node.items() if reads}
    above: dict[Node, tuple[str, ...]] = {}
    reads: dict[str, tuple[str, ...]] = {}
    for node in program.graph.nodes:
        read = [(sites[one.name],) if one.name in sites else above[one] for one in node.all_input_nodes]
        above[node] = tuple(dict.fromkeys(name for names in read for name in names))
        if node.name in sites and above[node]:
            reads[sites[node.name]] = above[node]
    return reads


def _folded(score: Score, program: Program) -> set[str]:
    """Weights of layers that the side has only together with what is below them (a batch norm), judged as one."""
    inside = covered(program, score.judged_nodes)
    names = program.weight_names()
    return {
        names[node.name]
        for node in program.graph.nodes
        # Compilers fold what follows into the weights of such ops.
        if node.name in names and node.users
        if all(u.name in inside and traits_of(u).multiplies and traits_of(u).addend == 2 for u in node.users)
    }


def joined(found: Sequence[Divergence]) -> list[Divergence]:
    """Return the divergences of a side; the first says what is wrong in its line: what most passes of it show.

    What is proven of one op is not the mistake where other ops of its line are wrong as well.
    """
    if not found or not found[0].source or not any(hint.proven for hint in found[0].hints[:1]):
        return list(found)
    first = found[0]
    if first.hints[0].evidence == "order":
        return list(found)  # that an op is done later explains the other op of the line
    own = (first.step, first.source, first.site.rpartition("/")[0])
    alike: dict[str, list[Hint]] = {}
    for one in found:
        module, _, op = one.site.rpartition("/")
        if one.hints and (one.step, one.source, module) == own:
            alike.setdefault(op.partition(".")[0], []).append(one.hints[0])
    told: dict[str, Hint] = {}
    for hints in alike.values():
        kinds = Counter(_LABEL.sub("", hint.text) for hint in hints)
        most = next(hint for hint in hints if _LABEL.sub("", hint.text) == kinds.most_common(1)[0][0])
        told.setdefault(most.text.partition(_PLACES)[0], most)
    said = [*told.values()]
    if said == [first.hints[0]]:
        return list(found)
    if len(said) > 1:
        text = "; and ".join(hint.in_words() for hint in said)
        said[0] = dataclasses.replace(said[0], text=text, proven=True, evidence="tried", change=None, line=None)
    return [dataclasses.replace(first, hints=(said[0], *first.hints[1:])), *found[1:]]


def main_of(scores: Sequence[Score]) -> Score:
    """Return the score that the verdict rests on: that of the first candidate that is judged op by op, else the last.

    The baseline's own file is not a candidate, and the result of a pass is built into what comes after it.
    """
    own = (Place.SOURCE, Place.PASS)
    return next((s for s in scores if s.side.observed_at is ObservedAt.OP and s.side.place not in own), scores[-1])


def _level(
    score: Score, program: Program, divergences: Sequence[Divergence], severity: Severity | None, verdict: Verdict
) -> LevelResult:
    side = score.side
    ours, theirs = _COMPARED.get(side.place, ("program", f"program after {side.level}"))
    note = None
    if side.place is Place.RELEASE and severity is not None:
        note = f"bitwise equal to the engine in {severity.num_bitwise} of {severity.num_tokens} rows of logits"
        if severity.first_change:
            note += f"; changed token: {severity.first_change}"
    return LevelResult(
        name=side.level,
        baseline=ours,
        candidate=theirs,
        verdict=verdict,
        guarantee=side.guarantee.text,
        num_judged=len(score.pairs),
        coverage=coverage(score, program, results_agree=all(result.agrees for result in score.results.compared)),
        first_divergence=divergences[0] if divergences else None,
        note=note,
    )


def _with_observer_effect(divergence: Divergence, verdicts: Mapping[str, str]) -> Divergence:
    """Report an error that exists only with, or only without, debug outputs."""
    with_outputs = divergence.level == Place.ENGINE
    other = Place.RELEASE if with_outputs else Place.ENGINE if divergence.level == Place.RELEASE else ""
    if divergence.verdict != "wrong" or verdicts.get(other) not in ("identical", "rounding"):
        return divergence
    which = "with" if with_outputs else "without"
    text = f"only the engine {which} debug outputs is wrong: adding outputs changes the answer"
    hint = Hint("other", text, 1.0, evidence="observer")
    proven = [known for known in divergence.hints if known.proven]
    others = [known for known in divergence.hints if not known.proven]
    return dataclasses.replace(divergence, hints=(*proven, hint, *others))


def _with_ops_left_out(score: Score, program: Program, divergence: Divergence) -> Divergence:
    """Say which ops one side has, and the other has not, between the last tensors that agree and this one."""
    found = left_out(program, score.side, divergence.node or "")
    if found is None or _is_of_right_layers(score, program, divergence, found.text):
        return divergence
    is_explained = any(hint.score >= _EXPLAINS for hint in divergence.hints)
    hint = Hint(found.kind, found.text, 1.0 if found.is_one_sided else 0.6, evidence="ops")
    if found.is_one_sided:
        # The two ops are not counterparts then, and how they are written is no evidence.
        others = tuple(hint for hint in divergence.hints if hint.score >= _EXPLAINS)
        is_known = any(other.proven for other in others)
        hints = (*others, hint) if is_known else (hint, *others)
        divergence = dataclasses.replace(divergence, hints=hints)
        # None of these ops is there, and the region is named by its end.
        own = program.sites.by_node.get(divergence.node or "", ())
        if own and not is_known and divergence.site not in {site.name for site in own}:
            divergence = dataclasses.replace(divergence, site=own[0].name, source=own[0].source)
        return divergence
    # A right port may have other ops as well: they are no evidence if the mistake is known.
    hints = divergence.hints if is_explained else (hint, *divergence.hints)
    return dataclasses.replace(divergence, hints=hints)


def _is_of_right_layers(score: Score, program: Program, divergence: Divergence, text: str) -> bool:
    """Whether the same place of another layer, which is right, is written with the same other ops."""
    place = place_of(divergence.site, divergence.source)
    if "*" not in place:
        return False
    right = {pair.site for pair in score.pairs if pair.inherited or pair.verdict not in FLAGGED}
    alike = (site for site in program.sites if site.name in right and site.name != divergence.site)
    some = itertools.islice((site for site in alike if place_of(site.name, site.source) == place), _MOST_ALIKE)
    return any(
        found is not None and found.text == text for found in (left_out(program, score.side, s.node) for s in some)
    )


def _within_regions(score: Score, program: Program) -> Iterator[Pair]:
    """A pair for each op that the candidate writes differently, with the verdict of the region that it is in."""
    inside = region_nodes(score) if score.side.observed_at is ObservedAt.OP else {}
    by_region: dict[str, list[Pair]] = {}
    for pair in score.pairs:
        by_region.setdefault(pair.site, []).append(pair)
    names = {node: sites[0].name for node, sites in program.sites.by_node.items()}
    for node in sorted(float_nodes(program, ("op",)) & inside.keys()):
        runs: dict[tuple[str | None, int], list[Pair]] = {}
        for end in inside[node]:
            for pair in by_region.get(names[end], ()):
                runs.setdefault((pair.case, pair.step), []).append(pair)
        for ends in runs.values():
            last = max(ends, key=lambda pair: VERDICTS.index(pair.verdict))
            reason = f"written with other ops: judged with the region that ends in {last.site}"
            yield dataclasses.replace(last, site=names[node], method="region", figures=None, reason=reason)


def _first(origins: Sequence[Divergence], order: Mapping[str, int], levels: Sequence[str]) -> Divergence | None:
    """The earliest wrong origin by level, step and graph order; the earliest suspicious one when none is wrong."""
    for level in reversed(FLAGGED):
        found = [d for d in origins if d.verdict == level]
        if found:
            return min(found, key=lambda d: (levels.index(d.level or ""), d.step, order[d.node or ""]))
    return None


def _written_differently(program: Program, scores: Sequence[Score]) -> Iterator[WrittenDifferently]:
    for score in scores:
        verdicts: dict[str, Verdict] = {}
        for pair in score.pairs:
            verdicts[pair.site] = worst([verdicts.get(pair.site, "identical"), pair.verdict])
        for node, (own, how) in written_differently(program, score.side).items():
            site = program.sites.by_node[node][0].name
            if site in verdicts:
                yield WrittenDifferently(site, own, how, verdicts[site], score.side.level)


UNREAD = "nothing reads it: no result can depend on it"
BY_NAME_ONLY = "by its name alone; from its own inputs it is right, and the results agree"


def softened(scores: Sequence[Score], program: Program) -> tuple[dict[str, list[Pair]], dict[str, list[Divergence]]]:
    """Return pairs and divergences by level, with alarms softened that cannot matter."""
    unread = unread_nodes(program)
    main = [score for score in scores if score.side.observed_at is ObservedAt.OP and score.side.place is not Place.PASS]
    # All results were compared and agree, and no tie had to excuse any of them.
    agree = [s for s in scores if s.results.compared and all(r.agrees and not r.exempt for r in s.results.compared)]
    right: set[str] = set()
    for score in main:
        flagged = {pair.site for pair in score.pairs if pair.verdict in FLAGGED}
        # One op that is wrong, and what was paired by name may be what shows it.
        if score in agree and score is not scores[0] and not any(pair.verdict == "wrong" for pair in score.pairs):
            right |= {n for n in score.judged_nodes if program.sites.by_node[n][0].name not in flagged}
    pairs, divergences = {}, {}
    for score in scores:
        excused = dict.fromkeys(unread, UNREAD)
        if score.side.observed_at is ObservedAt.SEGMENT and score in agree and score is not scores[0]:
            named = {site.name for node in right for site in program.sites.by_node.get(node, ())}
            if all(pair.site in named for pair in score.pairs if pair.verdict == "wrong"):
                excused = dict.fromkeys(right, BY_NAME_ONLY) | excused
        sites = {site.name: why for node, why in excused.items() for site in program.sites.by_node.get(node, ())}
        origins = list(score.divergences.values())
        # Without an op that makes an error, where results differ, the first that has fewer bits.
        if not origins and score.coarsened is not None and not all(r.agrees for r in score.results.compared):
            origins = [score.coarsened]
        pairs[score.side.level] = [
            dataclasses.replace(pair, verdict="suspicious", reason=sites[pair.site])
            if pair.verdict == "wrong" and pair.site in sites
            else pair
            for pair in score.pairs
        ]
        divergences[score.side.level] = [
            dataclasses.replace(found, verdict="suspicious")
            if found.verdict == "wrong" and found.node in excused
            else found
            for found in origins
        ]
    return pairs, divergences


def vacuous(program: Program, scores: Sequence[Score]) -> Iterator[str]:
    """Yield a sentence for each result of the baseline that is constant, or depends on no input.

    Args:
        program: The baseline's.
        scores: Of all sides, the unchanged baseline's first.
    """
    varying = of_inputs(program)
    independent = [n for n in results_of(program) if program.node(program.output_nodes[n]) not in varying]
    constant = dict.fromkeys(name for score in scores[:1] for name in score.results.constant)
    for name in independent:
        yield f"the baseline's {name} depends on no input: it says nothing of what computes on them"
    for name in constant:
        if name not in independent:
            yield f"all elements of the baseline's {name} are the same number on these inputs: it shows few mistakes"


def memorized(program: Program, scores: Sequence[Score]) -> Iterator[str]:
    """Yield a sentence for each result that depends on an input in the baseline alone."""
    for score in scores:
        own = score.side.program
        if own is None or own is program:
            continue
        names = {node: name for name, node in program.output_nodes.items() if name in results_of(program)}
        varying = of_inputs(program) | of_inputs(own)
        for ours, theirs in paired_results(program, own).items():
            if ours in names and program.node(ours) in varying and own.node(theirs) not in varying:
                yield f"the candidate's {names[ours]} depends on no input"
