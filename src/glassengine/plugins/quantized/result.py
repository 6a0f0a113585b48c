"""The result of judging a quantized candidate, in the words of every other comparison."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from glassengine import environment
from glassengine.judge.end_to_end import by_signal
from glassengine.plugins.quantized.effects import Outcome, Weight, snr_db
from glassengine.program import LoadedModel
from glassengine.results import (
    Divergence,
    Findings,
    Hint,
    LevelResult,
    Pair,
    Policy,
    Quantization,
    QuantizedWeight,
    ResultComparison,
    Skipped,
    Verdict,
    WeightsComparison,
    worst,
)

LEVEL = "weights"


def finished(weights: Sequence[Weight]) -> tuple[QuantizedWeight, ...]:
    """Return what was found of each weight, the largest share first."""
    errors = [weight.figures["error"] for weight in weights]
    finite = sum(error for error in errors if math.isfinite(error))
    made = [
        QuantizedWeight(
            name=weight.name,
            verdict=_verdict(weight),
            snr_db=weight.error.snr_db,
            rms_steps=weight.error.rms_steps,
            max_steps=weight.error.max_steps,
            output_snr_db=snr_db(weight.output_power, weight.error_power) if weight.output_power else None,
            output_over_rounding=_over(weight),
            logits_snr_db=weight.figures["snr_db"],
            kl=weight.figures["kl"],
            share=weight.figures["error"] / finite if finite and math.isfinite(weight.figures["error"]) else 0.0,
            is_rescaled=weight.is_rescaled,
            hints=weight.error.mistakes,
        )
        for weight in weights
    ]
    return tuple(sorted(made, key=lambda weight: -weight.share))


def _over(weight: Weight) -> float | None:
    return math.sqrt(weight.error_power / weight.rounding_power) if weight.rounding_power > 0 else None


def _verdict(weight: Weight) -> Verdict:
    if not weight.error.mistakes:
        return "identical" if weight.error.rms_steps == 0 else "rounding"
    # Far from its values and yet no worse at its output than rounding: what compensates errors may go that far.
    over = _over(weight)
    is_vague = weight.error.mistakes[0].evidence == "not its values" and weight.error.rms_steps < 4
    return "suspicious" if is_vague and over is not None and over < 2 else "wrong"


def findings_of(
    baseline: LoadedModel,
    candidate: LoadedModel,
    found: Quantization,
    skipped: Sequence[Skipped],
    both: Sequence[str],
    policy: Policy,
) -> Findings:
    """Return the findings: a pair per weight, in the order of the model, and an origin per mistake."""
    order = {name: index for index, name in enumerate(both)}
    pairs = [
        _pair(weight.name, weight.verdict, weight.rms_steps, "; ".join(hint.text for hint in weight.hints) or None)
        for weight in found.weights
    ]
    origins = [
        _divergence(weight.name, weight.verdict, weight.hints)
        for weight in found.weights
        if weight.verdict in ("suspicious", "wrong")
    ]
    text = "it is not quantized, and is not the baseline's"
    pairs += [_pair(name, "wrong", None, text) for name in found.different]
    origins += [
        _divergence(name, "wrong", (Hint("swapped", text, 1.0, evidence="another weight"),)) for name in found.different
    ]
    known = {pair.site for pair in pairs}
    pairs += [_pair(name, "identical", None, None) for name in both if _site(name) not in known]
    pairs.sort(key=lambda pair: order[pair.site.removesuffix(":param")])
    origins.sort(key=lambda origin: order[origin.site.removesuffix(":param")])
    verdict = worst(pair.verdict for pair in pairs)
    failing = [origin for origin in origins if policy.fails(origin.verdict)]
    first = failing[0] if failing else origins[0] if origins else None
    guarantee = "judged by the step of each weight"
    return Findings(
        baseline=baseline.spec,
        candidate=candidate.spec,
        environment=environment.describe(),
        inside=verdict,
        inside_reason=f"{len(failing)} weights differ by more than quantization explains",
        first_divergence=first,
        origins=origins,
        pairs=tuple(pairs),
        skipped=skipped,
        coverage=len(both) / max(len(both) + sum(item.side == "baseline" for item in skipped), 1),
        levels=[LevelResult(LEVEL, baseline.spec, candidate.spec, verdict, guarantee, len(pairs), 1.0, first)],
        weights=WeightsComparison(
            compared=len(both),
            different=tuple(pair.site.removesuffix(":param") for pair in pairs if pair.verdict != "identical"),
            only_baseline=tuple(item.site for item in skipped if item.side == "baseline"),
            only_candidate=tuple(item.site for item in skipped if item.side == "candidate"),
        ),
        quantization=found,
    )


def result_of(expected: Outcome, found: Outcome, total: Mapping[str, Any], num_steps: int) -> ResultComparison:
    """Return the results of both sides, over all forwards together: judged by what is left of the signal."""
    b, c = expected.rows, found.rows
    judgement = by_signal(b, c)
    name = "logits" if expected.are_logits else "output"
    return ResultComparison(
        name=name,
        candidate_name=name,
        level=LEVEL,
        method="name",
        verdict=judgement.verdict,
        reason=judgement.reason,
        case=None,
        step=0,
        num_steps=num_steps,
        shape=tuple(b.shape),
        dtype="float32",
        candidate_dtype="float32",
        max_abs_diff=float((c.double() - b.double()).abs().max()) if b.numel() else 0.0,
        largest=float(b.double().abs().max()) if b.numel() else 0.0,
        snr_db=total["snr_db"],
        cosine_similarity=total["cosine"],
        judged_by="signal",
    )


def as_cost(result: ResultComparison) -> ResultComparison:
    """Return a result of a quantized candidate, softened: what rounding costs decides nothing; a shape or NaN does."""
    is_loss = result.verdict == "wrong" and result.reason is None
    return dataclasses.replace(result, verdict="suspicious") if is_loss else result


def _site(name: str) -> str:
    return f"{name}:param"


def _pair(name: str, verdict: Verdict, noise_ratio: float | None, reason: str | None) -> Pair:
    return Pair.of_weight(name, verdict, noise_ratio, reason, level=LEVEL)


def _divergence(name: str, verdict: Verdict, hints: tuple[Hint, ...]) -> Divergence:
    return Divergence.without_run(_site(name), verdict, hints, level=LEVEL)
