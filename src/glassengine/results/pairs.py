"""Tensors that were judged one by one, how many of each kind there are, and how many tokens agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

from glassengine.results.base import Result, Verdict
from glassengine.results.figures import Figures, Summary


@dataclass(frozen=True)
class Pair(Result):
    """One tensor of the baseline judged against one of the candidate.

    Attributes:
        step: 0 is the prefill, or the only forward.
        site: Of the baseline.
        candidate_site: Of the candidate.
        method: How the two were paired: "name", "name+fingerprint", "alias", "map", "output", "consumer", "content" (by
            what they compute), "region" (an op that the candidate does not have, judged where its region ends).
        confidence: Of the pairing, 0 to 1.
        verdict: "identical", "rounding", "suspicious" or "wrong".
        judged_by: What the verdict rests on: "reverse replay", "segment", "noise floor", "given tolerance", "tolerance
            (uncalibrated)" or "shape".
        figures: The difference; None where it was not worth measuring.
        noise_ratio: Error over the noise floor, in the worst slice.
        bound_ratio: Error over the rounding bound, of the worst element.
        rung: Which implementation, of several.
        case: Name of the batch of prompts or inputs.
        inherited: Whether the error was carried in by the inputs.
        reason: What decided, where it was not the two ratios.
        baseline: Statistics of the baseline's tensor, where they were asked for.
        candidate: Statistics of the candidate's.
        abs_error: Statistics of |c - b|.
        rel_error: Statistics of |c - b| / |b|.
        rank: Process that had the tensor.
    """

    step: int
    site: str
    candidate_site: str
    method: str
    confidence: float
    verdict: Verdict
    judged_by: str
    figures: Figures | None = None
    noise_ratio: float | None = None
    bound_ratio: float | None = None
    rung: str | None = None
    case: str | None = None
    inherited: bool = False
    reason: str | None = None
    baseline: Summary | None = None
    candidate: Summary | None = None
    abs_error: Summary | None = None
    rel_error: Summary | None = None
    rank: int = 0


class Counts(TypedDict):
    """How many tensors were compared, by verdict, and how many could not be.

    Attributes:
        compared: Pairs; the four verdicts add up to it.
        identical: Of these.
        rounding: Of these.
        suspicious: Of these.
        wrong: Of these.
        inherited: Pairs whose error was carried in by the inputs.
        unmatched_baseline: Tensors of the baseline without a counterpart.
        unmatched_candidate: Tensors of the candidate without a counterpart.
        not_recorded: Tensors of which no values were recorded.
        missing_steps: Steps that only one side has.
    """

    compared: int
    identical: int
    rounding: int
    suspicious: int
    wrong: int
    inherited: int
    unmatched_baseline: int
    unmatched_candidate: int
    not_recorded: int
    missing_steps: int


class TokenAgreement(TypedDict):
    """How much a disagreement of the logits of the last position matters to the user of the model.

    Attributes:
        num_tokens: Over all steps.
        token_agreement: Share of tokens that are the same, ties included; null without tokens.
        num_ties: Tokens that differ because rounding decides between two.
        mean_kl: Mean divergence of the next token, in nats.
        max_kl: Largest of a step.
        first_changed_token: Case, step, row and both tokens.
    """

    num_tokens: int
    token_agreement: float | None
    num_ties: int
    mean_kl: float | None
    max_kl: float
    first_changed_token: str | None


def counts_of(
    pairs: Sequence[Pair],
    *,
    unmatched_baseline: int,
    unmatched_candidate: int,
    not_recorded: int,
    missing_steps: int = 0,
) -> Counts:
    """Return the counts that every comparison has: of `pairs` by verdict, and of what could not be paired."""
    return {
        "compared": len(pairs),
        "identical": sum(pair.verdict == "identical" for pair in pairs),
        "rounding": sum(pair.verdict == "rounding" for pair in pairs),
        "suspicious": sum(pair.verdict == "suspicious" for pair in pairs),
        "wrong": sum(pair.verdict == "wrong" for pair in pairs),
        "inherited": sum(pair.inherited for pair in pairs),
        "unmatched_baseline": unmatched_baseline,
        "unmatched_candidate": unmatched_candidate,
        "not_recorded": not_recorded,
        "missing_steps": missing_steps,
    }


def added(first: Counts, second: Counts) -> Counts:
    """Return the counts of two parts of one comparison."""
    left, right = (cast("Mapping[str, int]", counts) for counts in (first, second))
    return cast("Counts", {name: number + right[name] for name, number in left.items()})
