"""How far the logits of one step are from those of another engine, and whether a token would change.

"Within rounding" is judged by the noise floor of the logits: r, the error that rounding alone explains (root mean
square, relative to the logits'), measured with `reference`. Two engines that both err by r differ by sqrt(2) r, and the
largest of n such differences is about sqrt(2 ln 2n) times that:

    noise_ratio = max over positions of max( rms(c - b), max|c - b| / sqrt(2 ln 2n) ) / (sqrt(2) r rms(b))

is about 1 for engines that only round differently; the limit is that of `numerics.verdict`. Where the floor cannot be
measured, the tolerance of the dtype at the scale of each position's largest logit is used instead, with a note.

Shape legend: B batch, P positions that hold a token, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from glassengine.judge.cases import Case, StepInputs, empty_caches
from glassengine.judge.exclusions.masked import valid_mask
from glassengine.judge.replay.reference import ReferenceRun
from glassengine.numerics.judgement import WRONG
from glassengine.numerics.metrics.measure import measure
from glassengine.numerics.metrics.tolerance import tolerance
from glassengine.program.representation.program import Program
from glassengine.results.engines import AGREEMENTS, Agreement, StepDifference, TokenDifference

BY_FLOOR = "noise floor"
BY_TOLERANCE = "tolerance (uncalibrated)"

FLOOR_STEPS = 4
"""Steps in which the noise floor is measured: each costs several forward passes, some of them in float64."""


def measure_floors(
    program: Program, ids: torch.Tensor, mask: torch.Tensor, tokens: Sequence[torch.Tensor], coarsest: torch.dtype
) -> list[float]:
    """Return the noise floor r of the logits of each step, relative to their root mean square.

    Only the first `FLOOR_STEPS` are measured; the others are given the largest of those. Steps differ: where attention
    may be a near tie: one has ten times the noise of the next.

    Args:
        program: With weights.
        ids: Prompts [B, S], left-padded.
        mask: [B, S], 1 for tokens.
        tokens: Tokens [B] to go on with.
        coarsest: The coarser dtype of the two engines that will be judged.
    """
    steps = min(len(tokens), FLOOR_STEPS)
    inputs = StepInputs.first(Case("side by side", steps, input_ids=ids, attention_mask=mask))
    node = program.output_nodes["logits"]
    floors: list[float] = []
    reference = ReferenceRun(program, coarsest=coarsest)

    def valid(of: torch.fx.Node, value: torch.Tensor) -> torch.Tensor | None:
        return valid_mask(program.sites.by_node[of.name][0], value, inputs)

    with torch.no_grad():
        for step in range(steps):
            if step:
                inputs = inputs.following(tokens[step - 1])
            named = inputs.named()
            reference.step(named if step else named | empty_caches(program, named), lambda *_: None, valid)
            floors.append(reference.relative_floors.pop(node))
    return floors + [max(floors)] * (len(tokens) - steps)


def judge_logits(step: int, baseline: torch.Tensor, candidate: torch.Tensor, floor: float | None) -> StepDifference:
    """Judge the candidate's logits [P, V] of one step; `floor` is what `measure_floors` found, if anything."""
    limit = tolerance(*(str(side.dtype).removeprefix("torch.") for side in (baseline, candidate)))
    figures = measure(baseline, candidate, rtol=limit.rtol, atol=limit.atol)
    same_bits = baseline.dtype == candidate.dtype and torch.equal(
        baseline.contiguous().view(torch.uint8), candidate.contiguous().view(torch.uint8)
    )
    epsilon = max(torch.finfo(side.dtype).eps for side in (baseline, candidate))
    units, noise_ratio, excess = 0.0, 0.0, 0.0
    for expected, actual in zip(baseline, candidate, strict=True):
        # Position by position, so that float64 copies stay small; elements that are not finite are counted in figures.
        expected, actual = expected.double(), actual.double()
        finite = expected.isfinite() & actual.isfinite()
        expected, error = expected[finite], (actual - expected)[finite].abs()
        if error.numel() == 0 or float(error.max()) == 0:
            continue
        scale, largest = float(expected.abs().max()), float(error.max())
        units = max(units, _ratio(largest, epsilon * scale))
        excess = max(excess, _ratio(largest, limit.atol + limit.rtol * scale))
        if floor is not None:
            typical = max(_rms(error), largest / math.sqrt(2 * math.log(2 * error.numel())))
            noise_ratio = max(noise_ratio, _ratio(typical, math.sqrt(2) * floor * _rms(expected)))
    if figures.num_nonfinite_mismatch:
        units = noise_ratio = excess = math.inf
    is_beyond = excess > 1 if floor is None else noise_ratio > WRONG
    return StepDifference(
        step=step,
        agreement="bitwise" if same_bits else "beyond" if is_beyond else "within rounding",
        judged_by=BY_TOLERANCE if floor is None else BY_FLOOR,
        noise_ratio=None if floor is None else noise_ratio,
        rounding_units=units,
        figures=figures,
    )


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def _ratio(value: float, unit: float) -> float:
    return value / unit if unit else math.inf


def token_differences(step: int, baseline: torch.Tensor, candidate: torch.Tensor) -> list[TokenDifference]:
    """Return the rows of logits [B, V] whose likeliest token differs."""
    found = []
    for row, (ours, theirs) in enumerate(zip(baseline.double(), candidate.double(), strict=True)):
        token, other = int(ours.argmax()), int(theirs.argmax())
        if token != other:
            margins = float(ours[token] - ours[other]), float(theirs[other] - theirs[token])
            found.append(TokenDifference(step, row, token, other, *margins))
    return found


def worst(found: Sequence[Agreement]) -> Agreement:
    """Return the worst of `found`, which is not empty."""
    return max(found, key=AGREEMENTS.index)
