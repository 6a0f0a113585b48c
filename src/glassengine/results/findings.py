"""Collects what a check finds and concludes from it: the one place where a comparison becomes ok or not.

`docs/concepts.md` has the rule with its cases. `decide` applies it in this order:

    prompt differs     the sides make other tokens or texts of the same prompt: this is known before anything runs
    weights differ     a weight of a served file is another: this is known before anything runs
    results differ     the sides differ as a user runs them, or a result is beyond its floor, whatever lies inside
    differs inside     an op is wrong, from its own inputs, though these inputs may hide it from the results
    token changes      the release engine picks another token than the engine with debug outputs
    over budget        a result has a smaller signal-to-noise ratio than --min-snr
    too little judged  nothing is wrong, and a result was not compared, or less than --min-coverage was judged finely
                       enough
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from glassengine.results.answer import CaseInputs, DriftRow, Exemption, Granularity, ResultComparison, Standing
from glassengine.results.base import VERDICTS, Verdict, worst
from glassengine.results.comparison import (
    Comparison,
    Divergence,
    LevelResult,
    Skipped,
    WeightsComparison,
    WrittenDifferently,
)
from glassengine.results.hints import Quantization
from glassengine.results.pairs import Counts, Pair, TokenAgreement, counts_of
from glassengine.results.sentences import lines_of
from glassengine.results.without_tensors import LEVEL, PromptComparison, RolloutComparison


@dataclass(frozen=True)
class Policy:
    """What a user accepts.

    Attributes:
        fail_on: The mildest verdict that is not ok.
        min_coverage: Least share of the baseline that must have been judged.
        min_snr: Least signal-to-noise ratio of each result, in dB; None for any.
    """

    fail_on: str = "wrong"
    min_coverage: float = 0.9
    min_snr: float | None = None

    def fails(self, verdict: Verdict) -> bool:
        """Return whether a verdict is not ok."""
        return VERDICTS.index(verdict) >= VERDICTS.index(self.fail_on)


@dataclass(frozen=True)
class Decision:
    """Why a comparison is ok or not, as a type and in words; None where it is ok.

    Attributes:
        standing: As a type.
        reason: In words.
        beside: Parts of the reason beside the results and the first divergence.
    """

    standing: Standing
    reason: str | None = None
    beside: tuple[str, ...] = ()


@dataclass
class Findings:
    """What a check has found, and what decides whether that is ok. Most attributes are those of `Comparison`.

    Attributes:
        baseline: What it is, as it was given.
        candidate: Likewise.
        environment: Of the baseline.
        candidate_environment: Of the candidate; None for the baseline's.
        inside: The worst verdict of what lies inside: tensors, ops, weights.
        inside_reason: What is wrong inside, in words; None names the first divergence.
        wrong_weights: Which weights of a served file are not the baseline's, in words; None where none.
        differences: What differs between the sides as a user runs them, in words.
        token_change: Which token the release engine picks otherwise; None where none.
        left: Which results were not compared, in words; None where all were.
        missing: What is missing for the least coverage, in words.
        over: What is over budget, in words, where that is not one of `results`.
        costs: Results that differ by what a coarser precision costs: no mistake, but counted against a budget.
        counts: None to count pairs and what was skipped on either side.
        explanation: What explains a difference of the results, in words; it is added to the reason.
        interruption: How far the work was when it was interrupted, in words: then the answer is never ok.
    """

    baseline: str
    candidate: str
    environment: Mapping[str, Any]
    candidate_environment: Mapping[str, Any] | None = None
    inside: Verdict = "identical"
    inside_reason: str | None = None
    wrong_weights: str | None = None
    differences: Sequence[str] = ()
    token_change: str | None = None
    left: str | None = None
    missing: str | None = None
    over: str | None = None
    costs: Sequence[ResultComparison] = ()
    pairs: Sequence[Pair] = ()
    origins: Sequence[Divergence] = ()
    first_divergence: Divergence | None = None
    skipped: Sequence[Skipped] = ()
    counts: Counts | None = None
    coverage: float = 1.0
    levels: Sequence[LevelResult] = ()
    severity: Mapping[str, TokenAgreement] = field(default_factory=dict)
    calibration: str | None = None
    same_weights: bool | None = None
    weights: WeightsComparison | None = None
    written_differently: Sequence[WrittenDifferently] = ()
    quantization: Quantization | None = None
    results: Sequence[ResultComparison] = ()
    granularity: Sequence[Granularity] = ()
    inputs: Sequence[CaseInputs] = ()
    drift: Sequence[DriftRow] = ()
    exemptions: Sequence[Exemption] = ()
    num_elements: int = 0
    notes: Sequence[str] = ()
    generates: bool = False
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    explanation: str | None = None
    interruption: str | None = None
    rollout: RolloutComparison | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst of all."""
        if self.differences or self.wrong_weights is not None:
            return "wrong"
        return worst([self.inside, *(result.verdict for result in self.results)])

    def interrupt(self, missing: str | None = None) -> None:
        """Mark the findings as those of interrupted work.

        Args:
            missing: What was not done; None counts the steps.
        """
        steps = len({(pair.case, pair.step) for pair in self.pairs})
        total = sum(one.num_steps for one in self.inputs)
        self.interruption = f"interrupted: {missing or f'{min(steps, total)} of {total} steps were begun'}"
        self.skipped = [*self.skipped, Skipped("*", "both", self.interruption)]
        self.notes = [self.interruption, *self.notes]

    def conclude(self, policy: Policy) -> Comparison:
        """Return the comparison that follows."""
        decision = decide(self, policy)
        counts = self.counts or counts_of(
            self.pairs,
            unmatched_baseline=sum(item.side == "baseline" for item in self.skipped),
            unmatched_candidate=sum(item.side == "candidate" for item in self.skipped),
            not_recorded=0,
        )
        known = {one.name for one in fields(self)} & {one.name for one in fields(Comparison)}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value := getattr(self, name), list) else value for name in known
        }
        sides = {"baseline": self.environment, "candidate": self.candidate_environment or self.environment}
        values |= {"counts": counts, "results": (*self.costs, *self.results), "environment": sides}
        return Comparison(
            **values,
            ok=decision.standing == "ok",
            verdict=self.verdict,
            standing=decision.standing,
            not_ok_because=decision.reason,
            other_reasons=decision.beside,
            too_little=decision.standing == "too little judged",
        )


def decide(findings: Findings, policy: Policy) -> Decision:
    """Apply the rule of the module's docstring, and add to its reason what explains it."""
    decision = _decide(findings, policy)
    reason, beside = decision.reason, decision.beside
    is_mild = decision.standing in ("ok", "too little judged")
    if findings.explanation is not None and not is_mild:
        reason, beside = f"{reason}; {findings.explanation}", (*beside, findings.explanation)
    if findings.interruption is None:
        return Decision(decision.standing, reason, beside)
    if is_mild:
        return Decision("too little judged", findings.interruption)
    return Decision(decision.standing, f"{reason} ({findings.interruption})", (*beside, findings.interruption))


def _decide(findings: Findings, policy: Policy) -> Decision:
    first, results = findings.first_divergence, findings.results
    inside = findings.inside_reason or (
        f"the first {findings.inside} {first.noun} is {first.site}{lines_of(first)}" if first is not None else None
    )
    if findings.wrong_weights is not None:
        return Decision("weights differ", findings.wrong_weights)
    if findings.differences:
        told = tuple(dict.fromkeys(findings.differences))
        return Decision("results differ", "; ".join(told), told)
    beside = () if findings.inside_reason is None else (findings.inside_reason,)
    different = [result for result in results if policy.fails(result.verdict)]
    if different:
        also = f"; {inside}" if inside is not None and policy.fails(findings.inside) else ""
        return Decision("results differ", f"{different[-1].in_words()}{also}", beside if also else ())
    if policy.fails(findings.inside):
        if inside is None:
            return Decision("weights differ", "weights differ")
        # A quantized candidate's results do differ, by what its precision costs.
        is_hidden = bool(results) and all(r.agrees and r.judged_by == "noise floor" for r in results)
        is_hidden = is_hidden and findings.inside_reason is None
        hidden = "differs inside, not in the results: " if is_hidden else ""
        return Decision("differs inside", hidden + inside, beside)
    if findings.token_change is not None:
        return Decision(
            "token changes", f"the release engine picks another token than the engine: {findings.token_change}"
        )
    over = findings.over or over_budget([*findings.costs, *results], policy.min_snr)
    if over is not None:
        return Decision("over budget", over)
    undecided = next((result for result in results if not result.is_decided), None)
    if findings.left is not None or undecided is not None:
        text = findings.left or undecided.in_words()  # type: ignore[union-attr]
        return Decision("too little judged", f"{text}; {findings.missing}" if findings.missing else text)
    if findings.coverage < policy.min_coverage:
        wanted = f"(--min-coverage {policy.min_coverage:g})"
        text = f"only {findings.coverage:.1%} of the baseline's float-valued sites were judged {wanted}".replace(
            ".0%", "%"
        )
        if results and all(result.agrees for result in results):
            text += "; the results agree"
        return Decision("too little judged", f"{text}; {findings.missing}" if findings.missing else text)
    return Decision("ok")


def with_prompt(result: Comparison, prompt: PromptComparison) -> Comparison:
    """Return a comparison with the level of its prompts before all others; with a wrong one it is not ok."""
    verdict: Verdict = "wrong" if prompt.wrong else "identical"
    number = prompt.compared.get("tokens", 0) or sum(prompt.compared.values())
    guarantee = "judged by files" if "files" in prompt.compared else "judged by texts"
    note = None if prompt.wrong else prompt.in_words()
    level = LevelResult(LEVEL, prompt.baseline, prompt.candidate, verdict, guarantee, number, note=note)
    result = replace(result, prompt=prompt, levels=(level, *result.levels), verdict=worst([verdict, result.verdict]))
    if not prompt.wrong:
        return result
    first, more = prompt.wrong[0], len(prompt.wrong) - 1
    what = "the checkpoint does not fit" if first.part == "loading" else "the prompts differ"
    reason = f"{what}: {first.cause}: {first.detail}" + (f", and {more} more" if more else "")
    if result.not_ok_because:
        reason += f"; {result.not_ok_because}"
    return replace(result, ok=False, standing="prompt differs", not_ok_because=reason, too_little=False)


def with_grafts(result: Comparison, more: Sequence[Divergence], note: str) -> Comparison:
    """Return a comparison with the origins that grafts have uncovered; with one it is not ok."""
    if more and result.ok:
        reason = f"an op is wrong behind what was grafted: {more[0].site}"
        result = replace(result, ok=False, standing="differs inside", verdict="wrong", not_ok_because=reason)
    return replace(result, origins=(*result.origins, *more), notes=(note, *result.notes))


def over_budget(results: Sequence[ResultComparison | DriftRow], min_snr: float | None) -> str | None:
    """Return which result loses more of its signal than is allowed; None where none does."""
    known = [(result.snr_db, result) for result in results if result.snr_db is not None]
    if min_snr is None or not known:
        return None
    snr_db, least = min(known, key=lambda one: one[0])
    if snr_db >= min_snr:
        return None
    verb = "have" if isinstance(least, ResultComparison) and least.is_plural else "has"
    name = f"{least.site}:" if isinstance(least, DriftRow) else f"{least.name} {verb}"
    return f"{name} {snr_db:.1f} dB (--min-snr {min_snr:g}dB)"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM after something was found.

    Attributes:
        partial: What was found until then, marked as incomplete.
    """

    def __init__(self, partial: Comparison) -> None:
        super().__init__("interrupted")
        self.partial = partial
