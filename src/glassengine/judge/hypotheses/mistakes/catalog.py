"""The mistakes that are tried, the most credible first: what the candidate's program shows, then common mistakes,
then anything that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from glassengine.judge.hypotheses.mistakes.activations import activations, derivatives
from glassengine.judge.hypotheses.mistakes.arguments import as_theirs, same_op, usual, whole
from glassengine.judge.hypotheses.mistakes.candidate_ops import another_op, extra_op, one_for_several
from glassengine.judge.hypotheses.mistakes.fitted_constants import bases, fitted_constants, scaled_positions
from glassengine.judge.hypotheses.mistakes.global_transforms import (
    another_tensor,
    cut_off,
    done_twice,
    dropped,
    parts,
    rearranged,
    scaled,
    zeroed,
)
from glassengine.judge.hypotheses.mistakes.layouts import (
    fused,
    missing_rotation,
    neighbors,
    permuted_operands,
    reshaped,
)
from glassengine.judge.hypotheses.mistakes.losses import losses, relabeled
from glassengine.judge.hypotheses.mistakes.masks import counted, mask_pairs, of_attention
from glassengine.judge.hypotheses.mistakes.operands import altered, another, another_inside, exchanged, left_out
from glassengine.judge.hypotheses.mistakes.operations import other_ops, variances
from glassengine.judge.hypotheses.mistakes.precision import coarser, in_its_own_dtype
from glassengine.judge.hypotheses.mistakes.unrolled_recurrence import recurrences
from glassengine.judge.hypotheses.mistakes.weights_read import (
    another_layer,
    another_module,
    every_weight,
    packed,
    weights,
)
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question

DESCRIBED: dict[Callable[..., Any], frozenset[str]] = {
    cut_off: frozenset({"clamp", "clamp_min", "clamp_max", "minimum", "maximum", "relu", "hardtanh", "relu6"}),
    dropped: frozenset({"dropout", "native_dropout", "bernoulli", "rand", "rand_like", "alpha_dropout"}),
    zeroed: frozenset({"slice", "narrow", "constant_pad_nd", "pad", "zeros", "zeros_like", "new_zeros", "where"}),
    rearranged: frozenset({"roll", "flip", "index_select", "index", "gather", "take_along_dim"}),
    parts: frozenset({"index_put", "index_copy", "slice_scatter", "select_scatter", "copy", "cat", "where"}),
    permuted_operands: frozenset(),
    fitted_constants: frozenset(),
    scaled_positions: frozenset(),
    scaled: frozenset(),
    done_twice: frozenset(),
    another_tensor: frozenset(),
}
"""Families that describe -> ops one of which a candidate has that does that; none: whatever it has may do it."""

Family = Callable[[Question], Iterator[Hypothesis]]

FAMILIES: tuple[tuple[float, Family], ...] = (
    (1.0, same_op),
    (1.0, weights),
    (1.0, packed),
    (0.98, as_theirs),
    (0.97, of_attention),
    (0.97, bases),
    (0.97, scaled_positions),
    (0.97, losses),
    (0.97, relabeled),
    (0.97, derivatives),
    (0.96, recurrences),
    (0.96, exchanged),
    (0.96, left_out),
    (0.96, activations),
    (0.95, other_ops),
    (0.95, variances),
    (0.95, usual),
    (0.95, another_op),
    (0.95, one_for_several),
    (0.94, neighbors),
    (0.94, missing_rotation),
    (0.94, reshaped),
    (0.94, fused),
    (0.93, whole),
    (0.93, another_layer),
    (0.93, another_module),
    (0.93, every_weight),
    (0.93, another),
    (0.93, another_inside),
    (0.92, another_tensor),
    (0.92, altered),
    (0.92, done_twice),
    (0.92, in_its_own_dtype),
    (0.92, coarser),
    (0.92, cut_off),
    (0.92, zeroed),
    (0.92, dropped),
    (0.91, extra_op),
    (0.91, permuted_operands),
    (0.9, fitted_constants),
    (0.85, rearranged),
    (0.82, parts),
    (0.81, mask_pairs),
    (0.81, counted),
    (0.8, scaled),
)
"""Score and family. Each hint was tried and reproduces the candidate's result; the score only ranks."""
