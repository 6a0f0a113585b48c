"""Sentences about results, the same on a terminal and on a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple

from glassengine.results import (
    FLAGGED,
    MOST_OPS,
    VERDICTS,
    ArtifactComparison,
    Comparison,
    Divergence,
    Figures,
    Granularity,
    Hint,
    Pair,
    Quantization,
    Replayed,
    ResultComparison,
    SeriesPoint,
)
from glassengine.results.answer import Exemption, InputUsed
from glassengine.results.sentences import named_mistake
from glassengine.results.without_tensors import RolloutComparison

_LESS_THAN_PROOF = ("tried", "argument", "ops", "values", "weights")
"""Evidence of what kind of mistake it is; any other word says where it is."""
_WORTH_SAYING = 0.005
"""Share of an error that is left after a proof, and named."""
_TRAINED = ("forward", "backward", "run", "update")
"""Levels whose steps are those of a training, not of a generation."""
_REASONS = {"below ties or padding": "that depends on ties or padding"}
AGREEMENT = {"bitwise": "bitwise equal", "within rounding": "within rounding", "beyond": "beyond rounding"}
_MAX_NAMES = 3
TOLD = frozenset({"complete", "flat", "renamed", "arrangements"})
"""Facts of a side that `side_notes` says in words."""


class Headline(NamedTuple):
    """The first words of an answer.

    Attributes:
        why: What decided, in a sentence; of a comparison that is ok, what its differences are.
        is_flagged: Whether it is ok with a verdict that a reader must know.
    """

    why: str
    is_flagged: bool = False


def headline(result: Comparison) -> Headline:
    """Return the first words of an answer."""
    if (named := named_mistake(result)) is not None:
        return Headline(named)
    if result.not_ok_because:
        # Why it is not ok, and nothing that sounds like the opposite; of two records also what it looks like.
        hints = result.first_divergence.hints if result.first_divergence and result.calibration else ()
        looks = "".join(f": {hint.in_words()}" for hint in hints[:1])
        return Headline(("too little was judged: " if result.too_little else "") + result.not_ok_because + looks)
    if result.verdict in FLAGGED:
        return Headline(f"worst verdict {result.verdict}", True)
    if result.prompt is not None and not result.counts["compared"]:
        return Headline(result.prompt.in_words())
    if result.rollout is not None:
        return Headline(result.rollout.in_words())
    if result.verdict == "identical":
        return Headline("bitwise identical")
    by_signal = any(found.judged_by == "signal" for found in result.results)
    if result.calibration == "uncalibrated":
        return Headline("every difference is within tolerance")
    coarse = next(
        (one.candidate_dtype for one in result.results if one.candidate_dtype in ("bfloat16", "float16")), None
    )
    is_plain = result.quantization is None and coarse is not None
    cause = "rounding" if not by_signal else f"rounding to {coarse}" if is_plain else "the quantization"
    tie = " or a tie" if any(found.exempt and found.verdict != "identical" for found in result.results) else ""
    return Headline(f"every difference is explained by {cause}{tie}")


def sentence(text: str) -> str:
    """Return a sentence of a page."""
    return f"{text[:1].upper()}{text[1:]}."


def level(name: str) -> str:
    """Return what a level is called on a screen."""
    return {"candidate, untouched": "candidate as it runs", "program": "exported program"}.get(name, name)


def guarantee(text: str) -> str:
    """Return how a level was judged, for a screen."""
    return text.removeprefix("judged ").replace("by segments", "in regions")


def judged_by(text: str) -> str:
    """Return what the verdict on a tensor rests on, for a screen."""
    return {"reverse replay": "the op, computed again", "segment": "its region, computed again"}.get(text, text)


def of_side(side: str) -> str:
    """Return what a side is called after "of": "both sides", "the baseline"."""
    return "both sides" if side == "both" else f"the {side}"


def step_of(result: Comparison, found: Divergence) -> str:
    """Return "step 0 (prefill)"."""
    where = f"step {found.step}"
    if result.generates and found.level not in _TRAINED:
        where += " (prefill)" if found.step == 0 else f" (decode step {found.step})"
    return where


def hint_lines(hint: Hint) -> Iterator[tuple[str, str]]:
    """Yield (what, text): a mistake that is proven is called by its kind, anything else may be one."""
    kind = "" if hint.kind == "other" or hint.text.startswith(f"{hint.kind} ") else f"{hint.kind}: "
    yield ("mistake", f"{kind}{hint.text}") if hint.proven else ("hint", hint.in_words())
    if hint.line is not None:
        yield "line", hint.line


def hint_details(hint: Hint) -> Iterator[tuple[str, str]]:
    """Yield the lines of a hint, and what is known of how well it explains: for answers that have room for it."""
    yield from hint_lines(hint)
    if hint.proven:
        yield "proven", "the baseline with this change makes what the candidate made, up to rounding"
    if hint.unexplained is not None and (not hint.proven or hint.unexplained >= _WORTH_SAYING):
        yield "unexplained", f"{hint.unexplained:.2g} of the error"


def side_notes(result: Comparison) -> Iterator[str]:
    """Yield how sides were read: those that are incomplete, and those that were brought into another form."""
    for side in ("baseline", "candidate"):
        own = result.environment.get(side) or {}
        if not own.get("complete", True):
            yield f"the {side} is incomplete: only its completed steps were compared"
        for how, count in own.get("flat", {}).items():
            yield f"the {side} has no dimension for rows ({how}): {count} of its tensors are compared as one row"
        if renamed := own.get("renamed"):
            yield f"one model is inside of another module: {renamed}"
        if arrangements := own.get("arrangements"):
            counted = "; ".join(f"{count} {how}" for how, count in arrangements.items())
            yield f"of several ranks, the tensors of the {side} were put together: {counted}"


def untried(found: Divergence) -> str | None:
    """Return that not every kind of mistake was tried; None where all were, or where one is proven."""
    if not found.num_untried or (found.hints and found.hints[0].proven):
        return None
    return f"{found.num_untried} families of mistakes were not tried: what one divergence may cost was spent"


def hints_worth_a_line(hints: Sequence[Hint]) -> list[Hint]:
    """Return the hints without those that only may be so, beside one that is proven."""
    proven = bool(hints) and hints[0].proven
    return [hint for hint in hints if hint.proven or not proven or hint.evidence not in _LESS_THAN_PROOF]


def pair_of(found: Divergence, pairs: Iterable[Pair]) -> Pair | None:
    """Return the pair that shows a divergence: of several cases, the one in which it is wrong."""
    here = [p for p in pairs if (p.level, p.step) == (found.level, found.step)]
    places = [p for p in here if p.site == found.site]
    if all(p.figures is None for p in places):  # an op inside of a region, which was measured at its end
        places = [p for p in here if p.candidate_site == found.candidate_site and not p.inherited] or places
    ranked = [p for p in places if found.rank in (None, p.rank)] or places
    own = [p for p in ranked if not p.inherited] or ranked
    return max(own, key=lambda p: VERDICTS.index(p.verdict), default=None)


def size(pair: Pair | None) -> str:
    """Return how large the error of a pair is, against what rounding explains."""
    if pair is None:
        return "its size is not known"
    if pair.noise_ratio is None:
        return _without_size(pair)
    text = f"{ratio(pair.noise_ratio)} times what rounding alone explains"
    if pair.bound_ratio is not None:
        text += f", {ratio(pair.bound_ratio)} times the rounding bound of this op"
    figures = pair.figures
    if figures is not None and figures.worst_index is not None:
        text += (
            f"; largest at {list(figures.worst_index)}: {both_values(figures)}; {figures.num_different} of "
            f"{figures.num_elements} elements differ"
        )
    return text


def ratio(value: float) -> str:
    """Return a ratio in three digits, in the form of a page: "8060", "4.90e+5"."""
    return f"{float(f'{value:.3g}'):g}" if abs(value) < 1e5 else f"{value:.2e}".replace("e+0", "e+")


def own_error(found: Divergence) -> Iterator[tuple[str, str]]:
    """Yield which error an op makes itself, and which comes from its inputs, where both are known."""
    if found.introduced is not None and found.inherited is not None:
        yield "rms", f"an error of {found.introduced:.3g} is made here, {found.inherited:.3g} comes from the inputs"


def _without_size(pair: Pair) -> str:
    """What differs in kind: integers, bools, masks, shapes; and what has no noise floor."""
    figures = pair.figures
    text = pair.reason
    if text is None and figures is not None and math.isfinite(figures.max_abs_diff):
        loss = f" ({figures.snr_db:.0f} dB)" if math.isfinite(figures.snr_db) else ""
        text = f"{figures.num_different} of {figures.num_elements} elements differ{loss}"
    text = text or "cannot be measured"
    if figures is None or figures.worst_index is None or " at [" in text:
        return text
    which = "first" if figures.max_abs_diff == 1 else "largest"
    return f"{text}; {which} at {list(figures.worst_index)}: {both_values(figures)}"


def both_values(figures: Figures) -> str:
    """Return the values of both sides at the element that differs most."""
    return f"baseline {figures.baseline_at_worst:.6g} | candidate {figures.candidate_at_worst:.6g}"


def result_line(found: ResultComparison) -> str:
    """Return how a result of the model agrees or differs, and whether a token changes."""
    text = found.in_words()
    if not found.agrees and found.level != found.case:
        text += f" in {found.case}, step {found.step}"
    if found.method != "name":
        by_shape = ": no other tensor of the record has its shape" if found.method == "shape" else ""
        text += f"; the candidate calls it {found.candidate_name}{by_shape}"
    if 0 < found.exempt < 1:
        text += f"; {found.exempt:.1%} of it not counted: it depends on a tie"
    if found.left_out:
        text += f"; {found.left_out:.0%} of it left out: padding, or undefined in the baseline"
    if found.mean_kl is None or found.verdict == "identical":
        return text
    changed = found.num_tokens - found.same_tokens
    tokens = f"{changed} of {found.num_tokens} next tokens change" if changed else "no next token changes"
    return f"{text}; {tokens}, mean KL {found.mean_kl:.2g} nats"


def gap(found: RolloutComparison) -> str:
    """Return the figures of the gap between the log-probabilities of an engine and those of its policy."""
    outside = f"{_share(found.outside) if found.outside else 'none'} of the tokens outside [0.9, 1.1]"
    return f"k3 KL {found.k3:.2g} nats, {outside}, root mean square {found.rms:.2g}"


def rollout_tokens(found: RolloutComparison) -> str:
    """Return what was compared of a rollout."""
    versions = f", weights of {', '.join(found.versions[:_MAX_NAMES])}" if found.versions else ""
    return f"{found.num_tokens} of {found.num_samples} responses ({found.format}); trainer in {found.dtype}{versions}"


def cost_line(cost: Quantization, results: Sequence[ResultComparison]) -> str:
    """Return what the rounded weights of a file cost: the engine's results beside the checkpoint's."""
    text = f"the file against the checkpoint: {cost.logits_snr_db:.1f} dB"
    if cost.token_agreement is not None and cost.kl is not None:
        same = round(cost.token_agreement * cost.num_tokens)
        text += f", {same} of {cost.num_tokens} next tokens are the same, mean KL {cost.kl:.2g} nats"
    worst = next((one for one in results if one.judged_by == "signal"), None)
    if worst is not None and worst.snr_db is not None and worst.max_abs_diff is not None:
        text += f"; worst in {worst.case}, step {worst.step}: {worst.snr_db:.1f} dB"
        text += f", largest difference {worst.max_abs_diff:.2g} of {worst.largest:.3g}"
    return text


def results_shown(result: Comparison) -> list[ResultComparison]:
    """Return the results of the last comparison, or those of an earlier one with a worse verdict, worst first.

    The last comparison judges what the user runs. It may not see the choices inside, so that it allows what an earlier
    one calls wrong.
    """
    worst_first = sorted(result.results, key=_severity, reverse=True)
    return [one for one in worst_first if one.level == max(reversed(worst_first), key=_severity).level]


def _severity(found: ResultComparison) -> int:
    return VERDICTS.index(found.verdict)


def severity_lines(result: Comparison) -> Iterator[tuple[str, str]]:
    """Yield (level, text): what becomes of the tokens in each comparison."""
    for name, found in result.severity.items():
        if not found["num_tokens"]:
            continue
        same, mean = found["token_agreement"], found["mean_kl"]
        share = "" if same is None else f"same generated token in {same:.1%} of "
        kl = "" if mean is None else f"; KL mean {mean:.2g}, largest {found['max_kl']:.2g} nats"
        ties = f"; {found['num_ties']} decided by ties" if found["num_ties"] else ""
        changed = f"; first change: {found['first_changed_token']}" if found["first_changed_token"] else ""
        yield name, f"{level(name)}: {share}{found['num_tokens']}{kl}{ties}{changed}"


def input_line(used: InputUsed) -> str:
    """Return what an input is: "x float32[3, 8] -1..1"."""
    if used.shape is None:
        return f"{used.name} {used.value}"
    text = f"{used.name} {used.dtype}[{', '.join(map(str, used.shape))}]"
    if used.minimum is not None and used.maximum is not None:
        same = used.minimum == used.maximum
        text += f" all {used.minimum:.4g}" if same else f" {used.minimum:.4g}..{used.maximum:.4g}"
    return f"{text} ({used.recipe})" if used.recipe and not used.is_made_up else text


def judged(found: Granularity) -> str:
    """Return how finely the inside was judged."""
    parts = [
        (found.op_by_op, "op by op"),
        (found.in_regions, f"in regions of at most {MOST_OPS} ops"),
        (found.in_large_regions, "in larger regions"),
        (found.results_only, "by the results only"),
    ]
    text = ", ".join(f"{share:.0%} {how}" if share >= 0.005 else f"<1% {how}" for share, how in parts if share > 0)
    if found.largest_region > MOST_OPS:
        text += f" (the largest: {found.largest_region} ops, ending in {found.largest_region_end})"
    return f"{found.num_sites} float tensors: {text}" if found.num_sites else "no tensor of floats"


def exempt(exemptions: Iterable[Exemption]) -> str:
    """Return which share of the elements did not count, and why; "" where all did."""
    return ", ".join(
        f"{_share(one.share)} {_REASONS.get(one.reason, one.reason)} (most in {one.largest_site})" for one in exemptions
    )


def _share(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 else "<0.1%"


def replay_sentence(result: Replayed) -> str:
    """Return what came of a replay."""
    if result.bisection is not None:
        found = result.bisection
        if found.failure is None:
            return f"{found.backend} does not break this graph"
        return f"{found.backend} breaks {len(found.ops)} of {found.num_ops} ops: {found.message or found.failure}"
    if result.comparison is not None:
        return f"worst verdict {result.comparison.verdict}"
    if result.first_nonfinite is not None:
        return f"{result.first_nonfinite['op']} made the first {result.first_nonfinite['kinds']}"
    if result.error is not None:
        return "the run failed"
    known = [output for output in result.outputs if output.same_bits is not None]
    if result.outputs and not known:
        return "it ran"
    if not result.outputs:
        return "node by node, nothing is made that is not finite"
    same = sum(bool(output.same_bits) for output in known)
    return f"{same} of {len(known)} outputs have the same bits as recorded"


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the shortest ends of `paths` that tell them apart."""
    parts = [PurePath(path).parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = [str(PurePath(*part[-length:])) for part in parts]
        if len(set(names)) == len(set(paths)):
            return names
    return list(paths)


def is_unfinished(result: ArtifactComparison) -> bool:
    """Whether two builds are the same as far as they go, and one did not end well: no verdict."""
    is_same = all(stage.status == "identical" for stage in result.stages)
    return is_same and not (result.complete or result.differences or result.files)


def artifacts_sentence(result: ArtifactComparison) -> str:
    """Return whether two builds have the same artifacts, and where they differ first."""
    if result.ok:
        return "identical: every stage, option and version"
    first = next((stage for stage in result.stages if stage.status != "identical"), None)
    if first is not None:
        return f"different: first in stage {first.name}, {first.status}"
    if is_unfinished(result):
        return "the same as far as they go, but a build did not end well"
    return "different: the graphs are the same at every stage, settings or files are not"


def point_words(point: SeriesPoint) -> str:
    """Return where two series differ, and by how much."""
    sides = f"{number_words(point.baseline)} against {number_words(point.candidate)}"
    told = f"step {point.step}, {point.site}: {sides}"
    if point.variation is not None:
        told += f", a difference of {number_words(point.difference)} where the variation is "
        told += number_words(point.variation)
    return told


def number_words(value: float | None) -> str:
    """Return a number of a series."""
    return "not finite" if value is None else f"{value:.6g}"


def bytes_text(number: float) -> str:
    """Return a number of bytes: "3.0 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
