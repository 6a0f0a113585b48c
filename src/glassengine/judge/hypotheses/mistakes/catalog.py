"""The mistakes that are tried, the most credible first: what the candidate's program shows, then common mistakes,
then anything that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

from glassengine.judge.hypotheses.mistakes import (
    arguments,
    candidate_ops,
    global_transforms,
    layouts,
    losses,
    masks,
    operands,
    operations,
    unrolled_recurrence,
    weights_read,
)
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question

Family = Callable[[Question], Iterator[Hypothesis]]

_BY_SCORE: dict[float, tuple[Family, ...]] = {
    1.0: (arguments.same_op, weights_read.weights, weights_read.packed),
    0.99: (arguments.same_ops,),
    0.98: (arguments.as_theirs,),
    0.97: (
        masks.of_attention,
        masks.of_caches,
        arguments.bases,
        arguments.scaled_positions,
        losses.losses,
        losses.relabeled,
        operations.derivatives,
    ),
    0.96: (
        unrolled_recurrence.recurrences,
        operands.another_pass,
        operands.all_of_another_pass,
        operands.exchanged,
        operands.left_out,
        operations.activations,
    ),
    0.95: (
        operations.other_ops,
        operations.variances,
        arguments.usual,
        candidate_ops.another_op,
    ),
    0.94: (layouts.neighbors, layouts.along_parts, layouts.missing_rotation, layouts.reshaped, layouts.fused),
    0.93: (
        arguments.whole,
        weights_read.another_module,
        weights_read.every_weight,
        operands.another,
        operands.another_inside,
    ),
    0.92: (
        global_transforms.another_tensor,
        operands.altered,
        global_transforms.done_twice,
        global_transforms.in_its_own_dtype,
        global_transforms.coarser,
        global_transforms.filled,
        global_transforms.cut_off,
        global_transforms.zeroed,
        global_transforms.dropped,
    ),
    0.91: (candidate_ops.extra_op, candidate_ops.moved_op, layouts.permuted_operands),
    0.905: (candidate_ops.expressions,),
    0.9: (arguments.fitted_constants,),
    0.85: (global_transforms.rearranged,),
    0.82: (global_transforms.parts,),
    0.81: (masks.mask_pairs, masks.counted),
    0.8: (global_transforms.scaled,),
}
FAMILIES = tuple((score, family) for score, families in _BY_SCORE.items() for family in families)
"""Score and family. Each hint was tried and reproduces the candidate's result; the score only ranks."""

DESCRIBED: dict[Family, Set[str]] = {
    global_transforms.cut_off: {"clamp", "clamp_min", "clamp_max", "minimum", "maximum", "relu", "hardtanh", "relu6"},
    global_transforms.filled: {*global_transforms.FILLING},
    global_transforms.dropped: {"dropout", "native_dropout", "bernoulli", "rand", "rand_like", "alpha_dropout"},
    global_transforms.zeroed: {
        "slice",
        "narrow",
        "constant_pad_nd",
        "pad",
        "zeros",
        "zeros_like",
        "new_zeros",
        "where",
    },
    global_transforms.rearranged: {"roll", "flip", "index_select", "index", "gather", "take_along_dim"},
    global_transforms.parts: {"index_put", "index_copy", "slice_scatter", "select_scatter", "copy", "cat", "where"},
    layouts.permuted_operands: set(),
    arguments.fitted_constants: set(),
    arguments.scaled_positions: set(),
    global_transforms.scaled: set(),
    global_transforms.done_twice: set(),
    global_transforms.another_tensor: set(),
}
"""Families that describe what came out -> ops, one of which a candidate has that does that; none: any op may do it."""
